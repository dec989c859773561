"""docs/retrieval.md's table of SciFact is that of its record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
NAMES = {  # a row of the page, by words in it; the method in the record
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


def test_the_page_shows_what_validation_chose() -> None:
    text = (ROOT / "records/2026-11-16_scifact_h200/runs.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    page = (ROOT / "docs/retrieval.md").read_text(encoding="utf-8")
    head = page.index("| test nDCG@10, five seeds |")
    shown = 0
    for line in page[head : page.index("\n\n", head)].splitlines()[2:]:
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        (method,) = (name for words, name in NAMES.items() if words in title)
        for batch, cell in zip((4, 16, 64), cells, strict=True):
            own = [r for r in rows if (r["method"], r["batch"]) == (method, batch)]
            grid = [r for r in own if r["seed"] == 0]
            assert len(grid) == 4, "two betas and two learning rates"
            best = max(grid, key=lambda r: r["validation"])
            tests = [r["test"] for r in own if (r["beta"], r["lr"]) == (best["beta"], best["lr"])]
            seeds = re.search(r"\((\d) seeds\)", cell)
            assert len(tests) == (int(seeds[1]) if seeds else 5)
            assert abs(float(cell.split()[0]) - mean(tests)) < 6e-4, (title, batch, mean(tests))
            shown += 1
    assert shown == 33
