"""One visit of EMC2Loss, end to end, against its exact expectation; and the bugs it must catch.

All anchors look the same and their proposals are drawn independently, so one call holds thousands
of replicates of one visit. Its expected weights are known without sampling: P(state after step r)
is the start times the r-th power of the one-step kernel (Metropolis-Hastings), or an average of
softmaxes over all tuples of proposals (i-SIR). The weights are read off the gradient.

False alarms: 1e-3 per test (two-sided normal, Bonferroni over the negatives); seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import negchain.losses.walk as walk
from negchain import Draw, EMC2Loss, Given
from negchain.pool import Side
from oracles import metropolis_matrix, unit

BETA, NUM_KEYS, NUM_ANCHORS, NUM_DRAWS = 3.0, 5, 5000, 4
M = NUM_KEYS + NUM_ANCHORS  # keys are items 0 .. 4, anchors the rest
START = 2  # the key every chain holds


def _embeddings() -> tuple[Tensor, Tensor]:
    """The anchor, and the keys with well spread similarities."""
    generator = torch.Generator().manual_seed(1)
    anchor = unit(torch.randn(6, generator=generator, dtype=torch.float64))
    other = torch.randn(NUM_KEYS, 6, generator=generator, dtype=torch.float64)
    other = unit(other - (other @ anchor)[:, None] * anchor)
    cosine = torch.tensor([0.8, -0.6, 0.5, 0.1, -0.2], dtype=torch.float64)[:, None]
    return anchor, cosine * anchor + (1 - cosine**2).sqrt() * other


def _expected(kernel: str, logits: Tensor, log_q: Tensor) -> Tensor:
    """Expected weight of each key over one visit that starts at START."""
    if kernel == "isir":
        total = torch.zeros(NUM_KEYS, dtype=torch.float64)
        for pool in itertools.product(range(NUM_KEYS), repeat=NUM_DRAWS):
            slots = torch.tensor([START, *pool])
            weights = torch.softmax((logits - log_q)[slots], 0)
            total.index_add_(0, slots, weights * log_q[slots[1:]].sum().exp())
        return total
    accept = (logits - log_q)[None, :] - (logits - log_q)[:, None]
    step = accept.clamp(max=0).exp() * log_q.exp()[None, :]
    step.fill_diagonal_(0)
    step += torch.diag(1 - step.sum(1))
    if (log_q == log_q[0]).all():
        assert torch.allclose(step, metropolis_matrix(logits), atol=1e-12)
    state = torch.zeros(NUM_KEYS, dtype=torch.float64)
    state[START] = 1.0
    total = torch.zeros_like(state)
    burn_in = NUM_DRAWS // 2
    for number in range(NUM_DRAWS):
        state = state @ step
        if number >= burn_in:
            total += state / (NUM_DRAWS - burn_in)
    return total


def largest_z_score(kernel: str, *, uniform: bool = True, views: str = "shared") -> float:
    """Run one visit of 5000 chains; how far the mean weights are from the exact ones."""
    anchor, keys = _embeddings()
    generator = torch.Generator().manual_seed(3)
    q = torch.full((NUM_KEYS,), 0.2) if uniform else torch.tensor([0.1, 0.3, 0.15, 0.25, 0.2])
    q = q.double()
    loss_fn = EMC2Loss(M, BETA, kernel, proposals=Given(), views=views, symmetric=views == "shared")
    loss_fn.chains.states.fill_(START)
    index = torch.arange(NUM_KEYS, M)
    picked = torch.multinomial(
        q.expand(NUM_ANCHORS, -1), NUM_DRAWS, replacement=True, generator=generator
    )
    # One more column is the anchor's own positive: neither a proposal nor a step.
    ids = torch.cat([index[:, None], picked], 1)
    drawn = torch.cat([anchor.expand(NUM_ANCHORS, 1, -1), keys[picked]], 1).requires_grad_()
    carried = keys[START].expand(NUM_ANCHORS, -1).clone().requires_grad_()
    z = anchor.expand(NUM_ANCHORS, -1)
    log_q = None
    if not uniform:
        log_q = torch.cat([q, torch.full((NUM_ANCHORS,), 1e-9)]).log()
    request = loss_fn.request(index)
    assert (request.ids == START).all()
    draw = Draw(ids, log_q)
    loss_fn(z, z, index, request.answer(carried), draw=draw, drawn=drawn).backward()
    scale = NUM_ANCHORS / BETA  # two views: 2N rows, both gradients in one place
    assert drawn.grad is not None and carried.grad is not None
    # the loss brings embeddings to unit length, so read the tangential part against its own size
    tangent = anchor - keys * (keys @ anchor)[:, None]
    size = tangent.square().sum(1)
    weights = torch.zeros(NUM_ANCHORS, NUM_KEYS + 1, dtype=torch.float64)
    share = torch.linalg.vecdot(drawn.grad[:, 1:], tangent[picked]) / size[picked] * scale
    weights.scatter_add_(1, picked, share)
    weights[:, START] += carried.grad @ tangent[START] / size[START] * scale
    weights[:, NUM_KEYS] = 1 - weights[:, :NUM_KEYS].sum(1)  # what is missing from a total of one
    expected = torch.cat([_expected(kernel, BETA * keys @ anchor, q.log()), torch.zeros(1)])
    error = weights.mean(0) - expected
    deviation = weights.std(0) / math.sqrt(NUM_ANCHORS)
    return float((error.abs() / deviation.clamp(min=1e-9)).max())


BOUND = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - 5e-4 / (NUM_KEYS + 1))))


@pytest.mark.statistical
@pytest.mark.parametrize("views", ["shared", "paired"])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_expected_weights_of_a_visit(kernel, uniform, views) -> None:
    assert largest_z_score(kernel, uniform=uniform, views=views) < BOUND


# ---------------------------------------------------------------- planted bugs

scan, corrected = walk.mh_scan, walk.Start.corrected


def inverted_ratio(logits, start, log_u, burn_in, *rest):
    flipped = torch.where(logits > -math.inf, -logits, -math.inf)
    return scan(flipped, -start, log_u, burn_in, *rest)


def counts_one_too_many(logits, start, log_u, burn_in, *rest):
    return scan(logits, start, log_u, burn_in - 1, *rest)


def counts_one_too_few(logits, start, log_u, burn_in, *rest):
    return scan(logits, start, log_u, burn_in + 1, *rest)


def divides_by_all_steps(logits, start, log_u, burn_in, *rest):
    done = scan(logits, start, log_u, burn_in, *rest)
    steps = (logits > -math.inf).sum(1)
    share = (steps - burn_in) / steps
    return done._replace(
        weights=done.weights * share[:, None], start_weight=done.start_weight * share
    )


def drops_the_carried_state(start, kind):
    return torch.full_like(start.logit, -math.inf)


def uses_a_stale_score(start, kind):
    """The score the carried state had before its embedding moved a little away."""
    return corrected(start, kind) + 0.3 * BETA


def own_positive_allowed(self, ids):
    return torch.zeros_like(ids, dtype=torch.bool)


PLANTED: list[tuple[str, Callable[..., object]]] = [
    ("mh_scan", inverted_ratio),
    ("mh_scan", counts_one_too_many),
    ("mh_scan", counts_one_too_few),
    ("mh_scan", divides_by_all_steps),
    ("Start.corrected", drops_the_carried_state),
    ("Start.corrected", uses_a_stale_score),
    ("Side.excludes", own_positive_allowed),
]


@pytest.mark.statistical
@pytest.mark.parametrize("name, bug", PLANTED, ids=[bug.__name__ for _, bug in PLANTED])
def test_planted_bug_is_caught(monkeypatch, name, bug) -> None:
    owner = {"mh_scan": walk, "Start.corrected": walk.Start, "Side.excludes": Side}[name]
    monkeypatch.setattr(owner, name.split(".")[-1], bug)
    assert largest_z_score("mh") > 1.4 * BOUND


@pytest.mark.statistical
@pytest.mark.parametrize("bug", [drops_the_carried_state, uses_a_stale_score])
def test_planted_bug_is_caught_in_isir(monkeypatch, bug) -> None:
    monkeypatch.setattr(walk.Start, "corrected", bug)
    assert largest_z_score("isir", views="paired") > 2 * BOUND
