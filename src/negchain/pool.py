"""The pool: the columns z_j a row's weights are spread over, and which of them it may not use.

A *side* is one direction of comparison: anchors (rows) against a pool of keys (columns).
`views="shared"` has one side whose rows are both views of the batch and whose columns are both
views of the batch; `views="paired"` has one side per direction. Columns drawn from beyond the batch
are appended. Every column carries its id, so that equal ids and known positives are never
negatives, and belongs to a *kind*: how it was drawn, and with what probability q.

    corrected logit   l_ij = beta * s_ij - log( q(z_j) * m_neg )    (0: uniform over the negatives)
    log partition     log( m_neg / n sum_j exp(l_ij) )  estimates  log sum_{D_neg} exp(beta s)

With several kinds, of n_k draws each, q is their mixture sum_k n_k q_k / n (the balance heuristic):
the partition is then unbiased where the draws of a kind do not depend on those of another
(tests/losses/test_corpus.py, tests/losses/test_importance.py).

Rows may come in groups that are offered different columns (the two views of a batch, each offered
one copy of every item); all other sides have one group.

Shapes: `B` batch, `N` rows, `G` groups of N / G rows, `K` columns of a group, `C` private columns
per row, `D` embedding, `M` data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from negchain.rng import fit_for_numpy

LogQ = Tensor | Callable[[Tensor], Tensor] | None


class Draw(NamedTuple):
    """Negatives the caller drew from beyond the batch, and the distribution they came from.

    Attributes:
        ids: [R] data set positions offered to every row, or [N, C] private to each row.
        log_q: [M] log-probability of *every* id under today's distribution, or a function from ids
            to it; None means uniform. All of them, because a chain may hold any id, and its step is
            only right if the state it holds is weighed by the same q as the proposals.

    Example:
        >>> draw = Draw(torch.tensor([5, 9]), torch.full((20,), 1 / 20).log())
        >>> draw.ids.shape
        torch.Size([2])
    """

    ids: Tensor
    log_q: LogQ = None

    def log_q_of(self, ids: Tensor) -> Tensor | None:
        """Log-probability of ids, of their shape; weights are never differentiated, nor is q."""
        if self.log_q is None:
            return None
        if callable(self.log_q):
            return self.log_q(ids).detach()
        return self.log_q.detach().to(ids.device)[ids.long()]  # uint8 would be a mask


@dataclass(frozen=True)
class Kind:
    """Columns first .. last - 1 of every row, all drawn in one way."""

    first: int
    last: int
    count: Tensor  # [N] draws they stand for, excluded ones included where q counts them
    log_q: Callable[[Tensor], Tensor] | None  # ids [N, ...] -> log(q * m_neg); None: 0


@dataclass(frozen=True)
class Side:
    """One direction: N anchors against K columns; `losses.columns.PrivateSide` has more of them."""

    queries: Tensor  # [N,D]
    positives: Tensor  # [N,D]
    anchor_ids: Tensor  # [N] position of each anchor among the anchors
    positive_ids: Tensor  # [N] position of its positive among the keys
    known: Tensor | None  # [N,L] further key positions that are never negatives, -1 = padding
    keys: Tensor  # [G,K,D]
    key_ids: Tensor  # [G,K]
    excluded: Tensor  # [N,K] bool
    multiplicity: int  # negatives of the target per item (two views, or k augmentations)
    ids_per_item: int  # ids an item goes by: k with k stored augmentations, else 1
    num_keys: int | None  # M, positions the key ids range over; None: unknown
    hidden_keys: Tensor | None = None  # [G,K',D] the other copies of the batch's items
    kinds: tuple[Kind, ...] = field(default=())
    copies: int = 1  # how often every item of the batch is among the columns of a row
    views: int = 1  # rows of every item

    @property
    def num_rows(self) -> int:
        """N."""
        return self.queries.shape[0]

    def log_num_negatives(self) -> Tensor | None:
        """log m_neg of each row, [N]; None when the size of the data set is unknown."""
        if self.num_keys is None:
            return None
        if self.known is None:
            count = max(self.num_keys - 1, 1) * self.multiplicity
            return self.queries.new_full((self.num_rows,), math.log(count))
        numbers = self.num_keys - 1 - num_distinct(self.known, self.positive_ids)
        return (numbers.clamp(min=1) * self.multiplicity).to(self.queries.dtype).log()

    def items_of(self, ids: Tensor) -> Tensor:
        """The items that ids name, of the ids' shape."""
        return ids // self.ids_per_item if self.ids_per_item > 1 else ids

    def excludes(self, ids: Tensor) -> Tensor:  # [N] or [N,C] -> bool of the same shape
        """Whether an id given per row is the row's own positive or a known one."""
        own, known = self.positive_ids, self.known
        ids = self.items_of(ids)
        if ids.dim() == 2:
            own, known = own[:, None], None if known is None else known[:, None, :]
        mask = ids == own
        return mask if known is None else mask | (ids[..., None] == known).any(-1)

    @cached_property
    def to_positives(self) -> Tensor:  # [N], differentiable
        """Similarity of every row to its positive."""
        similarity: Tensor = torch.linalg.vecdot(self.queries, self.positives)
        return similarity

    def similarities(self) -> Tensor:  # [N,K], differentiable
        """Similarity of every row to every column."""
        return products(self.queries, self.keys)

    def all_excluded(self) -> Tensor:  # [N,K] bool
        """Columns each row may not use."""
        return self.excluded

    def column_ids(self) -> Tensor:  # [N,K]
        """The id of every column of every row."""
        return self.key_ids.repeat_interleave(self.num_rows // len(self.key_ids), 0)

    def ids_at(self, row: Tensor, column: Tensor) -> Tensor:  # [B] [B] -> [B]
        """Ids of given columns of given rows."""
        return self.key_ids[row // (self.num_rows // len(self.key_ids)), column]

    def keys_at(self, row: Tensor, column: Tensor) -> Tensor:  # [B] [B] -> [B,D]
        """Embeddings of given columns of given rows."""
        return self.keys[row // (self.num_rows // len(self.keys)), column]

    def counts(self) -> Tensor:
        """n, draws the partition estimate divides by, [N]."""
        return sum((kind.count for kind in self.kinds[1:]), self.kinds[0].count)

    def correction(self, ids: Tensor) -> Tensor | None:  # [N, ...] -> [N, ...]
        """log( sum_k n_k q_k m_neg / n ) of ids over all kinds; None where all are uniform."""
        if all(kind.log_q is None for kind in self.kinds):
            return None
        if len(self.kinds) == 1 and self.kinds[0].log_q is not None:
            return self.kinds[0].log_q(ids)
        dtype, shape, terms = self.queries.dtype, (-1, *[1] * (ids.dim() - 1)), []
        for kind in self.kinds:
            weight = kind.count.to(dtype).log().view(shape).expand(ids.shape)
            terms.append(weight if kind.log_q is None else weight + kind.log_q(ids))
        counts = self.counts().to(dtype)
        return torch.logsumexp(torch.stack(terms), 0) - counts.log().view(shape)


def products(queries: Tensor, keys: Tensor) -> Tensor:  # [N,D] [G,K,D] -> [N,K]
    """Of every row with the columns of its group."""
    return torch.bmm(queries.view(len(keys), -1, queries.shape[1]), keys.mT).flatten(0, 1)


def usable(logits: Tensor, excluded: Tensor) -> Tensor:
    """Logits with -inf where excluded or not finite."""
    excluded = excluded if all_finite(logits) else excluded | ~torch.isfinite(logits)
    return logits.masked_fill(excluded, -math.inf)


def all_finite(z: Tensor) -> bool:
    """Whether everything is seen to be finite; False too where looking is not free."""
    return fit_for_numpy(z) and bool(np.isfinite(z.detach().numpy()).all())


def num_distinct(known: Tensor, own: Tensor) -> Tensor:  # [N,L] [N] -> [N] int64
    """How many different ids, other than padding (-1) and `own`, each row of `known` names."""
    ordered = known.sort(1).values
    fresh = (ordered >= 0) & (ordered != own[:, None])
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return fresh.sum(1)


def matches(ids: Tensor, own: Tensor, known: Tensor | None) -> Tensor:  # [K] [N] -> [N,K] bool
    """Which columns are a row's own positive or one of its known positives."""
    mask = ids[None, :] == own[:, None]
    return mask if known is None or len(ids) == 0 else mask | among(ids, known)


def among(ids: Tensor, known: Tensor) -> Tensor:  # [K] [N,L] -> [N,K] bool
    """Which columns are one of a row's known positives.

    Looked up, not compared: L may be a whole class, and memory stays at N x (K + L).
    """
    num_columns = len(ids)
    ordered = ids.sort().values
    place = torch.searchsorted(ordered, known)
    there = ordered[place.clamp(max=num_columns - 1)] == known
    place = torch.where(there, place, num_columns)  # one column more, for what is not there
    found = torch.zeros(len(known), num_columns + 1, dtype=torch.bool, device=ids.device)
    return found.scatter(1, place, True)[:, torch.searchsorted(ordered, ids)]


def is_among(ids: Tensor, others: Tensor) -> Tensor:  # [K] [L] -> [K] bool
    """Which ids are among the others (torch.isin would wait for the device)."""
    ordered = others.sort().values
    at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return ordered[at] == ids


def first_writer(slots: Tensor, allowed: Tensor) -> Tensor:  # [N] [N] bool -> [N] int64
    """For each row the first allowed row that writes to the same slot, -1 if none is allowed.

    An indexed assignment with repeated indices is undefined on a GPU; letting every repeat write
    the same value settles it. Sorted by slot, allowed rows before others and otherwise in
    order, the row looked for heads the rows of its slot: N log N instead of comparing all pairs,
    in two operations more.

    Example:
        >>> first_writer(torch.tensor([7, 9, 7, 7]), torch.tensor([False, False, True, True]))
        tensor([ 2, -1,  2,  2])
    """
    least = slots.long() * 2
    ordered, rows = torch.sort(least + ~allowed, stable=True)
    first = rows[torch.searchsorted(ordered, least)]
    return torch.where(allowed[first], first, -1)


def write_rows(
    table: Tensor,  # [M,...]
    slots: Tensor,  # [N]
    values: Tensor,  # [N,...]
    allowed: Tensor,  # [N] bool
    changed: Tensor | None = None,  # [N] bool: whether a writer has anything to write
) -> None:
    """table[slots] = values where allowed, in place, first writer wins; no host synchronisation.

    A first writer that has nothing to write still keeps the others from it.

    Example:
        >>> table = torch.zeros(3)
        >>> slots, allowed = torch.tensor([1, 1]), torch.tensor([True, True])
        >>> write_rows(table, slots, torch.tensor([7.0, 8.0]), allowed)
        >>> table
        tensor([0., 7., 0.])
    """
    if fit_for_numpy(table):  # the same, and less to do
        rows = np.flatnonzero(allowed.numpy())[::-1]  # of repeats numpy keeps the last
        stored, here, new = table.numpy(), slots.numpy()[rows], values.numpy()[rows]
        if changed is not None:
            kept = ~changed.numpy()[rows]
            new[kept] = stored[here[kept]]
        stored[here] = new
        return
    writer = first_writer(slots, allowed)
    writes = writer >= 0 if changed is None else (writer >= 0) & changed[writer]
    values = values[writer].to(table.dtype)
    table[slots] = torch.where(writes.view(-1, *[1] * (values.dim() - 1)), values, table[slots])
