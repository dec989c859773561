"""Counting every c-th state, or one column of every c: which, how much, and that it is unbiased."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from negchain import ISIR, MH, EMC2Loss, mh_scan, rng
from negchain.weights import isir_weights
from negchain.weights.metropolis import Scan

logit = st.one_of(st.just(-math.inf), st.integers(-40, 40).map(lambda i: i / 4))
log_uniform = st.floats(-22, 0, width=32)


@st.composite
def chains(draw) -> tuple[Tensor, Tensor, Tensor, int, int]:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 13))
    table = [draw(st.lists(logit, min_size=columns, max_size=columns)) for _ in range(rows)]
    noise = [draw(st.lists(log_uniform, min_size=columns, max_size=columns)) for _ in range(rows)]
    start = draw(st.lists(logit, min_size=rows, max_size=rows))
    burn_in, every = draw(st.integers(0, columns - 1)), draw(st.integers(2, columns + 2))
    return torch.tensor(table), torch.tensor(start), torch.tensor(noise), burn_in, every


def counted_columns(num_columns: int, burn_in: int, every: int) -> list[int]:
    """The columns after which a state counts."""
    ends = {*range(every - 1, num_columns, every), num_columns - 1}
    return sorted(column for column in ends if column >= burn_in)


def plain_loop(
    logits: list[float], start: float, log_u: list[float], burn_in: int, every: int
) -> tuple[list[float], float, int]:
    """Weights of the columns, of the start, and the final state, by the letter of the docs."""
    state, current, states = -1, start, []
    for column, (proposal, log_v) in enumerate(zip(logits, log_u, strict=True)):
        if proposal > -math.inf and proposal - log_v > current:
            state, current = column, proposal
        states.append(state)
    picked = [states[column] for column in counted_columns(len(logits), burn_in, every)]
    shares = [picked.count(column) / len(picked) for column in range(len(logits))]
    return shares, picked.count(-1) / len(picked), state


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains())
def test_the_documented_states_are_counted(inputs) -> None:
    """Both backends agree to the bit, and with the loop; Triton's is checked by scan_cases.py."""
    logits, start, log_u, burn_in, every = inputs
    reference = mh_scan(logits, start, log_u, burn_in, "reference", every)
    fast = mh_scan(logits, start, log_u, burn_in, "torch", every)
    for a, b in zip(reference, fast, strict=True):
        assert torch.equal(a, b)
    for row in range(len(logits)):
        weights, start_weight, last = plain_loop(
            logits[row].tolist(), start[row].item(), log_u[row].double().tolist(), burn_in, every
        )
        assert reference.weights[row].tolist() == pytest.approx(weights, abs=1e-6)
        assert reference.start_weight[row].item() == pytest.approx(start_weight, abs=1e-6)
        assert int(reference.last[row]) == last
    total = reference.weights.sum(1) + reference.start_weight
    assert torch.allclose(total, torch.ones(len(start)))
    num_counted = len(counted_columns(logits.shape[1], burn_in, every))
    assert num_counted <= math.ceil(logits.shape[1] / every)
    assert ((reference.weights > 0).sum(1) <= num_counted).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(chains())
def test_the_walk_itself_does_not_depend_on_it(inputs) -> None:
    logits, start, log_u, burn_in, every = inputs
    thin, full = mh_scan(logits, start, log_u, 0, "torch", every), mh_scan(logits, start, log_u, 0)
    for name in ("last", "last_logit", "accepts"):
        assert torch.equal(getattr(thin, name), getattr(full, name))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_without_columns_the_start_has_all_weight(backend) -> None:
    nothing = torch.zeros(2, 0)
    scan = mh_scan(nothing, torch.zeros(2), nothing, 0, backend, count_every=3)
    assert scan.start_weight.tolist() == [1, 1] and scan.last.tolist() == [-1, -1]


def test_one_counted_state_is_the_last() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, start = torch.randn(5, 9, generator=generator), torch.randn(5, generator=generator)
    log_u = torch.rand(5, 9, generator=generator).log()
    for every, burn_in in ((9, 0), (30, 4), (4, 8)):
        scan = mh_scan(logits, start, log_u, burn_in, count_every=every)
        columns = torch.arange(9)[None] == scan.last[:, None]
        assert torch.equal(scan.weights, columns.float())
        assert torch.equal(scan.start_weight, (scan.last < 0).float())


