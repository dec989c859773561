"""Requests that a caller kept and hands back: are they those of this loss, batch and call?

A call with `encode=` makes requests of its own, and passes none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from negchain.losses.batch import Call, Ids, as_ids
from negchain.losses.request import Request


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
