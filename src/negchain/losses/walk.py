"""One visit: the chains of a batch's rows move over their columns.

With shared views an item has one chain and two rows. Two ways to share it:

parallel    both rows start at the carried state, each is offered one copy of every other item (the
            two rows different ones), and the state of one of them, chosen by a coin, is stored.
sequential  both rows are offered both copies; the second row starts where the first ended, its
            logit read again under the second view.

A chain that is offered the same items again and again forgets what it carried and settles on
the softmax over the batch: the sequential walk offers every item four times per visit and is
measurably biased towards the in-batch softmax, the parallel one is not (docs/methods/emc2.md).

Shapes: `B` chains, `N` rows, `K` columns, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from negchain import draws
from negchain.losses.base import effective_negatives
from negchain.losses.chains import Arrival, ChainTable
from negchain.pool import Side
from negchain.weights.isir import isir_weights
from negchain.weights.metropolis import Backend, Scan, mh_scan

Kernel = Literal["mh", "isir"]
WalkOrder = Literal["parallel", "sequential"]


@dataclass(frozen=True)
class Sampler:
    """How chains move: the settings of a walk and the key of its random draws."""

    kernel: Kernel
    order: WalkOrder
    burn_in: float
    backend: Backend
    seed: int
    step: Tensor  # []
    count_every: int = 1

    def coin(self, num_items: int) -> Tensor | None:  # [B] bool
        """Which copy of each item rows of the first view are offered; None: both."""
        if self.order == "sequential":
            return None
        row = torch.zeros(1, dtype=torch.int32, device=self.step.device)
        return draws.bits(self.seed, self.step, draws.STREAM_COPY, row, num_items)[0] % 2 == 0


@dataclass(frozen=True)
class Walk:
    """What the chains did, and what they weigh."""

    weights: Tensor  # [N,K]
    start_mass: Tensor  # [N] weight on the carried state
    carried_weight: Tensor  # [N] the part of it that is trained ("score" drops it)
    carried_similarity: Tensor | None  # [N] differentiable similarity to the carried state
    accepts: Tensor  # [N]
    num_steps: Tensor  # [N] moves each row could make: its proposals, or one for i-SIR
    slots: tuple[Tensor, ...]  # per view [B], the chain of each row
    finals: tuple[Tensor, ...]  # per view [B], row * K + column of the final state, -1 = unmoved

    @property
    def moved(self) -> Tensor:
        """Chains that ended in a new state, [B]."""
        return self.finals[-1] >= 0

    def report(self, valid: Tensor) -> dict[str, Tensor]:  # [B] bool
        """Numbers for `info`; see docs/diagnostics.md."""
        moved = (self.moved & valid).sum()
        kind = self.weights.dtype
        return {
            "acceptance_rate": self.accepts.sum().to(kind) / self.num_steps.sum().clamp(min=1),
            "carried_mass": self.start_mass.mean(),
            "dropped_mass": (self.start_mass - self.carried_weight).mean(),
            "chain_age": (valid.sum() - moved).to(kind) / moved.clamp(min=1),
            "effective_negatives": effective_negatives(self.weights, self.carried_weight),
        }

    def arrivals(self, side: Side, similarity: Tensor) -> Iterator[tuple[Tensor, Arrival]]:
        """For each view its chains and where they ended, in the order in which to store them."""
        num_columns = similarity.shape[1]
        # With log_q_all the correction of a carried state is looked up anew at each visit.
        tagged = side.draw is not None and side.draw.log_q_all is None
        correction = side.log_correction() if tagged else None
        ids = side.column_ids()
        for slots, final in zip(self.slots, self.finals, strict=True):
            row = final.clamp(min=0) // num_columns
            column = final.clamp(min=0) % num_columns
            yield (
                slots,
                Arrival(
                    moved=final >= 0,
                    ids=ids[row, column],
                    similarity=similarity.detach()[row, column],
                    key=side.keys_at(row, column).detach(),
                    correction=None if correction is None else correction[row, column],
                ),
            )


def walk_chains(
    side: Side,
    logits: Tensor,
    chains: ChainTable,
    side_number: int,
    slots: tuple[Tensor, ...],
    encoded: tuple[Tensor, ...] | None,
    beta: float | Tensor,
    sampler: Sampler,
    rows: Tensor | None = None,
) -> Walk:
    """Move the chains of a side; pure: `chains` is read, not written.

    Args:
        side: the anchors and their columns.
        logits: [N, K] corrected logits, -inf = excluded.
        chains: where the chains stand.
        side_number: which table of `chains`.
        slots: per view, the chain of each row, [B].
        encoded: per view, the embedding of the carried state, [B, D]; None: not encoded.
        beta: inverse temperature.
        sampler: how to move.
        rows: [N] numbers of the rows in the whole batch, for their draws; None: 0 .. N - 1.
    """
    start, trained = _carried_logits(side, chains, side_number, slots, encoded, beta, sampler)
    num_steps = (logits > -math.inf).sum(1)
    stream = 16 * side_number
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    if sampler.order == "sequential" and len(slots) == 2:
        scan = _walk_on(logits, start, num_steps, slots, sampler, stream, rows)
    else:
        scan = _scan(logits, start, num_steps, rows, sampler, stream)
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    mass = torch.where(start > -math.inf, scan.start_weight, 0.0)
    finals = _finals(scan.last, logits.shape[1], slots, sampler, stream, rows)
    return Walk(
        weights=scan.weights,
        start_mass=mass,
        carried_weight=torch.zeros_like(mass) if trained is None else mass,
        carried_similarity=trained,
        accepts=scan.accepts,
        num_steps=torch.ones_like(num_steps) if sampler.kernel == "isir" else num_steps,
        slots=slots,
        finals=finals,
    )


def _scan(
    logits: Tensor, start: Tensor, num_steps: Tensor, rows: Tensor, sampler: Sampler, stream: int
) -> Scan:
    """One transition of every row, all starting at their carried states."""
    seed, step = sampler.seed, sampler.step
    num_columns = logits.shape[1]
    if sampler.kernel == "isir":
        noise = draws.gumbel(
            seed, step, draws.STREAM_GUMBEL + stream, rows, num_columns + 1, logits.dtype
        )
        return isir_weights(logits, start, noise, sampler.count_every)
    order = draws.permutation(seed, step, draws.STREAM_ORDER + stream, num_columns)
    log_u = draws.log_uniform(
        seed, step, draws.STREAM_ACCEPT + stream, rows, num_columns, logits.dtype
    )
    # 1e-3: a share like 0.29 of 100 steps is 29 steps, not 28, whatever the precision
    skipped: int | Tensor = (num_steps * sampler.burn_in + 1e-3).long()
    if sampler.count_every > 1:
        skipped = int(num_columns * sampler.burn_in + 1e-3)
    scan = mh_scan(logits[:, order], start, log_u, skipped, sampler.backend, sampler.count_every)
    weights = torch.empty_like(scan.weights)
    weights[:, order] = scan.weights
    last = torch.where(scan.last >= 0, order[scan.last.clamp(min=0)], -1)
    return scan._replace(weights=weights, last=last)


def _walk_on(
    logits: Tensor,
    start: Tensor,
    num_steps: Tensor,
    slots: tuple[Tensor, ...],
    sampler: Sampler,
    stream: int,
    rows: Tensor,
) -> Scan:
    """The sequential walk: the second view's rows start where the first view's ended."""
    size = len(slots[0])
    first = _scan(logits[:size], start[:size], num_steps[:size], rows[:size], sampler, stream)
    held = torch.where(slots[0] == slots[1], first.last, -1)  # column the second view starts at
    column = held.clamp(min=0)[:, None]
    reread = logits[size:].gather(1, column)[:, 0]
    begin = torch.where(held >= 0, reread, start[size:])
    second = _scan(logits[size:], begin, num_steps[size:], rows[size:], sampler, stream)
    # Weight on the start belongs to the column it was, if it was one.
    mass = second.start_weight
    second.weights.scatter_add_(1, column, torch.where(held >= 0, mass, 0.0)[:, None])
    return Scan(
        weights=torch.cat([first.weights, second.weights]),
        start_weight=torch.cat([first.start_weight, torch.where(held >= 0, 0.0, mass)]),
        last=torch.cat([first.last, torch.where(second.last >= 0, second.last, held)]),
        last_logit=torch.cat([first.last_logit, second.last_logit]),
        accepts=torch.cat([first.accepts, second.accepts]),
    )


def _finals(
    last: Tensor,
    num_columns: int,
    slots: tuple[Tensor, ...],
    sampler: Sampler,
    stream: int,
    rows: Tensor,
) -> tuple[Tensor, ...]:
    """Per view, the row and column each chain is stored at; see `Walk.finals`."""
    size = len(slots[0])
    here = torch.arange(len(last), device=last.device)
    flat = torch.where(last >= 0, here * num_columns + last, -1)
    if len(slots) == 1:
        return (flat,)
    first, second, shared = flat[:size], flat[size:], slots[0] == slots[1]
    if sampler.order == "parallel":
        key = draws.STREAM_VIEW + stream
        coin = draws.bits(sampler.seed, sampler.step, key, rows[:size], 1)[:, 0] % 2 == 0
        second = torch.where(shared & coin, first, second)
    return torch.where(shared, -1, first), second  # a shared chain is stored once


def _carried_logits(
    side: Side,
    chains: ChainTable,
    side_number: int,
    slots: tuple[Tensor, ...],
    encoded: tuple[Tensor, ...] | None,
    beta: float | Tensor,
    sampler: Sampler,
) -> tuple[Tensor, Tensor | None]:
    """Corrected logit of each row's carried state [N], and its similarity if it is trained [N]."""
    slot = torch.cat(slots)
    ids = chains.ids(side_number, slot)
    unusable = side.excludes(ids)
    trained: Tensor | None = None
    if encoded is not None:
        trained = torch.linalg.vecdot(side.queries, torch.cat(encoded))
    elif chains.keep == "cached":
        keys = chains.cached_keys(side_number, slot, side.queries.shape[1]).to(side.queries.dtype)
        seen = torch.isfinite(keys).all(1)  # NaN before the first visit, which 0 * NaN would spread
        unusable = unusable | ~seen
        trained = torch.linalg.vecdot(side.queries, keys.masked_fill(~seen[:, None], 0.0))
    similarity = chains.scores[side_number][slot] if trained is None else trained.detach()
    beta = beta.detach() if isinstance(beta, Tensor) else beta
    logit = similarity.to(side.queries.dtype) * beta
    if side.draw is not None and side.draw.log_q_all is not None:
        logit = logit - side.mixture_correction(ids[:, None])[:, 0]
    else:
        correction = chains.correction(side_number, slot)
        logit = logit if correction is None else logit - correction
    unusable = unusable | ~torch.isfinite(logit)
    if sampler.kernel == "isir":  # as a set, {carried} u batch holds an item once
        batch_ids = side.column_ids()[:, : side.num_batch_columns]
        unusable = unusable | (ids[:, None] == batch_ids).any(1)
    return logit.masked_fill(unusable, -math.inf), trained
