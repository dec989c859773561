"""Lemmas 1 and 2 on chains whose joint kernel is small enough to be a matrix.

Lemma 1     |P(xi_t = z) - pi(z)| <= (1 - BR / (2 m m_neg e^{2 beta}))^t, for the worst start and z.
Lemma 2     |P_theta - P_theta'| <= 2^{R+1} B L_P e^{2 beta} beta |theta - theta'|, entry by entry.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.reproduce.common import Row

TIMES = (1, 2, 4, 8, 16, 32, 64, 128)


def mh_kernel(logits: Tensor) -> Tensor:  # [K] -> [K,K]
    """One Metropolis-Hastings step with uniform proposals: row = from, column = to.

    Example:
        >>> logits = torch.tensor([0.0, 1.0])
        >>> torch.allclose(logits.softmax(0) @ mh_kernel(logits), logits.softmax(0))
        True
    """
    kernel = torch.exp((logits[None, :] - logits[:, None]).clamp(max=0)) / len(logits)
    kernel.fill_diagonal_(0)
    return kernel + torch.diag(1 - kernel.sum(1))


def joint_kernel(logits: Tensor, batch: int, steps: int) -> Tensor:  # [m,K] -> [K^m,K^m]
    """The kernel of all chains: B of m, drawn without replacement, make R steps each."""
    moved = [torch.linalg.matrix_power(mh_kernel(row), steps) for row in logits]
    still = torch.eye(logits.shape[1], dtype=logits.dtype)
    parts = [
        functools.reduce(torch.kron, [k if i in some else still for i, k in enumerate(moved)])
        for some in itertools.combinations(range(len(moved)), batch)
    ]
    return torch.stack(parts).mean(0)


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_similarities(m: int, states: int, seed: int, dim: int = 2) -> Tensor:
    """Of m random unit vectors with others, [m,states]."""
    generator = torch.Generator().manual_seed(seed)
    x, z = (randn(generator, count, dim) for count in (m, states))
    return normalize(x, dim=-1) @ normalize(z, dim=-1).T


def mixing(job: Row) -> Row:
    """Largest |P(xi_t = z) - pi(z)| over starts and states, against Lemma 1's bound."""
    m, batch, steps, beta, states = job["m"], job["B"], job["R"], job["beta"], 3
    logits = beta * random_similarities(m, states, seed=0)
    kernel = joint_kernel(logits, batch, steps)
    target = functools.reduce(torch.kron, logits.softmax(1))
    share = batch * steps / (m * states * math.exp(2 * beta))
    curve = []
    for t in TIMES:
        worst = float((torch.linalg.matrix_power(kernel, t) - target).abs().max())
        curve.append({"t": t, "measured": worst, "bound": max(0.0, 1 - share / 2) ** t})
    second = float(torch.linalg.eigvals(kernel).abs().sort().values[-2])
    # Lemma 1 assumes BR <= m m_neg e^{2 beta} (its proof's last line).
    holds = all(p["measured"] <= p["bound"] + 1e-9 for p in curve)
    found = {"curve": curve, "rate": second, "bound_rate": 1 - share / 2}
    return {**found, "assumed": share <= 1, "holds": holds}


def lipschitz(job: Row) -> Row:
    """Lemma 2: local Lipschitz constants in theta, the largest of 1,000 thetas.

    That of a transition probability, or of a similarity, is the norm of its gradient.
    """
    steps, batch, beta, m, states = job["R"], job["B"], job["beta"], 2, 3

    def similarities(theta: Tensor) -> Tensor:
        return normalize(theta[:m], dim=-1) @ normalize(theta[m:], dim=-1).T

    def kernel(theta: Tensor) -> Tensor:
        return joint_kernel(beta * similarities(theta), batch, steps)

    def largest(of: Callable[[Tensor], Tensor], thetas: Tensor) -> float:
        jacobians = torch.func.vmap(torch.func.jacrev(of), chunk_size=50)(thetas)
        return float(jacobians.flatten(3).norm(dim=3).max())

    thetas = normalize(randn(torch.Generator().manual_seed(0), 1000, m + states, 2), dim=-1)
    measured, slope = largest(kernel, thetas), largest(similarities, thetas)
    bound = 2 ** (steps + 1) * batch * slope * math.exp(2 * beta) * beta
    return {"measured": measured, "bound": bound, "L_P": slope, "holds": measured <= bound}
