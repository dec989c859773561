"""In-batch softmax: the negatives of the batch stand for all negatives.

    W_ij = exp(l_ij) / sum_k exp(l_ik),        l = beta * similarity - log q

Estimates   p_i by the softmax over the pool (DCL; InfoNCE adds the positive to the sum).
State       none.
Cost        one exponential per logit.
Bias        does not vanish: shrinks only with the number of columns.

Shapes: `N` rows, `K` columns, `M` items, `R` draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_weights(logits: Tensor) -> tuple[Tensor, Tensor]:  # [N,K] -> [N,K], [N]
    """Softmax over the columns that are not excluded (-inf), and the log of its denominator.

    A row without a single column gets zero weights and -inf.

    Example:
        >>> weights, log_sum = softmax_weights(torch.tensor([[0.0, 0.0, -math.inf]]))
        >>> weights
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    log_sum = torch.logsumexp(logits, 1)
    shift = torch.where(log_sum > -math.inf, log_sum, 0.0)
    return torch.exp(logits - shift[:, None]), log_sum


def draw_from(log_q: Tensor, uniforms: Tensor) -> Tensor:  # [M], [R] in (0,1] -> [R] int64
    """R i.i.d. draws from exp(log_q) by inverting its distribution function (in float64).

    Example:
        >>> draw_from(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.2, 0.8]))
        tensor([0, 1])
    """
    cumulative = log_q.double().exp().cumsum(0)
    points = uniforms.double() * cumulative[-1]
    return torch.searchsorted(cumulative, points).clamp_(max=len(log_q) - 1)
