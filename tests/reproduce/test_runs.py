"""What `reproduce.runs` measures of a run."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negchain.reproduce import cost, runs
from negchain.reproduce.common import Options

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
        yield SimpleNamespace(step=Step(), order=order, kept=kept), False

    monkeypatch.setattr(runs, "prepared", prepared)
    monkeypatch.setattr(runs, "_load", lambda config: None)
    found = runs.peak_memory({"settings": {"device": "cpu"}, "method": "infonce", "seed": 0})
    assert found["device"] == "CPU"
    assert found["peak_bytes"] == pytest.approx(28 * MIB, abs=2**16)


def test_the_table_of_memory_is_beside_infonce() -> None:
    jobs = [job for job in cost.jobs(Options(quick=True)) if job["kind"] == "memory"]
    rows = [{"job": job, "peak_bytes": (1 + i % 7) * MIB, "device": "CPU"}
            for i, job in enumerate(jobs)]  # fmt: skip
    lines = [line.split(" | ") for line in cost.table(rows).splitlines()[2:]]
    assert [line[3] for line in lines[:7]] == [f"{k}.00" for k in range(1, 8)]
    assert [float(line[2]) for line in lines[:7]] == list(range(1, 8))
