"""The Metropolis-Hastings scan: three implementations, one result (taxonomy 4, 12, 13)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_cases import COLUMNS, disagreement, scan_cases

from interpreter import interpreted
from negchain import mh_scan
from oracles import algorithm_1, expected_visits


@pytest.mark.parametrize(
    "columns", [*COLUMNS[:-1], pytest.param(COLUMNS[-1], marks=pytest.mark.slow)]
)
def test_reference_is_algorithm_1(columns) -> None:
    for name, (logits, start, log_u, burn_in) in scan_cases((columns,)):
        scan = mh_scan(logits, start, log_u, burn_in, backend="reference")
        for row in range(len(logits)):
            skipped = int(burn_in[row]) if isinstance(burn_in, torch.Tensor) else burn_in
            visits, start_visits, last, last_logit, accepts, counted = algorithm_1(
                logits[row].tolist(), start[row].item(), log_u[row].tolist(), skipped
            )
            got = (scan.weights[row].double() * counted).round().long().tolist()
            assert got == visits, name
            assert round(scan.start_weight[row].item() * counted) == start_visits, name
            assert (int(scan.last[row]), int(scan.accepts[row])) == (last, accepts), name
            assert scan.last_logit[row].item() == last_logit, name


def test_torch_equals_reference_to_the_bit() -> None:
    assert disagreement("torch") == []


@pytest.mark.slow
def test_triton_equals_reference_to_the_bit() -> None:
    """Under Triton's interpreter; `fast/fused/test_twins.py` has some of it quickly."""
    interpreted(Path(__file__).with_name("scan_cases.py"))


def test_auto_is_torch_on_a_cpu() -> None:
    _, inputs = next(iter(scan_cases((41,))))
    for a, b in zip(mh_scan(*inputs), mh_scan(*inputs, backend="torch"), strict=True):
        assert torch.equal(a, b)


def test_no_columns() -> None:
    for backend in ("reference", "torch"):
        scan = mh_scan(torch.zeros(3, 0), torch.zeros(3), torch.zeros(3, 0), 0, backend)
        assert torch.equal(scan.start_weight, torch.ones(3))
        assert scan.last.tolist() == [-1] * 3 and scan.accepts.tolist() == [0] * 3


def test_inputs_are_not_changed() -> None:
    for backend in ("reference", "torch"):
        for _, inputs in scan_cases((7,)):
            before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
            mh_scan(*inputs, backend=backend)
            for a, b in zip(inputs, before, strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    "change, words",
    [
        ({"log_u": torch.zeros(2, 4)}, "log_u"),
        ({"logits": torch.zeros(3)}, "logits"),
        ({"start_logit": torch.zeros(3)}, "start_logit"),
        ({"burn_in": 3}, "burn_in"),
        ({"burn_in": -1}, "burn_in"),
        ({"burn_in": torch.zeros(3, dtype=torch.long)}, "burn_in"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_errors(change, words) -> None:
    call = {
        "logits": torch.zeros(2, 3),
        "start_logit": torch.zeros(2),
        "log_u": torch.zeros(2, 3),
        "burn_in": 0,
        **change,
    }
    with pytest.raises(ValueError, match=words):
        mh_scan(**call)


# ---------------------------------------------------------------- properties

logit = st.one_of(st.just(-math.inf), st.integers(-40, 40).map(lambda i: i / 4))
log_uniform = st.floats(-22, 0, width=32)


@st.composite
def chains(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    table = [draw(st.lists(logit, min_size=columns, max_size=columns)) for _ in range(rows)]
    noise = [draw(st.lists(log_uniform, min_size=columns, max_size=columns)) for _ in range(rows)]
    start = draw(st.lists(logit, min_size=rows, max_size=rows))
    burn_in = draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    return torch.tensor(table), torch.tensor(start), torch.tensor(noise), torch.tensor(burn_in)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains())
def test_properties(inputs) -> None:
    logits, start, log_u, burn_in = inputs
    reference = mh_scan(*inputs, backend="reference")
    fast = mh_scan(*inputs, backend="torch")
    for a, b in zip(reference, fast, strict=True):
        assert torch.equal(a, b)
    weights = reference.weights
    assert (weights >= 0).all() and (reference.start_weight >= 0).all()
    assert torch.allclose(weights.sum(1) + reference.start_weight, torch.ones(len(start)))
    assert (weights[logits == -math.inf] == 0).all()
    moved = reference.last >= 0
    assert torch.equal(moved, reference.accepts > 0)
    held = logits.gather(1, reference.last.clamp(min=0)[:, None])[:, 0]
    assert torch.equal(reference.last_logit, torch.where(moved, held, start))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.integers(-64, 64).map(lambda i: i / 4))
def test_a_shift_of_all_logits_changes_nothing(inputs, shift) -> None:
    # On a grid of 2^-20 float64 adds exactly, so that no comparison is decided by rounding.
    *grid, burn_in = inputs
    logits, start, log_u = ((x.double() * 2**20).round() / 2**20 for x in grid)
    for backend in ("reference", "torch"):
        plain = mh_scan(logits, start, log_u, burn_in, backend)
        moved = mh_scan(logits + shift, start + shift, log_u, burn_in, backend)
        assert torch.equal(plain.weights, moved.weights)
        assert torch.equal(plain.last, moved.last)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.randoms(use_true_random=False))
def test_rows_are_independent_chains(inputs, random) -> None:
    order = list(range(len(inputs[1])))
    random.shuffle(order)
    whole = mh_scan(*inputs, backend="torch")
    part = mh_scan(*(x[order] for x in inputs), backend="torch")
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[order], b)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(), st.data())
def test_an_excluded_column_is_as_good_as_absent(inputs, data) -> None:
    logits, start, log_u, burn_in = inputs
    column = data.draw(st.integers(0, logits.shape[1]))

    def widen(x: torch.Tensor, value: float) -> torch.Tensor:
        extra = torch.full((len(x), 1), value)
        return torch.cat([x[:, :column], extra, x[:, column:]], 1)

    wide = mh_scan(widen(logits, -math.inf), start, widen(log_u, -1.0), burn_in)
    kept = [j for j in range(logits.shape[1] + 1) if j != column]
    plain = mh_scan(*inputs)
    assert torch.equal(wide.weights[:, kept], plain.weights)
    assert torch.equal(wide.start_weight, plain.start_weight)


