"""The sections of one run's page: headline, curves, pictures, settings.

Each function returns HTML text; `Page` gathers, beside it, the numbers for the page's JSON block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .charts import AXES, Chart, Series, draw, method_colour, number
from .galleries import chains, embedding_map, neighbours
from .runs import Run, thinned

POINTS = 200  # a curve's points on a page
_SKIPPED_SHOWN = 200


@dataclass
class Page:
    """HTML in reading order, and the numbers behind it."""

    html: list[str] = field(default_factory=list)
    charts: dict[str, Any] = field(default_factory=dict)
    maps: dict[str, Any] = field(default_factory=dict)

    def add(self, html: str) -> None:
        """Append a piece; an empty one leaves no trace."""
        self.html.append(html)


@dataclass(frozen=True)
class Metric:
    """A metric's name in `metrics.jsonl`, on the page, and its unit."""

    key: str
    name: str
    unit: str
    note: str = ""


KNN1 = Metric("knn1", "1-NN accuracy", "percent", "Nearest neighbour among the training images")
PROBE = Metric("probe", "Linear probe", "percent", "Logistic regression on frozen features")
LOSS = Metric("loss", "Training loss", "number", "What each step minimised")
GLOBAL_LOSS = Metric("global_loss", "Global loss, exact", "number", "On a fixed probe set")
ESTIMATED = Metric(
    "estimated_global_loss", "Global loss, estimated", "number", "From the batches seen"
)
ACCEPTANCE = Metric(
    "acceptance_rate", "Acceptance rate", "percent", "Share of proposals the chains accept"
)
CARRIED = Metric(
    "carried_mass", "Carried mass", "percent", "Weight on negatives kept from earlier steps"
)
EFFECTIVE = Metric(
    "effective_negatives", "Effective negatives", "count", "Per row, 1 / Σ of squared weights"
)
THROUGHPUT = Metric("images_per_second", "Throughput", "count", "Images per second")
RATE = Metric("lr", "Learning rate", "number", "Of the optimizer")

# (title, note, lines with their direct labels): one chart each on a run's page
_RUN_CHARTS: Sequence[tuple[str, str, Sequence[tuple[Metric, str]]]] = (
    ("Accuracy on test images", "Frozen features",
     ((KNN1, "1-NN"), (PROBE, "probe"), (Metric("probe_paper", "", "percent"), "probe, paper’s"))),
    ("Training loss", LOSS.note, ((LOSS, "loss"),)),
    ("Global loss", "Exact on a fixed probe set, estimated from batches",
     ((GLOBAL_LOSS, "exact"), (ESTIMATED, "estimated"))),
    *((m.name, m.note, ((m, m.name),)) for m in (ACCEPTANCE, CARRIED, EFFECTIVE, THROUGHPUT, RATE)),
)  # fmt: skip


def headline(run: Run) -> str:
    """Title, the settings that matter, and what a reader must know first."""
    config = run.config
    named = (("batch_size", "batch size"), ("beta", "β"), ("epochs", "epochs"), ("steps", "steps"),
             ("encoder", "encoder"), ("norm", "norm"), ("optimizer", "optimizer"), ("lr", "lr"),
             ("seed", "seed"))  # fmt: skip
    chips = "".join(
        f"<li>{text} <b>{escape(str(config[key]))}</b></li>"
        for key, text in named
        if config.get(key) is not None
    )
    return (
        f'<header style="--c:{method_colour(str(config.get("method")))}">'
        f'<p class="eyebrow">negchain · {escape(run.name)}</p>'
        f"<h1><span>{escape(run.method)}</span> on {escape(run.data_name)}</h1>"
        f'<ul class="chips">{chips}</ul></header>{notices(run)}'
    )


def notices(run: Run) -> str:
    """Plain sentences about what is missing from this run, and why."""
    said = []
    if not run.finished:
        last = run.metrics[-1] if run.metrics else {}
        seen = number(last.get("samples"), "count")
        where = f"the numbers are those after {seen} samples" if last else "nothing is recorded yet"
        said.append(f"<b>This run is unfinished:</b> {where}.")
    if run.final("knn1") is None and run.final("probe") is None:
        reason = run.data_info.get("unprobed")
        if run.classes and not reason:
            said.append("Labels exist, but no evaluation was recorded.")
        else:
            because = escape(str(reason or "this data has no labels"))
            said.append(f"<b>Nothing was probed,</b> because {because}.")
    return "".join(f'<p class="notice">{sentence}</p>' for sentence in said)


