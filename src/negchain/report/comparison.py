"""The sections of a comparison: the result table, overlaid curves, and the runs behind them.

Runs that differ only by seed are one line and one table row: mean ± standard deviation over seeds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from .charts import Chart, Series, dash, method_colour, number, strip
from .runs import Group, Run, mean_curve
from .sections import (
    ACCEPTANCE,
    CARRIED,
    EFFECTIVE,
    ESTIMATED,
    GLOBAL_LOSS,
    KNN1,
    LOSS,
    POINTS,
    PROBE,
    THROUGHPUT,
    Metric,
    Page,
    charts_section,
    notices,
    pictures,
    settings,
    tiles,
)

_GALLERIES = 8  # groups whose first run shows pictures: the page stays a few MB
_TIME = Metric("seconds", "Time", "seconds")
_COLUMNS = (KNN1, PROBE, GLOBAL_LOSS, _TIME, THROUGHPUT)
_CHARTS = (
    KNN1, PROBE, GLOBAL_LOSS, ESTIMATED, LOSS, ACCEPTANCE, CARRIED, EFFECTIVE, THROUGHPUT
)  # fmt: skip


def headline(groups: Sequence[Group], runs: Sequence[Run]) -> str:
    """Title and size of the comparison, and what a reader must know first."""
    data = list(dict.fromkeys(run.data_name for run in runs))
    named = data[0] if len(data) == 1 else f"{len(data)} data sets"
    seeds = sorted({len(group.runs) for group in groups})
    each = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    unfinished = sum(not run.finished for run in runs)
    notice = ""
    if unfinished:
        verb = "run is" if unfinished == 1 else "runs are"
        notice = (
            f'<p class="notice"><b>{unfinished} of {len(runs)} {verb} unfinished</b> and left out '
            "of means and curves wherever another seed has finished.</p>"
        )
    if all(run.final("knn1") is None and run.final("probe") is None for run in runs):
        notice += '<p class="notice"><b>Nothing was probed</b> in any of these runs.</p>'
    methods = list(dict.fromkeys(run.method for run in runs))
    what = f"{len(methods)} methods" if len(methods) > 1 else methods[0]
    variants = "1</b> variant" if len(groups) == 1 else f"{len(groups)}</b> variants"
    return (
        '<header><p class="eyebrow">negchain · comparison</p>'
        f"<h1>{escape(what)} on {escape(named)}</h1>"
        f'<ul class="chips"><li><b>{variants}</li><li><b>{len(runs)}</b> runs</li>'
        f"<li><b>{each}</b> per variant</li></ul>"
        f"</header>{notice}"
    )


def key_line(group: Group) -> str:
    """The group's line as it looks in the charts."""
    return (
        f'<svg class="key" viewBox="0 0 26 10" style="--c:{method_colour(group.method)}" '
        f'aria-hidden="true"><path d="M1 5H25"{dash(group.variant)}/></svg>'
    )


def _ranking(groups: Sequence[Group]) -> Metric:
    return next((m for m in (KNN1, PROBE) if any(len(g.finals(m.key)) for g in groups)), KNN1)


def results(groups: Sequence[Group]) -> str:
    """Mean ± s.d. over seeds, best first, with every seed of the leading measure as a dot."""
    lead = _ranking(groups)
    finals = [group.finals(lead.key) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: -finals[i].mean() if len(finals[i]) else 9)
    every = [float(value) for values in finals for value in values]
    limits = (min(every), max(every)) if every else (0.0, 1.0)
    columns = [m for m in _COLUMNS if any(len(group.finals(m.key)) for group in groups)]
    best = {m.key: _best(groups, m) for m in columns}
    labels = " ".join(group.label for group in groups)
    differing = [key for key in groups[0].settings if f"{key}=" not in labels]
    head = "".join(
        f'<th scope="col">{escape(name)}</th>'
        for name in ["Method", "Seeds", *(m.name for m in columns), *differing, "Seed by seed"]
    )
    rows = []
    for i in order:
        group = groups[i]
        cells = [
            f'<th scope="row">{key_line(group)}{escape(group.label)}</th>',
            f"<td>{_seeds(group)}</td>",
        ]
        cells += [_cell(group, m, best[m.key]) for m in columns]
        cells += [f"<td>{escape(str(group.settings[key]))}</td>" for key in differing]
        cells.append(f"<td>{strip(finals[i], limits, method_colour(group.method))}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<section><h2>Results</h2><p class="lead">Mean ± standard deviation over seeds, best '
        f"{escape(lead.name)} first; the best of each column is bold. Dots: "
        f'{escape(lead.name)} of each seed, with a tick at the mean.</p><div class="scroll">'
        f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></section>"
    )


