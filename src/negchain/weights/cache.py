"""A stale table of all embeddings: exact draws from yesterday's softmax, or proposals for today's.

    Negative Cache:       z_i = argmax_z [ beta q_i . psi_old(z) + Gumbel ],    W = 1 at z_i
    informed proposals:   q(z) = (1 - share) / M + share * mean_i softmax_z(beta q_i . psi_old(z))

The product with the table and both formulas are in `negchain.losses.table`, chunk by chunk.

Estimates   p_i by one draw from the stale softmax (Negative Cache); as a proposal the table biases
            nothing, because weights are corrected by log q.
State       the table: M x D floats, and a cursor for its refresh.
Cost        one product with the table per row, M D multiplications; a share of re-encodings.
Bias        staleness (Negative Cache, tests/losses/test_planted.py); none as a proposal of chains
            at stationarity (tests/losses/test_long_run.py) and of a partition
            (tests/losses/test_importance.py).

Shapes: `N` rows, `M` items of the table, `R` draws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_from(log_q: Tensor, uniforms: Tensor) -> Tensor:  # [M], [R] in (0,1] -> [R] int64
    """R i.i.d. draws from exp(log_q) by inverting its distribution function (in float64).

    Example:
        >>> draw_from(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.2, 0.8]))
        tensor([0, 1])
    """
    cumulative = log_q.double().exp().cumsum(0)
    points = uniforms.double() * cumulative[-1]
    return torch.searchsorted(cumulative, points).clamp_(max=len(log_q) - 1)
