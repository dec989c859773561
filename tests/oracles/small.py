"""The long-run mean gradient of EMC² on a handful of items, by enumeration: no bound, no noise.

Where views that differ share a chain, both copies are offered, the carried state is cached or
1 - p+ comes from a noisy partition, the mean gradient is not the exact one. With few items all that
a visit draws can be listed: who is in the batch, in which view each negative is offered, the view
the carried state comes in, the draws, the order of the scan. Given these a chain's moves are a
matrix, so

    K   = sum over visits of  chance * (view of the carried state) * moves       law = law K
    E g = sum over visits of  chance * pull * beta ( sum_z E[W_z | law] ds(a, z) - ds(a, y) )

Batches are new sets every step, so the carried state of a chain does not depend on the batch it
meets. Rows of both views have one distribution, and gradients add up: a row at a time is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from oracles.exact import Exact, add_similarity, log_sum_exp, normalised


@dataclass(frozen=True)
class Small:
    """A setting of EMC²: `size` items in `num_views` views, at addresses i V + v."""

    table: np.ndarray  # [T,D] raw embeddings
    size: int
    batch_size: int
    beta: float
    num_views: int = 1  # 1 or 2
    paired: bool = False  # anchors at i V + v, keys at (size + j) V + v; one direction
    isir: bool = False
    burn_in: float = 0.5
    copies: int = 1  # of every item of the batch, offered to a row
    use_batch: bool = True
    uniform: int = 0  # uniform draws, met before the batch
    informed: tuple[float, float] | None = None  # share, sharpness of one draw from the table
    cached: bool = False
    all: bool = False  # denominator "all", partition afresh
    known: tuple[frozenset[int], ...] | None = None


@dataclass(frozen=True)
class Sweep:
    """Columns of one kind that a row may use."""

    columns: tuple[int, ...]
    count: int  # draws they stand for
    log_q: np.ndarray | None  # [T]; None: uniform over the row's negatives
    a_set: bool = False  # a batch: distinct items, in no order


@dataclass(frozen=True)
class Visit:
    """One thing that can happen to a row."""

    chance: float
    anchor: int
    positive: int
    sweeps: tuple[Sweep, ...]
    log_partition: float


class Walk:
    """Where a chain may be: `still` at its start, or `moved` to another address; [start, T]."""

    def __init__(self, starts: Sequence[int], total: int) -> None:
        self.still = np.ones(len(starts))
        self.moved = np.zeros((len(starts), total))

    def copy(self) -> Walk:
        other = Walk([], 0)
        other.still, other.moved = self.still.copy(), self.moved.copy()
        return other


def mean_gradient(s: Small) -> tuple[Exact, dict[int, tuple[list[int], np.ndarray]]]:
    """The mean gradient, and per chain the addresses it holds between visits with their law.

    Without `cached` the view of a held item is drawn anew at every visit; its law is uniform there.
    """
    unit, norm = normalised(s.table)
    positive, negative, slope = np.zeros_like(s.table), np.zeros_like(s.table), 0.0
    laws = {}
    for i in range(s.size):
        starts = [z for j in negatives_of(s, i) for z in addresses(s, j)]
        visits = list(visits_of(s, unit, i))
        done = [walk(s, unit, starts, visit) for visit in visits]
        kernel = sum(v.chance * ends for v, (_, _, ends) in zip(visits, done, strict=True))
        if not s.cached:  # the item is kept, its view is forgotten
            item = np.array([z // s.num_views for z in starts])
            kernel = kernel @ ((item[:, None] == item[None, :]) / s.num_views)
        equations = np.vstack([kernel.T - np.eye(len(starts)), np.ones(len(starts))])
        law = np.linalg.lstsq(equations, np.append(np.zeros(len(starts)), 1.0), rcond=None)[0]
        laws[i] = (starts, law)
        for visit, (weights, carried, _) in zip(visits, done, strict=True):
            a, own = visit.anchor, float(unit[visit.anchor] @ unit[visit.positive])
            pull = 1.0
            if s.all:
                pull = 1 / (1 + math.exp(s.beta * own - visit.log_partition))
            scale = visit.chance * pull * s.beta / s.size
            add_similarity(positive, unit, norm, a, [visit.positive], np.array([-scale]))
            add_similarity(negative, unit, norm, a, range(len(unit)), scale * (law @ weights))
            held, before = law * carried, negative.copy()
            add_similarity(negative, unit, norm, a, starts, scale * held)
            if s.cached:  # no gradient for the carried negative
                negative[starts] = before[starts]
            mean = (law @ weights) @ (unit @ unit[a]) + held @ (unit[starts] @ unit[a])
            slope += scale / s.beta * (mean - own)
    return Exact(0.0, positive, negative, slope), laws


def negatives_of(s: Small, i: int) -> list[int]:
    return [j for j in range(s.size) if j != i and not (s.known and j in s.known[i])]


def addresses(s: Small, j: int) -> list[int]:
    """Where the views of item j are, as a negative."""
    first = (s.size + j if s.paired else j) * s.num_views
    return list(range(first, first + s.num_views))


def visits_of(s: Small, unit: np.ndarray, i: int) -> Iterator[Visit]:
    """Everything that can be drawn for a row of item i, with its probability."""
    others = [j for j in range(s.size) if j != i]
    sets = list(itertools.combinations(others, s.batch_size - 1))
    mine = range(s.num_views)
    pairs = [(a, b) for a in mine for b in mine if s.paired or s.num_views == 1 or a != b]
    usable = set(negatives_of(s, i))
    for a, b in pairs:
        anchor, positive = i * s.num_views + a, addresses(s, i)[b]
        for batch in sets:
            inside = [j for j in batch if j in usable] if s.use_batch else []
            for views in itertools.product(mine, repeat=len(inside)):
                chance = 1 / (len(pairs) * len(sets) * s.num_views ** len(inside))
                offered = [addresses(s, j)[v] for j, v in zip(inside, views, strict=True)]
                if s.copies == 2:
                    other = [(v + 1) % s.num_views for v in views]
                    offered += [addresses(s, j)[v] for j, v in zip(inside, other, strict=True)]
                first = Sweep(tuple(offered), len(offered), None, a_set=True)
                for more, sweep in draws_of(s, unit, i, anchor, batch, usable):
                    sweeps = (*sweep, *((first,) if s.use_batch else ()))
                    log_z = partition(s, unit, anchor, sweeps, inside, len(usable))
                    yield Visit(chance * more, anchor, positive, sweeps, log_z)


def draws_of(
    s: Small, unit: np.ndarray, i: int, anchor: int, batch: tuple[int, ...], usable: set[int]
) -> Iterator[tuple[float, tuple[Sweep, ...]]]:
    """The draws beside the batch: over all ids, i's own and known ones too, which are no steps."""
    num = 1 if s.informed else s.uniform
    if num == 0:
        yield 1.0, ()
        return
    q = np.full(s.size, 1 / s.size)
    if s.informed:  # what is stale is the same embedding: one view
        share, sharpness = s.informed
        stale = []
        for row in (i, *batch):
            x = unit[row * s.num_views]
            logits = np.full(s.size, -math.inf)
            for j in negatives_of(s, row):
                logits[j] = sharpness * s.beta * float(x @ unit[addresses(s, j)[0]])
            stale.append(np.exp(logits - log_sum_exp(logits)))
        q = (1 - share) * q + share * np.mean(stale, axis=0)
    log_q = np.zeros(len(unit))
    for j in range(s.size):
        log_q[addresses(s, j)] = math.log(q[j])
    everyone = [(j, z) for j in range(s.size) for z in addresses(s, j)]
    for drawn in itertools.product(everyone, repeat=num):
        chance = math.prod(q[j] / s.num_views for j, _ in drawn)
        columns = tuple(z for j, z in drawn if j in usable)
        yield chance, (Sweep(columns, num, log_q),)


