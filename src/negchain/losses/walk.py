"""One visit: the chains of a batch's rows move over their columns.

With shared views an item has one chain and two rows: both start at the carried state, each is
offered one copy of every other item (the two rows different ones), and the state of one of them,
chosen by a coin, is stored. (Offering the same items again and again would drive the chain to the
softmax over the batch.)

Columns of several kinds (the batch, and draws from beyond it) have different probabilities q:

mh      one sweep per kind, one after the other. In each the ratio uses that kind's q for proposals
        and held state alike, so every sweep leaves p as it is, and so do all of them.
isir    one softmax over all of them with the mixture's q. The carried state takes the place of one
        proposal, whose kind is drawn with probability n_k q_k(carried): then the set of states is
        one that p and the kinds could have produced, whichever of them p made (an exact step).

A batch without replacement is a uniformly random *set*: with i-SIR a carried state that is itself
in the batch is counted once, and so is an item that a batch holds twice.

Shapes: `B` chains, `N` rows, `K` columns, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from negchain import draws
from negchain.losses.base import effective_negatives
from negchain.losses.chains import Arrival
from negchain.losses.settings import ISIR, MH, Kernel
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

    def coin(self, num_items: int) -> Tensor:  # [B] bool
        """Which copy of each item rows of the first view are offered."""
        row = torch.zeros(1, dtype=torch.int32, device=self.step.device)
        return draws.bits(self.seed, self.step, draws.STREAM_COPY, row, num_items)[0] % 2 == 0


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
    start: Start
    accepts: Tensor  # [N]
    num_steps: Tensor  # [N] moves each row could make: its proposals, or one for i-SIR
    slots: tuple[Tensor, ...]  # per view [B], the chain of each row
    finals: tuple[Tensor, ...]  # per view [B], row * K + column of the final state, -1 = unmoved

    def report(self, valid: Tensor) -> dict[str, Tensor]:  # [B] bool
        """Numbers for `info`; see docs/diagnostics.md."""
        moved = ((self.finals[-1] >= 0) & valid).sum()
        kind = self.weights.dtype
        return {
            "acceptance_rate": self.accepts.sum().to(kind) / self.num_steps.sum().clamp(min=1),
            "carried_mass": self.carried_weight.mean(),
            "chain_age": (valid.sum() - moved).to(kind) / moved.clamp(min=1),
            "effective_negatives": effective_negatives(self.weights, self.carried_weight),
        }

    def arrivals(self, side: Side, keep_keys: bool) -> Iterator[tuple[Tensor, Arrival]]:
        """For each view its chains and where they ended, in the order in which to store them."""
        num_columns = self.weights.shape[1]
        for slots, final in zip(self.slots, self.finals, strict=True):
            at = final.clamp(min=0)
            row, column = at // max(num_columns, 1), at % max(num_columns, 1)
            if num_columns == 0:
                yield slots, Arrival(final >= 0, self.start.ids[row], None)
                continue
            key = side.keys_at(row, column).detach() if keep_keys else None
            yield slots, Arrival(final >= 0, side.ids_at(row, column), key)


def walk_chains(
    side: Side,
    similarity: Tensor,
    start: Start,
    beta: float | Tensor,
    logits: Tensor,
    slots: tuple[Tensor, ...],
    sampler: Sampler,
    side_number: int,
    rows: Tensor,
) -> Walk:
    """Move the chains of a side; pure.

    Args:
        side: the anchors and their columns.
        similarity: [N, K] to every column.
        start: where the chains stand.
        beta: inverse temperature.
        logits: [N, K] corrected by the mixture of all kinds, -inf = excluded.
        slots: per view, the chain of each row, [B].
        sampler: how to move.
        side_number: which direction, for the random draws.
        rows: [N] numbers of the rows in the whole batch, for their draws.
    """
    stream = 16 * side_number
    if isinstance(sampler.kernel, ISIR):
        scan = _isir(side, logits, start, sampler, stream, rows)
        num_steps = torch.ones_like(scan.accepts)
    elif len(side.kinds) == 1:
        num_steps = (logits > -math.inf).sum(1)
        first = _corrected(start, side.kinds[0])
        scan = _sweep(logits, first, num_steps, _skipped(sampler, num_steps), sampler, stream, rows)
    else:
        scan, num_steps = _sweeps(side, similarity, start, beta, sampler, stream, rows)
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    mass = torch.where(start.logit > -math.inf, scan.start_weight, 0.0)
    return Walk(
        weights=scan.weights,
        carried_weight=mass,
        start=start,
        accepts=scan.accepts,
        num_steps=num_steps,
        slots=slots,
        finals=_finals(scan.last, logits.shape[1], slots, sampler, stream, rows),
    )


def _corrected(start: Start, kind: Kind) -> Tensor:  # [N]
    """The carried state's logit under a kind's q; +inf where that kind never proposes it."""
    if kind.log_q is None:
        return start.logit
    corrected = start.logit - kind.log_q(start.ids[:, None])[:, 0]
    return torch.where(start.logit > -math.inf, corrected, -math.inf)


def _skipped(sampler: Sampler, num_steps: Tensor) -> Tensor:  # [N] -> [N]
    """P, the steps of each row that are not counted."""
    assert isinstance(sampler.kernel, MH)
    burn_in = sampler.kernel.burn_in
    if burn_in >= 1:
        return torch.full_like(num_steps, int(burn_in))
    # 1e-3: a share like 0.29 of 100 steps is 29 steps, not 28, whatever the precision
    return (num_steps * burn_in + 1e-3).long()


def _sweep(
    logits: Tensor,
    start: Tensor,
    num_steps: Tensor,
    skipped: Tensor,
    sampler: Sampler,
    stream: int,
    rows: Tensor,
    first_column: int = 0,
) -> Scan:
    """One Metropolis-Hastings scan over the columns of one kind, in a random order."""
    assert isinstance(sampler.kernel, MH)
    seed, step, every = sampler.seed, sampler.step, sampler.kernel.count_every
    num_columns = logits.shape[1]
    log_u = draws.log_uniform(
        seed, step, draws.STREAM_ACCEPT + stream, rows, num_columns, logits.dtype, first_column
    )
    burn_in: int | Tensor = skipped
    if every > 1:
        share = sampler.kernel.burn_in
        burn_in = int(share if share >= 1 else num_columns * share + 1e-3)
        burn_in = min(burn_in, num_columns - 1)  # nothing left to count: the final state counts
    if first_column > 0:  # draws come in a random order as they are
        return mh_scan(logits, start, log_u, burn_in, sampler.backend, every)
    order = draws.permutation(seed, step, draws.STREAM_ORDER + stream, num_columns)
    scan = mh_scan(logits[:, order], start, log_u, burn_in, sampler.backend, every)
    weights = torch.empty_like(scan.weights)
    weights[:, order] = scan.weights
    last = torch.where(scan.last >= 0, order[scan.last.clamp(min=0)], -1)
    return scan._replace(weights=weights, last=last)


def _sweeps(
    side: Side,
    similarity: Tensor,
    start: Start,
    beta: float | Tensor,
    sampler: Sampler,
    stream: int,
    rows: Tensor,
) -> tuple[Scan, Tensor]:
    """A sweep per kind of columns, each with its own q; weights are shares of all counted steps."""
    beta = beta.detach() if isinstance(beta, Tensor) else beta
    plain = (similarity.detach() * beta).masked_fill(side.all_excluded(), -math.inf)
    ids, here = side.column_ids(), torch.arange(len(plain), device=plain.device)
    steps = [(plain[:, kind.first : kind.last] > -math.inf).sum(1) for kind in side.kinds]
    total = torch.stack(steps).sum(0)
    left = _skipped(sampler, total)  # steps that are still to be skipped
    visits = plain.new_zeros(len(plain), plain.shape[1] + 1)  # the last column counts the start
    at = torch.full_like(here, -1)  # column each chain is at, -1: its start
    held, accepts = start, torch.zeros_like(here)
    for kind, num_steps in zip(side.kinds, steps, strict=True):
        part = plain[:, kind.first : kind.last]
        if kind.log_q is not None:
            part = part - kind.log_q(ids[:, kind.first : kind.last])
            part = part.masked_fill(~torch.isfinite(part), -math.inf)
        skipped = torch.minimum(left, num_steps)
        scan = _sweep(
            part, _corrected(held, kind), num_steps, skipped, sampler, stream, rows, kind.first
        )
        counted = (num_steps - skipped).to(plain.dtype)[:, None]
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
    counted = visits.sum(1)
    visits[here, at] += (counted == 0).to(visits.dtype)  # nothing counted: the final state counts
    weights = visits / counted.clamp(min=1)[:, None]
    return Scan(weights[:, :-1], weights[:, -1], at, held.logit, accepts), total


def _isir(
    side: Side, logits: Tensor, start: Start, sampler: Sampler, stream: int, rows: Tensor
) -> Scan:
    """One i-SIR step of every row."""
    assert isinstance(sampler.kernel, ISIR)
    seed, step, num_columns = sampler.seed, sampler.step, logits.shape[1]
    kinds = side.kinds
    if len(kinds) > 1:
        correction = side.correction(start.ids[:, None])
        first = start.logit if correction is None else start.logit - correction[:, 0]
        u = draws.uniform(seed, step, draws.STREAM_SLOT + stream, rows, 2, logits.dtype)
        logits = logits.masked_fill(_taken_place(side, start, u), -math.inf)
    elif kinds[0].log_q is None:  # a set: {carried} u batch holds an item once
        ids = side.key_ids.repeat_interleave(side.num_rows // len(side.key_ids), 0)
        inside = (start.ids[:, None] == ids).any(1)
        first = start.logit.masked_fill(inside, -math.inf)
        logits = logits.masked_fill(_repeated(side), -math.inf)
    else:
        first = _corrected(start, kinds[0])
    noise = draws.gumbel(
        seed, step, draws.STREAM_GUMBEL + stream, rows, num_columns + 1, logits.dtype
    )
    return isir_weights(logits, first, noise, sampler.kernel.count_every)


def _repeated(side: Side) -> Tensor:  # [N,K] bool
    """Columns whose item a usable column further left is too; each copy of the batch by itself."""
    groups, width = side.key_ids.shape
    usable = ~side.excluded.view(groups, -1, width).all(1)
    masks = []
    for ids, good in zip(
        side.key_ids.view(groups * side.copies, -1),
        usable.view(groups * side.copies, -1),
        strict=True,
    ):
        first = first_writer(ids, good)
        masks.append((first >= 0) & (first != torch.arange(len(ids), device=ids.device)))
    return torch.stack(masks).view(groups, width).repeat_interleave(side.num_rows // groups, 0)


def _taken_place(side: Side, start: Start, u: Tensor) -> Tensor:  # [N,2] -> [N,K] bool
    """The proposal of each row whose place its carried state takes."""
    shares = []
    for kind in side.kinds:
        log_q = 0.0 if kind.log_q is None else kind.log_q(start.ids[:, None])[:, 0]
        shares.append(kind.count.to(u.dtype).log() + log_q)
    ends = torch.softmax(torch.stack(shares), 0).cumsum(0)  # [kinds,N]
    chosen = (u[:, 0] > ends[:-1]).sum(0)  # [N]
    excluded = side.all_excluded()
    mask = torch.zeros_like(excluded)
    for number, kind in enumerate(side.kinds):
        counts = torch.zeros_like(excluded)
        if kind.log_q is None:  # of the row's negatives only
            counts[:, kind.first : kind.last] = ~excluded[:, kind.first : kind.last]
        else:
            counts[:, kind.first : kind.last] = True
            if number == 0:  # the batch of a corpus: the row's own column is no draw
                own = torch.arange(len(counts), device=counts.device) % max(kind.last, 1)
                counts[torch.arange(len(counts), device=counts.device), own] = False
        place = counts.cumsum(1)
        target = torch.ceil(u[:, 1] * place[:, -1]).clamp(min=1)
        mask |= counts & (place == target[:, None]) & (chosen == number)[:, None]
    return mask & (start.logit > -math.inf)[:, None]


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
    key = draws.STREAM_VIEW + stream
    coin = draws.bits(sampler.seed, sampler.step, key, rows[:size], 1)[:, 0] % 2 == 0
    second = torch.where(shared & coin, first, second)
    return torch.where(shared, -1, first), second  # a shared chain is stored once
