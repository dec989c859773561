"""The sections of one run's page: headline, results, curves, pictures, settings.

A section is HTML text. Those with charts or a map take the `Page`, which also gathers the numbers
that the page's script needs.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from negchain.printable import counted

from .advice import advice, against_baselines, best_by
from .charts import AXES, Chart, Series, draw, method_colour
from .measures import (
    ACCEPTANCE,
    CARRIED,
    EFFECTIVE,
    GLOBAL_LOSS,
    LOSS,
    ONLINE,
    OWN_LOSS,
    RATE,
    THROUGHPUT,
    TIME,
    VARIANCE,
    Metric,
    number,
)
from .page import POINTS, Page
from .runs import Run, thinned
from .statistics import bounds, interval_of

_SKIPPED_SHOWN = 200


# (title, note, lines with their direct labels): one chart each on a run's page, after its results
_RUN_CHARTS: Sequence[tuple[str, str, Sequence[tuple[Metric, str]]]] = (
    ("Training loss", LOSS.note, ((LOSS, "loss"),)),
    ("Global loss", "Exact, on a fixed probe set",
     ((GLOBAL_LOSS, "exact"), (OWN_LOSS, "plain keys"))),
    *((m.name, m.note, ((m, m.name),))
      for m in (ONLINE, VARIANCE, ACCEPTANCE, CARRIED, EFFECTIVE, THROUGHPUT, RATE)),
)  # fmt: skip
# charts that are missed if they are absent: others belong to some methods only
_EXPECTED = ("Training loss", "Global loss")


def headline(run: Run) -> str:
    """Title, the settings that matter, and what a reader must know first."""
    config = run.config
    named = (("batch_size", "batch size"), ("beta", "β"), ("epochs", "epochs"), ("steps", "steps"),
             ("encoder", "encoder"), ("norm", "norm"), ("optimizer", "optimizer"), ("lr", "lr"),
             ("seed", "seed"))  # fmt: skip
    chips = "".join(
        f"<li>{text} <b>{escape(_short(str(config[key])))}</b></li>"
        for key, text in named
        if config.get(key) is not None and key not in run.foreign
    )
    return (
        f'<header style="--c:{method_colour(str(config.get("method")))}">'
        f'<p class="eyebrow">negchain · {escape(run.name)}</p>'
        f"<h1><span>{escape(run.method)}</span> on {escape(run.data_name)}</h1>"
        f'<ul class="chips">{chips}</ul></header>{notices(run)}'
    )


def _short(value: str) -> str:
    """A setting as it is; of a folder (an encoder may be one) its name."""
    return os.path.basename(value) if os.path.isabs(value) else value


def notices(run: Run) -> str:
    """Plain sentences about what is missing from this run, and why."""
    said = []
    if not run.finished:
        last = run.metrics[-1] if run.metrics else {}
        seen = number(last.get("samples"), "count")
        where = f"the numbers are those after {seen} samples" if last else "nothing is recorded yet"
        said.append(
            f"<b>This run is unfinished:</b> {where}. While it trains, every evaluation writes "
            "this page again: reload to see more. One that was stopped or failed goes on with "
            "negchain train --out and --resume."
        )
    if not run.labelled:
        said.append(
            f"<b>Nothing was probed,</b> because {escape(run.unprobed)}: look at the neighbours "
            "below, and at the loss."
            if run.unprobed
            else "Labels exist, but no evaluation was recorded."
        )
    said += [escape(sentence) for sentence in advice(run)]
    whole = re.compile(r"--[a-z-]+")  # else a line may end between -- and the option's name
    said = [whole.sub(r'<span class="option">\g<0></span>', sentence) for sentence in said]
    return "".join(f'<p class="notice">{sentence}</p>' for sentence in said)


def tiles(run: Run) -> str:
    """The headline numbers."""
    loss = GLOBAL_LOSS if run.final("global_loss") is not None else LOSS
    accuracies = (
        (m.name, m.text(run.final(m.key)), _beside(run, m))
        for m in run.shown.lead
        if run.final(m.key) is not None or run.classes
    )
    kind = "global, exact" if loss is GLOBAL_LOSS else "training"
    before = _before(run, loss) if loss is GLOBAL_LOSS else ""
    speed = THROUGHPUT.text(run.final(THROUGHPUT.key))
    entries = (
        *accuracies,
        ("Final loss", loss.text(run.final(loss.key)), "; ".join(filter(None, (kind, before)))),
        ("Throughput", speed, f"{run.shown.noun} per second"),
        ("Time", TIME.text(run.final(TIME.key)), "wall clock"),
        ("Samples seen", number(run.final("samples"), "count"), _passes(run)),
    )
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><b>{value}</b><small>{note}</small></div>'
        for name, value, note in entries
    )
    return f'<div class="tiles">{tiles}</div>'


def _beside(run: Run, metric: Metric) -> str:
    """What a tile says below an accuracy."""
    if run.final(metric.key) is None:
        return "not measured"
    return _before(run, metric) or run.shown.tested


def _before(run: Run, metric: Metric) -> str:
    before = run.baseline(metric.key).get("untrained")
    return "" if before is None else f"{metric.text(before)} before"


def standing(run: Run) -> str:
    """The results beside what they must beat, and the other measures; empty without labels."""
    if not run.labelled:
        return ""
    blocks = []
    for metric in run.shown.lead:
        value = run.final(metric.key)
        if value is None:
            continue
        interval, base = interval_of(run, metric.key), run.baseline(metric.key)
        own = run.method if run.finished else f"{run.method}, so far"
        lines = [("own", own, value, bounds(interval) if interval else "")]
        lines += [(k, name, base[k], "") for k, name in run.shown.baselines.items() if k in base]
        bars = "".join(
            f'<div class="{kind}"><span>{escape(name)}</span><i style="--w:{100 * share:.1f}%"></i>'
            f"<b>{metric.text(share)}</b><small>{sure}</small></div>"
            for kind, name, share, sure in lines
        )
        blocks.append(
            f'<article class="card"><h3>{metric.name}</h3><p>{escape(metric.note)}</p>'
            f'<div class="bars">{bars}</div></article>'
        )
    rows = []
    for metric in run.shown.secondary:
        if (value := run.final(metric.key)) is not None:
            told = ". ".join(filter(None, (_before(run, metric), escape(metric.note))))
            rows.append((metric.name, f"<b>{metric.text(value)}</b> <small>{told}</small>"))
    if rows:
        blocks.append(
            '<article class="card measures"><h3>Other measures</h3><p>Of the same encoder</p>'
            f"{table(rows)}</article>"
        )
    sentences = against_baselines(run)
    if (kept := run.final("best_step")) is not None:
        which = f"of step {kept:,.0f} of {run.final('step') or 0:,.0f}, the best by {best_by(run)}"
        sentences.append(f"What was kept is the encoder {which if kept else 'as it was'}.")
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<section style="--c:{method_colour(str(run.config.get("method")))}">'
        '<h2>Did training help?</h2><p class="lead">Results on '
        f"{_tested(run)}. In brackets: the range that "
        f"other {run.shown.tested} of this kind would give, 19 times of 20. "
        f"{run.shown.explained}</p>"
        f'<div class="said">{said}</div>'
        f'<div class="grid top">{"".join(blocks)}</div></section>'
    )


def _tested(run: Run) -> str:
    """What results are of, with how many of them chose the encoder."""
    count, chose = run.data_info.get("test", 0), run.data_info.get("validation")
    split = ""
    if isinstance(chose, int) and 0 < chose < count:
        split = f" ({chose:,} validation, {count - chose:,} test)"
    if count == 1:  # the noun is in plural
        return f"the {run.shown.tested}, of which there is 1"
    return f"{count or 'the'} {run.shown.tested}{split}"


def _passes(run: Run) -> str:
    if run.passes is None:
        return f"training {run.shown.noun}"
    number = f"{run.passes:.3g}"
    return f"{number} pass{'es' * (number != '1')} over {run.data_info['num_samples']:,}"


def curves(page: Page, run: Run) -> None:
    """One chart per metric the run recorded, and a sentence for those it did not."""
    colour = method_colour(str(run.config.get("method")))
    drawn, missing = [], []
    results = (
        f"Results on {run.shown.tested}",
        "The first point is before training",
        [(metric, metric.short or metric.name) for metric in run.shown.lead],
    )
    for title, note, lines in (results, *_RUN_CHARTS):
        present = [(m, label, curve) for m, label in lines if len(curve := run.curve(m.key))]
        # a metric with a single point is measured at the start and the end only
        present = [line for line in present if len(line[2]) > 1] or present
        if not present:
            probed = title != "Global loss" or "probe_samples" not in run.foreign  # a task may not
            if (title in _EXPECTED and probed) or (title == results[0] and run.classes):
                missing.append(title.lower())
            continue
        series = [
            Series(label, thinned(curve, POINTS), None,
                   colour if i == 0 else "var(--second)", max(i - 1, 0), i)
            for i, (_, label, curve) in enumerate(present)
        ]  # fmt: skip
        first = present[0][0]
        drawn.append(Chart(f"run-{first.key}", title, note, first.unit, series))
    page.add(charts_section(page, drawn, ""))
    if missing:
        page.add(f'<p class="lead">Not recorded in this run: {", ".join(missing)}.</p>')


def charts_section(page: Page, charts: Sequence[Chart], extra: str, look: str = "") -> str:
    """All charts, each drawn against samples and against time, with the switch between the two."""
    cards = "".join(_card(page, chart) for chart in charts)
    if not cards:
        return "<section><h2>Curves</h2><p class='lead'>No metric was recorded.</p></section>"
    return (
        '<section class="curves"><div class="bar"><h2>Curves</h2><div class="switch">'
        '<input type="radio" name="axis" id="by-samples" checked>'
        '<label for="by-samples">Samples seen</label>'
        '<input type="radio" name="axis" id="by-seconds"><label for="by-seconds">Time</label>'
        f'</div></div>{extra}<div class="grid {look}">{cards}</div></section>'
    )


def _card(page: Page, chart: Chart) -> str:
    bodies = []
    for axis in AXES:
        result = draw(chart, axis)
        if result is None:
            body = '<p class="empty">No point has a value on this axis.</p>'
        else:
            body, page.charts[f"{chart.key}-{axis}"] = result
        bodies.append(f'<div class="by-{axis}">{body}</div>')
    value = ""
    if len(chart.series) == 1:
        value = f"<b>{number(float(chart.series[0].curve.values[-1]), chart.unit)}</b>"
    return (
        f'<article class="card"><h3>{escape(chart.title)}{value}</h3>'
        f"<p>{escape(chart.note)}</p>{''.join(bodies)}</article>"
    )


def pictures(page: Page, run: Run, *, small: bool = False) -> None:
    """What the task shows of its data; on a comparison page less of each."""
    level = "h4" if small else "h2"
    for title, html, data in run.shown.pictures(run, small):
        linked = ""
        if data is not None:
            key = f"map-{len(page.maps)}"
            page.maps[key], linked = data, f' data-map="{key}"'
        if html:
            page.add(f"<section{linked}><{level}>{title}</{level}>{html}</section>")


def settings(run: Run) -> str:
    """Every setting, the machine, and the files that were left out; folded away."""
    hidden = {"data_info", *run.foreign}
    rows = [(k, escape(_text(value))) for k, value in run.config.items() if k not in hidden]
    info = run.data_info
    words = {"num_samples": "to train on", "train": "labelled for training",
             "validation": "for validation", "test": "for test"}  # fmt: skip
    known = {key: info[key] for key in words if type(info.get(key)) is int}
    if {"validation", "test"} <= known.keys():
        known["test"] -= known["validation"]  # which counts all that is judged
    counts = ", ".join(f"{count:,} {words[key]}" for key, count in known.items())
    said = [counts, *(str(note) for note in info.get("notes", []))]
    rows.insert(0, (run.shown.noun, escape("; ".join(filter(None, said)))))
    return (
        "<details><summary>Settings, versions and hardware</summary>"
        f'<div class="scroll">{table(rows)}</div></details>'
        f"{_skipped(info.get('skipped', []))}"
    )


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names beside HTML."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{html}</td></tr>" for name, html in rows)
    return f'<table class="settings">{lines}</table>'


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _skipped(rows: Sequence[Any]) -> str:
    files = [row for row in rows if isinstance(row, list) and len(row) == 2]
    if not files:
        return ""
    listed = table((str(file), escape(str(why))) for file, why in files[:_SKIPPED_SHOWN])
    more = len(files) - _SKIPPED_SHOWN
    rest = f"<p class='lead'>… and {more} more.</p>" if more > 0 else ""
    count = counted(len(files), "file was left out", "files were left out")
    return f'<details><summary>{count}</summary><div class="scroll">{listed}</div>{rest}</details>'
