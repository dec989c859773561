"""Several ranks: with a process group a loss works on the batch of all of them.

    gather     embeddings, positions and answers of all ranks, joined in rank order
    loss       of the joined batch, whole, on every rank, as one process computes it: draws depend
               on the row of the joined batch, so all ranks move the same chains
    backward   a rank keeps the gradient of its own rows, times the number of ranks W

DDP and FSDP average over ranks, and the mean of W times the parts is their sum: the gradient of one
process, with uneven batches too. A learned beta has the whole gradient on every rank, which the
mean leaves as it is. Nothing is sent in the backward pass.

With `gather=False` every rank has a pool of its own; ranks then tell each other which rows of the
state they changed, so that a sample finds its chain on whichever rank it comes next.

Shapes: `W` ranks, `V` copies, `n` rows of a rank, `B` batch, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from negchain.losses.agreement import Piece, agreed, is_drawn, parts_of
from negchain.losses.batch import Call, as_ids
from negchain.losses.columns import count_keys, given_draws, sample_rows
from negchain.losses.request import Part, Request, check_answers, check_held, check_requests
from negchain.pool import Draw, first_writer, write_rows

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss


class Ranks(NamedTuple):
    """This process among those that train together; `loss_fn` counts the bytes it sends."""

    rank: int
    world: int
    group: dist.ProcessGroup | None
    loss_fn: ContrastiveLoss

    @property
    def join(self) -> bool:
        """Whether their batches are joined; if not, ranks share changes of state only."""
        return self.loss_fn.gather is not False

    def step(self, ahead: int) -> Tensor:
        """The step of a call's draws; ranks with pools of their own draw differently."""
        calls = ahead if self.join else ahead * self.world + self.rank
        return self.loss_fn.step + calls

    def all_gather(self, flat: Tensor) -> Tensor:  # [n] -> [W,n]
        """The same-sized tensors of all ranks."""
        found = flat.new_empty(self.world, len(flat))
        dist.all_gather_into_tensor(found.view(-1), flat.contiguous(), group=self.group)
        self.loss_fn.bytes_sent += flat.nbytes * (self.world - 1)
        return found

    def all_to_all(self, rows: Tensor, out: list[int], back: list[int]) -> Tensor:
        """Rows [n, ...] in the order of their ranks, `out` to each; `back` come from each."""
        found = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), back, out, group=self.group)
        sent = sum(out) - out[self.rank]
        self.loss_fn.bytes_sent += sent * rows[:1].nbytes if len(rows) else 0
        return found


def ranks_of(loss_fn: ContrastiveLoss) -> Ranks | None:
    """The processes of a process group that a loss works with; None where it is alone."""
    group = loss_fn.gather if isinstance(loss_fn.gather, dist.ProcessGroup) else None
    world = dist.get_world_size(group)
    return Ranks(dist.get_rank(group), world, group, loss_fn) if world > 1 else None


