"""Uncorrected top-k: hard negatives from a stale table, as if they had been in the batch.

    T_i  = the `top` keys with the largest x_i . psi_old(z);   row i adds `num` of T_i, by lot
    W_ij = softmax_j( beta s_ij )   over the batch and everything the rows added

Estimates   p_i by the softmax over the columns at hand: what ADORE and ANCE do between refreshes,
            and what mined hard negatives are where the table is never refreshed.
State       the table: M x D floats, and a refresh cursor.
Cost        M D per row for the top, `num` encodes per row, refresh * M encodes per step.
Bias        the negatives below the top are counted as if there were few of them: does not vanish.
"""

from __future__ import annotations

import warnings
from typing import Any, Unpack

import torch
from torch import Tensor

from negchain import rng
from negchain.losses.columns import Key
from negchain.losses.request import Part
from negchain.losses.settings import Informed, Shared, check_count
from negchain.losses.softmax import without_probabilities
from negchain.losses.table import StaleTable
from negchain.losses.weighted import WeightedLoss
from negchain.pool import Side
from negchain.weights.softmax import softmax_weights


class TopKLoss(WeightedLoss):
    """The in-batch softmax with `num` of each row's `top` nearest keys of a stale table added.

    The baseline for `ImportanceLoss`: the same table, the same encodes, no correction. All rows
    share what each of them added. Value and saturation are of the columns at hand, so `info` makes
    no claim about the global loss.

    Args:
        num_samples: number of anchors; also of keys unless `num_keys` is given.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        num: keys every row adds.
        top: how many of its nearest keys they are drawn from.
        refresh: share of the table that is encoded anew per step.
        views, symmetric, num_keys, dim, normalize, seed, gather, shard_state: as for `InfoNCELoss`.
        denominator: "all" (InfoNCE's) or "negatives" (DCL's).

    Example:
        >>> encoder, items = torch.nn.Linear(5, 8), torch.randn(50, 5)
        >>> loss_fn = TopKLoss(50, beta=10.0, top=10)
        >>> encode = lambda ids: encoder(items[ids])
        >>> loss_fn.fill(encode)
        >>> index = torch.arange(4)
        >>> loss_fn(encode(index), encode(index), index, encode=encode).backward()
    """

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        num: int = 2,
        top: int = 20,
        refresh: float = 0.01,
        **shared: Unpack[Shared],
    ) -> None:
        check_count("top (nearest keys)", top)
        if not 1 <= num <= top:
            raise ValueError(
                f"num (keys a row adds) must be from 1 to top={top} (drawn from these), got {num}"
            )
        shared = {"denominator": "all", **shared}
        table = Informed(num=num, refresh=refresh)
        super().__init__(num_samples, beta, proposals=table, **shared)
        self.num, self.top = num, top

    def _drawn(self, side: Side, table: StaleTable, key: Key) -> Part:
        """`num` of the `top` of every row."""
        if table.embeddings.shape[1] == 0:
            warnings.warn(
                "the table of TopKLoss is empty, so the nearest keys of all rows are the same "
                "few; call loss_fn.fill(encode) once before training",
                stacklevel=2,
            )
        seed, step, number = key
        nearest = table.top(self.top, side)
        row = torch.arange(side.num_rows, device=nearest.device)
        lot = rng.bits(seed, step, rng.FOR_PROPOSE + 16 * number, row, nearest.shape[1])
        ids = nearest.gather(1, lot.argsort(1)[:, : self.num])
        return Part("draw", number, ids.flatten())

    def _begin(self, *given: Any, **layout: Any) -> list[Side]:
        """Columns without probabilities, from a set of unknown size."""
        return [without_probabilities(side) for side in super()._begin(*given, **layout)]

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax over the columns, and their own sum."""
        return softmax_weights(logits)
