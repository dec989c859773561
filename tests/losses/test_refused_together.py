"""A call that one of two ranks makes wrongly is refused on both: none waits for the other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from losses_under_test import M
from torch import Tensor, nn

from forked import fork_ranks
from negchain import (
    MH,
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    InBatch,
    Informed,
    NegativeCacheLoss,
    SogCLRLoss,
    TopKLoss,
)

DIM = 5


def z(rows: int = 4, dim: int = DIM) -> Tensor:
    return torch.randn(rows, dim, dtype=torch.float64)


def encode(ids: Tensor) -> Tensor:
    return z(len(ids))


def positions(rank: int) -> Tensor:
    return torch.arange(4) + 4 * rank


def given(rank: int, bad: Draw, good: Draw, gather: bool = True, **more: Any) -> None:
    loss_fn = EMC2Loss(M, proposals=Given(), gather=gather)
    draw = bad if rank else good
    call = {"draw": draw, "drawn": z(draw.ids.numel())} | (more if rank else {})
    request = loss_fn.request(positions(rank)).encode(encode)
    loss_fn(z(), z(), positions(rank), request, **call)


def local_draws(rank: int) -> None:
    loss_fn = EMC2Loss(M, kernel=MH(burn_in=3), proposals=Given(), gather=False)
    draw = Draw(torch.arange(4 - rank))
    more = {"draw": draw, "drawn": z(4 - rank), "encode": encode}
    loss_fn(z(), z(), positions(rank), **more)


def joined_burn_in(rank: int) -> str:
    """Of the joined batch, 7 proposals and not 3; both ranks refuse more in the same words."""
    called(rank, EMC2Loss(M, kernel=MH(burn_in=6)))
    with pytest.raises(ValueError) as error:
        called(rank, EMC2Loss(M, kernel=MH(burn_in=7)))
    return str(error.value)


def corpus(rank: int, bad: Any, **options: Any) -> None:
    loss_fn = DCLLoss(M, num_keys=30, views="paired", **options)
    loss_fn(z(), z(), positions(rank), key_index=bad if rank else positions(rank))


def unasked(rank: int, loss_fn: EMC2Loss) -> None:
    request = loss_fn.request(positions(rank)).encode(encode)
    loss_fn(z(), z(), positions(rank), *([] if rank else [request]))


def called(rank: int, loss_fn: Any) -> None:
    loss_fn(z(), z(), positions(rank), encode=encode)


def known(rank: int, bad: Any) -> None:
    good = torch.zeros(4, 2, dtype=torch.int64)
    DCLLoss(M)(z(), z(), positions(rank), known=bad if rank else good)


def local(rank: int, loss_fn: Any, spoil: float = 1.0, shift: int = 0, answers: float = 1) -> None:
    spoil, shift, answers = (spoil, shift, answers) if rank else (1.0, 0, 1)
    index = positions(rank) + shift
    loss_fn(z() * spoil, z(), index, encode=lambda ids: encode(ids) * answers)


def stored(rank: int) -> None:
    loss_fn, first = EMC2Loss(M, augmentations=2, carried="cached", gather=False), 0 * positions(0)
    loss_fn(z(), z(), positions(rank), augmentation=(first, first + 1 + rank))


def moved(rank: int) -> None:
    """Chains of rank 1 move between its request and its call."""
    loss_fn = EMC2Loss(M, gather=False)
    early = loss_fn.request(positions(1 if rank else 3)).encode(encode)
    for _ in range(3):
        loss_fn(z(), z(), positions(rank), encode=encode)
    loss_fn(z(), z(), early.index, early)


NAN, ONE = float("nan"), torch.ones(1, dtype=torch.int64)
THREE, TWO = Draw(torch.zeros(8, 3, dtype=torch.int64)), Draw(torch.zeros(8, 2, dtype=torch.int64))
WRONG: dict[str, Callable[[int], Any]] = {
    "key_index too short": lambda r: corpus(r, ONE),
    "key_index no integers": lambda r: corpus(r, torch.zeros(4)),
    "known too short": lambda r: known(r, ONE[None]),
    "known flat": lambda r: known(r, torch.zeros(4, dtype=torch.int64)),
    "known ragged": lambda r: known(r, [[1], [1, 2], [3], [4]]),
    "index missing": lambda r: DCLLoss()(z(), z(), None if r else positions(r)),
    "another type": lambda r: DCLLoss(M)(
        *[z().to([z().dtype, torch.float32][r])] * 2, positions(r)
    ),
    "another width": lambda r: DCLLoss(M)(z(4, 5 - r), z(4, 5 - r), positions(r)),
    "another size": lambda r: DCLLoss(M + r)(z(), z(), positions(r)),
    "another layout": lambda r: EMC2Loss(M, views=["shared", "paired"][r])(
        z(), z(), positions(r), encode=[encode, (encode, encode)][r]
    ),
    "another method": lambda r: called(r, [SogCLRLoss, DCLLoss][r](M)),
    "another beta": lambda r: called(r, DCLLoss(M, 5.0 + r)),
    "a learned beta": lambda r: called(r, DCLLoss(M, [5.0, nn.Parameter(torch.tensor(5.0))][r])),
    "another normalize": lambda r: called(r, DCLLoss(M, normalize=r == 0)),
    "another symmetric": lambda r: called(r, DCLLoss(M, views="paired", symmetric=r == 0)),
    "another kernel": lambda r: called(r, EMC2Loss(M, kernel=MH(burn_in=r))),
    "other copies": lambda r: called(r, EMC2Loss(M, proposals=InBatch(1 + r))),
    "another gamma": lambda r: called(r, SogCLRLoss(M, gamma=0.5 + 0.1 * r)),
    "another top": lambda r: called(r, TopKLoss(M, num=2, top=4 + r)),
    "another pool": lambda r: called(r, EMC2Loss(M, gather=r == 0)),
    "answers of another width": lambda r: EMC2Loss(M)(
        z(), z(), positions(r), encode=lambda ids: z(len(ids), 5 - r)
    ),
    "no answer": lambda r: unasked(r, EMC2Loss(M)),
    "draws of too few rows": lambda r: given(r, Draw(torch.zeros(7, 3, dtype=torch.int64)), THREE),
    "draws for one view": lambda r: given(r, Draw(THREE.ids[:4]), THREE),
    "draws of another width": lambda r: given(r, TWO, THREE),
    "draws without embeddings": lambda r: given(r, THREE, THREE, drawn=None),
    "draws of another set": lambda r: given(r, Draw(THREE.ids, torch.zeros(M + 1)), THREE),
    "draws nobody asked for": lambda r: DCLLoss(M)(
        z(), z(), positions(r), draw=THREE if r else None, drawn=z(24) if r else None
    ),
    "before informed draws": lambda r: EMC2Loss(M, proposals=Informed(4))(
        z(), z(), positions(r), encode=encode, known=torch.zeros(4 - r, 1, dtype=torch.int64)
    ),
    "local NaN": lambda r: local(r, EMC2Loss(M, gather=False), NAN),
    "local position": lambda r: local(r, EMC2Loss(M, gather=False), shift=M),
    "local answer": lambda r: local(r, EMC2Loss(M, gather=False), answers=NAN),
    "local, no answer": lambda r: unasked(r, EMC2Loss(M, gather=False)),
    "local average": lambda r: local(r, SogCLRLoss(M, gather=False), NAN),
    "local table": lambda r: local(r, NegativeCacheLoss(M, gather=False), shift=M),
    "local informed": lambda r: local(r, EMC2Loss(M, proposals=Informed(4), gather=False), NAN),
    "local, moved since": moved,
    "local stored view": stored,
    "local draws": lambda r: given(r, Draw(THREE.ids + M), THREE, gather=False),
    "local drawn": lambda r: given(r, THREE, THREE, gather=False, drawn=NAN * z(24)),
    "local burn-in": lambda r: EMC2Loss(M, kernel=MH(burn_in=2), gather=False)(
        z(4 - r), z(4 - r), positions(r)[r:], encode=encode
    ),
    "local burn-in of draws": lambda r: local_draws(r),
    "local key": lambda r: corpus(r, positions(r) + 30, gather=False),
}


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{folder}/meet", wait, 2, rank)
    said = {}
    for name, call in WRONG.items():
        with pytest.raises(ValueError) as error:
            call(rank)
        said[name] = str(error.value)
    # ranks still understand each other, and batches that only look alike are taken
    DCLLoss(M)(z(2), z(2), torch.tensor([[0, 1], [2, 0]][rank]))
    said["joined burn-in"] = joined_burn_in(rank)
    torch.save(said, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refused")
    fork_ranks(2, one_rank, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", WRONG)
def test_both_ranks_refuse(name: str, said: list[dict[str, str]]) -> None:
    first, second = said[0][name], said[1][name]
    assert ("ranks [1] refused" in first) != ("all ranks must agree on" in first), first
    assert second == first if "agree" in first else "refused" not in second


def test_both_ranks_refuse_a_burn_in_of_the_whole_joined_batch(said: list[dict[str, str]]) -> None:
    assert said[0]["joined burn-in"] == said[1]["joined burn-in"]
    assert "offers 7 at batch size 8" in said[0]["joined burn-in"]
