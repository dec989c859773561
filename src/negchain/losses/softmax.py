"""InfoNCE and DCL: the batch's own softmax, with and without the positive in the denominator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from torch import Tensor

from negchain.losses import fused
from negchain.losses.batch import Call
from negchain.losses.request import Request
from negchain.losses.settings import Common, InBatch, Proposals, one_of
from negchain.losses.weighted import WeightedLoss
from negchain.objective import Denominator
from negchain.pool import Side
from negchain.weights.softmax import softmax_weights


class _InBatchLoss(WeightedLoss):
    """The in-batch estimate; its two final classes differ in the denominator only."""

    _denominator: Denominator

    def __init__(
        self,
        num_samples: int | None = None,
        beta: float | Tensor = 14.28,
        *,
        proposals: Proposals | Literal["batch"] = "batch",
        key_counts: Tensor | None = None,
        backend: Literal["auto", "torch", "fused"] = "auto",
        **common: Unpack[Common],
    ) -> None:
        one_of("backend", backend, ("auto", "torch", "fused"))
        super().__init__(
            num_samples,
            beta,
            denominator=self._denominator,
            proposals=proposals,
            key_counts=key_counts,
            **common,
        )
        self.backend = backend
        self._counts_steps = not isinstance(self.proposals, InBatch)

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        sides = fused.in_batch(self, call)
        return super()._loss(call, requests) if sides is None else self._finish(*sides)

    def _begin(self, *given: Any, **layout: Any) -> list[Side]:
        sides = super()._begin(*given, **layout)
        if isinstance(self.proposals, InBatch) and self.num_keys is not None:
            sides = [without_probabilities(side) for side in sides]
        return sides

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The batch's own softmax."""
        return softmax_weights(logits)


def without_probabilities(side: Side) -> Side:
    """A side whose columns all count the same, from a set of unknown size."""
    kinds = tuple(dataclasses.replace(kind, log_q=None) for kind in side.kinds)
    return dataclasses.replace(side, kinds=kinds, num_keys=None)


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
        gather: with a process group, whose batches are the pool: of all ranks (True; "even" if they
            are of one size and nothing may wait), of a process group's, or the rank's own (False);
            see docs/several_gpus.md.
        shard_state: every rank keeps a block of the state instead of all of it (needs `dim`).
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
