"""InfoNCE and DCL: the batch's own softmax, with and without the positive in the denominator.

Estimates   p_i by the softmax over the batch.
State       none.
Cost        B^2 D for the similarities.
Bias        shrinks only with the batch size.
"""

from __future__ import annotations

from typing import Literal

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
from negchain.weights.softmax import softmax_weights


class _InBatchLoss(ContrastiveLoss):
    """The in-batch estimate; its two final classes differ in the denominator only."""

    _denominator: Denominator

    def __init__(
        self,
        beta: float | Tensor = 14.28,
        *,
        views: Views = "shared",
        symmetric: bool = True,
        num_samples: int | None = None,
        num_keys: int | None = None,
        normalize: bool = True,
        backend: Literal["auto", "torch", "fused"] = "auto",
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        super().__init__(
            beta,
            views=views,
            symmetric=symmetric,
            denominator=self._denominator,
            num_samples=num_samples,
            num_keys=num_keys,
            normalize=normalize,
        )
        self.backend = backend

    @full_precision
    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Tensor | None = None,
        *,
        key_index: Tensor | None = None,
        known: Tensor | None = None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
    ) -> Tensor:
        """The loss of a batch; call `.backward()` on it.

        Args:
            z_a: [B, D] embeddings of one view (or of the anchors).
            z_b: [B, D] embeddings of the other view (or of the keys).
            index: [B] data set positions; samples with equal ids are never negatives of each
                other. None: all different.
            key_index: [B] positions of z_b among the keys, with `num_keys`.
            known: [B, L] further positives of each anchor, padded with -1; never negatives.
            draw: negatives from beyond the batch (see `negchain.Draw`).
            drawn: their embeddings.

        Returns:
            [] scalar.
        """
        if known is None and draw is None and fused.applies_in_batch(self.backend, z_a):
            total, numbers = fused.in_batch(self, z_a, z_b, index, key_index)
            if self.num_positions is None:
                del numbers["global_loss"]
            self._info = numbers
            return total
        if self.backend == "fused":
            raise fused.not_applicable(z_a)
        _, sides = self._begin(z_a, z_b, index, key_index, known, draw, drawn)
        values: list[Tensor] = []
        report: dict[str, list[Tensor]] = {"global_loss": [], "effective_negatives": []}
        for side in sides:
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            weights, log_sum = softmax_weights(logits)
            value = self._value(side, similarity, Estimate(weights, log_sum))
            values.append(value)
            log_partition = global_log_partition(side, logits)
            if log_partition is not None:
                report["global_loss"].append(value.detach() + (log_partition - log_sum).mean())
            report["effective_negatives"].append(effective_negatives(weights))
        return self._finish(values, report)


class InfoNCELoss(_InBatchLoss):
    r"""InfoNCE (SimCLR, CLIP): cross-entropy of the positive against the batch.

    $$ -\log \frac{e^{\beta s(x_i,y_i)}}{e^{\beta s(x_i,y_i)} + \sum_j e^{\beta s(x_i,z_j)}} $$

    Args:
        beta: inverse temperature; a `nn.Parameter` to learn it.
        views: "shared" (one encoder, two views, 2B - 2 negatives) or "paired" (two encoders).
        symmetric: both views (directions) are anchors.
        num_samples: size of the data set, only needed for `info["global_loss"]` and for draws.
        num_keys: size of a corpus of keys that is not one-to-one with the anchors.
        normalize: bring embeddings to unit length first.
        backend: "fused" (a dozen GPU kernels), "torch" (readable), "auto": fused on a GPU where it
            applies (negatives from the batch, float32 or half precision, at most 1,024 samples).

    Example:
        >>> import torch
        >>> z_a, z_b = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
        >>> loss = InfoNCELoss(beta=10.0)(z_a, z_b)
        >>> loss.backward()
    """

    _denominator = "all"


class DCLLoss(_InBatchLoss):
    r"""DCL: InfoNCE with the positive left out of the denominator; the in-batch form of eq. (1).

    $$ -\log \frac{e^{\beta s(x_i,y_i)}}{\sum_j e^{\beta s(x_i,z_j)}} $$

    Arguments as for `InfoNCELoss`.

    Example:
        >>> import torch
        >>> z_a, z_b = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16)
        >>> DCLLoss(beta=10.0)(z_a, z_b, torch.arange(8)).backward()
    """

    _denominator = "negatives"
