"""The exact global loss, eq. (1), over the embeddings of a whole data set: the oracle.

    L = mean over anchors of   -beta s(x, y) + log sum_{z in D_neg(x)} exp(beta s(x, z))

It works through the similarity matrix in chunks of rows and forms the gradient on the way (every
row's gradient needs only that row), so memory grows with chunk * M, not with M * M. With an encoder
in chunks (`negchain.Chunked`) no activation of more than one chunk is ever alive either.

Shapes: `M` items, `N` anchors (2M for shared views), `K` keys, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.losses.batch import Views, as_embedding, as_ids, without_autocast
from negchain.losses.settings import check_count, one_of
from negchain.objective import Denominator
from negchain.pool import matches

CHUNK_ELEMENTS = 1 << 25  # logits held at a time when no chunk is given: 128 MiB in float32


class _SideLoss(torch.autograd.Function):
    """Sum over anchors of eq. (1), with the gradient computed beside the value."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        positives: Tensor,
        keys: Tensor,
        beta: Tensor,
        excluded: Callable[[slice], Tensor],
        denominator: Denominator,
        chunk: int,
    ) -> Tensor:
        total = queries.new_zeros(())
        needs = any(ctx.needs_input_grad[:4])
        gradients = [torch.zeros_like(t) for t in (queries, positives, keys, beta) if needs]
        for begin in range(0, queries.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            query, positive_key = queries[rows], positives[rows]
            similarity = query @ keys.T
            logits = (beta * similarity).masked_fill_(excluded(rows), -math.inf)
            positive = torch.linalg.vecdot(query, positive_key)
            log_sum = torch.logsumexp(logits, 1)
            value = log_sum - beta * positive
            pull = (log_sum > -math.inf).to(positive.dtype)  # 0: an anchor without negatives
            if denominator == "all":  # of the gap, which stays precise where a pair is solved
                value, pull = F.softplus(value), torch.sigmoid(value)
            total += torch.where(log_sum > -math.inf, value, 0.0).sum()
            if not needs:
                continue
            log_sum = log_sum.clamp(min=torch.finfo(log_sum.dtype).min)
            weights = torch.exp(logits - log_sum[:, None]) * pull[:, None]
            d_query, d_positive, d_keys, d_beta = gradients
            d_query[rows] = beta * (weights @ keys - pull[:, None] * positive_key)
            d_positive[rows] = -beta * pull[:, None] * query
            d_keys += beta * (weights.T @ query)
            d_beta += (torch.linalg.vecdot(weights, similarity) - pull * positive).sum()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # `once_differentiable` lets a constant `grad` pass
            raise RuntimeError(
                "global_loss is differentiable once: its gradient is made beside the value and has "
                "no graph; leave out create_graph=True"
            )
        d_query, d_positive, d_keys, d_beta = (grad * g for g in ctx.saved_tensors)
        return d_query, d_positive, d_keys, d_beta, None, None, None


def global_loss(
    z_a: Tensor,
    z_b: Tensor,
    beta: float | Tensor,
    chunk: int | None = None,
    *,
    views: Views = "shared",
    symmetric: bool = True,
    denominator: Denominator = "negatives",
    index: Tensor | None = None,
    known: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    r"""Eq. (1) over whole-data-set embeddings, all pairs, differentiable (tests/test_exact.py).

    $$ L = \frac1N \sum_i \Big[ -\beta s(x_i,y_i)
       + \log \sum_{z \in D_{neg}(x_i)} e^{\beta s(x_i,z)} \Big] $$

    Args:
        z_a: [M, D] embeddings of one view of every item (or of every anchor).
        z_b: [M, D] embeddings of the other view (or of every key).
        beta: inverse temperature; a tensor receives its gradient.
        chunk: anchors worked on at a time; None chooses it so that 128 MiB of logits are held.
        views: "shared": anchors are all 2M views, negatives both views of all other items;
            "paired": z_a against z_b and, if symmetric, z_b against z_a.
        symmetric: both views (directions) are anchors.
        denominator: "negatives" (eq. (1)) or "all" (positive kept in the denominator).
        index: [M] ids; items with equal ids are never negatives of each other. None: all different.
        known: [M, L] further ids that are no negatives of an item, padded with -1; not mutual.
        normalize: bring embeddings to unit length first.

    Returns:
        [] scalar. An anchor without any negative contributes nothing, as in every loss.

    Example:
        >>> z_a, z_b = torch.randn(2, 50, 8).requires_grad_().unbind()
        >>> loss = global_loss(z_a, z_b, beta=5.0)
        >>> bool(torch.isclose(loss, global_loss(z_a, z_b, beta=5.0, chunk=7)))
        True
    """
    if z_a.dim() != 2 or z_a.shape != z_b.shape or z_a.shape[0] < 2:
        raise ValueError(
            "z_a and z_b must be embeddings of one shape [M, D] with M >= 2, "
            f"got {tuple(z_a.shape)} and {tuple(z_b.shape)}"
        )
    one_of("views", views, ("shared", "paired"))
    one_of("denominator", denominator, ("negatives", "all"))
    if chunk is not None:
        check_count("chunk (anchors at a time)", chunk)
    size, device = z_a.shape[0], z_a.device
    z_a, z_b = as_embedding(z_a, normalize), as_embedding(z_b, normalize)
    ids = (
        torch.arange(size, device=device) if index is None else as_ids("index", index, size, device)
    )
    known = None if known is None else as_ids("known", known, size, device, dims=2)
    both, swapped = torch.cat([z_a, z_b]), torch.cat([z_b, z_a])
    if views == "shared":
        sides = [(both, swapped, both) if symmetric else (z_a, z_b, both)]
    else:
        sides = [(z_a, z_b, z_b), (z_b, z_a, z_a)][: 2 if symmetric else 1]
    beta_tensor = torch.as_tensor(beta, dtype=z_a.dtype, device=device)
    numbers = torch.arange(len(sides[0][0]), device=device) % size  # of each anchor's item

    def excluded(rows: slice) -> Tensor:  # [c,K] bool: keys that are no negatives
        item = numbers[rows]
        mask = matches(ids, ids[item], None if known is None else known[item])
        return mask.repeat(1, len(sides[0][2]) // size)

    total = z_a.new_zeros(())
    for side in sides:
        step = chunk or max(1, CHUNK_ELEMENTS // len(side[2]))
        with without_autocast(z_a):
            part = _SideLoss.apply(*side, beta_tensor, excluded, denominator, step)
        total = total + part / len(side[0])
    return total / len(sides)
