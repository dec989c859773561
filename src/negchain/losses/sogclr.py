"""SogCLR as a module: one moving average per sample, in log space, in the state dict.

Estimates   p_i by the batch's exponentials over a remembered denominator.
State       log u: one float per sample (per direction).
Cost        B^2 D for the similarities.
Bias        does not vanish: u lags behind the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from negchain.fast import fused
from negchain.losses.base import Call, ContrastiveLoss, one_of
from negchain.losses.batch import Views
from negchain.losses.partition import detached_logits, effective_negatives, global_log_partition
from negchain.losses.reporting import Report, keep
from negchain.losses.request import Request
from negchain.losses.settings import InBatch, Proposals, Uniform, as_proposals
from negchain.objective import Denominator, Estimate
from negchain.pool import write_view_mean
from negchain.weights.sogclr import sogclr_weights


class SogCLRLoss(ContrastiveLoss):
    r"""SogCLR: the in-batch exponentials divided by a moving average of their mean.

    $$ u_i \leftarrow (1-\gamma) u_i + \gamma \, \tfrac1K \sum_j e^{\beta s_{ij}}, \qquad
       W_{ij} = \frac{e^{\beta s_{ij}}}{K u_i} $$

    The first visit of a sample starts its average at the batch's own value. With two views each
    view's row mixes the sample's one average with its own value; their mean is stored. The positive
    pulls with weight 1, as the gradient of eq. (1) says; LibAUC's `GCLoss_v2` pulls with the sum of
    the row's weights instead, which is 1 only on average (docs/methods/sogclr.md).

    Args:
        num_samples: size of the data set (of anchors).
        beta: inverse temperature; a `nn.Parameter` to learn it.
        gamma: share of the new value; 1 gives DCL.
        proposals: as for `InfoNCELoss`; None: the batch, and `Uniform()` beside it for a corpus,
            where the batch alone does not reach every key.
        views, symmetric, num_keys, key_counts, dim, normalize, seed, backend: as for `InfoNCELoss`.
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
        views: Views = "shared",
        symmetric: bool = True,
        denominator: Denominator = "negatives",
        num_keys: int | None = None,
        key_counts: Tensor | None = None,
        dim: int | None = None,
        normalize: bool = True,
        seed: int = 0,
        backend: Literal["auto", "torch", "fused"] = "auto",
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        if proposals is None:
            proposals = InBatch() if num_keys is None else Uniform()
        super().__init__(
            num_samples,
            beta,
            views=views,
            symmetric=symmetric,
            denominator=denominator,
            proposals=as_proposals(proposals),
            num_keys=num_keys,
            key_counts=key_counts,
            dim=dim,
            normalize=normalize,
            seed=seed,
        )
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma (share of the new value) must be in (0, 1], got {gamma}")
        self.gamma = gamma
        self.backend = backend
        self.add_state("log_u", torch.full((self.num_sides, num_samples), -math.inf))

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        if fused.applies_in_batch(self, call):
            value, self._info = fused.in_batch(self, call, log_u=self.log_u, gamma=self.gamma)
            return value
        if self.backend == "fused":
            raise fused.not_applicable(call.z_a)
        batch, sides = self._begin(call, requests)
        total: list[Tensor] = []
        report: Report = {"global_loss_low": [], "effective_negatives": []}
        for table, side in zip(self.log_u, sides, strict=True):
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            log_u = table[side.anchor_ids].to(logits.dtype)
            counts = None if len(side.kinds) == 1 else side.counts()
            weights, log_u = sogclr_weights(logits, log_u, self.gamma, counts)
            log_partition = global_log_partition(side, logits)
            log_num_negatives = side.log_num_negatives()
            assert log_partition is not None and log_num_negatives is not None
            self._count_lonely(log_partition)
            estimate = Estimate(weights, log_partition, log_u + log_num_negatives)
            total.append(self._value(side, similarity, estimate))
            if self.training:
                write_view_mean(table, batch.index, log_u, batch.valid)
            report["global_loss_low"].append(keep(total[-1]))
            report["effective_negatives"].append(partial(effective_negatives, weights))
        if self.training:
            self._remember(batch, sides, requests)
            self._count_keys(batch)
            self.step += 1
        return self._finish(total, report)