class _Gather(torch.autograd.Function):
    """`Ranks.all_gather`, whose backward keeps this rank's share, times W."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[ctx.ranks.rank] * ctx.ranks.world, None


def joined(
    pieces: Mapping[Any, Piece], ranks: Ranks, sizes: Sequence[int] = ()
) -> dict[Any, Tensor]:
    """Pieces of all ranks, joined along their rows in rank order; one message, differentiable.

    `sizes`: of the ranks' batches.
    """
    if not pieces:
        return {}
    shapes = [
        [(p.rows.shape[0], (p.counts or sizes)[rank], *p.rows.shape[2:]) for p in pieces.values()]
        for rank in range(ranks.world)
    ]
    lengths = [[math.prod(shape) for shape in own] for own in shapes]
    flat = torch.cat([p.rows.reshape(-1) for p in pieces.values()])
    flat = F.pad(flat, (0, max(map(sum, lengths)) - len(flat)))
    gathered: Tensor = _Gather.apply(flat, ranks)  # type: ignore[no-untyped-call]
    parts = [
        map(Tensor.view, row[: sum(own)].split(own), shape)
        for row, own, shape in zip(gathered, lengths, shapes, strict=True)
    ]
    whole = [torch.cat(own, 1) for own in zip(*parts, strict=True)]
    return dict(zip(pieces, whole, strict=True))


def joined_rows(rows: Tensor, counts: Sequence[int], ranks: Ranks) -> Tensor:  # [n,...] -> [B,...]
    """The rows of all ranks, of which each has so many."""
    return joined({0: Piece(rows[None], counts)}, ranks)[0][0]


# ---------------------------------------------------------------------- what to encode


def share_out(part: Part, ranks: Ranks) -> Part:
    """Of ids all ranks know, those this rank encodes: as many on every rank, the last repeated.

    (Unequal numbers of encoder passes would make a wrapped encoder wait for ever.)
    """
    ids = part.ids.flatten()
    if part.per_row or not len(ids) or not (ranks.join or part.purpose == "refresh"):
        return part
    size = -(-len(ids) // ranks.world)
    mine = torch.arange(size, device=ids.device) + ranks.rank * size
    return replace(part, ids=ids[mine.clamp(max=len(ids) - 1)], whole=part.ids)


def together(z: Tensor, count: int, ranks: Ranks) -> Tensor:  # [n,D] -> [count,D]
    """The shares of all ranks, in order."""
    return joined_rows(z, [len(z)] * ranks.world, ranks)[:count]


# ---------------------------------------------------------------------- the call


@contextmanager
def over_ranks(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> Iterator[tuple[Call, Sequence[Request]]]:
    """The call a loss computes, given what this rank was called with; state ends equal on all."""
    loss_fn = ranks.loss_fn
    if ranks.join:
        call, requests = gathered(ranks, call, requests)
        check_held(loss_fn, call, requests)
        yield call, requests
    else:
        if len(loss_fn.tables) or (loss_fn.training and _keeps_rows(loss_fn)):
            agreed(ranks, call, requests)
        check_requests(loss_fn, call, requests)
        check_held(loss_fn, call, requests)
        check_answers(requests, call.z_a)
        requests = _renewed_together(requests, ranks)
        before = loss_fn.step.clone()
        loss_fn.step.copy_(before + ranks.rank)
        moved: Tensor | int = 0
        try:
            yield call, requests
            moved = loss_fn.step - before - ranks.rank
        finally:
            loss_fn.step.copy_(before + moved * ranks.world)
        if loss_fn.training:
            _tell(ranks, call, requests)


def _keeps_rows(loss_fn: ContrastiveLoss) -> bool:
    """Whether there is state by rows, which ranks with pools of their own share."""
    from negchain.losses.base import ContrastiveLoss  # imports this module

    own = type(loss_fn)._touched is not ContrastiveLoss._touched
    return own or len(loss_fn.tables) > 0 or loss_fn.num_keys is not None


def asked_together(ranks: Ranks, call: Call) -> Call:
    """The call that draws depend on, given this rank's."""
    return gathered(ranks, call, ())[0] if ranks.join else agreed(ranks, call, ()) and call


