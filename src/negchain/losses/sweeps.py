"""What a plain walk leaves out: columns of several kinds, and i-SIR.

Kinds of columns, the batch and draws from beyond it, have different probabilities q. Chains walk
over one kind after the other, the batch last: in each such sweep proposals and held state are
weighed by that kind's q. Draws from a stale table depend on who is in the batch, so one scan over
all kinds with the mixture's q would not leave p as it is, and no more would the draws after the
batch: their q would depend on what the chain has just met. Draws first leave p whoever is in the
batch, and then the batch is as good as new (tests/losses/test_enumerated.py).

A batch without replacement is a uniformly random *set*: with i-SIR a carried state that is itself
in the batch is counted once, and so is an item that a batch holds twice.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from negchain import rng
from negchain.losses.settings import ISIR
from negchain.objective import constant
from negchain.pool import Kind, Side, first_writer
from negchain.weights.isir import isir_weights
from negchain.weights.metropolis import Scan

if TYPE_CHECKING:
    from negchain.losses.walk import Sampler, Start


def sweep_kinds(
    side: Side, similarity: Tensor, start: Start, beta: float | Tensor, sampler: Sampler
) -> tuple[Scan, Tensor]:
    """A sweep per kind of columns, each with its own q, the batch's last.

    Weights are shares of all counted steps; with i-SIR a sweep counts as its number of columns.
    """
    plain = (similarity.detach() * constant(beta)).masked_fill(side.all_excluded(), -math.inf)
    ids, here = side.column_ids(), torch.arange(len(plain), device=plain.device)
    isir = isinstance(sampler.kernel, ISIR)
    parts = [plain[:, kind.first : kind.last] for kind in side.kinds]
    steps = [sampler.num_steps(part) for part in parts]
    total = torch.stack(steps).sum(0)
    left = sampler.skipped(total)  # steps that are still to be skipped
    visits = plain.new_zeros(len(plain), plain.shape[1] + 1)  # the last column counts the start
    at = torch.full_like(here, -1)  # column each chain is at, -1: its start
    held, accepts = start, torch.zeros_like(here)
    for number in reversed(range(len(parts))):
        kind, part, num_steps = side.kinds[number], parts[number], steps[number]
        if kind.log_q is not None:
            part = part - kind.log_q(ids[:, kind.first : kind.last])
            part = part.masked_fill(~torch.isfinite(part), -math.inf)
        skipped = torch.minimum(left, num_steps)
        first = held.corrected(kind)
        scan = sampler.sweep(side, number, part, held.ids, first, skipped)
        counted = (kind.count if isir else num_steps - skipped).to(plain.dtype)[:, None]
        visits[:, kind.first : kind.last] += scan.weights * counted
        visits[here, at] += scan.start_weight * counted[:, 0]
        at = torch.where(scan.last >= 0, scan.last + kind.first, at)
        column = at.clamp(min=0)
        held = dataclasses.replace(
            start,
            ids=torch.where(at >= 0, ids[here, column], start.ids),
            logit=torch.where(at >= 0, plain[here, column], start.logit),
        )
        accepts, left = accepts + scan.accepts, left - skipped
    counted_all = visits.sum(1)
    visits[here, at] += (counted_all == 0).to(visits.dtype)  # nothing counted: the final state is
    weights = visits / torch.where(counted_all > 0, counted_all, 1.0)[:, None]
    return Scan(weights[:, :-1], weights[:, -1], at, held.logit, accepts), total


def columns_skipped(burn_in: float, side: Side, number: int) -> int:
    """With count_every > 1 the burn-in is in columns: those of kind `number` it has."""
    kind, total = side.kinds[number], side.kinds[-1].last
    columns = int(burn_in if burn_in >= 1 else total * burn_in + 1e-3)
    columns -= total - kind.last  # columns of the sweeps before
    return max(0, min(columns, kind.last - kind.first - 1))  # then the final state counts at least


def resample(
    side: Side, number: int, logits: Tensor, ids: Tensor, start: Tensor, sampler: Sampler
) -> Scan:
    """An i-SIR step over the columns of one kind; arguments as of `Sampler.sweep`."""
    kind = side.kinds[number]
    if number == 0 and kind.log_q is None and len(side.key_ids[0]) >= kind.last:
        start, logits = as_set(side, kind, ids, start, logits)
    stays = start == math.inf  # this kind never proposes the held state, so it never leaves it
    start, logits = start.masked_fill(stays, 0.0), logits.masked_fill(stays[:, None], -math.inf)
    at = logits.shape[1] + 1, logits.dtype, kind.first + number
    noise = sampler.draw(rng.gumbel, rng.FOR_GUMBEL, sampler.rows, *at)
    return isir_weights(logits, start, noise, sampler.kernel.count_every)


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
    # what no row may use is a marked sample's column: no item of the batch, whatever its id
    there = ~side.excluded[:, kind.first : kind.last].all(0)
    held = (side.items_of(ids)[:, None] == names) & there
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
