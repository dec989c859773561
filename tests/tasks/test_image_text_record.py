"""docs/image_text.md's table of Flickr8k is that of its record."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
NAMES = {  # a row of the page; the method in the record
    "`infonce`, a batch of 2 b": "infonce 2b",
    "`sogclr`, b draws": "sogclr",
    "`informed`, b draws": "informed",
    "`emc2`": "emc2",
    "`infonce`, a batch of b": "infonce",
}


def test_the_page_shows_what_validation_chose() -> None:
    text = (ROOT / "records/2026-11-16_flickr8k_h200/runs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    page = (ROOT / "docs/image_text.md").read_text(encoding="utf-8")
    head = page.index("| test R@1, mean of both ways, three seeds |")
    first, _, *lines = page[head : page.index("\n\n", head)].splitlines()
    batches = [int(cell.split("=")[1]) for cell in first.strip("| ").split("|")[1:]]
    shown = 0
    for line in lines:
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for batch, cell in zip(batches, cells, strict=True):
            own = [r for r in rows if (r["method"], r["batch"]) == (NAMES[title], batch)]
            grid = [r for r in own if r["seed"] == 0]
            if len(grid) < 2:  # not tuned, so not shown
                assert cell == "–"
                continue
            best = max(grid, key=lambda r: r["validation"])
            tests = [r["test"] for r in own if r["lr"] == best["lr"]]
            assert len(tests) == 3
            assert abs(float(cell) - mean(tests)) < 6e-4, (title, batch, mean(tests))
            shown += 1
    assert shown == 9
