"""The pool: the columns z_j a row's weights are spread over, and which of them it may not use.

A *side* is one direction of comparison: anchors (rows) against a pool of keys (columns).
`views="shared"` has one side whose rows are both views of the batch and whose columns are both
views of the batch; `views="paired"` has one side per direction. Columns drawn by the caller
from beyond the batch are appended. Every column carries its id, so that equal ids and known
positives are never negatives, and the logarithm of the probability it was drawn with.

    corrected logit   l_ij = beta * s_ij - log( q(z_j) * m_neg )        (0 for in-batch columns)
    log partition     log( m_neg / K sum_j exp(l_ij) )  estimates  log sum_{D_neg} exp(beta s)

Rows may come in groups that are offered different columns (the two views of a batch, each offered
one copy of every item); all other sides have one group.

Shapes: `B` batch, `N` rows, `G` groups of N / G rows, `K` columns of a group, `C` private columns
per row, `D` embedding, `M` data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """Negatives from beyond the batch: which, and with what probability each was drawn.

    Attributes:
        ids: [R] data set positions offered to every row, or [N, C] private to each row.
        log_q: log-probability of each draw over the whole data set, same shape as `ids`; None means
            uniform.
        log_q_all: [M] log-probability of *every* item. With it in-batch columns and carried states
            are weighed by the same mixture as the draws (the balance heuristic); without it each
            column keeps the probability it came with.
        log_partition: [N] log partition of each row's negatives, where whoever drew knows it.
        private: with ids [N]: the i-th draw belongs to row i alone.

    Example:
        >>> draw = Draw(torch.tensor([5, 9]), torch.tensor([0.01, 0.02]).log())
        >>> draw.ids.shape
        torch.Size([2])
    """

    ids: Tensor
    log_q: Tensor | None = None
    log_q_all: Tensor | None = None
    log_partition: Tensor | None = None
    private: bool = False


@dataclass(frozen=True)
class Side:
    """One direction: N anchors against K shared and C private columns."""

    queries: Tensor  # [N,D]
    positives: Tensor  # [N,D]
    anchor_ids: Tensor  # [N] position of each anchor among the anchors
    positive_ids: Tensor  # [N] position of its positive among the keys
    known: Tensor | None  # [N,L] further key positions that are never negatives, -1 = padding
    keys: Tensor  # [G,K,D]
    key_ids: Tensor  # [G,K]
    excluded: Tensor  # [N,K] bool
    num_batch_columns: int  # the first columns come from the batch, the rest from a draw
    multiplicity: int  # negatives of the target per item (two views, or k augmentations)
    ids_per_item: int  # ids an item goes by: k with k stored augmentations, else 1
    num_keys: int | None  # M, positions the key ids range over; None: unknown
    hidden_keys: Tensor | None = None  # [G,K',D] the other copies of the batch's items
    private_keys: Tensor | None = None  # [N,C,D]
    private_ids: Tensor | None = None  # [N,C]
    draw: Draw | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return self.queries.shape[0]

    def log_num_negatives(self) -> Tensor | None:
        """log m_neg of each row, [N]; None when the size of the data set is unknown."""
        if self.num_keys is None:
            return None
        count = torch.full_like(self.positive_ids, self.num_keys - 1)
        if self.known is not None:
            count = count - num_distinct(self.known, self.positive_ids)
        return (count.clamp(min=1) * self.multiplicity).to(self.queries.dtype).log()

    def excludes(self, ids: Tensor) -> Tensor:  # [N] or [N,C] -> bool of the same shape
        """Whether an id given per row is the row's own positive or a known one."""
        own, known, ids = self.positive_ids, self.known, ids // self.ids_per_item
        if ids.dim() == 2:
            own, known = own[:, None], None if known is None else known[:, None, :]
        mask = ids == own
        return mask if known is None else mask | (ids[..., None] == known).any(-1)

    def similarities(self) -> Tensor:  # [N, K+C], differentiable
        """Similarity of every row to every column, shared columns first."""
        groups = self.queries.view(self.keys.shape[0], -1, self.queries.shape[1])
        similarity = (groups @ self.keys.mT).flatten(0, 1)
        if self.private_keys is None:
            return similarity
        private = torch.einsum("nd,ncd->nc", self.queries, self.private_keys)
        return torch.cat([similarity, private], 1)

    def all_excluded(self) -> Tensor:  # [N, K+C] bool
        """Columns each row may not use."""
        if self.private_ids is None:
            return self.excluded
        return torch.cat([self.excluded, self.excludes(self.private_ids)], 1)

    def column_ids(self) -> Tensor:  # [N, K+C]
        """The id of every column of every row."""
        ids = self.key_ids.repeat_interleave(self.num_rows // len(self.key_ids), 0)
        return ids if self.private_ids is None else torch.cat([ids, self.private_ids], 1)

    def keys_at(self, row: Tensor, column: Tensor) -> Tensor:  # [B] [B] -> [B,D]
        """Embeddings of given columns of given rows."""
        group, num_shared = row // (self.num_rows // len(self.keys)), self.keys.shape[1]
        if self.private_keys is None:
            return self.keys[group, column]
        own = self.private_keys[row, (column - num_shared).clamp(min=0)]
        if num_shared == 0:
            return own
        shared = self.keys[group, column.clamp(max=num_shared - 1)]
        return torch.where((column < num_shared)[:, None], shared, own)

    def num_draws(self) -> int:
        """Draws each row was offered, excluded ones included."""
        shared = self.keys.shape[1] - self.num_batch_columns
        return shared + (0 if self.private_ids is None else self.private_ids.shape[1])

    def counts(self) -> Tensor:
        """Columns the partition estimate divides by, [N]: usable batch columns plus all draws."""
        usable = (~self.excluded[:, : self.num_batch_columns]).sum(1)
        return usable + self.num_draws()

    def log_correction(self) -> Tensor | None:
        """log(q * m_neg) of every column, [N, K+C]; None when all columns are uniform."""
        draw = self.draw
        if draw is None or (draw.log_q is None and draw.log_q_all is None):
            return None
        log_m = self.log_num_negatives()
        if log_m is None:
            raise ValueError(
                "a draw with probabilities needs the size of the data set to compare them with the "
                "batch's; give num_samples= (or num_keys=) when the loss is constructed"
            )
        scale = log_m - self._log_negatives_per_id()
        if draw.log_q_all is not None:
            return self.mixture_correction(self.column_ids())
        assert draw.log_q is not None
        log_q = draw.log_q.to(scale.dtype)
        if log_q.dim() == 1:
            log_q = log_q.expand(self.num_rows, -1)
        batch = log_q.new_zeros(self.num_rows, self.num_batch_columns)
        return torch.cat([batch, log_q + scale[:, None]], 1)

    def _log_negatives_per_id(self) -> float:
        return math.log(self.multiplicity / self.ids_per_item)

    def mixture_correction(self, ids: Tensor) -> Tensor:  # [N, ...] -> [N, ...]
        """log(q_mix(z) * m_neg) at `ids`, q_mix the mixture of uniform batch columns and draws."""
        assert self.draw is not None and self.draw.log_q_all is not None
        log_m = self.log_num_negatives()
        assert log_m is not None
        num_draws = self.num_draws()
        total = self.counts().to(log_m.dtype)[:, None]
        log_q = self.draw.log_q_all.to(log_m.dtype)[ids] - self._log_negatives_per_id()
        informed = (log_q + log_m[:, None]).exp() * num_draws
        return ((total - num_draws + informed) / total).log()


def num_distinct(known: Tensor, own: Tensor) -> Tensor:  # [N,L] [N] -> [N] int64
    """How many different ids, other than padding (-1) and `own`, each row of `known` names."""
    ordered = known.sort(1).values
    fresh = (ordered >= 0) & (ordered != own[:, None])
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return fresh.sum(1)


def matches(ids: Tensor, own: Tensor, known: Tensor | None) -> Tensor:  # [K] [N] -> [N,K] bool
    """Which columns are a row's own positive or one of its known positives."""
    mask = ids[None, :] == own[:, None]
    if known is not None:
        for column in known.unbind(1):  # L is small; this keeps memory at N x K
            mask |= ids[None, :] == column[:, None]
    return mask


def first_writer(slots: Tensor, allowed: Tensor) -> Tensor:  # [N] [N] bool -> [N] int64
    """For each row the first allowed row that writes to the same slot, -1 if none is allowed.

    An indexed assignment with repeated indices is undefined on a GPU; letting every repeat write
    the same value makes it exact. Sorted by slot, allowed rows before others and otherwise in
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


def write_rows(table: Tensor, slots: Tensor, values: Tensor, allowed: Tensor) -> None:
    """table[slots] = values where allowed, in place, first writer wins; no host synchronisation.

    Args:
        table: [M, ...] state to change.
        slots: [N] rows of the table.
        values: [N, ...] new values.
        allowed: [N] bool.

    Example:
        >>> table = torch.zeros(3)
        >>> slots, allowed = torch.tensor([1, 1]), torch.tensor([True, True])
        >>> write_rows(table, slots, torch.tensor([7.0, 8.0]), allowed)
        >>> table
        tensor([0., 7., 0.])
    """
    writer = first_writer(slots, allowed)
    shape = [-1] + [1] * (values.dim() - 1)
    new = torch.where(
        (writer >= 0).view(shape), values[writer.clamp(min=0)].to(table.dtype), table[slots]
    )
    table[slots] = new


def write_view_mean(table: Tensor, index: Tensor, log_values: Tensor, allowed: Tensor) -> None:
    """Store the log of the mean over views of exp(log_values), one value per item, in place.

    Args:
        table: [M] state to change.
        index: [B] items.
        log_values: [V * B] one value per row, view after view.
        allowed: [B] bool; a value that is not finite is never written.
    """
    views = log_values.view(-1, len(index))
    mean = torch.logsumexp(views, 0) - math.log(len(views))
    write_rows(table, index, mean, allowed & torch.isfinite(mean))
