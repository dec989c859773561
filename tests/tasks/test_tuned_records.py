"""Tables of pages that tell tuned runs are those of their records."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

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


@pytest.mark.parametrize(
    "page, head, record, names, tried, seeds, cells",
    [
        ("retrieval", "test nDCG@10, five seeds", "scifact", SCIFACT, 4, 5, 33),
        ("image_text", "test R@1, mean of both ways, three seeds", "flickr8k", FLICKR, 2, 3, 9),
    ],
)
def test_a_page_shows_what_validation_chose(
    page: str, head: str, record: str, names: dict[str, str], tried: int, seeds: int, cells: int
) -> None:
    """Of `tried` settings with seed 0; a cell without all of them, and only such a one, is "–"."""
    text = (ROOT / f"records/2026-11-16_{record}_h200/runs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    lines = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split(f"| {head} |")[1]
    first, _, *lines = lines.split("\n\n")[0].splitlines()
    batches = [int(cell.split("=")[1]) for cell in first.strip("| ").split("|")]
    shown = 0
    for line in lines:
        title, *told = [cell.strip() for cell in line.strip("|").split("|")]
        (method,) = (name for words, name in names.items() if words in title)
        for batch, cell in zip(batches, told, strict=True):
            own = [r for r in rows if (r["method"], r["batch"]) == (method, batch)]
            grid = [r for r in own if r["seed"] == 0]
            assert (cell == "–") == (len(grid) < tried), (title, batch)
            if cell == "–":
                continue
            assert len(grid) == tried
            best = max(grid, key=lambda r: r["validation"])
            tests = [r["test"] for r in own if (r["beta"], r["lr"]) == (best["beta"], best["lr"])]
            assert len(tests) == seeds
            assert abs(float(cell) - mean(tests)) < 6e-4, (title, batch, mean(tests))
            shown += 1
    assert shown == cells


def test_the_page_shows_what_equal_time_gives() -> None:
    text = (ROOT / "records/2026-11-16_scifact_h200/time.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    head = "| test nDCG@10, in the time of `informed` | b = 16 | b = 64 |"
    page = (ROOT / "docs/retrieval.md").read_text(encoding="utf-8").split(head)[1]
    lines = page.split("\n\n")[0].splitlines()[2:]
    assert len(lines) == len(SCIFACT)
    for line in lines:
        title, *told = [cell.strip() for cell in line.strip("|").split("|")]
        (method,) = (name for words, name in SCIFACT.items() if words in title)
        for batch, cell in zip((16, 64), told, strict=True):
            own = [r["test"] for r in rows if (r["method"], r["batch"]) == (method, batch)]
            assert len(own) == (0 if cell == "–" else 5), (title, batch)
            assert cell == "–" or abs(float(cell) - mean(own)) < 6e-4, (title, batch, mean(own))
