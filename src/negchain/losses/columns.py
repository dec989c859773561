"""Columns from beyond the batch, and how likely columns of the batch are where keys are a corpus.

Shapes: `N` rows, `R` shared draws, `C` private draws per row, `D` embedding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from negchain import rng
from negchain.losses.batch import INTEGERS, Batch, Call, check_answer, is_traced, lay_out
from negchain.losses.request import Part, Request, answered
from negchain.losses.settings import Given, InBatch, Uniform
from negchain.pool import Draw, Kind, Side, matches
from negchain.printable import show

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss

Popularity = Callable[[Tensor], Tensor]  # key ids -> log-probability as somebody's positive
Key = tuple[int, Tensor, int]  # seed, step, side number: what random draws are a function of


@dataclass(frozen=True, kw_only=True)
class PrivateSide(Side):
    """A side with C more columns, other ones for each row; they come after the shared ones."""

    private_ids: Tensor  # [N,C]
    private_keys: Tensor  # [N,C,D]

    def similarities(self) -> Tensor:
        """[N, K+C], differentiable."""
        shared = super().similarities()
        private = torch.einsum("nd,ncd->nc", self.queries, self.private_keys)
        return torch.cat([shared, private], 1)

    def all_excluded(self) -> Tensor:
        """[N, K+C] bool."""
        return torch.cat([self.excluded, self.excludes(self.private_ids)], 1)

    def column_ids(self) -> Tensor:
        """[N, K+C]."""
        return torch.cat([super().column_ids(), self.private_ids], 1)

    def ids_at(self, row: Tensor, column: Tensor) -> Tensor:
        """[B] [B] -> [B]."""
        return self.column_ids()[row, column]

    def keys_at(self, row: Tensor, column: Tensor) -> Tensor:
        """[B] [B] -> [B,D]."""
        num_shared = self.keys.shape[1]
        own = self.private_keys[row, (column - num_shared).clamp(min=0)]
        if num_shared == 0:
            return own
        shared = super().keys_at(row, column.clamp(max=num_shared - 1))
        return torch.where((column < num_shared)[:, None], shared, own)


def with_private(side: Side, ids: Tensor, keys: Tensor) -> PrivateSide:  # [N,C] [N,C,D]
    """A side with private columns appended."""
    own = {each.name: getattr(side, each.name) for each in dataclasses.fields(Side)}
    return PrivateSide(**own, private_ids=ids, private_keys=keys)


def without_batch(side: Side) -> Side:
    """The rows of a side, with no column yet."""
    return dataclasses.replace(
        side,
        keys=side.keys[:, :0],
        key_ids=side.key_ids[:, :0],
        excluded=side.excluded[:, :0],
        hidden_keys=None,
        kinds=(),
    )


def rows_alone(loss_fn: ContrastiveLoss, batch: Batch) -> list[Side]:
    """The sides of a batch, with no column yet."""
    return [without_batch(side) for side in lay_out(loss_fn, batch)]


def with_proposals(
    loss_fn: ContrastiveLoss,
    sides: list[Side],
    batch: Batch,
    call: Call,
    requests: Sequence[Request],
    items: slice | None,
) -> list[Side]:
    """The batch's columns as draws by popularity (a corpus) or none, and drawn ones appended."""
    proposals = loss_fn.proposals
    if proposals.alone:
        sides = [without_batch(side) for side in sides]
    elif loss_fn.num_keys is not None:
        counts, counting = loss_fn.key_counts, loss_fn._counts_keys
        log_q = popularity(counts, batch, loss_fn.num_samples, counting)
        sides = [by_popularity(side, batch, log_q, items) for side in sides]
    if isinstance(proposals, InBatch):
        return sides
    if isinstance(proposals, Given):
        drawn = given_draws(call, len(sides))
    else:
        parts = [answered(requests, "draw", number) for number in range(len(sides))]
        drawn = [(Draw(part.ids, part.log_q), z) for part, z in parts]
    pairs = zip(sides, drawn, strict=True)
    return [with_draw(side, *pair, loss_fn.num_ids, loss_fn.normalize) for side, pair in pairs]


