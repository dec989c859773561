"""Kernel algebra, no sampling: transition matrices built from the code (taxonomy 3).

Lemma 1 (mixing) and Lemma 2 (Lipschitz in the parameters) are checked on these matrices.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from negchain import mh_scan
from negchain.weights import isir_weights
from oracles import metropolis_matrix, subsets, unit

SIZES = [2, 3, 5, 8]


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, 0)


def random_logits(size: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, generator=generator, dtype=torch.float64)


def mh_matrix(logits: Tensor, backend: str = "torch") -> Tensor:
    """T[z, z'] of one step with a uniform proposal.

    The probability of acceptance is read off the code: the largest log_u it accepts, by bisection
    over the doubles, is log of that probability.
    """
    size = len(logits)
    start, proposal = (x.flatten() for x in torch.meshgrid(logits, logits, indexing="ij"))
    low, high = torch.full_like(start, -100.0), torch.zeros_like(start)  # accepted, maybe refused

    def accepted(log_u: Tensor) -> Tensor:
        return mh_scan(proposal[:, None], start, log_u[:, None], 0, backend).accepts == 1

    assert accepted(low).all()
    always = accepted(high - 1e-300)
    for _ in range(70):
        middle = (low + high) / 2
        yes = accepted(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    probability = torch.where(always, 1.0, low.exp()).view(size, size)
    kernel = probability / size
    return kernel + torch.diag(1 - kernel.sum(1))


def isir_matrix(logits: Tensor, pools: list[tuple[int, ...]], dedup: bool) -> Tensor:
    """T[z, z'] averaged over pools; `dedup`: a carried state in the pool counts once."""
    size = len(logits)
    kernel = torch.zeros(size, size, dtype=torch.float64)
    for z in range(size):
        columns = torch.tensor(pools)
        start = logits[z].expand(len(pools)).clone()
        if dedup:
            start[(columns == z).any(1)] = -math.inf
        noise = torch.zeros(len(pools), columns.shape[1] + 1, dtype=torch.float64)
        scan = isir_weights(logits[columns], start, noise)
        kernel[z].index_add_(0, columns.flatten(), scan.weights.flatten())
        kernel[z, z] += scan.start_weight.sum()
    return kernel / len(pools)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_metropolis_leaves_p_invariant(size, seed, backend) -> None:
    logits = random_logits(size, seed)
    kernel, p = mh_matrix(logits, backend), softmax(logits)
    assert (kernel - metropolis_matrix(logits)).abs().max() < 1e-12
    assert (p @ kernel - p).abs().max() < 1e-12
    flow = p[:, None] * kernel
    assert (flow - flow.T).abs().max() < 1e-12


def test_metropolis_with_corrected_logits() -> None:
    """Any proposal q: the same scan on logit - log q leaves p invariant."""
    logits, log_q = random_logits(6, 3), torch.log_softmax(random_logits(6, 4, 1.0), 0)
    accept = (mh_matrix(logits - log_q) * 6).clamp(max=1)  # off the diagonal: P(accept)
    kernel = accept * log_q.exp()[None, :]
    kernel.fill_diagonal_(0)
    kernel += torch.diag(1 - kernel.sum(1))
    p = softmax(logits)
    assert (p @ kernel - p).abs().max() < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_isir_leaves_p_invariant_without_replacement(size, seed) -> None:
    logits = random_logits(size, seed)
    p = softmax(logits)
    for pool_size in range(1, size):
        kernel = isir_matrix(logits, subsets(range(size), pool_size), dedup=True)
        assert torch.allclose(kernel.sum(1), torch.ones(size, dtype=torch.float64), atol=1e-13)
        assert (p @ kernel - p).abs().max() < 1e-12
        # and it is the dedup that makes it so
        if 1 < size:
            twice = isir_matrix(logits, subsets(range(size), pool_size), dedup=False)
            assert (p @ twice - p).abs().max() > 1e-4 or pool_size == 1


@pytest.mark.parametrize("size, draws", [(2, 3), (3, 4), (5, 3), (8, 2)])
def test_isir_leaves_p_invariant_with_independent_draws(size, draws) -> None:
    logits = random_logits(size, 7)
    pools = list(itertools.product(range(size), repeat=draws))
    kernel, p = isir_matrix(logits, pools, dedup=False), softmax(logits)
    assert (p @ kernel - p).abs().max() < 1e-12


def test_isir_draws_from_its_weights() -> None:
    """The next state is the Gumbel-max winner: its slot's noise decides, the start is slot 0."""
    logits, start = random_logits(4, 1)[None], torch.zeros(1, dtype=torch.float64)
    joint = torch.cat([start[:, None], logits], 1)
    for slot in range(5):
        noise = -joint.clone()
        noise[0, slot] += 1.0
        scan = isir_weights(logits, start, noise)
        assert int(scan.last) == slot - 1 and int(scan.accepts) == int(slot > 0)
        assert scan.last_logit.item() == joint[0, slot].item()
    assert torch.allclose(
        torch.cat([scan.start_weight[:, None], scan.weights], 1), joint.softmax(1), atol=1e-14
    )


def problem(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """An anchor and its negatives on the unit sphere."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(size + 1, 4, generator=generator, dtype=torch.float64)
    return unit(z)[0], unit(z)[1:]


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("beta", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_lemma_1_mixing(size, beta, seed) -> None:
    """sup_z |P^tau(z, .) - p|_TV <= (1 - exp(-2 c^2 beta) / m_neg)^tau, c = 1 on the sphere."""
    anchor, negatives = problem(seed, size)
    logits = beta * negatives @ anchor
    kernel, p = mh_matrix(logits), softmax(logits)
    rate = 1 - math.exp(-2 * beta) / size
    power = torch.eye(size, dtype=torch.float64)
    for tau in range(1, 60):
        power = power @ kernel
        distance = 0.5 * (power - p).abs().sum(1).max().item()
        assert distance <= rate**tau + 1e-12


@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_lemma_2_lipschitz(num_steps, seed) -> None:
    """|P_theta - P_theta'| <= (2^R - 1) 2 L_P exp(2 c^2 beta) beta |theta - theta'|.

    theta is the anchor's embedding here: s = theta . z has Lipschitz constant |z| = 1, and
    the kernel is that of R steps (largest absolute row sum).
    """
    beta, size = 2.0, 6
    anchor, negatives = problem(seed, size)
    generator = torch.Generator().manual_seed(seed + 100)
    step = 0.05 * torch.randn(4, generator=generator, dtype=torch.float64)
    other = unit(anchor + step)
    kernels = [
        torch.linalg.matrix_power(mh_matrix(beta * negatives @ x), num_steps)
        for x in (anchor, other)
    ]
    difference = (kernels[0] - kernels[1]).abs().sum(1).max().item()
    bound = (2**num_steps - 1) * 2 * math.exp(2 * beta) * beta * (anchor - other).norm().item()
    assert 0 < difference <= bound
