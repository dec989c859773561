"""What ranks tell each other before they send anything: one that refuses its call is heard by all.

A rank that raised between two messages would leave the others waiting for it. So everything it will
send is built and checked first, and all ranks compare sizes, settings and types in one short
message (80 bytes).

Shapes: `V` copies, `n` rows of a rank, `D` embedding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from negchain.losses.batch import Call, as_ids, check_answer, check_batch, check_call
from negchain.losses.columns import check_draw, check_ids, given_draws
from negchain.losses.request import Part, Request, check_answers, check_held, check_requests
from negchain.losses.settings import Kernel, Proposals

if TYPE_CHECKING:
    from negchain.losses.distributed import Ranks


class Piece(NamedTuple):
    """Something every rank has rows of."""

    rows: Tensor  # [V,n,...]
    counts: Sequence[int] | None = None  # n of every rank; None: the size of its batch


def is_drawn(name: str, piece: Piece) -> bool:
    """Whether these are the caller's draws for each row of the batch."""
    return name.startswith("draw") and piece.counts is None


def _own(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> tuple[dict[str, Piece], dict[str, Piece]]:
    """The ids and the embeddings this rank sends, checked."""
    loss_fn = ranks.loss_fn
    check_call(loss_fn, call)
    check_requests(loss_fn, call, requests)
    check_answers(requests, call.z_a)
    (size, dim), device = call.z_a.shape, call.z_a.device
    named = {"index": call.index, "key_index": call.key_index, "known": call.known}
    named |= {f"view{n}": view for n, view in enumerate(call.augmentation or ())}
    numbers = {
        name: Piece(as_ids(name, ids, size, device, 2 if name == "known" else 1)[None])
        for name, ids in named.items()
        if ids is not None
    }
    rows = {"z_a": Piece(call.z_a[None]), "z_b": Piece(call.z_b[None])}
    given = [] if call.draw is None else given_draws(call, loss_fn.num_sides)
    for side, (draw, z) in enumerate(given):
        check_draw(draw, z, dim, (size, 2 * size))
        check_ids(draw, draw.ids, loss_fn.num_ids)
        if not ranks.join:
            check_answer(z.reshape(-1, dim), draw.ids, call.z_a, loss_fn.normalize)
        ids = draw.ids.to(device)[None]
        counts = None if ids.dim() == 3 else [ids.shape[1]] * ranks.world
        numbers[f"draw{side}"] = Piece(ids, counts)
        rows[f"drawn{side}"] = Piece(z.reshape(*ids.shape, dim), counts)
    for at, part in parts_of(requests):
        assert part.embeddings is not None
        z = part.embeddings.to(device)
        rows[at] = Piece(z[None], [len(z)] * ranks.world)
        if part.per_row:
            numbers[at] = Piece(part.ids.to(device).view(part.per_row, size))
            rows[at] = Piece(z.view(part.per_row, size, dim))
        if part.purpose != "refresh" and not ranks.join:  # nobody else will look at it
            check_answer(z, part.ids, call.z_a, loss_fn.normalize)
    if not ranks.join:
        check_batch(loss_fn, call)
        drawn = min((draw.ids.shape[-1] for draw, _ in given), default=0)
        loss_fn.check_batch_size(size, drawn)
        check_held(loss_fn, call, requests)
        if "index" in numbers:  # the rows that others will be told of have to be rows of the state
            list(loss_fn._touched(call, numbers["index"].rows[0], requests))
    return numbers, rows


# What ranks tell each other before they send anything; L of `known` is -1 where there is none.
_HEAD = ("refused", "batch", "dim", "seed", "turn", "known", "copies", "kinds", "step", "index")
_Head = dict[str, int]
# Settings that shapes do not show; with two values ranks would compute two losses.
_SETTINGS = (
    "num_samples", "num_ids", "views", "symmetric", "denominator", "normalize", "beta", "proposals",
    "kernel", "gamma", "top",
)  # fmt: skip


def agreed(
    ranks: Ranks, call: Call, requests: Sequence[Request]
) -> tuple[dict[str, Piece], dict[str, Piece], list[_Head]]:
    """What this rank sends, and every rank's sizes.

    What is wrong on one rank is refused on all of them, before anything is sent: none waits.
    """
    loss_fn, device, refusal = ranks.loss_fn, call.z_a.device, None
    numbers, rows, mine = dict[str, Piece](), dict[str, Piece](), [1] + [0] * 7
    even, hashed = loss_fn.gather == "even", torch.tensor(ranks.rank, device=device)
    try:
        numbers, rows = _own(ranks, call, requests)
        size, dim = call.z_a.shape
        known = numbers["known"].rows.shape[2] if "known" in numbers else -1
        drawn = [own.rows.shape[1] for name, own in numbers.items() if is_drawn(name, own)]
        copies = max(drawn, default=0) // max(size, 1)
        kinds = 0 if even else _kinds(ranks, numbers, rows)
        mine = [0, size, dim, loss_fn.seed % 2**63, loss_fn._turn, known, copies, kinds]
    except Exception as error:  # whatever it is, the others must hear of it
        if even:
            raise
        refusal = error
    if even:
        return numbers, rows, [dict(zip(_HEAD, mine, strict=False))] * ranks.world
    if "index" in numbers:
        hashed = _hashed(numbers["index"].rows[0])
    measured = torch.stack([loss_fn.step.to(device), hashed])
    told = ranks.all_gather(torch.cat([torch.tensor(mine, device=device), measured])).tolist()
    if refusal is not None:
        raise refusal
    heads = [dict(zip(_HEAD, row, strict=True)) for row in told]
    _check_heads(heads, ranks.join)
    return numbers, rows, heads


def _kinds(ranks: Ranks, numbers: dict[str, Piece], rows: dict[str, Piece]) -> int:
    """A number that is another one where ranks were built or called differently."""
    loss_fn = ranks.loss_fn
    kinds = [f"{type(loss_fn).__name__} {ranks.join}"]
    for name in _SETTINGS:
        value = getattr(loss_fn, name, None)
        # a tensor may be learned, and a method of one's own may call anything so
        plain = isinstance(value, int | float | str | Kernel | Proposals)
        kinds += [f"{name} {value if plain else None}"]
    kinds += [str(torch.cat([own.rows.flatten()[:0] for own in rows.values()]).dtype)]
    for name, own in (numbers | rows).items():
        if name != "known":  # a rank may have none
            begin = 2 if own.counts is None or not ranks.join else 1
            kinds += [f"{name} {tuple(own.rows.shape[begin:])}"]
    return zlib.crc32(" ".join(kinds).encode())


def _hashed(index: Tensor) -> Tensor:  # [n] -> []
    """A number that two different batches share by chance once in 2^64 times."""
    mixed = index + torch.arange(len(index), device=index.device) * 0x2545F4914F6CDD1D
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D
    return (mixed ^ (mixed >> 32)).sum()


def _check_heads(heads: list[_Head], join: bool) -> None:
    bad = [rank for rank, head in enumerate(heads) if head["refused"]]
    if bad:
        raise ValueError(f"ranks {bad} refused their batch, and the others with them; see there")
    for name in ("dim", "seed", "turn", "step", "copies", "kinds"):
        values = [head[name] for head in heads if head["batch"] or name != "copies"]
        if len(set(values)) > 1:
            what = "settings and what they pass" if name == "kinds" else f"{name}, got {values}"
            raise ValueError(
                f"all ranks must agree on {what}: build the loss alike on every rank (one seed), "
                "load its state on every one, and call it alike"
            )
    if join and heads[0]["batch"] and len({(head["batch"], head["index"]) for head in heads}) == 1:
        raise ValueError(
            "every rank passed the same positions: the loss gathers by itself, so give each rank "
            "its own batch (a DistributedSampler), not a gathered one; or use gather=False"
        )


def parts_of(requests: Sequence[Request]) -> Iterator[tuple[str, Part]]:
    """All parts, each with a name: the numbers of request and part."""
    for number, request in enumerate(requests):
        for place, part in enumerate(request.parts):
            yield f"{number}.{place}", part
