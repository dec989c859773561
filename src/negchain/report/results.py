"""The result table of a comparison, for the page and for the terminal.

Groups come best first, then the baselines. A cell is the mean over seeds with its 95 % interval
(accuracies) or its standard deviation over seeds. A winner is marked only where one group is better
than every other with 97.5 % probability (see `statistics`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.markup import escape  # else "[96.1, 98.4]" is a style
from rich.table import Table

from negchain.tasks import LOSS_OF
from negchain.train.config import flag

from .measures import GLOBAL_LOSS, THROUGHPUT, TIME, Metric
from .runs import Group, Run, group_runs, load_run
from .statistics import LEVEL, Estimate, beyond_chance, bounds, estimates, over_start, winner

_COLUMNS = (GLOBAL_LOSS, TIME, THROUGHPUT)  # after the task's own


@dataclass(frozen=True)
class Cell:
    """A mean as text, how sure it is, and whether it wins its column."""

    text: str
    spread: str = ""
    wins: bool = False


@dataclass(frozen=True)
class Results:
    """Columns; a row of cells per group, by place in `order`; rows of baselines; what to say."""

    columns: list[Metric]
    order: list[int]
    rows: list[list[Cell]]
    baselines: list[tuple[str, list[str]]]
    lead: Metric
    notes: list[str]


def compare(groups: Sequence[Group]) -> Results:
    """Everything the table shows."""
    task = groups[0].shown
    every = (*task.columns, *_COLUMNS)
    columns = [m for m in every if any(len(group.finals(m.key)) for group in groups)]
    ranked = [m for m in (*task.lead, GLOBAL_LOSS) if m in columns]
    lead = ranked[0] if ranked else GLOBAL_LOSS
    sign = -1 if lead.higher else 1
    finals = [group.finals(lead.key) for group in groups]
    order = sorted(
        range(len(groups)), key=lambda i: sign * finals[i].mean() if len(finals[i]) else np.inf
    )
    rows: list[list[Cell]] = [[] for _ in groups]
    winners = dict[str, int | None]()
    counted = [run for group in groups for run in group.counted]
    unfinished = [group.label for group in groups if not group.finished]
    apart = len({run.data_state for run in counted} - {""}) > 1
    settings = {key: {run.config.get(key) for run in counted} for key in LOSS_OF}
    unlike = [flag(key) for key, values in settings.items() if len(values) > 1]
    for metric in columns:
        found = estimates(groups, metric.key)
        settled = apart or unfinished or (metric is GLOBAL_LOSS and unlike)
        winners[metric.key] = None if settled else winner(found, higher=metric.higher)
        for i, estimate in enumerate(found):
            values = groups[i].finals(metric.key)
            rows[i].append(_cell(estimate, values, metric, winners[metric.key] == i))
    notes = _notes(groups, lead, winners.get(lead.key))
    if apart:
        notes = [
            "No winner is named: the runs were made on different data, or states of it. So were "
            "the baselines: see each run's own."
        ]
    elif unfinished:
        why = f"no run of {' and '.join(unfinished)} has finished"
        notes = [f"No winner is named: {why}."] if notes else []
    elif lead is GLOBAL_LOSS and unlike:
        why = f"exact losses of another {' and '.join(unlike)} are no better or worse"
        notes = [f"No winner is named: {why}."]
    elif (advised := recommendation(groups, lead)) is not None:
        notes.insert(0, advised)
    held = [metric for metric in columns if not (metric is GLOBAL_LOSS and unlike)]
    baselines = [] if apart else _baselines(groups, columns, held)
    return Results(columns, order, rows, baselines, lead, notes)


def _cell(estimate: Estimate | None, values: np.ndarray, metric: Metric, wins: bool) -> Cell:
    if estimate is None:
        return Cell("–")
    spread = ""
    if metric.unit == "percent" and estimate.items and estimate.interval is not None:
        spread = bounds(estimate.interval)
    elif estimate.seeds > 1:
        sd = float(values.std(ddof=1))
        rounded = metric.text(float(f"{sd:.2g}"))
        spread = f"± {100 * sd:.2f}" if metric.unit == "percent" else f"± {rounded}"
    return Cell(metric.text(estimate.mean), spread, wins)


def _baselines(
    groups: Sequence[Group], columns: Sequence[Metric], held: Sequence[Metric]
) -> list[tuple[str, list[str]]]:
    """Means over all runs: (name, one text per column), where any is known and `held` has it."""
    runs = [run for group in groups for run in group.counted]
    rows = []
    prefixes = list(groups[0].shown.baselines)
    named = {(prefix, run.shown.baselines[prefix]) for run in runs for prefix in prefixes}
    for prefix, name in sorted(named, key=lambda pair: (prefixes.index(pair[0]), pair)):
        alike = [run for run in runs if run.shown.baselines[prefix] == name]
        texts = []
        for metric in columns:
            found = [held_against(run, metric) for run in alike if metric in held]
            values = [base[prefix] for base in found if prefix in base]
            texts.append(metric.text(float(np.mean(values))) if values else "")
        if any(texts):
            rows.append((name, texts))
    return rows


def _notes(groups: Sequence[Group], lead: Metric, best: int | None) -> list[str]:
    compared = [group for group in groups if len(group.finals(lead.key))]
    if len(compared) < 2:
        return []
    if any(len(group.finals(lead.key)) < 2 for group in compared):
        tested = groups[0].shown.tested
        cover = f": the intervals cover other {tested} only" * (lead in groups[0].shown.lead)
        return [
            f"One seed each says nothing about other seeds, so no winner is named{cover}. "
            "Add --seeds 3 or more."
        ]
    if best is None:
        return [f"No winner by {lead.name}: the differences are within the noise."]
    noise = f"the noise of seeds and {groups[0].shown.noun}"
    return [f"{groups[best].label} is best by {lead.name}, beyond {noise}."]


def comparison_table(paths: Sequence[Path]) -> Table:
    """The results of several run folders as a table for the terminal; a star marks a winner."""
    groups = group_runs([load_run(path) for path in paths])
    found = compare(groups)
    few = (*groups[0].shown.lead, GLOBAL_LOSS, TIME)
    shown = [i for i, m in enumerate(found.columns) if m in few]
    table = Table(box=None, caption="\n".join(found.notes) or None, caption_justify="left")
    table.add_column("", overflow="fold", min_width=18)  # so that 80 characters hold everything
    for i in shown:
        heading = found.columns[i].name.replace(", ", ",\n")
        table.add_column(heading, justify="right", no_wrap=True)
    for place in found.order:
        cells = [found.rows[place][i] for i in shown]
        seeds = len(groups[place].runs) - groups[place].repeated
        open_ = ", unfinished" * (not groups[place].finished)
        name = f"{groups[place].label} ({seeds} seed{'s' * (seeds > 1)}{open_})"
        table.add_row(
            escape(name), *(f"{'*' * c.wins}{c.text}\n{escape(c.spread)}".rstrip() for c in cells)
        )
    for name, texts in found.baselines:
        table.add_row(name, *(texts[i] for i in shown), style="dim")
    return table


def summary_table(run: Run) -> Table:
    """The numbers of one run for the terminal, each beside what it must beat."""
    table = Table(box=None)
    table.add_column("")
    every = (*run.shown.lead, *run.shown.secondary, GLOBAL_LOSS)
    held = {m: held_against(run, m) for m in every if run.final(m.key) is not None}
    known = [p for p in run.shown.baselines if any(p in found for found in held.values())]
    for heading in ("result", *(run.shown.baselines[prefix].lower() for prefix in known)):
        table.add_column(heading, justify="right")
    for metric, found in held.items():
        texts = [metric.text(found[p]) if p in found else "" for p in known]
        table.add_row(metric.name, metric.text(run.final(metric.key)), *texts)
    for metric in (THROUGHPUT, TIME):
        if run.final(metric.key) is not None:
            table.add_row(metric.note or metric.name, metric.text(run.final(metric.key)))
    return table


def held_against(run: Run, metric: Metric) -> dict[str, float]:
    """What a result must beat, by the baseline's prefix; chance is that of the leading ones."""
    found = {} if metric in (TIME, THROUGHPUT) else run.baseline(metric.key)
    return {k: v for k, v in found.items() if k != "chance" or metric in run.shown.lead}


