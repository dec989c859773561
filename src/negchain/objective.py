"""The one equation: from weights and partitions to a scalar with the right value and gradient.

    gradient   beta/N sum_i c_i [ -grad s(x_i, y_i) + sum_j W_ij grad s(x_i, z_j) ]   W, c constant
    value      1/N sum_i -beta s(x_i, y_i) + log_partition_i

`c_i` is 1 when the positive is left out of the denominator (the paper's eq. (1)), and 1 - p_i+ when
it is kept in: then log_partition is joined by beta s(x_i, y_i), and a solved pair stops pulling.
beta stays outside the stop-gradient, so it may be learned.

Shapes: `N` rows, `K` shared and `C` private columns.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.pool import Side, products, usable

Denominator = Literal["negatives", "all"]
SHORTEST = 1e-12  # a vector no longer than this has no direction: it stays 0 and gets no gradient


class Estimate(NamedTuple):
    """What a method says about the negatives of N rows."""

    weights: Tensor  # [N,K], never differentiated
    log_partition: Tensor  # [N] log of the sum over the negatives, for the value; -inf: none
    log_saturation: Tensor | None = None  # [N] the same for 1 - p+; None: as log_partition
    # [N] weight of the row's own carried negative, and the similarity to it, differentiable
    carried: tuple[Tensor, Tensor] | None = None


def contrastive_objective(
    positive: Tensor,  # [N] similarity of each anchor to its positive, differentiable
    similarity: Tensor,  # [N,K] to each column, differentiable
    estimate: Estimate,
    beta: float | Tensor,
    denominator: Denominator,
) -> Tensor:  # []
    """Mean over rows of a loss with the value and the gradient of the module's header.

    A row without any negative contributes nothing.

    Example:
        >>> s = torch.tensor([[0.1, -0.3]], requires_grad=True)
        >>> logits = 5.0 * s.detach()
        >>> e = Estimate(logits.softmax(1), logits.logsumexp(1))
        >>> contrastive_objective(torch.tensor([0.9]), s, e, 5.0, "negatives").backward()
        >>> torch.allclose(s.grad, 5.0 * logits.softmax(1))
        True
    """
    log_partition = estimate.log_partition
    positive_logit = constant(beta) * positive.detach()
    has_negatives = log_partition > -math.inf
    value = log_partition - positive_logit
    pull = has_negatives.to(similarity.dtype)
    if denominator == "all":
        value = F.softplus(value)
        saturation = estimate.log_saturation
        saturation = log_partition if saturation is None else saturation
        pull = pull * torch.sigmoid(saturation - positive_logit)
    value = torch.where(has_negatives, value, 0.0)
    negative = torch.linalg.vecdot(estimate.weights, similarity)
    if estimate.carried is not None:
        weight, to_carried = estimate.carried
        negative = negative + weight * to_carried
    surrogate = pull * (negative - positive) * beta
    # NaN embeddings make `value` and `surrogate` NaN, which is what a gradient scaler looks for.
    total: Tensor = (value + (surrogate - surrogate.detach())).mean()
    return total


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


def global_log_partition(side: Side, logits: Tensor) -> Tensor | None:  # [N,K+C] -> [N]
    """log( m_neg / n sum_j exp(l_ij) ) over a row's n columns; None if m_neg is unknown."""
    log_num_negatives = side.log_num_negatives()
    if log_num_negatives is None:
        return None
    counts = side.counts().clamp(min=1).to(logits.dtype)
    return torch.logsumexp(logits, 1) + log_num_negatives - counts.log()


def bracket(
    side: Side, logits: Tensor, beta: float | Tensor, held_ids: Tensor, held_logit: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # [N,K+C] ... [N] [N] -> three [N]
    """Log partitions without carried states (low on average), with them, and the middle.

    The copies of the batch's items that rows are not offered as proposals (`Side.hidden_keys`)
    count too: a partition may count an item twice, a walk must not meet it twice.
    """
    log_m = side.log_num_negatives()
    assert log_m is not None
    log_sum, count = torch.logsumexp(logits, 1), side.counts()
    if side.hidden_keys is not None and len(side.kinds) == 1:
        others = products(side.queries.detach(), side.hidden_keys) * constant(beta)
        others = usable(others, side.excluded)
        log_sum, count = torch.logaddexp(log_sum, torch.logsumexp(others, 1)), 2 * count
    count = count.to(log_m.dtype)
    low = log_sum + log_m - count.clamp(min=1).log()
    # With the carried state, a draw from p, as one more column of independent draws E[1 / mean] =
    # m_neg / Z (the identity behind i-SIR): the logarithm of that mean lies above log Z on average.
    # Where items count in two copies the state still counts in one. With equal views that is a mean
    # between `low`'s and the identity's, about which nothing is proven; it lay above where it was
    # tried (tests/losses/test_long_run.py).
    correction = side.correction(held_ids)
    held = held_logit if correction is None else held_logit - correction
    high = torch.logaddexp(log_sum, held) + log_m - (count + 1).log()
    high = torch.where(held.isfinite(), high, low)  # +inf: what no column could have been
    return low, high, torch.where(low > -math.inf, (low + high) / 2, high)


def mean_loss(
    positive_logit: Tensor, denominator: Denominator, log_partition: Tensor
) -> Tensor:  # [N] [N] -> []
    """Mean of log_partition - positive_logit over the rows that have negatives."""
    gap = log_partition - positive_logit
    gap = F.softplus(gap) if denominator == "all" else gap
    return torch.where(log_partition > -math.inf, gap, 0.0).mean()


def effective_negatives(weights: Tensor, private: Tensor | None = None) -> Tensor:
    """Mean over rows of (sum W)^2 / sum W^2: how many negatives share a row's weight; -> [].

    Example:
        >>> effective_negatives(torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
        tensor(2.)
    """
    own = weights[:, :0] if private is None else private[:, None]
    joint, tiny = torch.cat([weights, own], 1), torch.finfo(weights.dtype).tiny
    # as shares first: SogCLR's weights may be too small to square
    share = joint / joint.sum(1, keepdim=True).clamp(min=tiny)
    squares = torch.linalg.vecdot(share, share).clamp(min=tiny)
    mean: Tensor = (share.sum(1).square() / squares).mean()
    return mean
