"""SogCLR: the batch's exponentials over a moving average of their mean.

    g_i  = mean_j exp(l_ij),   u_i <- (1 - gamma) u_i + gamma g_i,   W_ij = exp(l_ij) / (K u_i)

Estimates   p_i with a denominator remembered from earlier visits; rows need not sum to one.
State       log u_i, one float per anchor, kept in log space so that beta = 100 does not overflow.
Cost        one exponential per logit.
Bias        does not vanish: u_i lags behind the encoder and averages over augmentations.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def moving_log_mean(log_average: Tensor, log_value: Tensor, rate: float) -> Tensor:
    """log((1 - rate) e^a + rate e^v); an average that was never written (-inf) starts at v.

    A value of -inf (nothing was seen) leaves the average as it is.

    Example:
        >>> moving_log_mean(torch.tensor([-math.inf, 1.0]), torch.tensor([2.0, -math.inf]), 0.9)
        tensor([2., 1.])
    """
    old_share = math.log1p(-rate) if rate < 1 else -math.inf
    mixed = torch.logaddexp(log_average + old_share, log_value + math.log(rate))
    mixed = torch.where(log_average == -math.inf, log_value, mixed)
    return torch.where(log_value == -math.inf, log_average, mixed)


def sogclr_weights(
    logits: Tensor, log_u: Tensor, gamma: float, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and the new moving average.

    Args:
        logits: [N, K], -inf = excluded.
        log_u: [N] log of the moving average before this step; -inf on the first visit.
        gamma: share of the new value; 1 makes this the in-batch softmax.
        counts: [N] draws the columns stand for; None: those that are not excluded.

    Returns:
        weights [N, K] and the new log_u [N].

    Example:
        >>> w, log_u = sogclr_weights(torch.zeros(1, 4), torch.tensor([-math.inf]), 0.9)
        >>> w
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    count = (logits > -math.inf).sum(1) if counts is None else counts
    count = count.to(logits.dtype)
    log_mean = torch.logsumexp(logits, 1) - count.clamp(min=1).log()
    log_u = moving_log_mean(log_u, log_mean, gamma)
    shift = torch.where(log_u > -math.inf, log_u, 0.0) + count.clamp(min=1).log()
    return torch.exp(logits - shift[:, None]), log_u
