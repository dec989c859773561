"""One HTML document from run folders: everything inside it, nothing fetched.

The page's style and script are `page.css` and `page.js` beside this file. A content security
policy in the page forbids all network access and every script but that one, so a file name that
holds markup stays text even if escaping were to fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from negchain.files import replacing
from negchain.methods import METHODS

from . import comparison, sections
from .runs import Group, Run, group_runs, load_run
from .sections import Page

_FINALS = (
    "chance loss global_loss embedding_variance acceptance_rate carried_mass "
    "effective_negatives samples_per_second seconds samples step epoch".split()
)


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page of one run, or the comparison of several, to `out`; return `out`.

    >>> write_report([], Path("page.html"))
    Traceback (most recent call last):
    ValueError: a report needs at least one run, got none; name one or more run folders
    """
    if not runs:
        raise ValueError("a report needs at least one run, got none; name one or more run folders")
    out = Path(out)
    loaded = [load_run(Path(path)) for path in dict.fromkeys(Path(path) for path in runs)]
    tasks = {str(run.config.get("task", "images")): run.name for run in loaded}
    if len(tasks) > 1:
        named = ", ".join(f"{name} of {task}" for task, name in tasks.items())
        raise ValueError(f"runs are compared within one --task, got {named}; leave some out")
    groups = group_runs(loaded)
    page = Page()
    if len(loaded) == 1:
        run = loaded[0]
        title = f"{run.method} on {run.data_name}"
        page.add(sections.headline(run))
        page.add(sections.tiles(run))
        page.add(sections.standing(run))
        sections.curves(page, run)
        sections.pictures(page, run)
        page.add(f"<section><h2>Details</h2>{sections.settings(run)}</section>")
    else:
        title = "Comparison: " + ", ".join(dict.fromkeys(run.method for run in loaded))
        page.add(comparison.headline(groups, loaded))
        page.add(comparison.results(groups))
        comparison.curves(page, groups)
        page.add(comparison.gallery(groups))
        comparison.runs_section(page, groups, out)
    write_page(out, title, page, _numbers(page, groups))
    return out


def write_page(out: Path, title: str, page: Page, numbers: dict[str, Any]) -> None:
    """Write a page as one document, with `numbers` as its data.

    A reader sees the old page or the new one, never half.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        file.write(_document(title, page, numbers).encode("utf-8", "backslashreplace"))


def _numbers(page: Page, groups: Sequence[Group]) -> dict[str, Any]:
    """What the page shows, as data: for the script, and for whoever wants to read on."""
    return {
        "groups": [
            {"label": group.label, "method": group.method, "settings": group.settings,
             "runs": [_run_numbers(run) for run in group.runs]}
            for group in groups
        ],
        "charts": page.charts,
        "maps": page.maps,
    }  # fmt: skip


def _run_numbers(run: Run) -> dict[str, Any]:
    lead, rest = ([m.key for m in part] for part in (run.shown.lead, run.shown.secondary))
    held = [f"{prefix}_{key}" for prefix in run.shown.baselines for key in lead]
    finals = {key: run.final(key) for key in (*lead, *rest, *held, *_FINALS)}
    return {
        "name": run.name,
        "seed": run.config.get("seed"),
        "finished": run.finished,
        "final": {key: value for key, value in finals.items() if value is not None},
    }


def _document(title: str, page: Page, numbers: dict[str, Any]) -> str:
    here = files(__package__ or "negchain.report")
    style = _with_methods(here.joinpath("page.css").read_text(encoding="utf-8"))
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    # "<" may not stand in a script element's text, whatever its type
    data = json.dumps(numbers, allow_nan=False, default=str, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    means = f" Curves of more than {sections.POINTS} points show means of equal stretches."
    means *= bool(numbers["charts"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · negchain</title><style>{style}</style></head>"
        f"<body><main>{''.join(page.html)}</main><footer>Written by negchain.{means}</footer>"
        f'<script type="application/json" id="negchain-data">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _with_methods(style: str) -> str:
    """The page's style with the colours of the registered methods, light and dark."""
    for number, theme in enumerate(("light", "dark")):
        colours = " ".join(f"--{name}: {m.colour[number]};" for name, m in METHODS.items())
        style = style.replace(f"/*{theme}-methods*/", colours)
    return style
