"""The processes that train together, and how what each of them has becomes one thing.

Shapes: `W` ranks, `V` copies, `n` rows of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss

Gather = bool | Literal["even"] | dist.ProcessGroup
"""True: ranks gather; "even": so, and all their batches are of one size (nothing is checked, so
nothing waits for the device and a CUDA graph can record it); a process group: among its ranks only.
False: every rank has a pool of its own."""


class Ranks(NamedTuple):
    """This process among those that train together, and who counts what it sends."""

    rank: int
    world: int
    group: dist.ProcessGroup | None
    loss_fn: ContrastiveLoss

    @classmethod
    def of(cls, loss_fn: ContrastiveLoss) -> Ranks | None:
        """The ranks a loss works with; None where it is alone."""
        if getattr(loss_fn, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel calls copies of the loss and throws them away, and its chains "
                "with them; use torchrun and DistributedDataParallel, or keep the loss outside"
            )
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = loss_fn.gather if isinstance(loss_fn.gather, dist.ProcessGroup) else None
        world = dist.get_world_size(group)
        return cls(dist.get_rank(group), world, group, loss_fn) if world > 1 else None

    @property
    def join(self) -> bool:
        """Whether their batches are one; else only what is done to the state is done together."""
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


def check_gather(gather: Gather, shard_state: bool) -> Gather:
    """Refuse what is none."""
    if shard_state and gather is False:
        raise ValueError("shard_state=True needs gather=True: its ranks work on one batch")
    if not isinstance(gather, (bool, dist.ProcessGroup)) and gather != "even":
        raise ValueError(f"gather must be True, False, 'even' or a process group, got {gather!r}")
    return gather