@pytest.mark.parametrize("every, burn_in", [(0, 0), (-1, 0), (2, torch.zeros(2))])
def test_errors(every, burn_in) -> None:
    with pytest.raises(ValueError, match="count_every"):
        mh_scan(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), burn_in, count_every=every)


@pytest.mark.parametrize("kernel", [MH, ISIR])
@pytest.mark.parametrize("every", [0, -3])
def test_errors_of_the_settings(kernel, every) -> None:
    with pytest.raises(ValueError, match=f"count_every.* at least 1.* got {every}"):
        kernel(count_every=every)


@pytest.mark.parametrize("views", ["shared", "paired"])
def test_a_loss_that_counts_one_state(views) -> None:
    """With c = B a row has one negative, and it is where its chain ended."""
    loss_fn = EMC2Loss(40, 5.0, MH(count_every=8), carried="cached", views=views, symmetric=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        z = torch.randn(2, 8, 6, generator=generator)
        loss_fn(z[0], z[1], torch.randperm(40, generator=generator)[:8])
        assert loss_fn.info["effective_negatives"] == pytest.approx(1.0, abs=1e-6)
    assert loss_fn.info["carried_mass"] * 8 == pytest.approx(
        8 - 8 / (1 + loss_fn.info["chain_age"]), abs=1e-4
    )  # the start keeps all its weight in the chains that stayed, and none in the others


# ---------------------------------------------------------------- unbiased at stationarity

TARGET = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)  # ratios are multiples of 1/4
STEPS = 4


def expected_weights(burn_in: int, every: int, scan=mh_scan, hole: bool = False) -> Tensor:
    """Mean weight of each state, started at the target, over all proposals and all uniforms.

    Four midpoints per uniform integrate every accept or reject exactly; no sampling.
    """
    states = list(itertools.product(range(3), repeat=STEPS + 1))
    grid = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
    log_u = torch.cartesian_prod(*[grid] * STEPS).log()
    path = torch.tensor(states).repeat_interleave(len(log_u), 0)  # start, then proposals
    logits = TARGET.log()[path]
    if hole:
        logits[:, 2] = -math.inf
    done = scan(logits[:, 1:], logits[:, 0], log_u.repeat(len(states), 1), burn_in, "torch", every)
    weights = torch.cat([done.start_weight[:, None], done.weights], 1)
    weights = weights * (TARGET / TARGET.sum())[path[:, :1]] * 3 / len(path)
    return torch.zeros(3, dtype=torch.float64).index_add_(0, path.flatten(), weights.flatten())


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("burn_in", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_expected_weights_are_the_target(every, burn_in, hole) -> None:
    expected = expected_weights(burn_in, every, hole=hole)
    assert (expected - TARGET / TARGET.sum()).abs().max() < 1e-12


def forgets_the_start(*args) -> Scan:
    done = mh_scan(*args)
    total = done.weights.sum(1, keepdim=True)
    return done._replace(
        weights=done.weights / total.clamp(min=1e-9),
        start_weight=done.start_weight * (total == 0)[:, 0],
    )


def counts_accepted_only(logits, start, log_u, burn_in, backend, every) -> Scan:
    """A chain that did not move since the last end is not counted there."""
    done = mh_scan(logits, start, log_u, burn_in, backend, every)
    ends = len(counted_columns(logits.shape[1], burn_in, every))
    once = done.weights.clamp(max=1 / ends)
    return done._replace(weights=once, start_weight=1 - once.sum(1))


def inverts_the_ratio(logits, start, *rest) -> Scan:
    return mh_scan(torch.where(logits > -math.inf, -logits, logits), -start, *rest)


@pytest.mark.parametrize("bug", [forgets_the_start, counts_accepted_only, inverts_the_ratio])
def test_a_planted_bug_is_caught(bug) -> None:
    error = (expected_weights(0, 2, bug) - TARGET / TARGET.sum()).abs().max()
    assert error > 1e-2


# ---------------------------------------------------------------- i-SIR: one column of each group


def isir_loop(
    logits: list[float], start: float, gumbel: list[float], every: int
) -> tuple[list[float], float, int]:
    """Weights of the columns, of the start, and the next state, by the letter of the docs."""
    masses = [math.exp(x) for x in [start, *logits]]
    total = sum(masses) or 1.0
    weights = [0.0] * len(logits)
    for begin in range(0, len(logits), every):
        group = range(begin, min(begin + every, len(logits)))
        chosen = max(group, key=lambda j: logits[j] + gumbel[j + 1])
        weights[chosen] = sum(masses[j + 1] for j in group) / total
    noisy = [x + g for x, g in zip([start, *logits], gumbel, strict=True)]
    return weights, masses[0] / total, max(range(len(noisy)), key=lambda j: noisy[j]) - 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 2**20))
