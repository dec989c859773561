"""An i-SIR step of the chains over a batch, or over draws from beyond it.

A batch without replacement is a uniformly random *set*: with i-SIR a carried state that is itself
in the batch is counted once, and so is an item that a batch holds twice.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from negchain import rng
from negchain.pool import Kind, Side, first_writer
from negchain.weights.isir import isir_weights
from negchain.weights.metropolis import Scan

if TYPE_CHECKING:
    from negchain.losses.walk import Sampler


def resample(
    side: Side,
    number: int,
    logits: Tensor,
    ids: Tensor,
    start: Tensor,
    sampler: Sampler,
    count_every: int,
) -> Scan:
    """An i-SIR step over the columns of one kind; arguments as of `Sampler.sweep`."""
    kind = side.kinds[number]
    if number == 0 and kind.log_q is None and len(side.key_ids[0]) >= kind.last:
        start, logits = as_set(side, kind, ids, start, logits)
    stays = start == math.inf  # this kind never proposes the held state, so it never leaves it
    start, logits = start.masked_fill(stays, 0.0), logits.masked_fill(stays[:, None], -math.inf)
    at = logits.shape[1] + 1, logits.dtype, kind.first + number
    noise = sampler.draw(rng.gumbel, rng.FOR_GUMBEL, sampler.rows, *at)
    return isir_weights(logits, start, noise, count_every)


def as_set(
    side: Side, kind: Kind, ids: Tensor, start: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """i-SIR over a batch as a set: {held} u batch holds an item once; in two copies, each twice.

    A stored augmentation of the held item gives way to the held one: the batch has one of each item
    at most, so a set with two of one item could be met from one of its members and not from others.
    """
    batch = side.items_of(side.key_ids[:, kind.first : kind.last])
    names = batch.repeat_interleave(side.num_rows // len(batch), 0)
    logits = logits.masked_fill(repeated_items(side, kind), -math.inf)
    held = side.items_of(ids)[:, None] == names
    if side.ids_per_item > 1:
        return start, logits.masked_fill(held & (start > -math.inf)[:, None], -math.inf)
    return start.masked_fill(held.any(1), -math.inf) + math.log(side.copies), logits


def repeated_items(side: Side, kind: Kind) -> Tensor:  # [N,K] bool
    """Columns that repeat the item of a usable one to their left, within a copy of the batch."""
    batch = side.items_of(side.key_ids[:, : kind.last])
    groups, width = batch.shape
    usable = ~side.excluded[:, :width].reshape(groups, -1, width).all(1)
    masks = []
    for ids, good in zip(
        batch.reshape(groups * side.copies, -1),
        usable.reshape(groups * side.copies, -1),
        strict=True,
    ):
        first = first_writer(ids, good)
        masks.append((first >= 0) & (first != torch.arange(len(ids), device=ids.device)))
    return torch.stack(masks).view(groups, width).repeat_interleave(side.num_rows // groups, 0)
