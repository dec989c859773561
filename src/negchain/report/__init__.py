"""The report: what happened in a run, or in several, as one HTML page that needs no network.

runs.py          run folders read, and runs that differ only by seed as a group
measures.py      names and units of all numbers; `Shown`: what a task wants shown
statistics.py    how sure a number is, and whether there is a winner
results.py       the result table, for the page and for the terminal
advice.py        what looks wrong in a run, and whether training helped, in sentences
sections.py      the sections of one run's page
comparison.py    the sections of a page about several
tuning.py        what `compare --tune` tried, and chose
charts.py, galleries.py, embedding_map.py    lines, pictures and the map
images.py, retrieval.py, image_text.py       the `Shown` of each task
duplicates.py    the page of near-duplicates
page.py          the HTML document around all of it
"""

from collections.abc import Sequence
from pathlib import Path

from . import comparison, sections, tuning
from .page import Page
from .results import comparison_table, summary_table
from .runs import group_runs, load_run
from .tuning import Tuned

__all__ = ["comparison_table", "load_run", "summary_table", "write_report"]


def write_report(runs: Sequence[Path], out: Path, tuned: Sequence[Tuned] = ()) -> Path:
    """Write the page of one run, or the comparison of several, to `out`; return `out`.

    `tuned`: what the settings of these runs were chosen from.

    >>> write_report([], Path("page.html"))
    Traceback (most recent call last):
    ValueError: a report needs at least one run, got none; name one or more run folders
    """
    if not runs:
        raise ValueError("a report needs at least one run, got none; name one or more run folders")
    out = Path(out)
    loaded = [load_run(path) for path in dict.fromkeys(map(Path, runs))]
    tasks = {run.task: run.name for run in loaded}
    if len(tasks) > 1:
        named = ", ".join(f"{name} of {task}" for task, name in tasks.items())
        raise ValueError(f"runs are compared within one --task, got {named}; leave some out")
    page = Page()
    if len(loaded) == 1:
        run = loaded[0]
        title = f"{run.method} on {run.data_name}"
        page.add(sections.headline(run))
        page.add(sections.tiles(run))
        page.add(sections.standing(run))
        tuning.section(page, tuned, run.shown)
        sections.curves(page, run)
        sections.pictures(page, run)
        page.add(f"<section><h2>Details</h2>{sections.settings(run)}</section>")
    else:
        groups = group_runs(loaded)
        title = "Comparison: " + ", ".join(dict.fromkeys(run.method for run in loaded))
        page.add(comparison.headline(groups, loaded))
        page.add(comparison.results(groups))
        tuning.section(page, tuned, groups[0].shown)
        comparison.curves(page, groups)
        page.add(comparison.gallery(groups))
        comparison.runs_section(page, groups, out)
    page.write(out, title)
    return out
