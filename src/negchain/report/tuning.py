"""What `negchain compare --tune` tried: all values with their scores, and which was chosen."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from negchain.files import replacing
from negchain.methods import title_of
from negchain.printable import plain
from negchain.train.config import flag

from .charts import Chart, Series, draw, line_key, method_colour, strip
from .measures import GLOBAL_LOSS, Metric, Shown
from .page import Page
from .runs import Curve


@dataclass(frozen=True)
class Tried:
    """Settings that a method was run with, and the score of every seed that ended."""

    settings: Mapping[str, Any]
    scores: Mapping[int, float]
    chosen: bool


@dataclass(frozen=True)
class Tuned:
    """What a method chose from; `note` says why none was best by `by`.

    `by` is the score's key, empty where no run ended: nothing then says what the score would be.
    """

    method: str
    by: str
    note: str
    tried: Sequence[Tried]


def write_tuned(tuned: Sequence[Tuned], out: Path) -> None:
    """Write it as JSON."""
    with replacing(out) as file:
        file.write(json.dumps([asdict(one) for one in tuned], indent=1).encode())


def section(page: Page, tuned: Sequence[Tuned], shown: Shown) -> None:
    """A chart per setting and a table of all values; nothing where nothing was tuned."""
    if not tuned:
        return
    metric = _metric(next((one.by for one in tuned if one.by), GLOBAL_LOSS.key), shown)
    names = list(dict.fromkeys(name for one in tuned for t in one.tried for name in t.settings))
    said = "".join(
        f"<p>{escape(title_of(one.method))} {one.note}.</p>" for one in tuned if one.note
    )
    cards = "".join(_card(page, tuned, name, metric, len(names) > 1) for name in names)
    chose = f" The best by “{escape(metric.name)}” was chosen; of equals, the first."
    chose *= any(not one.note for one in tuned)
    page.add(
        '<section class="tuned"><h2>What was tuned</h2><p class="lead">Every method was run with '
        f"each value, seed 0.{chose} A method’s other seeds were run with what it chose.</p>"
        f'<div class="said">{said}</div>{_legend(tuned)}<div class="grid wide">{cards}</div>'
        f"{_table(tuned, names, metric)}</section>"
    )


def _metric(key: str, shown: Shown) -> Metric:
    known = (*shown.lead, *shown.secondary, *shown.columns, GLOBAL_LOSS)
    return next((metric for metric in known if metric.key == key), Metric(key, key, "number"))


def _legend(tuned: Sequence[Tuned]) -> str:
    """Names of the lines: of many lines, and on a narrow page, the charts have none."""
    buttons = [
        f'<button type="button" data-series="{index}">{line_key(one.method)}'
        f"{escape(title_of(one.method))}</button>"
        for index, one in enumerate(tuned)
        if not one.note
    ]
    return f'<div class="legend">{"".join(buttons)}</div>' if len(buttons) > 1 else ""


def _card(page: Page, tuned: Sequence[Tuned], name: str, metric: Metric, several: bool) -> str:
    """Scores of seed 0 over one setting's values, a line per method; what was chosen is ringed.

    Methods that could not choose are left out: their scores do not compare.
    """
    have = [
        (index, one)
        for index, one in enumerate(tuned)
        if not one.note and name in one.tried[0].settings
    ]
    values = list(dict.fromkeys(t.settings[name] for _, one in have for t in one.tried))
    values = values if any(isinstance(v, str) for v in values) else sorted(values)
    better, lines = max if metric.higher else min, []
    for index, one in have:
        scores = dict[Any, list[float]]()
        for t in one.tried:
            if 0 in t.scores:
                scores.setdefault(t.settings[name], []).append(t.scores[0])
        places = np.array([k + 0.5 for k, value in enumerate(values) if value in scores])
        best = np.array([better(scores[value]) for value in values if value in scores])
        (kept,) = (values.index(t.settings[name]) + 0.5 for t in one.tried if t.chosen)
        curve, colour = Curve(places, places, best), method_colour(one.method)
        lines.append(Series(title_of(one.method), curve, None, colour, 0, index, kept))
    note = f"{metric.name}{', the best over the other settings' if several else ''}"
    texts = [plain(value) for value in values]
    chart = Chart(f"tuned-{name}", flag(name), note, metric.unit, lines, 540, 310, texts)
    if (drawn := draw(chart, "samples")) is None:
        return ""
    body, page.charts[f"{chart.key}-samples"] = drawn
    return (
        f'<article class="card"><h3>{escape(chart.title)}</h3><p>{escape(note)}</p>'
        f'<div class="by-samples">{body}</div></article>'
    )


def _table(tuned: Sequence[Tuned], names: Sequence[str], metric: Metric) -> str:
    """A row per method and combination."""
    every = [score for one in tuned for t in one.tried for score in t.scores.values()]
    limits = (min(every), max(every)) if every else (0.0, 1.0)
    heads = ["Method", *map(flag, names), f"{metric.name}, seed 0", "All seeds", "Seed by seed"]
    rows = []
    for one in tuned:
        for t in one.tried:
            settings = [plain(t.settings.get(name, "–")) for name in names]
            score = metric.text(t.scores.get(0)) if 0 in t.scores else "not ended"
            found = list(t.scores.values())
            many = ""
            if len(found) > 1:
                spread = metric.text(statistics.stdev(found))
                many = f"{metric.text(statistics.fmean(found))}<small>± {spread}</small>"
            cells = [
                f'<th scope="row">{line_key(one.method)}{escape(title_of(one.method))}</th>',
                *(f"<td>{escape(text)}</td>" for text in settings),
                f"<td><b>{score}</b><small>chosen</small></td>"
                if t.chosen
                else f"<td>{score}</td>",
                f"<td>{many}</td>",
                f"<td>{strip(np.array(found), limits, method_colour(one.method))}</td>",
            ]
            rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'<div class="scroll"><table class="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
