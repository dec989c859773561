"""SogCLR as a module: one moving average per sample, in log space, in the state dict.

Estimates   p_i by the batch's exponentials over a remembered denominator.
State       log u: one float per sample (per direction).
Cost        B^2 D for the similarities.
Bias        does not vanish: u lags behind the encoder.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from negchain.fast import fused
from negchain.losses.base import (
    ContrastiveLoss,
    detached_logits,
    effective_negatives,
    full_precision,
    global_log_partition,
    one_of,
)
from negchain.losses.batch import Drawn, Draws, Views
from negchain.objective import Denominator, Estimate
from negchain.pool import write_view_mean
from negchain.weights.sogclr import sogclr_weights


class SogCLRLoss(ContrastiveLoss):
    r"""SogCLR: the in-batch exponentials divided by a moving average of their mean.

    $$ u_i \leftarrow (1-\gamma) u_i + \gamma \, \tfrac1K \sum_j e^{\beta s_{ij}}, \qquad
       W_{ij} = \frac{e^{\beta s_{ij}}}{K u_i} $$

    The first visit of a sample starts its average at the batch's own value. With two views each
    view's row mixes the sample's one average with its own value; their mean is stored.

    Args:
        num_samples: size of the data set (of anchors).
        beta: inverse temperature; a `nn.Parameter` to learn it.
        gamma: share of the new value; 1 gives DCL.
        views, symmetric, num_keys, normalize, backend: as for `InfoNCELoss`.
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
        views: Views = "shared",
        symmetric: bool = True,
        denominator: Denominator = "negatives",
        num_keys: int | None = None,
        normalize: bool = True,
        backend: Literal["auto", "torch", "fused"] = "auto",
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        super().__init__(
            beta,
            views=views,
            symmetric=symmetric,
            denominator=denominator,
            num_samples=num_samples,
            num_keys=num_keys,
            normalize=normalize,
        )
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma (share of the new value) must be in (0, 1], got {gamma}")
        self.gamma = gamma
        self.backend = backend
        self.register_buffer("log_u", torch.full((self.num_sides, num_samples), -math.inf))

    @full_precision
    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Tensor,
        *,
        key_index: Tensor | None = None,
        known: Tensor | None = None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
    ) -> Tensor:
        """The loss of a batch; arguments as for `InfoNCELoss.forward`, `index` required.

        In training mode the moving averages of the batch's samples are updated.
        """
        if known is None and draw is None and fused.applies_in_batch(self.backend, z_a):
            value, self._info = fused.in_batch(
                self, z_a, z_b, index, key_index, tables=self.log_u, gamma=self.gamma
            )
            return value
        if self.backend == "fused":
            raise fused.not_applicable(z_a)
        batch, sides = self._begin(z_a, z_b, index, key_index, known, draw, drawn)
        total: list[Tensor] = []
        report: dict[str, list[Tensor]] = {"global_loss": [], "effective_negatives": []}
        for table, side in zip(self.log_u, sides, strict=True):
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            log_u = table[side.anchor_ids].to(logits.dtype)
            weights, log_u = sogclr_weights(logits, log_u, self.gamma)
            log_partition = global_log_partition(side, logits)
            log_num_negatives = side.log_num_negatives()
            assert log_partition is not None and log_num_negatives is not None
            estimate = Estimate(weights, log_partition, log_u + log_num_negatives)
            total.append(self._value(side, similarity, estimate))
            if self.training:
                write_view_mean(table, batch.index, log_u, batch.valid)
            report["global_loss"].append(total[-1].detach())
            report["effective_negatives"].append(effective_negatives(weights))
        if self.training:
            self.step += 1
        return self._finish(total, report)
