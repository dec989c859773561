"""SogCLR as a module: one moving average per sample, in log space, in the state dict.

Estimates   p_i by the batch's exponentials over a remembered denominator.
State       log u: one float per sample (per direction).
Cost        B^2 D for the similarities.
Bias        does not vanish: u lags behind the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from negchain.losses import fused
from negchain.losses.batch import Call
from negchain.losses.request import Request
from negchain.losses.settings import (
    InBatch,
    Proposals,
    Shared,
    Uniform,
    as_proposals,
    one_of,
)
from negchain.losses.weighted import Learn, WeightedLoss
from negchain.objective import Estimate, global_log_partition
from negchain.pool import Side, write_view_mean
from negchain.weights.sogclr import sogclr_weights


class SogCLRLoss(WeightedLoss):
    r"""SogCLR: the in-batch exponentials divided by a moving average of their mean.

    $$ u_i \leftarrow (1-\gamma) u_i + \gamma \, \tfrac1K \sum_j e^{\beta s_{ij}}, \qquad
       W_{ij} = \frac{e^{\beta s_{ij}}}{K u_i} $$

    The first visit of a sample starts its average at the batch's own value. With two views each
    view's row mixes the sample's one average with its own value; their mean is stored. The positive
    pulls with weight 1, as the gradient of eq. (1) says (docs/methods/sogclr.md).

    Args:
        num_samples: size of the data set (of anchors).
        beta: inverse temperature; a `nn.Parameter` to learn it.
        gamma: share of the new value; 1 gives DCL.
        relative: as LibAUC's `GCLoss_v2`: u_i averages exp(beta (s_ij - s_i+)), relative to the
            positive, which pulls with the sum of its row's weights instead of 1.
        proposals: as for `InfoNCELoss`; None: the batch, and `Uniform()` beside it for a corpus,
            where the batch alone does not reach every key.
        views, symmetric, num_keys, key_counts, dim, normalize, seed, gather, shard_state, backend:
            as for `InfoNCELoss`.
        denominator: "negatives" (eq. (1)) or "all" (positive kept in, against m_neg u_i).

    Example:
        >>> loss_fn = SogCLRLoss(100, beta=10.0)
        >>> z_a, z_b = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
        >>> loss_fn(z_a, z_b, torch.arange(8)).backward()
    """

    log_u: Tensor

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        gamma: float = 0.9,
        *,
        relative: bool = False,
        proposals: Proposals | Literal["batch"] | None = None,
        key_counts: Tensor | None = None,
        backend: Literal["auto", "torch", "fused"] = "auto",
        **shared: Unpack[Shared],
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        if relative and backend == "fused":
            raise ValueError("backend='fused' does not know relative=True; use backend='auto'")
        if proposals is None:
            proposals = InBatch() if shared.get("num_keys") is None else Uniform()
        proposals = as_proposals(proposals)
        super().__init__(num_samples, beta, proposals=proposals, key_counts=key_counts, **shared)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma (share of the new value) must be in (0, 1], got {gamma}")
        self.gamma = gamma
        self.relative = relative
        self.backend = backend
        log_u = torch.full((self.num_sides, self.rows.count), -math.inf)
        self.add_state("log_u", log_u, rows=self.rows, dim=1)

    def _touched(
        self, call: Call, index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._touched(call, index, requests)
        for table in self.log_u:
            yield table, index

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        if self.relative:  # the kernels do not know it
            return super()._loss(call, requests)
        sides = fused.in_batch(self, call, log_u=self.log_u, gamma=self.gamma)
        return super()._loss(call, requests) if sides is None else self._finish(*sides)

    def _estimate(self, number: int, side: Side, logits: Tensor) -> tuple[Estimate, Learn]:
        table = self.log_u[number]
        positive: Tensor | float = 0.0
        if self.relative:
            alike = side.to_positives.detach()
            alike = (self._beta(alike) * alike).detach()
            logits, positive = logits - alike[:, None], alike
        log_u = self.rows.read(table, side.anchor_ids).to(logits.dtype)
        weights, log_u = sogclr_weights(logits, log_u, self.gamma, side.counts())
        log_partition, log_m = global_log_partition(side, logits), side.log_num_negatives()
        assert log_partition is not None and log_m is not None
        estimate = Estimate(weights, log_partition + positive, log_u + log_m + positive)
        write = self.rows.write
        return estimate, lambda batch: write_view_mean(
            table, batch.index, log_u, batch.valid, write
        )

    def _value(self, side: Side, similarity: Tensor, estimate: Estimate, *carried: Any) -> Tensor:
        if self.relative:  # the positive pulls with sum W: 1 - (1 - sum W)
            estimate = estimate._replace(carried_weight=1 - estimate.weights.sum(1))
            return super()._value(side, similarity, estimate, side.to_positives)
        return super()._value(side, similarity, estimate, *carried)
