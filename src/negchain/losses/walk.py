"""One visit: the chains of a batch's rows move over their columns.

With shared views an item has one chain and two rows: both start at the carried state, each is
offered one copy of every other item (the two rows different ones), and the state of one of them,
chosen by a coin, is stored. (Offering the same items again and again would drive the chain to the
softmax over the batch.)

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
from negchain.losses.sweeps import columns_skipped, resample, sweep_kinds
from negchain.objective import effective_negatives
from negchain.pool import Kind, Side
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

    def draw(self, kind: Callable[..., Tensor], use: int, rows: Tensor, *more: Any) -> Tensor:
        """Random numbers of this step and direction; see `negchain.rng`."""
        return rng.ahead(kind, self.seed, self.step, use + 16 * self.direction, rows, *more)

    def num_steps(self, logits: Tensor) -> Tensor:  # [N,K] -> [N]
        """Moves each row can make: its proposals; one for i-SIR."""
        count = (logits > -math.inf).sum(1)
        return torch.ones_like(count) if isinstance(self.kernel, ISIR) else count

    def skipped(self, num_steps: Tensor) -> Tensor:  # [N] -> [N]
        """P, the steps of each row that are not counted."""
        burn_in = 0.0 if isinstance(self.kernel, ISIR) else self.kernel.burn_in
        if burn_in >= 1:
            return torch.full_like(num_steps, int(burn_in))
        # 1e-3: a share like 0.29 of 100 steps is 29 steps, not 28, whatever the precision
        return (num_steps * burn_in + 1e-3).long()

    def sweep(
        self,
        side: Side,
        number: int,  # of the kind
        logits: Tensor,  # [N,K] corrected by its q
        ids: Tensor,  # [N] of the states the chains are in
        start: Tensor,  # [N] their logits, corrected likewise
        skipped: Tensor,  # [N] steps that are not counted
    ) -> Scan:
        """Move over the columns of one kind: a scan in a random order, or an i-SIR step."""
        kernel, num_columns, first = self.kernel, logits.shape[1], side.kinds[number].first
        if isinstance(kernel, ISIR):
            return resample(side, number, logits, ids, start, self)
        at = num_columns, logits.dtype, first
        log_u = self.draw(rng.log_uniform, rng.FOR_ACCEPT, self.rows, *at)
        burn_in: int | Tensor = skipped
        if kernel.count_every > 1:
            burn_in = columns_skipped(kernel.burn_in, side, number)
        if number > 0:  # draws come in a random order as they are
            return mh_scan(logits, start, log_u, burn_in, self.backend, kernel.count_every)
        order = self.draw(rng.orders, rng.FOR_ORDER, self.rows.new_zeros(1), num_columns)[0]
        met = logits.index_select(1, order)
        scan = mh_scan(met, start, log_u, burn_in, self.backend, kernel.count_every)
        weights = scan.weights.index_select(1, torch.argsort(order))  # back into place
        last = order[scan.last].masked_fill_(scan.last < 0, -1) if num_columns else scan.last
        return scan._replace(weights=weights, last=last)


@dataclass(frozen=True)
class Start:
    """The carried state of every row."""

    ids: Tensor  # [N]
    logit: Tensor  # [N] beta * similarity; -inf: not usable
    similarity: Tensor  # [N] differentiable

    def corrected(self, kind: Kind) -> Tensor:  # [N]
        """The logit under a kind's q; +inf where that kind never proposes the state."""
        if kind.log_q is None:
            return self.logit
        corrected = self.logit - kind.log_q(self.ids[:, None])[:, 0]
        return torch.where(self.logit > -math.inf, corrected, -math.inf)


@dataclass(frozen=True)
class Walk:
    """What the chains did, and what they weigh."""

    weights: Tensor  # [N,K]
    carried_weight: Tensor  # [N] weight on the carried state
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

    def note(self, numbers: dict[str, Number]) -> None:
        """Numbers of one side for `info`."""
        for name, number in numbers.items():
            self.report.setdefault(name, []).append(number)

    def rates(self) -> Report:
        """Ratios for `info`: of sums over the batch, whichever panels it came in."""
        kind, valid = self.total[0].dtype, self.batch.valid

        def rate(there: Arrival) -> Tensor:
            return there.accepts.sum().to(kind) / there.num_steps.sum().clamp(min=1)

        def age(there: Arrival) -> Tensor:
            good = valid.repeat(len(there.moved) // max(len(valid), 1))
            number = (there.moved & good).sum()
            return (good.sum() - number).to(kind) / number.clamp(min=1)

        ends = [there._replace(key=None) for there in self.arrivals]  # `info` keeps them
        return {
            "acceptance_rate": [partial(rate, there) for there in ends],
            "chain_age": [partial(age, there) for there in ends],
        }


def walk_chains(
    side: Side,
    similarity: Tensor,  # [N,K]
    start: Start,
    beta: float | Tensor,
    logits: Tensor,  # [N,K] corrected by the mixture of all kinds, -inf = excluded
    slots: Tensor,  # the chains: [B] of the items, or [N] of the rows
    sampler: Sampler,
) -> Walk:
    """Move the chains of a side; pure."""
    if len(side.kinds) > 1:
        scan, num_steps = sweep_kinds(side, similarity, start, beta, sampler)
    else:
        num_steps = sampler.num_steps(logits)
        held, skipped = start.corrected(side.kinds[0]), sampler.skipped(num_steps)
        scan = sampler.sweep(side, 0, logits, start.ids, held, skipped)
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    mass, weights = torch.where(start.logit > -math.inf, scan.start_weight, 0.0), scan.weights
    if sampler.kernel.count_every > 1:  # it may also have counted there before its first proposal
        rest = 1 - (scan.start_weight - mass)[:, None]
        weights = weights / torch.where(rest > 0, rest, 1.0)
    return Walk(weights, mass, _arrival(side, start, scan, num_steps, slots, sampler))


def _arrival(
    side: Side, start: Start, scan: Scan, num_steps: Tensor, slots: Tensor, sampler: Sampler
) -> Arrival:
    """Where the chains ended: where their row did, or one of their two rows, by a coin."""
    last = scan.last
    size, row = len(last) // side.views, torch.arange(len(last), device=last.device)
    if side.views == 2:
        coin = sampler.draw(rng.coins, rng.FOR_VIEW, sampler.rows[:size], 1)[:, 0]
        first, second = row.view(2, size)
        row = torch.where(coin, first, second)
        if len(slots) > size:  # a chain per view, unless both views are of one augmentation
            row = torch.cat([torch.where(slots[:size] == slots[size:], row, first), second])
    column = last[row]
    moved, column = column >= 0, column.clamp(min=0)
    ids, keys = start.ids[row], None
    if side.kinds[-1].last > 0:
        ids = side.ids_at(row, column)
        keys = side.keys_at(row, column).detach() if sampler.keep_keys else None
    return Arrival(slots, moved, ids, keys, scan.accepts, num_steps)
