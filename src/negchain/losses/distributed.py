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

from negchain.losses.batch import Call, Ids, as_ids, check_shapes, per_side
from negchain.losses.request import Part, Request, check_requests
from negchain.pool import Draw, write_rows

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


class _Gather(torch.autograd.Function):
    """`Ranks.all_gather`, whose backward keeps this rank's share, times W."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[ctx.ranks.rank] * ctx.ranks.world, None


class Piece(NamedTuple):
    """Something every rank has rows of."""

    rows: Tensor  # [V,n,...]
    counts: Sequence[int]  # n of every rank


def joined(pieces: Mapping[Any, Piece], ranks: Ranks) -> dict[Any, Tensor]:
    """Pieces of all ranks, joined along their rows in rank order; one message, differentiable."""
    if not pieces:
        return {}
    units = [p.rows.shape[0] * math.prod(p.rows.shape[2:]) for p in pieces.values()]
    lengths = [
        [unit * p.counts[rank] for unit, p in zip(units, pieces.values(), strict=True)]
        for rank in range(ranks.world)
    ]
    flat = torch.cat([p.rows.reshape(-1) for p in pieces.values()])
    flat = F.pad(flat, (0, max(map(sum, lengths)) - len(flat)))
    gathered: Tensor = _Gather.apply(flat, ranks)  # type: ignore[no-untyped-call]
    parts = [row[: sum(each)].split(each) for row, each in zip(gathered, lengths, strict=True)]
    return {
        name: torch.cat(
            [
                parts[rank][number].view(piece.rows.shape[0], count, *piece.rows.shape[2:])
                for rank, count in enumerate(piece.counts)
            ],
            1,
        )
        for number, (name, piece) in enumerate(pieces.items())
    }


# ---------------------------------------------------------------------- what to encode


def share_out(part: Part, ranks: Ranks) -> Part:
    """Of ids all ranks know, those this rank encodes: as many on every rank, the last repeated.

    (Unequal numbers of encoder passes would make a wrapped encoder wait for ever.)
    """
    ids = part.want.ids.flatten()
    if part.per_row or not len(ids) or not (ranks.join or part.purpose == "refresh"):
        return part
    size = -(-len(ids) // ranks.world)
    mine = torch.arange(size, device=ids.device) + ranks.rank * size
    want = part.want._replace(ids=ids[mine.clamp(max=len(ids) - 1)])
    return replace(part, want=want, whole=ids)


def together(z: Tensor, count: int, ranks: Ranks) -> Tensor:  # [n,D] -> [count,D]
    """The shares of all ranks, in order."""
    return joined({0: Piece(z[None], [len(z)] * ranks.world)}, ranks)[0][0, :count]


# ---------------------------------------------------------------------- the call


@contextmanager
def over_ranks(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> Iterator[tuple[Call, Sequence[Request]]]:
    """The call a loss computes, given what this rank was called with; state ends equal on all."""
    loss_fn = ranks.loss_fn
    if ranks.join:
        yield gathered(ranks, call, requests)
    else:
        check_requests(loss_fn, loss_fn._turn, call, requests)
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


def gathered(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> tuple[Call, Sequence[Request]]:
    """The call and the answers of all ranks as one."""
    sides = ranks.loss_fn.num_sides
    draws: list[Any] = [] if call.draw is None else per_side("draw", call.draw, sides)
    drawn: list[Any] = per_side("drawn", call.drawn, len(draws)) if draws else []
    heads = _heads(ranks, call, requests, draws)
    sizes, widest = [head["batch"] for head in heads], max(head["known"] for head in heads)
    size, (dim, device) = sizes[ranks.rank], (call.z_a.shape[1], call.z_a.device)

    ids = {name: as_ids("", value, size, device)[None] for name, value in _ids_of(call)}
    if widest >= 0:
        none = torch.zeros(size, 0, dtype=torch.int64)
        known = as_ids("known", none if call.known is None else call.known, size, device, 2)
        ids["known"] = F.pad(known, (0, widest - known.shape[1]), value=-1)[None]
    numbers = {name: Piece(value, sizes) for name, value in ids.items()}
    rows = {"z_a": Piece(call.z_a[None], sizes), "z_b": Piece(call.z_b[None], sizes)}
    for side, (draw, z) in enumerate(zip(draws, drawn, strict=True)):
        own, counts = draw.ids.to(device)[None], [len(draw.ids)] * ranks.world
        if draw.ids.dim() == 2:  # [N, C]: of the batch's rows, view after view
            copies = max(head["copies"] for head in heads)
            own, counts = own.view(copies, size, draw.ids.shape[1]), sizes
        numbers[f"draw{side}"] = Piece(own, counts)
        rows[f"drawn{side}"] = Piece(z.reshape(*own.shape, dim), counts)
    for at, part in _parts(requests):
        assert part.embeddings is not None
        z = part.embeddings.to(device)
        rows[at] = Piece(z[None], [len(z)] * ranks.world)
        if part.per_row:
            numbers[at] = Piece(part.want.ids.to(device).view(part.per_row, size), sizes)
            rows[at] = Piece(z.view(part.per_row, size, dim), sizes)
    found, z_of = joined(numbers, ranks), joined(rows, ranks)

    answers = [replace(request, index=found["index"][0], parts=[]) for request in requests]
    for at, part in _parts(requests):
        place = answers[int(at.split(".")[0])]
        place.parts.append(_whole_part(part, found.get(at), z_of[at].flatten(0, 1)))
    new_draws = []
    for side, draw in enumerate(draws):
        every = found[f"draw{side}"]
        new_draws.append(Draw(every.flatten(0, 1), draw.log_q))
    return (
        replace(
            call,
            z_a=z_of["z_a"][0],
            z_b=z_of["z_b"][0],
            **{name: found[name][0] for name in ("index", "key_index", "known") if name in found},
            augmentation=(found["view0"][0], found["view1"][0]) if "view0" in found else None,
            draw=_one_or_both(new_draws),
            drawn=_one_or_both([z_of[f"drawn{n}"].flatten(0, -2) for n in range(len(draws))]),
        ),
        answers,
    )


def _ids_of(call: Call) -> Iterator[tuple[str, Ids]]:
    """What a call names per sample."""
    given = {"index": call.index, "key_index": call.key_index}
    given |= {f"view{n}": view for n, view in enumerate(call.augmentation or ())}
    return ((name, value) for name, value in given.items() if value is not None)


def _parts(requests: Sequence[Request]) -> Iterator[tuple[str, Part]]:
    """All parts, each with a name: the numbers of request and part."""
    for number, request in enumerate(requests):
        for place, part in enumerate(request.parts):
            yield f"{number}.{place}", part


def _one_or_both(sides: list[Any]) -> Any:
    return (sides[0] if len(sides) == 1 else tuple(sides)) if sides else None


def _whole_part(part: Part, ids: Tensor | None, z: Tensor) -> Part:
    """A part with the ids and embeddings of all ranks."""
    if ids is None:
        ids = part.want.ids if part.whole is None else part.whole
    draw = part.draw
    if draw is not None and part.whole is None:
        draw = Draw(ids.flatten(), draw.log_q)
    want = part.want._replace(ids=ids.flatten())
    return replace(part, want=want, draw=draw, embeddings=z[: ids.numel()])


# What ranks tell each other before they send anything; L of `known` is -1 where there is none.
_HEAD = ("refused", "batch", "dim", "seed", "turn", "known", "draws", "copies", "step", "index")
_Head = dict[str, int]


def _heads(
    ranks: Ranks, call: Call, requests: Sequence[Request], draws: Sequence[Draw]
) -> list[_Head]:
    """Sizes of every rank's batch. What one rank refuses all refuse, so that none waits."""
    loss_fn, turn = ranks.loss_fn, ranks.loss_fn._turn
    refusal, size, device = None, 0, call.z_a.device
    hashed = torch.tensor(ranks.rank)
    try:
        check_shapes(call.z_a, call.z_b, call.key_index, loss_fn.num_keys)
        size = len(call.z_a)
        check_requests(loss_fn, turn, call, requests)
        if call.index is not None:
            index = as_ids("index", call.index, size, device)
            hashed = ((index + 1) * torch.arange(1, size + 1, device=device)).sum()
    except ValueError as error:
        refusal = error
    known = -1 if call.known is None else torch.as_tensor(call.known).shape[-1]
    shared = sum(len(draw.ids) for draw in draws if draw.ids.dim() == 1)
    copies = max((len(draw.ids) // max(size, 1) for draw in draws), default=0)
    refused = int(refusal is not None)
    mine = [refused, size, call.z_a.shape[-1], loss_fn.seed, turn, known, shared, copies]
    if loss_fn.gather == "even":
        rows = [mine] * ranks.world
    else:
        measured = torch.stack([loss_fn.step.to(device), hashed.to(device)])
        rows = ranks.all_gather(torch.cat([torch.tensor(mine, device=device), measured])).tolist()
    if refusal is not None:
        raise refusal
    heads = [dict(zip(_HEAD, row, strict=False)) for row in rows]
    if loss_fn.gather != "even":
        _check_heads(heads)
    return heads


def _check_heads(heads: list[_Head]) -> None:
    bad = [rank for rank, head in enumerate(heads) if head["refused"]]
    if bad:
        raise ValueError(f"ranks {bad} refused their batch, and the others with them; see there")
    for name in ("dim", "seed", "turn", "step", "draws"):
        values = [head[name] for head in heads]
        if len(set(values)) > 1:
            raise ValueError(
                f"all ranks must agree on {name}, got {values}: build the loss alike on every "
                "rank (one seed), load its state on every one, and call it alike"
            )
    if heads[0]["batch"] and len({(head["batch"], head["index"]) for head in heads}) == 1:
        raise ValueError(
            "every rank passed the same positions: the loss gathers by itself, so give each rank "
            "its own batch (a DistributedSampler), not a gathered one; or use gather=False"
        )


# ---------------------------------------------------------------------- pools of their own


def _renewed_together(requests: Sequence[Request], ranks: Ranks) -> list[Request]:
    """Requests in which refreshed rows of the stale tables are those of all ranks."""
    new = [replace(request, parts=list(request.parts)) for request in requests]
    for request in new:
        for place, part in enumerate(request.parts):
            if part.whole is not None and part.embeddings is not None:
                z = together(part.embeddings, len(part.whole), ranks)
                request.parts[place] = _whole_part(part, None, z)
    return new


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
        values = joined({0: Piece(table[own][None], counts[number])}, ranks)[0][0]
        at = slots[number][0]
        write_rows(table, at, values, torch.ones_like(at, dtype=torch.bool))
    first = sum(sizes[: ranks.rank])
    others = torch.cat([slots["keys"][0][:first], slots["keys"][0][first + len(keys) :]])
    loss_fn._count(others)
