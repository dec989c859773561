"""InfoNCE and DCL: the batch's own softmax, with and without the positive in the denominator.

Estimates   p_i by the softmax over the batch.
State       none.
Cost        B^2 D for the similarities.
Bias        shrinks only with the batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import Tensor

from negchain.fast import fused
from negchain.losses.base import Call, ContrastiveLoss, one_of
from negchain.losses.batch import Views
from negchain.losses.partition import detached_logits, effective_negatives, global_log_partition
from negchain.losses.reporting import Report, keep
from negchain.losses.request import Request
from negchain.losses.settings import InBatch, Proposals, as_proposals
from negchain.objective import Denominator, Estimate
from negchain.pool import Side
from negchain.weights.softmax import softmax_weights


class _InBatchLoss(ContrastiveLoss):
    """The in-batch estimate; its two final classes differ in the denominator only."""

    _denominator: Denominator

    def __init__(
        self,
        num_samples: int | None = None,
        beta: float | Tensor = 14.28,
        *,
        proposals: Proposals | Literal["batch"] = "batch",
        views: Views = "shared",
        symmetric: bool = True,
        num_keys: int | None = None,
        key_counts: Tensor | None = None,
        dim: int | None = None,
        normalize: bool = True,
        seed: int = 0,
        backend: Literal["auto", "torch", "fused"] = "auto",
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        super().__init__(
            num_samples,
            beta,
            views=views,
            symmetric=symmetric,
            denominator=self._denominator,
            proposals=as_proposals(proposals),
            num_keys=num_keys,
            key_counts=key_counts,
            dim=dim,
            normalize=normalize,
            seed=seed,
        )
        self.backend = backend

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        if fused.applies_in_batch(self, call):
            total, self._info = fused.in_batch(self, call)
            return total
        if self.backend == "fused":
            raise fused.not_applicable(call.z_a)
        batch, sides = self._begin(call, requests)
        values: list[Tensor] = []
        report: Report = {"global_loss_low": [], "effective_negatives": []}
        in_batch = isinstance(self.proposals, InBatch)
        for side in sides:
            similarity = side.similarities()
            if in_batch and self.num_keys is not None:  # the batch as it is: no claim on the corpus
                side = without_probabilities(side)
            logits = detached_logits(side, similarity, self._beta(similarity))
            weights, log_sum = softmax_weights(logits)
            self._count_lonely(log_sum)
            value = self._value(side, similarity, Estimate(weights, log_sum))
            values.append(value)
            log_partition = global_log_partition(side, logits)
            if log_partition is not None and not (in_batch and self.num_keys is not None):
                gap = (log_partition - log_sum).nan_to_num(0.0)
                report["global_loss_low"].append(keep(value + gap.mean()))
            report["effective_negatives"].append(partial(effective_negatives, weights))
        if self.training:
            self._remember(batch, sides, requests)
            self._count_keys(batch)
            self.step += int(len(self.tables) > 0 or not in_batch)
        return self._finish(values, report)


def without_probabilities(side: Side) -> Side:
    """The columns as if all were equally likely: in-batch losses take the batch as it is."""
    kinds = tuple(dataclasses.replace(kind, log_q=None) for kind in side.kinds)
    return dataclasses.replace(side, kinds=kinds)


class InfoNCELoss(_InBatchLoss):
    r"""InfoNCE (SimCLR, CLIP): cross-entropy of the positive against the batch.

    $$ -\log \frac{e^{\beta s(x_i,y_i)}}{e^{\beta s(x_i,y_i)} + \sum_j e^{\beta s(x_i,z_j)}} $$

    Args:
        num_samples: size of the data set, only needed for `info["global_loss_low"]` and for draws.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        proposals: further columns beside the batch: "batch" (none), `Uniform(...)`,
            `Informed(...)` or `Given()`; corrected by their probabilities (logQ).
        views: "shared" (one encoder, two views, 2B - 2 negatives) or "paired" (two encoders).
        symmetric: both views (directions) are anchors.
        num_keys: size of a corpus of keys that is not one-to-one with the anchors.
        key_counts: [num_keys] how many anchors each key is the positive of; None: counted on the
            way. Used where draws are corrected; in-batch columns alone are taken as they are.
        dim: dimension of the embeddings, for `Informed`'s table; None waits for the first batch.
        normalize: bring embeddings to unit length first.
        seed: of the draws.
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
