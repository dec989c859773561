"""The sparse backward pass equals dense products (taxonomy 12), however entries are spread.

Without a GPU the kernels run under Triton's interpreter, in one process of its own; see
`gather_cases` for the cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from interpreter import interpreted

pytest.importorskip("triton")

from gather_cases import BUGS, CASES, bad_rows, check  # noqa: E402

from negchain.fast.fused import function  # noqa: E402


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    told: dict[str, list[str]] = json.loads(
        interpreted(Path(__file__).with_name("gather_cases.py"))
    )
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_sorted_entries_equal_dense_products(found, name) -> None:
    assert found[name] == []


@pytest.mark.slow
def test_a_bad_row_has_no_entries(found) -> None:
    assert found["bad rows"] == []


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(found, bug) -> None:
    told = [text for name, text in found.items() if name.startswith(f"planted: {bug}: ")]
    assert told and all(told)


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_gpu(case) -> None:
    assert check(case, "cuda") == []


@pytest.mark.gpu
def test_a_bad_row_has_no_entries_on_a_gpu() -> None:
    assert bad_rows("cuda") == []


SIZE, SLOTS, DIM = 8192, 33, 512

SPREADS = {
    "uniform": lambda u: u * SIZE,
    "clusters": lambda u: torch.arange(SIZE, device="cuda")[:, None] // 128 * 128 + u * 3,
    "one column": lambda u: u * 0 + 4321,
}


def added(positions: Tensor, weights: Tensor, queries: Tensor, pool: Tensor) -> list[Tensor]:
    """Both products, a slot at a time."""
    rows, columns = (torch.zeros(SIZE, DIM, device="cuda") for _ in range(2))
    for slot in range(SLOTS):
        column, weight = positions[:, slot].long(), weights[:, slot, None]
        rows += weight * pool[column].float()
        columns.index_add_(0, column, weight * queries.float())
    return [rows, columns]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("spread", SPREADS)
def test_a_large_batch_on_a_gpu(spread, dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    queries, pool = (
        torch.randn(SIZE, DIM, device="cuda", generator=generator).to(dtype) for _ in range(2)
    )
    u, weights = torch.rand(2, SIZE, SLOTS, device="cuda", generator=generator)
    positions = SPREADS[spread](u).int()
    weights = torch.where(weights < 0.3, 0.0, weights)
    expected = added(positions, weights, queries, pool)
    visits = positions, weights, torch.full((SIZE,), SLOTS, dtype=torch.int32, device="cuda")
    plan = SimpleNamespace(index=torch.arange(SIZE), num_columns=SIZE)
    walked = SimpleNamespace(queries=queries, pool=pool, visits=visits)
    for got, other in zip(function._sparse_products(plan, walked), expected, strict=True):
        assert float((got - other).norm()) <= 1e-5 * float(other.norm())