def recommendation(groups: Sequence[Group], lead: Metric) -> str | None:
    """Which group to take, if any; None where nobody measured the encoder before training."""
    found = zip(groups, over_start(groups, lead.key), strict=True)
    known = [(group, gain) for group, gain in found if gain is not None and gain.interval]
    if not known or not lead.higher:
        return None
    best, gain = max(known, key=lambda pair: pair[1].mean)
    (test,) = over_start([best], f"test_{lead.key}")  # on queries that chose nothing
    noun = best.shown.noun
    tested = "" if test is None else f" ({test.in_points()} on test {noun})"
    gained = f"{gain.in_points()} of {lead.name} over the encoder as it was{tested}"
    if not beyond_chance([one for _, one in known]):
        chance = f", for the largest of {len(known)} gains" * (len(known) > 1)
        few = "two seeds leave it wide, so add --seeds 3 or more; else " * (gain.seeds == 2)
        return (
            f"Recommended: none of these. The most is gained by {best.label}, {gained}, which is "
            f"within the noise of {noun} and seeds{chance}: {few}keep the encoder you have, or "
            "look for false negatives in what the page shows."
        )
    alike = [
        group.label
        for group, other in known
        if group is not best and np.quantile(gain.means - other.means, (1 - LEVEL) / 2) <= 0
    ]
    more = f" Within the noise of it: {', '.join(alike)}." if alike else ""
    if gain.seeds == 1:
        more += f" That is one seed, chosen by the same {noun}: --seeds 3 would make sure of it."
    return f"Recommended: {best.label}, {gained}.{more}"
