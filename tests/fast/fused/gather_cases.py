"""The sparse backward pass against dense products; run as a script it does so without a GPU.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/fast/fused/gather_cases.py
prints {name of a case: [what differed, ...]} as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from interpreter import changed, hurry
from negchain import ISIR, MH, LargeBatchEMC2Loss
from negchain.fast.fused import function, gather_triton
from negchain.fast.fused.plan import Plan, Walked

Draw = Callable[["Case", torch.Generator], Tensor]


def uniform(case: Case, generator: torch.Generator) -> Tensor:
    return torch.randint(case.columns, (case.rows, case.slots), generator=generator)


def one_column(case: Case, generator: torch.Generator) -> Tensor:
    return torch.full((case.rows, case.slots), case.columns - 1)


def few_columns(case: Case, generator: torch.Generator) -> Tensor:
    """Repeated within nearly every row; column 0 among them."""
    return torch.randint(3, (case.rows, case.slots), generator=generator) * (case.columns // 3)


@dataclass(frozen=True)
class Case:
    """A sparse matrix: `views` groups of B rows, each with `columns` columns of its own."""

    name: str
    draw: Draw = uniform
    size: int = 19
    columns: int = 24
    slots: int = 5
    dim: int = 64
    views: int = 1
    blocks: int = 1
    full: bool = False  # all slots of all rows used, all with weight
    empty: tuple[int, ...] = ()  # rows without entries
    no_weight: bool = False
    dtype: torch.dtype = torch.float32
    planted: tuple[str, ...] = ()  # bugs that it must notice

    @property
    def rows(self) -> int:
        return self.views * self.size


BORDERS = ("last entry", "last flush")
CASES = (
    Case("uniform", planted=(*BORDERS, "neighbour", "old total", "one place")),
    Case("one column", one_column, planted=(*BORDERS, "one place")),
    Case("one column, two chunks", one_column, size=16, slots=4, full=True, planted=BORDERS),
    Case("one chunk and one entry", size=11, slots=3, full=True, planted=BORDERS),
    Case("repeated within a row", few_columns, slots=9, planted=("old total", "one place")),
    Case("a column per row", lambda c, g: torch.arange(c.rows)[:, None], slots=1, full=True),
    Case("empty rows", empty=(0, 7, 18)),
    Case("no entries at all", empty=tuple(range(19))),
    Case("no weight at all", no_weight=True),
    Case("one entry", size=1, slots=1, full=True, planted=("last flush",)),
    Case("many slots", slots=35, size=9, full=True, planted=("first slots",)),
    Case("shared views", views=2, blocks=2, planted=("first block",)),
    Case("shared views, one direction", views=1, blocks=2),
    Case("other widths", dim=192, size=7),
    Case("bfloat16", dtype=torch.bfloat16, dim=128, size=7),
)


def build(case: Case, device: str = "cpu") -> tuple[SimpleNamespace, SimpleNamespace]:
    """What `_sparse_products` reads of a plan and of what was walked."""
    generator = torch.Generator().manual_seed(len(case.name))
    shape = case.rows, case.slots
    positions = case.draw(case, generator).int()
    runs = torch.randint(case.slots + 1, (case.rows,), generator=generator).int()
    weights = torch.randn(shape, generator=generator)
    if case.full:
        runs[:] = case.slots
    else:
        start = torch.rand(shape, generator=generator) < 0.2  # the chain was still at the start
        positions[start], weights[start] = -1, 0.0
        weights[torch.rand(shape, generator=generator) < 0.2] = 0.0
    runs[list(case.empty)] = 0
    if case.no_weight:
        weights[:] = 0.0
    unused = torch.arange(case.slots) >= runs[:, None]
    positions[unused], weights[unused] = 10**9, float("nan")  # never written
    queries, pool = (
        torch.randn(count, case.dim, generator=generator).to(device, case.dtype)
        for count in (case.rows, case.blocks * case.columns)
    )
    visits = positions.to(device), weights.to(device), runs.to(device)
    plan = SimpleNamespace(index=torch.arange(case.size), num_columns=case.columns)
    return plan, SimpleNamespace(queries=queries, pool=pool, visits=visits)


def dense(plan: SimpleNamespace, walked: SimpleNamespace) -> Tensor:  # [N,blocks*K]
    """W in float64."""
    positions, weights, runs = (x.cpu() for x in walked.visits)
    matrix = torch.zeros(len(positions), len(walked.pool), dtype=torch.float64)
    for row, num_runs in enumerate(runs.tolist()):
        first = row // len(plan.index) * plan.num_columns
        for slot in range(num_runs):
            if weights[row, slot] != 0:
                matrix[row, first + int(positions[row, slot])] += weights[row, slot]
    return matrix


def check(case: Case, device: str = "cpu") -> list[str]:
    """Which gradients differ from dense products in float64."""
    plan, walked = build(case, device)
    matrix, queries, pool = dense(plan, walked), walked.queries, walked.pool
    got = function._sparse_products(plan, walked)
    expected = matrix @ pool.double().cpu(), matrix.mT @ queries.double().cpu()
    differences = [
        (one.cpu() - other).abs().max() for one, other in zip(got, expected, strict=True)
    ]
    return [
        f"{name} of {case.name}: {float(difference)}"
        for name, difference in zip(("rows", "columns"), differences, strict=True)
        if not difference < 1e-4
    ]


def bad_rows(device: str = "cpu") -> list[str]:
    """A row that is no number has no entry, or the kernels would write outside of their buffers."""
    found = []
    products = function._sparse_products

    def look(plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
        assert walked.visits is not None
        positions, weights, runs = walked.visits
        there = torch.arange(positions.shape[1], device=device) < runs[:, None]
        inside = (positions >= 0) & (positions < plan.num_columns)
        if (there & ~inside & (weights != 0)).any():
            found.append(f"{plan.weighting}: {positions.tolist()} {weights.tolist()}")
            walked.visits = positions, torch.zeros_like(weights), runs
        return products(plan, walked)

    with patch.object(function, "_sparse_products", look):
        for kernel in (MH(count_every=128), ISIR(count_every=128)):
            loss_fn = LargeBatchEMC2Loss(
                9, kernel=kernel, views="paired", carried="cached", dim=8, backend="fused"
            ).to(device)
            z = torch.randn(5, 8, device=device)
            z[1, 3], z[2, 3] = float("nan"), float("inf")
            z.requires_grad_()
            loss_fn(z, torch.randn_like(z), torch.arange(5, device=device)).backward()
            assert z.grad is not None
            if z.grad.isfinite().all(1).tolist() != [True, False, False, True, True]:
                found.append(f"{kernel}: {z.grad.tolist()}")
    return found


# ---------------------------------------------------------------------------- planted bugs

BUGS = {
    "last entry": ("for entry in range(begin, stop):", "for entry in range(begin, stop - 1):"),
    "last flush": (
        "        current = column\n    _flush(grad_pool_ptr, current, total, depth, STRIDE)\n",
        "        current = column\n",
    ),
    "neighbour": ("if column != current:", "if column > current + 1:"),
    "old total": (
        "            total = tl.zeros((WIDTH,), tl.float32)\n        total += query",
        "        total += query",
    ),
    "one place": ("earlier_ptr + at, earlier, mask", "earlier_ptr + at, earlier * 0, mask"),
    "first slots": ("slot = tl.program_id(1) * SLOTS +", "slot ="),
    "first block": ("column = (row // num_items) * num_columns +", "column = row * 0 +"),
}


def planted() -> dict[str, list[str]]:
    """What the comparison says about planted bugs."""
    found = {}
    for bug, (old, new) in BUGS.items():
        with (
            changed(gather_triton, old, new) as other,
            patch.object(function, "gather_triton", other),
            patch.object(torch, "empty", torch.zeros),  # a row's number that was never written
        ):
            for case in CASES:
                if bug in case.planted:
                    found[f"{bug}: {case.name}"] = check(case)
    return found


def main() -> None:
    """Check everything and print what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hurry()
    found = {case.name: check(case) for case in CASES} | {"bad rows": bad_rows()}
    print(json.dumps(found | {f"planted: {name}": told for name, told in planted().items()}))


if __name__ == "__main__":
    main()