def test_the_documented_column_of_a_group_has_its_mass(inputs, seed) -> None:
    logits, start, _, _, every = inputs
    logits, start = logits.double(), start.double()
    uniform = torch.rand(len(start), logits.shape[1] + 1, generator=torch.manual_seed(seed))
    gumbel = -(-uniform.double().clamp(1e-9, 1 - 1e-9).log()).log()
    done = isir_weights(logits, start, gumbel, every)
    whole = isir_weights(logits, start, gumbel)
    for name in ("start_weight", "last", "last_logit", "accepts"):  # the step does not depend on it
        assert torch.equal(getattr(done, name), getattr(whole, name))
    for row in range(len(logits)):
        weights, start_weight, last = isir_loop(
            logits[row].tolist(), start[row].item(), gumbel[row].tolist(), every
        )
        assert done.weights[row].tolist() == pytest.approx(weights, abs=1e-12)
        assert done.start_weight[row].item() == pytest.approx(start_weight, abs=1e-12)
        if whole.weights[row].sum() > 0:
            assert int(done.last[row]) == last
            if last >= 0:  # the next state speaks for its group
                assert done.weights[row, last] > 0
    assert ((done.weights > 0).sum(1) <= math.ceil(logits.shape[1] / every)).all()
    assert torch.equal(isir_weights(logits, start, gumbel, 1).weights, whole.weights)


def test_a_group_without_a_column_has_no_weight() -> None:
    logits = torch.tensor([[-math.inf, -math.inf, 1.0], [-math.inf] * 3])
    done = isir_weights(logits, torch.tensor([1.0, -math.inf]), torch.zeros(2, 4), 2)
    assert torch.allclose(done.weights, torch.tensor([[0, 0, 0.5], [0, 0, 0]]))
    assert torch.allclose(done.start_weight, torch.tensor([0.5, 0]))
    empty = isir_weights(torch.empty(2, 0), torch.zeros(2), torch.zeros(2, 1), 3)
    assert empty.weights.shape == (2, 0) and empty.start_weight.tolist() == [1, 1]


