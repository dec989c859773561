"""What is said of draws in a BatchNorm pass of their own is what the record has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from negchain.reproduce.common import read_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/methods/importance.md").read_text(encoding="utf-8")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import batchnorm_draws

    yield batchnorm_draws
    del sys.modules["batchnorm_draws"]


def test_the_table_on_the_page_is_that_of_the_record(benchmark) -> None:
    rows = read_rows(ROOT / benchmark.RECORD)
    assert len(rows) == 21
    assert benchmark.table(rows) in PAGE


def test_in_the_batchs_pass_informed_importance_has_a_lower_loss(benchmark) -> None:
    """In every seed; and no other method has losses far below 0."""
    ends = {
        (row["job"]["method"], row["job"]["way"], row["job"]["seed"]): row["curve"]
        for row in read_rows(ROOT / benchmark.RECORD)
    }
    for seed in range(3):
        apart, together = (
            ends["informed", way, seed][-1]["global_loss"] for way in ("own pass", "together")
        )
        assert apart - together > 0.4
    for (method, way, _), curve in ends.items():
        least = min(point["loss"] for point in curve)
        assert (least < -10) == ((method, way) == ("informed", "own pass"))


def test_what_is_said_of_stl10_is_in_its_records() -> None:
    before = read_rows(ROOT / "records/2026-11-20_draws-apart_h200.jsonl")
    after = [
        row
        for row in read_rows(ROOT / "records/reproduce/stl10.jsonl")
        if row["job"]["method"] == "informed" and row["job"]["setting"] in ("b16-batch", "b8-batch")
    ]
    settings = {row["job"]["setting"]: row["job"]["settings"]["batch_size"] for row in after}
    assert len(after) == 3
    losses = [
        point["loss"]
        for row in before
        if row["job"]["setting"] in settings
        for point in row["curve"]
    ]
    assert "far below 0, down to −18" in PAGE and -19 < min(losses) < -18
    for row in after:
        job = row["job"]
        step = 15_000  # of b = 8 what was measured after ten epochs, as the run was not ended
        epochs = step * settings[job["setting"]] // 12_000
        (was,) = (r for r in before if r["job"] == job)
        cells = [
            ", ".join(
                f"{point[key]:.{digits}f}".removeprefix("0") if key != "global_loss"
                else f"{point[key]:.{digits}f}"
                for key, digits in (("embedding_variance", 3), ("global_loss", 2), ("probe", 3))
            )
            for curve in (was["curve"], row["curve"])
            for point in curve
            if point["step"] == step
        ]  # fmt: skip
        head = f"| {job['seed']} | b = {settings[job['setting']]}, {epochs} epochs |"
        assert f"{head} {cells[0]} | {cells[1]} |" in PAGE
