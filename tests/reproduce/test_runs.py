"""What `reproduce.runs` measures of a run."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negchain.reproduce import cost, pages, runs
from negchain.reproduce.common import Options, read_rows

MIB = 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="by a GPU's own allocator there")
def test_peak_memory_is_what_a_step_holds_at_once(monkeypatch) -> None:
    """A run of known sizes: 8 MiB stay, a step takes 20 for a while; 50 were gone before it."""

    class Step:
        def __call__(self, number: int, batch: Any) -> None:
            first = torch.empty(12 * MIB, dtype=torch.uint8)
            second = torch.empty(8 * MIB, dtype=torch.uint8)
            del first, second
            torch.empty(16 * MIB, dtype=torch.uint8)

    @contextmanager
    def prepared(job: Any):
        torch.empty(50 * MIB, dtype=torch.uint8)
        kept = torch.empty(8 * MIB, dtype=torch.uint8)
        order = SimpleNamespace(batch=lambda number: None)
        task = SimpleNamespace(num_samples=9)
        yield SimpleNamespace(step=Step(), order=order, task=task, kept=kept), False

    monkeypatch.setattr(runs, "prepared", prepared)
    monkeypatch.setattr(runs, "_load", lambda config: None)
    found = runs.peak_memory({"settings": {"device": "cpu"}, "method": "infonce", "seed": 0})
    assert found["device"] == "CPU" and found["images"] == 9
    assert found["peak_bytes"] == pytest.approx(28 * MIB, abs=2**16)


def test_the_table_of_memory_is_beside_infonce() -> None:
    jobs = [job for job in cost.jobs(Options(quick=True)) if job["kind"] == "memory"]
    rows = [{"job": job, "peak_bytes": (1 + i % 7) * MIB, "device": "CPU", "images": 9}
            for i, job in enumerate(jobs)]  # fmt: skip
    lines = [line.split(" | ") for line in cost.table(rows).splitlines()[2:]]
    assert [line[4] for line in lines[:7]] == [f"{k}.00" for k in range(1, 8)]
    assert [float(line[3]) for line in lines[:7]] == list(range(1, 8))


def test_what_is_said_of_memory_is_in_the_record() -> None:
    """By device: a CPU's rows are in float32 and of all images, the GPU's are neither."""
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs" / "results.md").read_text(encoding="utf-8").split())
    rows = pages.where(read_rows(root / "records/reproduce/cost.jsonl"), kind="memory")
    peak = {(r["device"].split()[-1], r["job"]["setting"], r["job"]["method"]): r["peak_bytes"]
            for r in rows}  # fmt: skip
    assert len(peak) == len(rows) == 14 + 28

    def ratio(device: str, setting: str, first: str = "emc2", second: str = "infonce") -> str:
        return f"{peak[device, setting, first] / peak[device, setting, second]:.2f}"

    found = [ratio("CPU", name) for name in ("b32-none", "b32-batch", "b256-none")]
    assert "EMC²'s is {} times InfoNCE's at b = 32, {} times with".format(*found) in page
    assert f"BatchNorm, and {found[2]} times at b = 256" in page
    none, large, isir = ("b32-none", "b256-none", "isir")
    told = f"EMC² and i-SIR have {ratio('H200', none)} times InfoNCE's at b = 32, "
    told += f"{ratio('H200', 'b32-batch')} and {ratio('H200', 'b32-batch', isir)} with BatchNorm; "
    told += f"{ratio('H200', large)} at b = 256, {ratio('H200', 'b256-batch')} with BatchNorm"
    assert told in page
    for name in (none, large):
        assert ratio("H200", name, isir) == ratio("H200", name)
    for name in (none, "b32-batch", large, "b256-batch"):
        for method in ("dcl", "sogclr")[name == "b256-batch" :]:  # there DCL was the first
            assert abs(peak["H200", name, method] - peak["H200", name, "infonce"]) <= 2 * MIB
    assert "it came first (556 MiB, and 527 after another)" in page
    lines = (root / "records/reproduce/cost.jsonl").read_text(encoding="utf-8").splitlines()
    case = {"kind": "memory", "setting": "b32-batch", "method": "infonce"}
    own = [row for row in map(json.loads, lines) if row.get("device") == "NVIDIA H200"]
    twice = [row["peak_bytes"] for row in own if case.items() <= row["job"].items()]
    assert [round(size / MIB) for size in twice] == [556, 527]
    surplus = peak["H200", "b256-batch", "dcl"] - peak["H200", "b256-batch", "infonce"]
    assert "some 30 MiB more" in page and 28 < surplus / MIB < 32