@pytest.mark.parametrize("burn_in", [0, 1, 3])
def test_expected_weights_by_quadrature(burn_in) -> None:
    """Mean weights over a grid of log_u equal the expectation with accept/reject integrated out.

    Logits are chosen so that every acceptance probability is a multiple of 1/8: a grid of 8
    midpoints per uniform then integrates exactly.
    """
    eighths = torch.tensor([2.0, 8.0, 1.0, 4.0], dtype=torch.float64)
    start = torch.tensor(4.0, dtype=torch.float64).log()
    grid = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    log_u = torch.cartesian_prod(grid, grid, grid, grid).log()
    logits = eighths.log().expand(len(log_u), -1)
    for backend in ("reference", "torch"):
        scan = mh_scan(logits, start.expand(len(log_u)), log_u, burn_in, backend)
        weights, start_weight = expected_visits(eighths.log(), start.item(), burn_in)
        assert (scan.weights.mean(0) - weights).abs().max() < 1e-12
        assert abs(scan.start_weight.mean().item() - start_weight) < 1e-12


def test_a_uniform_of_zero_moves_nothing_to_an_excluded_column() -> None:
    """-inf minus the logarithm of 0 is no number, and a maximum would hand it on."""
    logits = torch.tensor([[-math.inf, 0.3, -math.inf, -2.0]])
    log_u = torch.tensor([[0.0, 0.5, 0.0, 0.9]]).log()
    scans = [mh_scan(logits, torch.zeros(1), log_u, 0, backend=b) for b in ("reference", "torch")]
    assert torch.equal(scans[0].weights, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    assert all(torch.equal(a, b) for a, b in zip(*scans, strict=True))


def test_what_is_not_finite_does_not_reach_earlier_columns() -> None:
    """+inf (half precision overflows) is where a chain stays, NaN is no proposal."""
    logits = torch.tensor([[-2.0, 0.3, math.inf], [-2.0, 0.3, math.nan]])
    log_u = torch.full((2, 3), -1.0)
    scans = [mh_scan(logits, torch.zeros(2), log_u, 0, backend=b) for b in ("reference", "torch")]
    assert scans[0].last.tolist() == [2, 1]
    assert all(torch.equal(a, b) for a, b in zip(*scans, strict=True))


def test_whatever_the_logits_are_a_scan_is_the_loop() -> None:
    """Half precision, and tensors with a graph behind them."""
    logits, start, log_u = torch.randn(4, 9), torch.randn(4), torch.rand(4, 9).log()
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        given = [t.to(kind) for t in (logits, start, log_u)]
        loop, scan = (mh_scan(*given, 3, backend=b) for b in ("reference", "torch"))
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(loop, scan, strict=True)
        )
    plain = mh_scan(logits, start, log_u, 3)
    for learned in (logits.clone().requires_grad_(), logits * torch.ones(1).requires_grad_()):
        assert torch.equal(plain.weights, mh_scan(learned, start, log_u, 3).weights)
    assert torch.equal(plain.weights, mh_scan(logits, start.requires_grad_(), log_u, 3).weights)
    starts = torch.randn(2, 4)  # torch.func, through the carried states alone
    got = torch.vmap(lambda one: mh_scan(logits, one, log_u, 3).weights)(starts)
    assert torch.equal(got, torch.stack([mh_scan(logits, s, log_u, 3).weights for s in starts]))
