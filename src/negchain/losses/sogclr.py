"""SogCLR as a module: one moving average per sample and direction, in log space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from negchain.losses import fused
from negchain.losses.batch import Batch, Call
from negchain.losses.request import Request
from negchain.losses.settings import Proposals, Shared, Uniform, one_of, require_samples
from negchain.losses.weighted import Learn, WeightedLoss
from negchain.objective import Estimate, global_log_partition
from negchain.pool import Side
from negchain.weights.sogclr import sogclr_weights


class SogCLRLoss(WeightedLoss):
    r"""SogCLR: the in-batch exponentials divided by a moving average of their mean.

    $$ u_i \leftarrow (1-\gamma) u_i + \gamma \, \tfrac1K \sum_j e^{\beta s_{ij}}, \qquad
       W_{ij} = \frac{e^{\beta s_{ij}}}{K u_i} $$

    The first visit of a sample starts its average at the batch's own value. With two views each
    view's row mixes the sample's one average with its own value; their mean is stored. The positive
    pulls with weight 1, as the gradient of eq. (1) says: as in LibAUC's `GCLoss_v1` (one encoder),
    and not as in its `GCLoss_v2` (docs/methods/sogclr.md).

    Args:
        num_samples: size of the data set (of anchors).
        beta: inverse temperature; a `nn.Parameter` to learn it.
        gamma: share of the new value; 1 gives DCL.
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
        proposals: Proposals | Literal["batch"] | None = None,
        key_counts: Tensor | None = None,
        backend: Literal["auto", "torch", "fused"] = "auto",
        **shared: Unpack[Shared],
    ) -> None:
        require_samples(num_samples)
        one_of("backend", backend, ("auto", "torch", "fused"))
        if proposals is None and shared.get("num_keys") is not None:
            proposals = Uniform()
        super().__init__(num_samples, beta, proposals=proposals, key_counts=key_counts, **shared)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma (share of the new value) must be in (0, 1], got {gamma}")
        self.gamma = gamma
        self.backend = backend
        log_u = torch.full((self.num_sides, self.rows.count), -math.inf, dtype=torch.float32)
        self.add_state("log_u", log_u, rows=self.rows, dim=1)

    def _touched(
        self, call: Call, index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._touched(call, index, requests)
        for table in self.log_u:
            yield table, index

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        sides = fused.in_batch(self, call, log_u=self.log_u, gamma=float(self.gamma))
        return super()._loss(call, requests) if sides is None else self._finish(*sides)

    def _estimate(self, number: int, side: Side, logits: Tensor) -> tuple[Estimate, Learn]:
        table = self.log_u[number]
        log_u = self.rows.read(table, side.anchor_ids).to(logits.dtype)
        weights, log_u = sogclr_weights(logits, log_u, self.gamma, side.counts())
        log_partition, log_m = global_log_partition(side, logits), side.log_num_negatives()
        assert log_partition is not None and log_m is not None

        def learn(batch: Batch) -> None:
            """Store the mean of the views' averages."""
            views = log_u.view(-1, len(batch.index))
            mean = torch.logsumexp(views, 0) - math.log(len(views))
            self.rows.write(table, batch.index, mean, batch.valid & torch.isfinite(mean))

        return Estimate(weights, log_partition, log_u + log_m), learn
