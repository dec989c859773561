"""The one equation: from weights to a scalar with the right value and the right gradient.

    gradient   beta/N sum_i c_i [ -grad s(x_i, y_i) + sum_j W_ij grad s(x_i, z_j) ]   W, c constant
    value      1/N sum_i -beta s(x_i, y_i) + log_partition_i

`c_i` is 1 when the positive is left out of the denominator (the paper's eq. (1)), and 1 - p_i+ when
it is kept in: then log_partition is joined by beta s(x_i, y_i), and a solved pair stops pulling.
beta stays outside the stop-gradient, so it may be learned.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Denominator = Literal["negatives", "all"]
SHORTEST = 1e-12  # a vector no longer than this has no direction: it stays 0 and gets no gradient


class Estimate(NamedTuple):
    """What a method says about the negatives of N rows."""

    weights: Tensor  # [N,K], never differentiated
    log_partition: Tensor  # [N] log of the sum over the negatives, for the value; -inf: none
    log_saturation: Tensor | None = None  # [N] the same for 1 - p+; None: as log_partition
    carried_weight: Tensor | None = None  # [N] weight of the row's own carried negative


def contrastive_objective(
    positive: Tensor,
    similarity: Tensor,
    estimate: Estimate,
    beta: float | Tensor,
    denominator: Denominator,
    carried_similarity: Tensor | None = None,
) -> Tensor:
    """Mean over rows of a loss with the value and the gradient of the module's header.

    Args:
        positive: [N] similarity of each anchor to its positive, differentiable.
        similarity: [N, K] similarity to each column, differentiable.
        estimate: weights and partition of the negatives.
        beta: inverse temperature, a number or a scalar tensor.
        denominator: "negatives" or "all".
        carried_similarity: [N] similarity to each row's carried negative, where it has one.

    Returns:
        [] scalar. A row without any negative contributes nothing.

    Example:
        >>> s = torch.tensor([[0.1, -0.3]], requires_grad=True)
        >>> logits = 5.0 * s.detach()
        >>> e = Estimate(logits.softmax(1), logits.logsumexp(1))
        >>> contrastive_objective(torch.tensor([0.9]), s, e, 5.0, "negatives").backward()
        >>> torch.allclose(s.grad, 5.0 * logits.softmax(1))
        True
    """
    log_partition = estimate.log_partition
    positive_logit = beta * positive.detach()
    if isinstance(beta, Tensor):
        positive_logit = positive_logit.detach()
    has_negatives = log_partition > -math.inf
    value = log_partition - positive_logit
    pull = has_negatives.to(similarity.dtype)
    if denominator == "all":
        value = torch.nn.functional.softplus(value)
        saturation = estimate.log_saturation
        saturation = log_partition if saturation is None else saturation
        pull = pull * torch.sigmoid(saturation - positive_logit)
    value = torch.where(has_negatives, value, 0.0)
    negative = torch.linalg.vecdot(estimate.weights, similarity)
    if carried_similarity is not None and estimate.carried_weight is not None:
        negative = negative + estimate.carried_weight * carried_similarity
    surrogate = pull * (negative - positive) * beta
    # NaN embeddings make `value` and `surrogate` NaN, which is what a gradient scaler looks for.
    total: Tensor = (value + (surrogate - surrogate.detach())).mean()
    return total