def gathered(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> tuple[Call, Sequence[Request]]:
    """The call and the answers of all ranks as one."""
    numbers, rows, heads = agreed(ranks, call, requests)
    sizes, widest = [head["batch"] for head in heads], max(head["known"] for head in heads)
    size, copies = len(call.z_a), max(head["copies"] for head in heads)
    if widest >= 0:
        none = Piece(torch.zeros(1, size, 0, dtype=torch.int64, device=call.z_a.device))
        known = numbers.pop("known", none).rows
        numbers["known"] = Piece(F.pad(known, (0, widest - known.shape[2]), value=-1))

    for own in (numbers, rows):
        for name, (value, _) in own.items():
            if is_drawn(name, own[name]):  # of the batch's rows, view after view
                own[name] = Piece(value.reshape(copies, size, *value.shape[2:]))
    found, z_of = joined(numbers, ranks, sizes), joined(rows, ranks, sizes)
    given = [] if call.draw is None else given_draws(call, ranks.loss_fn.num_sides)
    draws = [
        Draw(found[f"draw{side}"].flatten(0, 1), draw.log_q) for side, (draw, _) in enumerate(given)
    ]
    answers = [replace(request, index=found["index"][0], parts=[]) for request in requests]
    for at, part in parts_of(requests):
        place = answers[int(at.split(".")[0])]
        asked = part.ids if part.whole is None else part.whole
        asked = found[at].flatten() if at in found else asked
        z = z_of[at].flatten(0, 1)[: asked.numel()]
        whole = replace(part, ids=asked, embeddings=z)
        if part.purpose == "draw" and part.per_row and ranks.loss_fn.gather != "even":
            whole = _drawn_once(whole, torch.split(found["index"][0], sizes))
        place.parts.append(whole)
    ids: dict[str, Any] = {
        name: found[name][0] for name in ("index", "key_index", "known") if name in found
    }
    return (
        replace(
            call,
            z_a=z_of["z_a"][0],
            z_b=z_of["z_b"][0],
            **ids,
            augmentation=(found["view0"][0], found["view1"][0]) if "view0" in found else None,
            draw=_one_or_both(draws),
            drawn=_one_or_both([z_of[f"drawn{n}"].flatten(0, -2) for n in range(len(draws))]),
        ),
        answers,
    )


def _one_or_both(sides: list[Any]) -> Any:
    return (sides[0] if len(sides) == 1 else tuple(sides)) if sides else None


def _drawn_once(part: Part, index: Sequence[Tensor]) -> Part:
    """Draws by sample, given every rank's samples: what two ranks have drawn alike counts once."""
    assert part.embeddings is not None
    rows = torch.cat([sample_rows(own) for own in index])
    first = first_writer(rows, torch.ones_like(rows, dtype=torch.bool))
    new = first == torch.arange(len(rows), device=rows.device)
    return replace(part, ids=part.ids[new], embeddings=part.embeddings[new])


# ---------------------------------------------------------------------- pools of their own


def _renewed_together(requests: Sequence[Request], ranks: Ranks) -> list[Request]:
    """Requests in which refreshed rows of the stale tables are those of all ranks."""

    def renewed(part: Part) -> Part:
        if part.whole is None or part.embeddings is None:
            return part
        z = together(part.embeddings, len(part.whole), ranks)
        return replace(part, ids=part.whole, embeddings=z)

    return [replace(one, parts=[renewed(part) for part in one.parts]) for one in requests]


def _tell(ranks: Ranks, call: Call, requests: Sequence[Request]) -> None:
    """Send the rows of the state this rank changed, and take those of the others."""
    loss_fn = ranks.loss_fn
    if call.index is None:
        return
    index = as_ids("index", call.index, len(call.z_a), loss_fn.step.device)
    touched = list(loss_fn._touched(call, index, requests))
    if not touched and loss_fn.num_keys is None:
        return
    mine = torch.tensor([len(index), *(len(slots) for _, slots in touched)], device=index.device)
    sizes, *counts = ranks.all_gather(mine).T.tolist()
    keys = index if call.key_index is None else call.key_index
    keys = as_ids("key_index", keys, len(index), index.device)
    whole = {n: Piece(slots[None], counts[n]) for n, (_, slots) in enumerate(touched)}
    slots = joined(whole | {"keys": Piece(keys[None], sizes)}, ranks)
    for number, (table, own) in enumerate(touched):
        values, at = joined_rows(table[own], counts[number], ranks), slots[number][0]
        write_rows(table, at, values, torch.ones_like(at, dtype=torch.bool))
    first = sum(sizes[: ranks.rank])
    others = torch.cat([slots["keys"][0][:first], slots["keys"][0][first + len(keys) :]])
    if loss_fn._counts_keys:
        count_keys(loss_fn.key_counts, others)