@pytest.mark.parametrize("noise", [-math.inf, math.inf])
def test_noise_that_is_not_finite_chooses_no_excluded_column(noise) -> None:
    """The Gumbel noise of a uniform that is exactly 0 or 1."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf]])
    done = isir_weights(logits, torch.tensor([-math.inf]), torch.full((1, 4), noise), 3)
    assert done.weights.tolist() == [[0.0, 1.0, 0.0]]
    assert int(done.last) == 1


@pytest.mark.parametrize("every", [0, -1])
def test_errors_of_isir(every) -> None:
    with pytest.raises(ValueError, match="count_every"):
        isir_weights(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 3), every)


ISIR_LOGITS = torch.tensor([[0.3, -1.0, 2.0, -math.inf, 0.5, 1.5, -0.2]], dtype=torch.float64)
ISIR_START = torch.tensor([0.7], dtype=torch.float64)


def expected_isir(every: int, weigh=isir_weights) -> Tensor:
    """E W over the Gumbel noise, exactly: every outcome of every group with its probability.

    Gumbel-max: the column of a group with the largest noisy logit is j with probability
    softmax(group)_j, independently of the other groups. Noise that makes a chosen column of each
    group win (by far, whatever its logit) produces that outcome.
    """
    num_columns = ISIR_LOGITS.shape[1]
    groups = [range(b, min(b + every, num_columns)) for b in range(0, num_columns, every)]
    mean = torch.zeros(num_columns + 1, dtype=torch.float64)
    for outcome in itertools.product(*groups):
        chance = 1.0
        gumbel = torch.zeros(1, num_columns + 1, dtype=torch.float64)
        for group, chosen in zip(groups, outcome, strict=True):
            inside = torch.softmax(ISIR_LOGITS[0, list(group)], 0)
            chance *= float(inside[chosen - group.start])
            gumbel[0, chosen + 1] = 50.0
        if chance > 0:
            done = weigh(ISIR_LOGITS, ISIR_START, gumbel, every)
            mean += chance * torch.cat([done.start_weight, done.weights[0]])
    return mean


ISIR_SOFTMAX = torch.softmax(torch.cat([ISIR_START, ISIR_LOGITS[0]]), 0)


@pytest.mark.parametrize("every", [2, 3, 4, 7, 100])
def test_expected_weights_of_isir_are_the_softmax(every) -> None:
    assert (expected_isir(every) - ISIR_SOFTMAX).abs().max() < 1e-12


def largest_logit_speaks(logits, start, gumbel, every) -> Scan:
    return isir_weights(logits, start, torch.zeros_like(gumbel), every)


def its_own_weight_only(logits, start, gumbel, every) -> Scan:
    thin = isir_weights(logits, start, gumbel, every)
    whole = isir_weights(logits, start, gumbel)
    return thin._replace(weights=torch.where(thin.weights > 0, whole.weights, 0.0))


def groups_forget_the_start(logits, start, gumbel, every) -> Scan:
    return isir_weights(logits, torch.full_like(start, -math.inf), gumbel, every)


@pytest.mark.parametrize(
    "bug", [largest_logit_speaks, its_own_weight_only, groups_forget_the_start]
)
def test_a_planted_bug_of_isir_is_caught(bug) -> None:
    assert (expected_isir(3, bug) - ISIR_SOFTMAX).abs().max() > 1e-2


def test_hashed_noise_gives_the_softmax_on_average() -> None:
    """Through the draws of the loss: 20,000 rows, each |z| < 4.5; false alarm 5e-5 at most.

    Seven columns in two groups; a two-sided 4.5 sigma deviation has probability 6.8e-6.
    """
    rows, every = 20_000, 4
    gumbel = rng.gumbel(3, torch.tensor(5), rng.FOR_GUMBEL, torch.arange(rows), 8, torch.float64)
    done = isir_weights(ISIR_LOGITS.expand(rows, -1), ISIR_START.expand(rows), gumbel, every)
    spread = done.weights.std(0).clamp(min=1e-12) / math.sqrt(rows)
    z = (done.weights.mean(0) - ISIR_SOFTMAX[1:]) / spread
    assert z.abs().max() < 4.5
    assert done.weights.std(0)[[0, 1, 2, 4, 5, 6]].min() > 0.01  # and not because nothing varies


@pytest.mark.parametrize("views", ["shared", "paired"])
def test_an_isir_loss_with_groups_has_the_gradient_of_one_without(views) -> None:
    """The mean over 200 seeds against the loss that weighs every column: 5 standard errors.

    56 numbers, each beyond 5 (of Student's t) with probability 1.3e-6: a false alarm in 7e-5.
    """
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64).requires_grad_()

    def gradient(seed: int, every: int) -> Tensor:
        kernel = ISIR(count_every=every)
        loss_fn = EMC2Loss(
            40, 5.0, kernel, carried="cached", views=views, symmetric=False, seed=seed
        )
        return torch.autograd.grad(loss_fn(z[0], z[1], torch.arange(7)), z)[0].flatten()

    apart = torch.stack([gradient(seed, 3) - gradient(seed, 1) for seed in range(200)])
    error = apart.std(0) / math.sqrt(len(apart))
    assert (apart.mean(0).abs() <= 5 * error + 1e-12).all()
    assert error.max() > 1e-6
