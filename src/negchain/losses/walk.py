"""One visit: the chains of a batch's rows move over their columns.

With shared views an item has one chain and two rows: both start at the carried state, each is
offered one copy of every other item (the two rows different ones), and the state of one of them,
chosen by a coin, is stored. (Offering the same items again and again would drive the chain to the
softmax over the batch.)

Columns of several kinds (the batch, and draws from beyond it) have different probabilities q. They
are walked over one kind after the other, the batch last: in each such sweep proposals and held
state are weighed by that kind's q. Draws from a stale table depend on who is in the batch, so one
scan over all kinds with the mixture's q would not leave p as it is, and no more would the draws
after the batch: their q would depend on what the chain has just met. Draws first leave p whoever
is in the batch, and then the batch is as good as new (tests/losses/test_enumerated.py).

A batch without replacement is a uniformly random *set*: with i-SIR a carried state that is itself
in the batch is counted once, and so is an item that a batch holds twice.

Shapes: `B` chains, `N` rows, `K` columns, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from negchain import rng
from negchain.losses.batch import Batch
from negchain.losses.chains import Arrival
from negchain.losses.settings import ISIR, Kernel
from negchain.losses.state import Number, Report
from negchain.objective import constant, effective_negatives
from negchain.pool import Kind, Side, first_writer
from negchain.weights.isir import isir_weights
from negchain.weights.metropolis import Backend, Scan, mh_scan


@dataclass(frozen=True)
class Sampler:
    """How chains move: the settings of a walk and the key of its random draws."""

    kernel: Kernel
    backend: Backend
    seed: int
    step: Tensor  # []
    rows: Tensor  # [N] numbers of the rows in the whole batch
    keep_keys: bool = False  # whether embeddings of final states are wanted
    direction: int = 0

    def coin(self, num_items: int) -> Tensor:  # [B] bool
        """Whether rows of the first view are offered z_a's copy of each item, or z_b's."""
        return self.draw(rng.coins, rng.FOR_COPY, self.rows.new_zeros(1), num_items)[0]

    def draw(self, kind: Callable[..., Tensor], use: int, rows: Tensor, *more: Any) -> Tensor:
        """Random numbers of this step and direction; see `negchain.rng`."""
        return rng.ahead(kind, self.seed, self.step, use + 16 * self.direction, rows, *more)


@dataclass(frozen=True)
class Start:
    """The carried state of every row."""

    ids: Tensor  # [N]
    logit: Tensor  # [N] beta * similarity; -inf: not usable
    similarity: Tensor  # [N] differentiable


@dataclass(frozen=True)
class Walk:
    """What the chains did, and what they weigh."""

    weights: Tensor  # [N,K]
    carried_weight: Tensor  # [N] weight on the carried state
    accepts: Tensor  # [N]
    num_steps: Tensor  # [N] moves each row could make: its proposals, or one for i-SIR
    arrival: Arrival

    def report(self) -> dict[str, Number]:
        """Means over rows for `info`; see docs/diagnostics.md."""
        return {
            "carried_mass": lambda: self.carried_weight.mean(),
            "effective_negatives": lambda: effective_negatives(self.weights, self.carried_weight),
        }


@dataclass
class Visit:
    """What a call found, before anything is stored; lists have an entry per side."""

    batch: Batch
    sides: list[Side]
    total: list[Tensor] = field(default_factory=list)
    report: Report = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    moves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [N] made, [N] possible

    def note(self, numbers: dict[str, Number]) -> None:
        """Numbers of one side for `info`."""
        for name, number in numbers.items():
            self.report.setdefault(name, []).append(number)

    def rates(self) -> Report:
        """Ratios for `info`: of sums over the batch, whichever panels it came in."""
        kind, valid = self.total[0].dtype, self.batch.valid

        def rate(moves: tuple[Tensor, Tensor]) -> Tensor:
            return moves[0].sum().to(kind) / moves[1].sum().clamp(min=1)

        def age(moved: Tensor) -> Tensor:
            good = valid.repeat(len(moved) // max(len(valid), 1))
            number = (moved & good).sum()
            return (good.sum() - number).to(kind) / number.clamp(min=1)

        return {
            "acceptance_rate": [partial(rate, moves) for moves in self.moves],
            "chain_age": [partial(age, arrival.moved) for arrival in self.arrivals],
        }


def walk_chains(
    side: Side,
    similarity: Tensor,
    start: Start,
    beta: float | Tensor,
    logits: Tensor,
    slots: tuple[Tensor, ...],
    sampler: Sampler,
) -> Walk:
    """Move the chains of a side; pure.

    Args:
        side: the anchors and their columns.
        similarity: [N, K] to every column.
        start: where the chains stand.
        beta: inverse temperature.
        logits: [N, K] corrected by the mixture of all kinds, -inf = excluded.
        slots: the chains: one [B] for all views, or one [B] for each.
        sampler: how to move.
    """
    if len(side.kinds) > 1:
        scan, num_steps = _sweeps(side, similarity, start, beta, sampler)
    else:
        num_steps = _num_steps(logits, sampler)
        held = _corrected(start, side.kinds[0])
        skipped = _skipped(sampler, num_steps)
        scan = _sweep(side, 0, logits, start.ids, held, skipped, sampler)
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    mass, weights = torch.where(start.logit > -math.inf, scan.start_weight, 0.0), scan.weights
    if sampler.kernel.count_every > 1:  # it may also have counted there before its first proposal
        rest = 1 - (scan.start_weight - mass)[:, None]
        weights = weights / torch.where(rest > 0, rest, 1.0)
    arrival = _arrival(side, start, scan.last, slots, sampler)
    return Walk(weights, mass, scan.accepts, num_steps, arrival)


def _corrected(start: Start, kind: Kind) -> Tensor:  # [N]
    """The carried state's logit under a kind's q; +inf where that kind never proposes it."""
    if kind.log_q is None:
        return start.logit
    corrected = start.logit - kind.log_q(start.ids[:, None])[:, 0]
    return torch.where(start.logit > -math.inf, corrected, -math.inf)


def _num_steps(logits: Tensor, sampler: Sampler) -> Tensor:  # [N,K] -> [N]
    """Moves each row can make: its proposals; one for i-SIR."""
    count = (logits > -math.inf).sum(1)
    return torch.ones_like(count) if isinstance(sampler.kernel, ISIR) else count


def _skipped(sampler: Sampler, num_steps: Tensor) -> Tensor:  # [N] -> [N]
    """P, the steps of each row that are not counted."""
    burn_in = 0.0 if isinstance(sampler.kernel, ISIR) else sampler.kernel.burn_in
    if burn_in >= 1:
        return torch.full_like(num_steps, int(burn_in))
    # 1e-3: a share like 0.29 of 100 steps is 29 steps, not 28, whatever the precision
    return (num_steps * burn_in + 1e-3).long()


def _sweep(
    side: Side,
    number: int,
    logits: Tensor,
    ids: Tensor,
    start: Tensor,
    skipped: Tensor,
    sampler: Sampler,
) -> Scan:
    """Move over the columns of one kind: a scan in a random order, or an i-SIR step.

    Args:
        side: whose rows move.
        number: of the kind.
        logits: [N, K] corrected by its q.
        ids: [N] of the states the chains are in.
        start: [N] their logits, corrected likewise.
        skipped: [N] steps that are not counted.
        sampler: how to move.
    """
    kernel, rows, num_columns = sampler.kernel, sampler.rows, logits.shape[1]
    if isinstance(kernel, ISIR):
        return _resample(side, number, logits, ids, start, sampler, kernel.count_every)
    at = num_columns, logits.dtype, side.kinds[number].first
    log_u = sampler.draw(rng.log_uniform, rng.FOR_ACCEPT, rows, *at)
    burn_in: int | Tensor = skipped
    if kernel.count_every > 1:
        share, total = kernel.burn_in, side.kinds[-1].last
        burn_in = int(share if share >= 1 else total * share + 1e-3)
        burn_in -= total - side.kinds[number].last  # columns of the sweeps before
        burn_in = max(0, min(burn_in, num_columns - 1))  # then the final state counts at least
    if number > 0:  # draws come in a random order as they are
        return mh_scan(logits, start, log_u, burn_in, sampler.backend, kernel.count_every)
    order = sampler.draw(rng.orders, rng.FOR_ORDER, rows.new_zeros(1), num_columns)[0]
    met = logits.index_select(1, order)
    scan = mh_scan(met, start, log_u, burn_in, sampler.backend, kernel.count_every)
    weights = scan.weights.index_select(1, torch.argsort(order))  # back into place
    last = order[scan.last].masked_fill_(scan.last < 0, -1) if num_columns else scan.last
    return scan._replace(weights=weights, last=last)


def _resample(
    side: Side,
    number: int,
    logits: Tensor,
    ids: Tensor,
    start: Tensor,
    sampler: Sampler,
    count_every: int,
) -> Scan:
    """An i-SIR step over the columns of one kind; arguments as of `_sweep`."""
    kind = side.kinds[number]
    if number == 0 and kind.log_q is None and len(side.key_ids[0]) >= kind.last:
        start, logits = _as_set(side, kind, ids, start, logits)
    stays = start == math.inf  # this kind never proposes the held state, so it never leaves it
    start, logits = start.masked_fill(stays, 0.0), logits.masked_fill(stays[:, None], -math.inf)
    at = logits.shape[1] + 1, logits.dtype, kind.first + number
    noise = sampler.draw(rng.gumbel, rng.FOR_GUMBEL, sampler.rows, *at)
    return isir_weights(logits, start, noise, count_every)


def _sweeps(
    side: Side, similarity: Tensor, start: Start, beta: float | Tensor, sampler: Sampler
) -> tuple[Scan, Tensor]:
    """A sweep per kind of columns, each with its own q, the batch's last.

    Weights are shares of all counted steps; with i-SIR a sweep counts as its number of columns.
    """
    plain = (similarity.detach() * constant(beta)).masked_fill(side.all_excluded(), -math.inf)
    ids, here = side.column_ids(), torch.arange(len(plain), device=plain.device)
    isir = isinstance(sampler.kernel, ISIR)
    parts = [plain[:, kind.first : kind.last] for kind in side.kinds]
    steps = [_num_steps(part, sampler) for part in parts]
    total = torch.stack(steps).sum(0)
    left = _skipped(sampler, total)  # steps that are still to be skipped
    visits = plain.new_zeros(len(plain), plain.shape[1] + 1)  # the last column counts the start
    at = torch.full_like(here, -1)  # column each chain is at, -1: its start
    held, accepts = start, torch.zeros_like(here)
    for number in reversed(range(len(parts))):
        kind, part, num_steps = side.kinds[number], parts[number], steps[number]
        if kind.log_q is not None:
            part = part - kind.log_q(ids[:, kind.first : kind.last])
            part = part.masked_fill(~torch.isfinite(part), -math.inf)
        skipped = torch.minimum(left, num_steps)
        first = _corrected(held, kind)
        scan = _sweep(side, number, part, held.ids, first, skipped, sampler)
        counted = (kind.count if isir else num_steps - skipped).to(plain.dtype)[:, None]
        visits[:, kind.first : kind.last] += scan.weights * counted
        visits[here, at] += scan.start_weight * counted[:, 0]
        at = torch.where(scan.last >= 0, scan.last + kind.first, at)
        column = at.clamp(min=0)
        held = Start(
            torch.where(at >= 0, ids[here, column], start.ids),
            torch.where(at >= 0, plain[here, column], start.logit),
            start.similarity,
        )
        accepts, left = accepts + scan.accepts, left - skipped
    counted_all = visits.sum(1)
    visits[here, at] += (counted_all == 0).to(visits.dtype)  # nothing counted: the final state is
    weights = visits / torch.where(counted_all > 0, counted_all, 1.0)[:, None]
    return Scan(weights[:, :-1], weights[:, -1], at, held.logit, accepts), total


def _as_set(
    side: Side, kind: Kind, ids: Tensor, start: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """i-SIR over a batch as a set: {held} u batch holds an item once; in two copies, each twice.

    A stored augmentation of the held item gives way to the held one: the batch has one of each item
    at most, so a set with two of one item could be met from one of its members and not from others.
    """
    batch = side.items_of(side.key_ids[:, kind.first : kind.last])
    names = batch.repeat_interleave(side.num_rows // len(batch), 0)
    logits = logits.masked_fill(_repeated(side, kind), -math.inf)
    held = side.items_of(ids)[:, None] == names
    if side.ids_per_item > 1:
        return start, logits.masked_fill(held & (start > -math.inf)[:, None], -math.inf)
    return start.masked_fill(held.any(1), -math.inf) + math.log(side.copies), logits


def _repeated(side: Side, kind: Kind) -> Tensor:  # [N,K] bool
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


def _arrival(
    side: Side, start: Start, last: Tensor, slots: tuple[Tensor, ...], sampler: Sampler
) -> Arrival:
    """Where the chains ended: where their row did, or one of their two rows, by a coin."""
    size, row = len(slots[0]), torch.arange(len(last), device=last.device)
    if len(last) > size:
        coin = sampler.draw(rng.coins, rng.FOR_VIEW, sampler.rows[:size], 1)[:, 0]
        first, second = row.view(2, size)
        row = torch.where(coin, first, second)
        if len(slots) == 2:  # a chain per view, unless both views are of one augmentation
            row = torch.cat([torch.where(slots[0] == slots[1], row, first), second])
    column, chains = last[row], slots[0] if len(slots) == 1 else torch.cat(slots)
    moved, column = column >= 0, column.clamp(min=0)
    if side.kinds[-1].last == 0:
        return Arrival(chains, moved, start.ids[row], None)
    keys = side.keys_at(row, column).detach() if sampler.keep_keys else None
    return Arrival(chains, moved, side.ids_at(row, column), keys)
