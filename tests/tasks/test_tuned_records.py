"""Tables of pages that tell tuned runs are those of their records."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCIFACT = {  # a row of the page, by words in it; the method in the record
    "in-batch (": "in-batch",
    "GIST": "GIST",
    "EMC², uniform": "emc2 uniform",
    "random documents": "random",
    "SogCLR": "sogclr",
    "logQ": "logQ uniform",
    "CachedMNRL": "CachedMNRL 256",
    "mined once": "mined",
    "EMC², informed": "emc2 informed",
    "uncorrected": "table top-k",
    "importance weights": "informed importance",
}
FLICKR = {
    "`infonce`, a batch of 2 b": "infonce 2b",
    "`sogclr`, b draws": "sogclr",
    "`informed`, b draws": "informed",
    "`emc2`": "emc2",
    "`infonce`, a batch of b": "infonce",
}


Cells = dict[tuple[str, int], str]


def rows_of(record: str) -> list[dict[str, Any]]:
    text = (ROOT / f"records/2026-11-16_{record}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def key(row: dict[str, Any]) -> tuple[str, int]:
    return row["method"], row["batch"]


def setting(row: dict[str, Any]) -> tuple[float | None, float | None]:
    return row.get("beta"), row.get("lr")


def cells_of(page: str, head: str, names: dict[str, str]) -> Cells:
    """A page's table under a head: its cells by method and batch."""
    lines = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split(f"| {head} |")[1]
    first, _, *lines = lines.split("\n\n")[0].splitlines()
    batches = [int(cell.split("=")[1]) for cell in first.strip("| ").split("|")]
    assert len(lines) == len(names)
    found: Cells = {}
    for line in lines:
        title, *told = [cell.strip() for cell in line.strip("|").split("|")]
        (method,) = (name for words, name in names.items() if words in title)
        found |= {(method, b): cell for b, cell in zip(batches, told, strict=True)}
    return found


@pytest.mark.parametrize(
    "page, head, record, names, tried, seeds, cells",
    [
        ("retrieval", "test nDCG@10, five seeds", "scifact", SCIFACT, 4, 5, 33),
        ("image_text", "test R@1, mean of both ways, three seeds", "flickr8k", FLICKR, 2, 3, 13),
    ],
)
def test_a_page_shows_what_validation_chose(
    page: str, head: str, record: str, names: dict[str, str], tried: int, seeds: int, cells: int
) -> None:
    """Of `tried` settings with seed 0, or more; a cell is "–" if these or seeds are missing."""
    rows, shown = rows_of(f"{record}_h200/runs"), 0
    for case, cell in cells_of(page, head, names).items():
        own = [r for r in rows if key(r) == case]
        grid = [r for r in own if r["seed"] == 0]
        best = max(grid, key=lambda r: r["validation"], default={})
        tests = [r["test"] for r in own if setting(r) == setting(best)]
        assert (cell == "–") == (len(grid) < tried or len(tests) < seeds), case
        if cell == "–":
            continue
        assert len(tests) == seeds, case
        assert abs(float(cell) - mean(tests)) < 6e-4, (case, mean(tests))
        shown += 1
    assert shown == cells


def test_the_page_shows_what_equal_time_gives() -> None:
    rows = [*rows_of("scifact_h200/time"), *rows_of("scifact_h200/time_graph")]
    for case, cell in cells_of(
        "retrieval", "test nDCG@10, in the time of `informed`", SCIFACT
    ).items():
        own = [r["test"] for r in rows if (r["method"], r["batch"]) == case]
        assert len(own) < 5 if cell == "–" else len(own) == 5, case
        assert cell == "–" or abs(float(cell) - mean(own)) < 6e-4, (case, mean(own))