def with_draw(side: Side, draw: Draw, drawn: Tensor, num_ids: int | None, normalize: bool) -> Side:
    """Append a draw's columns, shared ([R]) or private to each row ([N, C])."""
    ids, shape = draw.ids.to(side.keys.device), tuple(draw.ids.shape)
    dim, groups = side.keys.shape[2], side.keys.shape[0]
    check_draw(draw, drawn, dim, (side.num_rows // side.views, side.num_rows))
    check_ids(draw, ids, num_ids)
    drawn = check_answer(drawn.reshape(-1, dim), ids, side.queries, normalize)
    first, columns = side.keys.shape[1], shape[-1]
    count = torch.full_like(side.positive_ids, columns)
    kinds = (*side.kinds, Kind(first, first + columns, count, _log_q(side, draw)))
    if ids.dim() == 2:
        repeat = side.num_rows // shape[0]
        keys = drawn.view(*shape, dim).repeat(repeat, 1, 1)
        side = dataclasses.replace(side, kinds=kinds)
        return with_private(side, ids.repeat(repeat, 1), keys)
    excluded = matches(side.items_of(ids), side.positive_ids, side.known)
    excluded = excluded | ~torch.isfinite(drawn).all(1)[None, :]
    return dataclasses.replace(
        side,
        keys=torch.cat([side.keys, drawn.expand(groups, -1, -1)], 1),
        key_ids=torch.cat([side.key_ids, ids.expand(groups, -1)], 1),
        excluded=torch.cat([side.excluded, excluded], 1),
        kinds=kinds,
    )


def uniform_parts(loss_fn: ContrastiveLoss, index: Tensor, step: Tensor) -> list[Part]:
    """Uniform draws of every side, for the caller to encode."""
    proposals, parts = loss_fn.proposals, []
    assert isinstance(proposals, Uniform) and loss_fn.num_ids is not None
    # so many, or one per sample of a batch, which every rank makes for its own
    count, per_row = proposals.num or 1, int(proposals.num is None)
    rows = sample_rows(index) if per_row else index.new_zeros(1)
    for side in range(loss_fn.num_sides):
        at = (loss_fn.seed, step, rng.FOR_PROPOSE + 16 * side, rows, count)
        u = rng.uniform(*at, torch.float64).flatten()
        bound = torch.full_like(u, loss_fn.num_ids, dtype=torch.int64)
        parts.append(Part("draw", side, rng.integers_below(bound, u), per_row=per_row))
    return parts


def sample_rows(index: Tensor) -> Tensor:  # [B] -> [B]
    """Rows of draws by sample; one that a batch holds twice draws twice.

    Otherwise draws were no longer independent, and chains left their target.
    """
    order = torch.argsort(index, stable=True)
    at = torch.arange(len(index), device=index.device)
    before = at - torch.searchsorted(index[order], index[order])
    return index + 1_000_003 * torch.empty_like(index).index_copy_(0, order, before)


def given_draws(call: Call, num_sides: int) -> list[tuple[Draw, Tensor]]:
    """The caller's draws and their embeddings, side by side."""
    draw, drawn = call.draw, call.drawn
    if draw is None or drawn is None:
        raise ValueError(
            "proposals=Given() needs draw= (ids and their probabilities) and drawn= (their "
            "embeddings) in every call; pass both"
        )
    num_sides = 1 if call.one_way else num_sides
    sides = per_side("draw", draw, num_sides), per_side("drawn", drawn, num_sides)
    pairs = list(zip(*sides, strict=True))
    for one, z in pairs:
        ids, log_q = one if isinstance(one, Draw) else (None, None)
        known = log_q is None or isinstance(log_q, Tensor) or callable(log_q)
        if not (isinstance(ids, Tensor) and isinstance(z, Tensor) and known):
            raise ValueError(
                f"draw= must be Draw(ids, log_q), drawn= a tensor, got {show((one, z))}"
            )
    return pairs  # type: ignore[return-value]


def per_side(name: str, value: object, num_sides: int) -> list[object]:
    """One entry per side: a pair where there are two sides, the thing itself where there is one."""
    if num_sides == 1:
        return [value]
    if not isinstance(value, (tuple, list)) or isinstance(value, Draw) or len(value) != 2:
        raise ValueError(
            f"{name}= must be a pair here, one entry per direction (views='paired' is symmetric); "
            "pass two, or construct the loss with symmetric=False"
        )
    return list(value)


def check_draw(draw: Draw, drawn: Tensor, dim: int, rows: tuple[int, int]) -> None:
    """Refuse shapes that are none of a draw; `rows`: how many may have draws of their own."""
    ids, shape = draw.ids, tuple(draw.ids.shape)
    if ids.dim() not in (1, 2) or ids.dtype not in INTEGERS:
        raise ValueError(
            f"draw.ids must be integers [R] or [N, C], got {ids.dtype} {shape}; "
            "pass positions (of a mask: mask.nonzero().flatten())"
        )
    if ids.dim() == 2 and shape[0] not in rows:
        raise ValueError(
            f"draw.ids [N, C] must have one row per row of the batch, {rows[1]}, got {shape}; "
            "pass one for each, or draws [R] that all of them share"
        )
    if tuple(drawn.shape) not in ((*shape, dim), (ids.numel(), dim)):
        raise ValueError(
            f"drawn must be the embeddings of draw.ids, [{ids.numel()}, {dim}], "
            f"got {tuple(drawn.shape)}"
        )


def check_ids(draw: Draw, ids: Tensor, size: int | None) -> None:
    """Refuse positions that are none, and probabilities that are not those of every position."""
    if draw.log_q is not None and size is None:
        raise ValueError(
            "a draw with probabilities needs the size of the data set to compare them with the "
            "batch's; give num_samples= (or num_keys=) when the loss is constructed"
        )
    if isinstance(draw.log_q, Tensor) and draw.log_q.shape != (size,):
        raise ValueError(
            f"draw.log_q must hold one log-probability per id, [{size}], "
            f"got {tuple(draw.log_q.shape)}"
        )
    if ids.device.type == "cpu" and not is_traced(ids) and size is not None and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise ValueError(
                f"draw.ids must hold data set positions in [0, {size}), "
                f"got {low if low < 0 else high}"
            )
        log_q = draw.log_q_of(ids) if isinstance(draw.log_q, Tensor) else None
        if log_q is not None and not bool(log_q.isfinite().all()):
            raise ValueError(
                "draw.log_q must be finite at every id that was drawn, got "
                f"{log_q[~log_q.isfinite()].tolist()[:5]}; give the log-probabilities draw.ids "
                "were drawn with"
            )


def _log_q(side: Side, draw: Draw) -> Callable[[Tensor], Tensor] | None:
    """ids -> log(q m_neg) of a draw over all ids, own positive included."""
    log_m = side.log_num_negatives()
    if log_m is None or side.num_keys is None:
        return None
    scale = log_m - math.log(side.multiplicity / side.ids_per_item)
    uniform = -math.log(side.num_keys * side.ids_per_item)

    def log_q(ids: Tensor) -> Tensor:
        base = scale.view(-1, *[1] * (ids.dim() - 1))
        log = draw.log_q_of(ids)
        return (base + uniform).expand(ids.shape) if log is None else log.to(scale.dtype) + base

    return log_q


def first_counts(counts: Tensor | None, num_keys: int) -> Tensor:
    """How often each key is a positive, then the sum; zeros where calls have to count."""
    if counts is None:
        return torch.zeros(num_keys + 1, dtype=torch.float64)
    counts = torch.as_tensor(counts)
    numbers = counts.dtype in INTEGERS or counts.is_floating_point()
    fits = numbers and counts.shape == (num_keys,)
    wrong = counts[~counts.isfinite() | (counts < 0)].tolist() if fits else []
    if wrong or not fits:
        raise ValueError(
            f"key_counts must hold a count per key, [{num_keys}] numbers of at least 0, got "
            f"{wrong[:5] or f'{counts.dtype} {tuple(counts.shape)}'}; "
            "pass torch.bincount(key_of, minlength=num_keys)"
        )
    return torch.cat([counts, counts.sum()[None]]).double()


def count_keys(key_counts: Tensor, keys: Tensor, valid: Tensor | None = None) -> None:  # [B]
    """Remember which keys were positives; part of changing state."""
    kind = key_counts.dtype
    ones = torch.ones_like(keys, dtype=kind) if valid is None else valid.to(kind)
    key_counts.index_add_(0, keys, ones)
    key_counts[-1] += ones.sum()


def popularity(
    counts: Tensor,  # [num_keys + 1] how often each key was a positive, and the sum
    batch: Batch,
    num_samples: int | None,  # m
    counting: bool,  # False: the counts were given
) -> Popularity:
    """key ids -> log-probability that another pair of a batch has this key: its count / (m - 1).

    A batch holds no pair twice: a row's columns come from the m - 1 other pairs. The row's own key
    is never its negative, so no other count lacks a pair. Counted on the way, after E whole passes
    and a share f of the next, a key of the batch was met E times, and counts for E + f (in the
    first pass the batch counts whole: there may be nothing else). A pass then has m pairs, one per
    anchor: where it has more, counts have to be given.
    """
    kind = batch.both.dtype
    if not counting or num_samples is None:
        log_q = (counts[:-1] / (counts[-1] - 1).clamp(min=1)).log().to(kind)
        return lambda ids: log_q[ids]
    mine = torch.where(batch.valid, batch.key_index, -1).sort().values
    passes = (counts[-1] / num_samples).clamp(min=1)
    share = torch.where(counts[-1] < num_samples, 1.0, passes % 1)
    total = passes * max(num_samples - 1, 1)

    def of(ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        here = torch.searchsorted(mine, ids, right=True) - torch.searchsorted(mine, ids)
        met = counts[ids]
        times = torch.where(met > 0, met + share * here, passes * here)
        return (times / total).log().to(kind)

    return of


def by_popularity(side: Side, batch: Batch, log_q: Popularity, items: slice | None) -> Side:
    """A side whose columns, the batch's, are draws by popularity; its rows are those of `items`."""
    mine = batch.valid if items is None else batch.valid[items]
    others = batch.valid.sum() - mine.long()  # the row's own column is no draw
    kind = Kind(0, side.keys.shape[1], others, _log_q(side, Draw(side.key_ids, log_q)))
    return dataclasses.replace(side, kinds=(kind,))
