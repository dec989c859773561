"""`negchain reproduce NAME --quick` of every experiment: minutes on two cores, and a result."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from negchain import reproduce
from negchain.cli import run
from negchain.reproduce import common

SLOW = [name for name in reproduce.NAMES if name not in ("stationarity", "time")]


@pytest.mark.parametrize("name", ["time", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_quick_experiment_ends_in_a_table_and_figures(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stationarity runs with the fast tests (test_reproduce.py), and time does, of two methods."""
    began, few = time.time(), ["--methods", "infonce,emc2"] if name == "time" else []
    given = [name, "--quick", "--device", "cpu", "--out", str(tmp_path), *few]
    assert run(["reproduce", *given]) == 0
    assert time.time() - began < 300
    assert list(tmp_path.glob(f"{name}*.svg"))
    assert capsys.readouterr().out.count("\n|") >= (3 if few else 6)  # head, methods
    rows = [
        row for of in common.runs_of(name) for row in common.read_rows(tmp_path / f"{of}.jsonl")
    ]
    assert rows and all(row.get("complete", True) for row in rows)
    for curve in (row["curve"] for row in rows if "config" in row):  # runs through the trainer
        assert curve[-1]["global_loss"] < curve[0]["global_loss"]
        assert curve[-1]["probe"] > 0.85 and curve[-1]["embedding_variance"] > 0.05
    bounds = [row for row in rows if row["job"].get("part") == "mixing"]
    assert (name == "theory") == bool(bounds)
    assert all(row["holds"] for row in bounds if row["job"]["R"] < 8)  # Lemma 1, few steps