def tiles(run: Run) -> str:
    """The headline numbers."""
    loss = GLOBAL_LOSS if run.final("global_loss") is not None else LOSS
    entries = (
        *(
            (
                m.name,
                number(run.final(m.key), "percent"),
                "test images" if run.final(m.key) is not None else "not measured",
            )
            for m in (KNN1, PROBE)
        ),
        (
            "Final loss",
            number(run.final(loss.key)),
            "global, exact" if loss is GLOBAL_LOSS else "training",
        ),
        ("Throughput", number(run.final("images_per_second"), "count"), "images per second"),
        ("Time", number(run.final("seconds"), "seconds"), "wall clock"),
        ("Samples seen", number(run.final("samples"), "count"), _passes(run)),
    )
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{name}</span><b>{value}</b><small>{note}</small></div>'
            for name, value, note in entries
        )
        + "</div>"
    )


def _passes(run: Run) -> str:
    size, seen = run.data_info.get("pretrain"), run.final("samples")
    if not isinstance(size, int) or size < 1 or seen is None:
        return "training images"
    return f"{seen / size:.3g} passes over {size:,}"


def curves(page: Page, run: Run) -> None:
    """One chart per metric the run recorded, and a sentence for those it did not."""
    colour = method_colour(str(run.config.get("method")))
    drawn, missing = [], []
    for title, note, lines in _RUN_CHARTS:
        present = [(metric, label) for metric, label in lines if len(run.curve(metric.key))]
        if not present:
            missing.append(title.lower())
            continue
        series = [
            Series(label, thinned(run.curve(metric.key), POINTS), None,
                   colour if i == 0 else "var(--second)", max(i - 1, 0), i)
            for i, (metric, label) in enumerate(present)
        ]  # fmt: skip
        key = "-".join(["run", present[0][0].key])
        drawn.append(Chart(key, title, note, present[0][0].unit, series))
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
    last = "–"
    if len(chart.series) == 1 and len(curve := chart.series[0].curve):
        last = number(float(curve.values[-1]), chart.unit)
    value = f"<b>{last}</b>" if last != "–" else ""
    return (
        f'<article class="card"><h3>{escape(chart.title)}{value}</h3>'
        f"<p>{escape(chart.note)}</p>{''.join(bodies)}</article>"
    )


def pictures(page: Page, run: Run, *, small: bool = False) -> None:
    """Neighbours, chains and map; on a comparison page fewer of each and no headings of h2."""
    level = "h4" if small else "h2"
    near = neighbours(run, rows=4) if small else neighbours(run)
    held = chains(run, limit=8) if small else chains(run)
    for title, html in (("Nearest neighbours", near), ("What the chains hold", held)):
        if html:
            page.add(f"<section><{level}>{title}</{level}>{html}</section>")
    result = embedding_map(run, thumbs=not small)
    if result is not None:
        key = f"map-{len(page.maps)}"
        html, page.maps[key] = result
        page.add(
            f'<section data-map="{key}"><{level}>Map of the embeddings</{level}><p class="lead">'
            "Each dot is an image; near dots have similar embeddings. Choose a class to see it "
            f"alone.</p>{html}</section>"
        )


def settings(run: Run) -> str:
    """Every setting, the machine, and the files that were left out; folded away."""
    hidden = ("data_info",)
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_text(value))}</td></tr>"
        for key, value in run.config.items()
        if key not in hidden
    )
    info = run.data_info
    counts = ", ".join(
        f"{info[key]} {name}"
        for key, name in (
            ("pretrain", "for pretraining"),
            ("train", "labelled for training"),
            ("test", "for test"),
        )
        if info.get(key) is not None
    )
    data = f"<tr><th>images</th><td>{escape(counts)}</td></tr>" if counts else ""
    return (
        "<details><summary>Settings, versions and hardware</summary>"
        f'<div class="scroll"><table class="settings">{data}{rows}</table></div></details>'
        f"{_skipped(info.get('skipped') or [])}"
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _skipped(files: Sequence[Sequence[str]]) -> str:
    if not files:
        return ""
    rows = "".join(
        f"<tr><th>{escape(str(file))}</th><td>{escape(str(reason))}</td></tr>"
        for file, reason in files[:_SKIPPED_SHOWN]
    )
    more = len(files) - _SKIPPED_SHOWN
    rest = f"<p class='lead'>… and {more} more.</p>" if more > 0 else ""
    count = "1 file was left out" if len(files) == 1 else f"{len(files)} files were left out"
    return (
        f'<details><summary>{count}</summary><div class="scroll">'
        f'<table class="settings">{rows}</table></div>{rest}</details>'
    )