def partition(
    s: Small,
    unit: np.ndarray,
    anchor: int,
    sweeps: tuple[Sweep, ...],
    inside: list[int],
    num_items: int,
) -> float:
    """log of m_neg times the weighted mean of exp(beta s), balance heuristic over the sweeps.

    A batch alone counts both copies of its items, offered or not.
    """
    m_neg = num_items * (1 if s.paired else 2)
    if len(sweeps) == 1 and s.use_batch:
        both = [z for j in inside for z in addresses(s, j)]
        seen = sweeps[0].columns if s.paired else both
        return math.log(m_neg / len(seen)) + log_sum_exp(s.beta * unit[list(seen)] @ unit[anchor])
    total = -math.inf
    for z in (z for sweep in sweeps for z in sweep.columns):
        share = sum(
            sweep.count * (1.0 if sweep.log_q is None else math.exp(sweep.log_q[z]) * num_items)
            for sweep in sweeps
        )
        total = np.logaddexp(total, s.beta * float(unit[z] @ unit[anchor]) - math.log(share))
    return float(total) + math.log(m_neg)


def walk(
    s: Small, unit: np.ndarray, starts: list[int], visit: Visit
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights [start, T] of columns, [start] of the carried state; where it ends [start, start].

    Shares of all counted steps; an i-SIR sweep counts as its number of columns.
    """
    plain = s.beta * unit @ unit[visit.anchor]
    at = Walk(starts, len(unit))
    weights, carried = np.zeros_like(at.moved), np.zeros(len(starts))
    steps = sum(len(sweep.columns) for sweep in visit.sweeps)
    skip, counted = int(steps * s.burn_in + 1e-3), 0.0
    for sweep in visit.sweeps:
        logits = plain if sweep.log_q is None else plain - sweep.log_q
        if s.isir:
            now, moved, still = isir(s, starts, at, sweep, logits)
            weights, carried = weights + sweep.count * moved, carried + sweep.count * still
            counted += sweep.count
        else:
            now, moved, still = scan(starts, at, sweep, logits, skip)
            weights, carried = weights + moved, carried + still
            counted += max(0, len(sweep.columns) - skip)
            skip = max(0, skip - len(sweep.columns))
        at = now
    if counted == 0:  # nothing to count: where it ends is
        weights, carried, counted = at.moved.copy(), at.still.copy(), 1.0
    ends = at.moved[:, starts] + np.diag(at.still)
    return weights / counted, carried / counted, ends


def scan(
    starts: list[int], at: Walk, sweep: Sweep, logits: np.ndarray, skip: int
) -> tuple[Walk, np.ndarray, np.ndarray]:
    """Metropolis-Hastings over the columns, in every order a batch may come in."""
    columns = sweep.columns
    orders = list(itertools.permutations(columns)) if sweep.a_set else [columns]
    end = Walk(starts, len(logits))
    end.still, weights, carried = 0 * at.still, 0 * at.moved, 0 * at.still
    for order in orders:
        now = at.copy()
        for step, z in enumerate(order):
            leave = np.exp(np.minimum(0.0, logits[z] - logits))
            into = now.still * leave[starts] + now.moved @ leave
            now.still = now.still * (1 - leave[starts])
            now.moved = now.moved * (1 - leave)
            now.moved[:, z] += into
            if step >= skip:
                weights, carried = weights + now.moved, carried + now.still
        end.still, end.moved = end.still + now.still, end.moved + now.moved
    end.still, end.moved = end.still / len(orders), end.moved / len(orders)
    return end, weights / len(orders), carried / len(orders)


def isir(
    s: Small, starts: list[int], at: Walk, sweep: Sweep, logits: np.ndarray
) -> tuple[Walk, np.ndarray, np.ndarray]:
    """The softmax over {held} and the columns, which is both the weights and the next state's law.

    A batch is a set: a held item that is in it is not counted beside itself, and another one as
    often as those that are.
    """
    inside = {z // s.num_views for z in sweep.columns} if sweep.a_set else set()
    columns = list(sweep.columns)

    def split(held: int) -> tuple[float, np.ndarray]:  # share that stays, shares of the columns
        own = [] if held // s.num_views in inside else [held]
        level = logits[own + columns]
        if own and sweep.a_set:  # as often as the others
            level[0] += math.log(s.copies)
        p = np.exp(level - log_sum_exp(level))
        return (float(p[0]), p[1:]) if own else (0.0, p)

    end = Walk(starts, len(logits))
    end.still, end.moved = 0 * at.still, 0 * at.moved
    for row, start in enumerate(starts):
        stays, goes = split(start)
        end.still[row] = at.still[row] * stays
        np.add.at(end.moved[row], columns, at.still[row] * goes)
        for z in np.flatnonzero(at.moved[row]):
            stays, goes = split(int(z))
            end.moved[row, z] += at.moved[row, z] * stays
            np.add.at(end.moved[row], columns, at.moved[row, z] * goes)
    return end, end.moved.copy(), end.still.copy()
