"""The sections of a comparison: the result table, overlaid curves, and the runs behind them.

Runs that differ only by seed are one line and one table row.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from negchain.methods import title_of

from .charts import Chart, Series, line_key, method_colour, strip
from .galleries import side_by_side
from .measures import ACCEPTANCE, CARRIED, EFFECTIVE, GLOBAL_LOSS, LOSS, ONLINE, THROUGHPUT
from .page import POINTS, Page
from .results import Cell, compare
from .runs import Group, Run, has_setting, mean_curve
from .sections import charts_section, notices, pictures, settings, tiles

_GALLERIES = 8  # groups whose first run shows pictures: the page stays a few MB
# without losses estimated from batches: each method's estimate has a bias of its own
_CHARTS = (GLOBAL_LOSS, LOSS, ONLINE, ACCEPTANCE, CARRIED, EFFECTIVE, THROUGHPUT)


def headline(groups: Sequence[Group], runs: Sequence[Run]) -> str:
    """Title and size of the comparison, and what a reader must know first."""
    data = list(dict.fromkeys(run.data_name for run in runs))
    named = data[0] if len(data) == 1 else f"{len(data)} data sets"
    seeds = sorted({len(group.runs) for group in groups})
    each = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    unfinished = sum(not run.finished for run in runs)
    notice = ""
    if unfinished:
        verb = "is" if unfinished == 1 else "are"
        notice = (
            f'<p class="notice"><b>{unfinished} of {len(runs)} runs {verb} unfinished</b> and left '
            "out of means and curves wherever another seed has finished.</p>"
        )
    if not any(run.labelled for run in runs):
        reasons = {run.unprobed for run in runs}
        why = f": {escape(reasons.pop())}" if len(reasons) == 1 and all(reasons) else ""
        notice += f'<p class="notice"><b>Nothing was probed</b> in any of these runs{why}.</p>'
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
    return line_key(group.method, group.variant)


def results(groups: Sequence[Group]) -> str:
    """The table: means with 95 % intervals, best first, baselines below, a dot per seed."""
    found = compare(groups)
    finals = [group.finals(found.lead.key) for group in groups]
    every = [float(value) for values in finals for value in values]
    limits = (min(every), max(every)) if every else (0.0, 1.0)
    labels = " ".join(group.label for group in groups)
    differing = [key for key in groups[0].settings if f"{key}=" not in labels]
    names = ["Run", "Seeds", *(m.name for m in found.columns), *differing, "Seed by seed"]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = []
    for i in found.order:
        group = groups[i]
        method = title_of(group.method)
        beside = "" if method in group.label else f" <small>{escape(method)}</small>"
        cells = [
            f'<th scope="row">{key_line(group)}{escape(group.label)}{beside}</th>',
            f"<td>{_seeds(group)}</td>",
            *(_cell(cell) for cell in found.rows[i]),
            *(f"<td>{escape(_setting(group, key))}</td>" for key in differing),
            f"<td>{strip(finals[i], limits, method_colour(group.method))}</td>",
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    for name, texts in found.baselines:
        cells = [f"<td>{text}</td>" for text in texts] + ["<td></td>"] * (len(differing) + 1)
        rows.append(
            f'<tr class="baseline"><th scope="row">{name}</th><td></td>{"".join(cells)}</tr>'
        )
    said = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    spreads = {cell.spread[:1] for row in found.rows for cell in row}
    noise = "± is the standard deviation over seeds. " * ("±" in spreads)
    if "[" in spreads:
        tested = groups[0].shown.tested
        noise = f"In brackets the 95 % interval over {tested} and seeds. {noise}"
    means = "Means over seeds" if any(len(g.counted) > 1 for g in groups) else "One seed"
    return (
        f'<section><h2>Results</h2><p class="lead">{means}, the best first by '
        f"{escape(found.lead.name)}. {noise}Bold marks a winner, and only where it is better than "
        "every other beyond the noise. Dots show that number for each seed, the tick their "
        f'mean.</p><div class="said">{said}</div><div class="scroll">'
        f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></section>"
    )


def _cell(cell: Cell) -> str:
    text = f"<b>{cell.text}</b>" if cell.wins else cell.text
    return f"<td>{text}{f'<small> {cell.spread}</small>' if cell.spread else ''}</td>"


def gallery(groups: Sequence[Group]) -> str:
    """The same images with their neighbours by each group's first run; empty without pictures."""
    shown = [(g.label, method_colour(g.method), g.runs[0]) for g in groups[:_GALLERIES]]
    html = side_by_side(shown)
    return f"<section><h2>Nearest neighbours, side by side</h2>{html}</section>" if html else ""


def _setting(group: Group, key: str) -> str:
    return str(group.settings[key]) if has_setting(group.method, key) else "–"


def _seeds(group: Group) -> str:
    open_runs = len(group.runs) - sum(run.finished for run in group.runs)
    counts = {"unfinished": open_runs, "repeated": group.repeated}
    said = "".join(f" <small>({n} {word})</small>" for word, n in counts.items() if n)
    return f"{len(group.runs) - group.repeated}{said}"


def curves(page: Page, groups: Sequence[Group]) -> None:
    """One chart per metric, one line per group: the mean, in a band of one s.d. over seeds."""
    # half the points of a run's page: noisy lines that cross need more smoothing
    points = max(40, min(POINTS // 2, 2400 // len(groups)))
    charts = []
    for metric in (*groups[0].shown.lead, *_CHARTS):
        series = []
        for index, group in enumerate(groups):
            curve, spread = mean_curve(group.counted, metric.key, points)
            band = spread if len(group.counted) > 1 else None
            look = method_colour(group.method), group.variant, index
            if len(curve):
                series.append(Series(group.label, curve, band, *look))
        only_before = metric in groups[0].shown.lead and all(len(s.curve) == 1 for s in series)
        if series and not only_before:
            key, words = f"all-{metric.key}", (metric.name, metric.note, metric.unit)
            charts.append(Chart(key, *words, series, width=540, height=310))
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
            page.add(
                f'<details class="run"><summary>{key_line(group)}<b>{escape(group.label)}</b>'
                f"<span>seed {escape(run.seed)}</span>{_lead(run)}"
                f"<span>{escape(run.name)}</span>"
                f"</summary>{notices(run)}{tiles(run)}{_own_page(run, out)}"
            )
            if nth == 0 and place < _GALLERIES:
                pictures(page, run, small=True)
            page.add(f"{settings(run)}</details>")
    page.add("</section>")


def _lead(run: Run) -> str:
    known = [m for m in (*run.shown.lead[:1], GLOBAL_LOSS) if run.final(m.key) is not None]
    metric = known[0] if known else GLOBAL_LOSS
    name = metric.short or metric.name
    return f"<span>{name} {metric.text(run.final(metric.key))}</span>"


def _own_page(run: Run, out: Path) -> str:
    report = run.path / "report.html"
    if not report.is_file() or report.resolve() == out.resolve():
        return ""
    address = Path(os.path.relpath(report.resolve(), out.resolve().parent)).as_posix()
    return f'<p class="lead"><a href="{quote(address)}">This run’s own page</a></p>'