def _best(groups: Sequence[Group], metric: Metric) -> str:
    """The best mean as the table shows it, so that what reads equal is equally bold."""
    means = [float(values.mean()) for g in groups if len(values := g.finals(metric.key))]
    if len(means) < 2:
        return ""
    pick = max if metric in (KNN1, PROBE, THROUGHPUT) else min
    return number(pick(means), metric.unit)


def _seeds(group: Group) -> str:
    open_runs = len(group.runs) - sum(run.finished for run in group.runs)
    return f"{len(group.runs)}" + (f" <small>({open_runs} unfinished)</small>" if open_runs else "")


def _cell(group: Group, metric: Metric, best: str) -> str:
    values = group.finals(metric.key)
    if not len(values):
        return "<td>–</td>"
    text = number(float(values.mean()), metric.unit)
    if len(values) > 1:
        sd = float(values.std(ddof=1))
        rounded = number(float(f"{sd:.2g}"), metric.unit)
        shown = f"{100 * sd:.2f}" if metric.unit == "percent" else rounded
        spread = f"<small> ± {shown}</small>"
    else:
        spread = ""
    return f"<td>{f'<b>{text}</b>' if text == best else text}{spread}</td>"


def curves(page: Page, groups: Sequence[Group]) -> None:
    """One chart per metric, one line per group: the mean, in a band of one s.d. over seeds."""
    # half a run page's points: noisy lines that cross need more smoothing than one alone
    points = max(40, min(POINTS // 2, 2400 // len(groups)))
    charts = []
    for metric in _CHARTS:
        series = []
        for index, group in enumerate(groups):
            curve, spread = mean_curve(group.counted, metric.key, points)
            if len(curve):
                series.append(
                    Series(
                        group.label,
                        curve,
                        spread if len(group.counted) > 1 else None,
                        method_colour(group.method),
                        group.variant,
                        index,
                    )
                )
        if series:
            charts.append(
                Chart(
                    f"all-{metric.key}",
                    metric.name,
                    metric.note,
                    metric.unit,
                    series,
                    width=540,
                    height=310,
                )
            )
    legend = "".join(
        f'<button type="button" data-series="{i}">{key_line(group)}{escape(group.label)}</button>'
        for i, group in enumerate(groups)
    )
    seeds = any(len(group.counted) > 1 for group in groups)
    note = "Lines are means over seeds, bands ± one standard deviation. " if seeds else ""
    extra = (
        f'<p class="lead">{note}Choose a name to see it alone.</p>'
        f'<div class="legend">{legend}</div>'
    )
    page.add(charts_section(page, charts, extra, "wide"))


def runs_section(page: Page, groups: Sequence[Group], out: Path) -> None:
    """Every run, folded: its numbers, its own page, pictures for the first of each group."""
    page.add("<section><h2>Runs</h2>")
    for place, group in enumerate(groups):
        for nth, run in enumerate(group.runs):
            seed = run.config.get("seed", "–")
            page.add(
                f'<details class="run"><summary>{key_line(group)}<b>{escape(group.label)}</b>'
                f"<span>seed {escape(str(seed))}</span><span>1-NN "
                f"{number(run.final('knn1'), 'percent')}</span><span>{escape(run.name)}</span>"
                f"</summary>{notices(run)}{tiles(run)}{_own_page(run, out)}"
            )
            if nth == 0 and place < _GALLERIES:
                pictures(page, run, small=True)
            page.add(f"{settings(run)}</details>")
    page.add("</section>")


def _own_page(run: Run, out: Path) -> str:
    report = run.path / "report.html"
    if not report.is_file() or report.resolve() == out.resolve():
        return ""
    address = Path(os.path.relpath(report.resolve(), out.resolve().parent)).as_posix()
    return f'<p class="lead"><a href="{quote(address)}">This run’s own page</a></p>'
