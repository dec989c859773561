"""Logits and partitions of a side: what every estimate is made of.

Shapes: `N` rows, `K` shared and `C` private columns.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.losses.batch import all_finite
from negchain.objective import Denominator
from negchain.pool import Side, products


def constant(beta: float | Tensor) -> float | Tensor:
    """A beta that nothing is learned through."""
    return beta.detach() if isinstance(beta, Tensor) else beta


def detached_logits(side: Side, similarity: Tensor, beta: float | Tensor) -> Tensor:
    """Corrected logits beta * s - log(q m_neg), [N, K+C]; -inf where excluded or not finite."""
    logits = similarity.detach() * constant(beta)
    if any(kind.log_q is not None for kind in side.kinds):
        correction = side.correction(side.column_ids())
        assert correction is not None
        logits = logits - correction
    return usable(logits, side.all_excluded())


def usable(logits: Tensor, excluded: Tensor) -> Tensor:
    """Logits with -inf where excluded or not finite."""
    excluded = excluded if all_finite(logits) else excluded | ~torch.isfinite(logits)
    return logits.masked_fill(excluded, -math.inf)


def global_log_partition(
    side: Side, logits: Tensor, beta: float | Tensor = 1.0
) -> Tensor | None:  # [N,K+C] -> [N]
    """log( m_neg / n sum_j exp(l_ij) ) over all columns at hand; None if m_neg is unknown.

    Columns at hand include the copies of the batch's items that rows are not offered as proposals
    (`Side.hidden_keys`): a partition may count an item twice, a walk must not meet it twice.
    """
    log_num_negatives = side.log_num_negatives()
    if log_num_negatives is None:
        return None
    log_sum, counts = log_sum_and_count(side, logits, beta)
    return log_sum + log_num_negatives - counts.clamp(min=1).to(log_sum.dtype).log()


def log_sum_and_count(
    side: Side, logits: Tensor, beta: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:  # [N,K+C] -> [N], [N]
    """log sum_j exp(l_ij) over all columns at hand, and how many draws they stand for."""
    log_sum, counts = torch.logsumexp(logits, 1), side.counts()
    if side.hidden_keys is not None and len(side.kinds) == 1:
        others = products(side.queries.detach(), side.hidden_keys) * constant(beta)
        others = usable(others, side.excluded)
        log_sum, counts = torch.logaddexp(log_sum, torch.logsumexp(others, 1)), 2 * counts
    return log_sum, counts


def bracket(
    side: Side, logits: Tensor, beta: float | Tensor, held_ids: Tensor, held_logit: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # [N,K+C] ... [N] [N] -> three [N]
    """Log partitions below and above the true one on average, and between, given carried states."""
    log_m = side.log_num_negatives()
    assert log_m is not None
    log_sum, count = log_sum_and_count(side, logits, beta)
    low = log_sum + log_m - count.clamp(min=1).to(log_m.dtype).log()
    # With the carried state, a draw from p, among the columns E[1 / mean] = m_neg / Z (the
    # identity behind i-SIR), so that the logarithm of this mean lies above log Z on average.
    correction = side.correction(held_ids)
    held = held_logit if correction is None else held_logit - correction
    high = torch.logaddexp(log_sum, held) + log_m - (count + 1).to(log_m.dtype).log()
    high = torch.where(held > -math.inf, high, low)
    return low, high, torch.where(low > -math.inf, (low + high) / 2, high)


def mean_loss(
    positive: Tensor, beta: float | Tensor, denominator: Denominator, log_partition: Tensor
) -> Tensor:  # [N] [N] -> []
    """Mean of log_partition - beta * positive over the rows that have negatives."""
    gap = log_partition - positive * beta
    gap = F.softplus(gap) if denominator == "all" else gap
    return torch.where(log_partition > -math.inf, gap, 0.0).mean()


def effective_negatives(weights: Tensor, private: Tensor | None = None) -> Tensor:
    """Mean over rows of (sum W)^2 / sum W^2: how many negatives share a row's weight; -> [].

    Example:
        >>> effective_negatives(torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
        tensor(2.)
    """
    total, squares = weights.sum(1), torch.linalg.vecdot(weights, weights)
    if private is not None:
        total, squares = total + private, squares + private * private
    tiny = torch.finfo(weights.dtype).tiny
    mean: Tensor = (total * total / squares.clamp(min=tiny)).mean()
    return mean
