"""What a loss wants encoded before it is called, and what came back.

    first  = loss_fn.request(index)                 carried states, uniform draws, a table's share
    first.answer(encoder(items[first.ids]))
    second = loss_fn.request(index, z_a, z_b)       draws that depend on the batch's embeddings
    if len(second.ids):
        second.answer(encoder(items[second.ids]))
    loss   = loss_fn(z_a, z_b, index, first, second)

The same lines serve every loss: a request may be empty. `loss_fn(z_a, z_b, index, encode=...)`
does all of it. A request of another loss, batch or step is refused.

Shapes: `R` positions, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from negchain.losses.batch import Call, Ids, as_ids, kept
from negchain.pool import LogQ
from negchain.printable import counted

Tower = Literal["keys", "anchors"]
TOWERS: tuple[Tower, Tower] = ("keys", "anchors")  # whose encoder makes the keys of a side
Purpose = Literal["carried", "draw", "refresh"]
Encode = Callable[[Tensor], Tensor]
Encodes = Encode | tuple[Encode, Encode]  # of keys and anchors, or (anchors', keys')


class Want(NamedTuple):
    """Positions to encode: where they lie, and whether the loss trains what comes back.

    Example:
        >>> import negchain
        >>> (want,) = negchain.EMC2Loss(50).request(torch.tensor([4, 7])).wants
        >>> len(want.ids), want.tower, want.gradient
        (2, 'keys', True)
    """

    ids: Tensor  # [R]; with k stored augmentations `item * k + augmentation`
    tower: Tower = "keys"  # "anchors": by the encoder of z_a (paired views in both directions)
    gradient: bool = True


@dataclass
class Part:
    """Ids to encode for one purpose, and what the loss remembers of them."""

    purpose: Purpose
    side: int
    ids: Tensor  # [R]; draws of their own for each row [N,C]
    log_q: LogQ = None  # of draws, as in `Draw`
    embeddings: Tensor | None = None
    log_partition: Tensor | None = None  # [N] of the distribution a negative was drawn from
    per_row: int = 0  # ids that every sample of the batch has here; 0: it is not made per sample
    whole: Tensor | None = None  # where ranks share the work: the ids of all of them

    @property
    def want(self) -> Want:
        """What the caller has to know of it."""
        return Want(self.ids.flatten(), TOWERS[self.side], self.purpose != "refresh")


@dataclass
class Request:
    """What one call of one loss wants encoded; made by `loss_fn.request`.

    Example:
        >>> import negchain
        >>> items, encoder = torch.randn(50, 3), torch.nn.Linear(3, 8)
        >>> loss_fn, index = negchain.EMC2Loss(50), torch.tensor([4, 7, 9])
        >>> request = loss_fn.request(index)
        >>> request.ids.shape                     # one carried negative per sample
        torch.Size([3])
        >>> z = encoder(torch.cat([items[index], items[index] + 0.1, items[request.ids]]))
        >>> loss = loss_fn(z[:3], z[3:6], index, request.answer(z[6:]))
    """

    owner: object
    index: Tensor  # [B]
    turn: int  # number of the call it is for
    parts: list[Part] = field(default_factory=list)
    augmentation: tuple[Tensor, Tensor] | None = None  # [B] each, of stored ones
    ahead: int = 0  # calls between its making and the one it is for

    def __post_init__(self) -> None:
        self.index, self.augmentation = kept(self.index), kept(self.augmentation)

    @property
    def wants(self) -> tuple[Want, ...]:
        """What to encode, part by part."""
        return tuple(part.want for part in self.parts)

    @property
    def ids(self) -> Tensor:  # [R]
        """All positions in one tensor, where one encoder makes all of them."""
        if len({want.tower for want in self.wants}) > 1:
            raise ValueError(
                "this request asks for keys and for anchors (paired views in both directions); "
                "encode request.wants one by one and pass the list to answer()"
            )
        return torch.cat([self.index[:0], *(want.ids for want in self.wants)])

    def answer(self, embeddings: Tensor | Sequence[Tensor]) -> Request:
        """Hand back the embeddings [R, D] of `ids`, or a list with one tensor per want."""
        counts = [want.ids.numel() for want in self.wants]
        if isinstance(embeddings, Tensor):
            if len(embeddings) != sum(counts):
                raise ValueError(
                    f"the answer must hold one embedding per id, {sum(counts)}, "
                    f"got {len(embeddings)}"
                )
            embeddings = torch.split(embeddings, counts)
        if len(embeddings) != len(counts):
            raise ValueError(
                f"the answer must hold one tensor per want, {len(counts)}, got {len(embeddings)}"
            )
        for part, count, z in zip(self.parts, counts, embeddings, strict=True):
            part.embeddings = _embeddings(z, count)
        return self

    def encode(self, encode: Encodes, *others: Request) -> Request:
        """Answer this request, and others with it, in one pass through each encoder.

        What is not trained is a pass of its own. At small batches a step costs its passes.

        Args:
            encode: positions [R] to embeddings [R, D]; a pair (anchors', keys') for two encoders.
        """
        asked = [(part, part.want) for request in (self, *others) for part in request.parts]
        encoders = encoders_of(encode, {want.tower for _, want in asked})
        passes: dict[tuple[int, bool], list[Part]] = {}
        for part, want in asked:
            number = len(encoders) - 1 if want.tower == "keys" else 0
            passes.setdefault((number, want.gradient), []).append(part)
        for (number, gradient), parts in passes.items():
            ids = [part.ids.flatten() for part in parts]
            with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
                z = encoders[number](ids[0] if len(ids) == 1 else torch.cat(ids))
            counts = [len(i) for i in ids]
            z = _embeddings(z, sum(counts))
            split = torch.split(z, counts) if len(counts) > 1 else (z,)
            for part, own in zip(parts, split, strict=True):
                part.embeddings = own
        return self


def encoders_of(encode: Encodes, towers: Collection[Tower]) -> tuple[Encode, ...]:
    """One encoder, or the anchors' and the keys', if they can make what is asked for."""
    encoders = encode if isinstance(encode, tuple) else (encode,)
    if len(encoders) not in (1, 2) or not all(callable(each) for each in encoders):
        raise ValueError(
            "encode must be a function from positions [R] to embeddings [R, D], or a pair of "
            f"them, got {type(encode).__name__}"
        )
    if len(encoders) == 1 and "anchors" in towers:
        raise ValueError(
            "views='paired' in both directions asks for keys and for anchors; pass "
            "encode=(anchors', keys'), or build the loss with symmetric=False"
        )
    return encoders


def _embeddings(z: object, count: int) -> Tensor:  # [count, D]
    """An answer to so many ids, if it is one."""
    got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
    if not isinstance(z, Tensor) or z.dim() != 2 or len(z) != count:
        ids = counted(count, "id", "ids")
        raise ValueError(f"the answer to {ids} must be a tensor [{count}, D], got {got}")
    return z


def answered(requests: Sequence[Request], purpose: Purpose, side: int) -> tuple[Part, Tensor]:
    """The part for a purpose and side, and its embeddings; an error that says what to do."""
    for part in (part for request in requests for part in request.parts):
        if (part.purpose, part.side) == (purpose, side) and part.embeddings is not None:
            return part, part.embeddings
    which = "drawn" if purpose == "draw" else purpose
    raise ValueError(
        f"this loss needs its {which} negatives encoded: call it with "
        "encode=lambda ids: encoder(items[ids]), or pass loss_fn.request(index) and "
        "loss_fn.request(index, z_a, z_b), answered"
    )


def check_answers(requests: Sequence[Request], like: Tensor) -> None:
    """Refuse requests without an answer, and answers whose width is not that of the batch."""
    for part in (part for request in requests for part in request.parts):
        if part.embeddings is None:
            raise ValueError(
                "this request was not answered: call request.answer(encoder(items[request.ids]))"
            )
        z, dim = part.embeddings, like.shape[-1]
        if z.dim() != 2 or z.shape[1] != dim or not z.is_floating_point():
            raise ValueError(
                f"an answer must hold embeddings [R, D] with D = {dim} in floating point, got "
                f"{z.dtype} {tuple(z.shape)}"
            )


def check_requests(loss_fn: Any, call: Call, requests: Sequence[Request]) -> None:
    """Refuse requests that are not those of this loss, batch and call."""
    turn = loss_fn._turn
    for request in requests:
        if not isinstance(request, Request):
            raise ValueError(
                f"requests follow index, got {type(request).__name__}; a function from positions "
                "to embeddings is passed by name, encode=..."
            )
        if request.owner is not loss_fn:
            raise ValueError("this request was made by another loss; ask this one")
        views = zip(request.augmentation or (), call.augmentation or (), strict=False)
        if call.index is None or not all(_same(*p) for p in ((request.index, call.index), *views)):
            raise ValueError(
                "this request was made for another batch: its index (or augmentation) is not that "
                "of this call; ask again with the positions you pass here"
            )
        drawn = any(part.purpose == "draw" for part in request.parts)
        if drawn and request.turn != turn:
            raise ValueError(
                f"this request was made for call {request.turn} of the loss and this is call "
                f"{turn}: its draws are of another step; ask anew before every call (and no "
                "encode= may call the loss that it answers)"
            )


def check_held(loss_fn: Any, call: Call, requests: Sequence[Request]) -> None:
    """Refuse carried states that were asked for before another visit moved their chains."""
    for request in requests:
        asked = [part for part in request.parts if part.purpose == "carried"]
        if not asked or request.turn - request.ahead == loss_fn._turn:
            continue
        held = loss_fn._asked(request.index, call.augmentation)
        for part, now in zip(asked, held, strict=True):
            if not torch.equal(part.ids, now):
                raise ValueError(
                    "the chains of this batch have moved since its request was made; ask again"
                )


def _same(mine: Ids, given: Ids) -> bool:
    """Whether two batches have equal positions; taken for granted in a CUDA graph."""
    if mine is given:
        return True
    if len(given) != len(mine):
        return False
    mine = torch.as_tensor(mine)
    given = as_ids("index", given, len(mine), mine.device)
    if mine.is_cuda and (
        mine.data_ptr() == given.data_ptr() or torch.cuda.is_current_stream_capturing()
    ):
        return True
    return torch.equal(mine.long(), given)
