"""A stale table of all embeddings: exact draws from yesterday's softmax, or proposals for today's.

    Negative Cache:       z_i = argmax_z [ beta q_i . psi_old(z) + Gumbel ],    W = 1 at z_i
    informed proposals:   q(z) = (1 - lambda) / M + lambda * mean_i softmax_z(beta q_i . psi_old(z))

Estimates   p_i by one draw from the stale softmax (Negative Cache); as a proposal the table biases
            nothing, because weights are corrected by log q.
State       the table: M x D floats, and a cursor for its refresh.
Cost        one product with the table per row, M D multiplications; a share of re-encodings.
Bias        staleness (Negative Cache); none (proposal).

Shapes: `N` rows, `M` items of the table, `R` draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gumbel_winner(logits: Tensor, gumbel: Tensor) -> tuple[Tensor, Tensor]:
    """One exact draw per row from softmax(logits), and the log of its denominator.

    Args:
        logits: [N, M], -inf = excluded.
        gumbel: [N, M] Gumbel noise.

    Returns:
        winner [N] int64 and log partition [N].

    Example:
        >>> winner, _ = gumbel_winner(torch.tensor([[0.0, 9.0]]), torch.zeros(1, 2))
        >>> int(winner)
        1
    """
    return (logits + gumbel).argmax(1), torch.logsumexp(logits, 1)


def informed_proposal(logits: Tensor, share: float = 0.5) -> Tensor:
    """log q(z) of the mixture every row proposes from, [M].

    Args:
        logits: [N, M] stale logits of the rows, -inf = excluded.
        share: lambda, the share of the rows' stale softmaxes; the rest is uniform, so that no
            negative ever has probability zero.

    Example:
        >>> informed_proposal(torch.zeros(2, 4)).exp()
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    num_rows, num_items = logits.shape
    mixture = torch.logsumexp(torch.log_softmax(logits, 1), 0) - math.log(num_rows)
    uniform = torch.full_like(mixture, math.log1p(-share) - math.log(num_items))
    return torch.logaddexp(mixture + math.log(share), uniform)


def draw_from(log_q: Tensor, uniforms: Tensor) -> Tensor:  # [M], [R] in (0,1] -> [R] int64
    """R i.i.d. draws from exp(log_q) by inverting its distribution function (in float64).

    Example:
        >>> draw_from(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.2, 0.8]))
        tensor([0, 1])
    """
    cumulative = log_q.double().exp().cumsum(0)
    points = uniforms.double() * cumulative[-1]
    return torch.searchsorted(cumulative, points).clamp_(max=len(log_q) - 1)
