"""State in blocks: of M rows every rank owns some, and all ranks read and write all of them.

Rows are read from their owners by all_to_all (positions go out, rows come back) and written without
a message: all ranks know the joined batch, and each keeps what it owns. Blocks are those of
`DTensor` (`torch.chunk`'s), so that `torch.distributed.checkpoint` saves them as they lie and loads
them into any number of ranks.

Shapes: `M` rows in all, `m` rows of this rank, `W` ranks, `n` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from negchain.losses.state import Rows
from negchain.pool import write_rows

if TYPE_CHECKING:
    from negchain.losses.distributed import Ranks


@dataclass(frozen=True)
class Shards(Rows):
    """The block of M rows that lies on this rank; what `Rows` does, over all ranks."""

    ranks: Ranks

    @property
    def block(self) -> int:
        """Rows of every rank but the last ones."""
        return -(-self.total // self.ranks.world)

    @property
    def first(self) -> int:
        """Position of the first row here."""
        return min(self.block * self.ranks.rank, self.total)

    @property
    def count(self) -> int:
        """m."""
        return min(self.block, self.total - self.first)

    def read(self, table: Tensor, slots: Tensor) -> Tensor:  # [m,...] [n] -> [n,...]
        """Rows at some positions, from their owners; all ranks read at the same time."""
        if slots.dim() > 1:  # they have many repeats: each is asked for once
            each, place = torch.unique(slots, return_inverse=True)
            return self.read(table, each)[place]
        owner = slots // self.block
        order = torch.argsort(owner, stable=True)
        wanted = torch.bincount(owner, minlength=self.ranks.world)
        asked = self.ranks.all_gather(wanted).tolist()  # [of whom][by whom], transposed below
        out, back = asked[self.ranks.rank], [row[self.ranks.rank] for row in asked]
        asks = self.ranks.all_to_all(slots[order], out, back)
        found = self.ranks.all_to_all(table[asks - self.first], back, out)
        return torch.empty_like(found).index_copy_(0, order, found)

    def write(
        self,
        table: Tensor,
        slots: Tensor,
        values: Tensor,
        allowed: Tensor,
        changed: Tensor | None = None,
    ) -> None:
        """`negchain.pool.write_rows`; every rank keeps its own rows."""
        own = slots - self.first
        mine = allowed & (own >= 0) & (own < self.count)
        changed = None if changed is None else changed[mine]
        write_rows(table, own[mine], values[mine], mine[mine], changed)

    def every(self, value: Tensor) -> Tensor:  # [...] -> [W,...]
        """The same thing of every rank."""
        return self.ranks.all_gather(value.reshape(-1)).view(-1, *value.shape)

    def draw(self, log_q: Tensor, uniforms: Tensor) -> Tensor:  # [m], [n] in (0,1] -> [n]
        """i.i.d. draws from exp(log_q) over all rows: an owner by its mass, then a row within."""
        ends = self.every(log_q.double().exp().sum()).cumsum(0)
        points = uniforms.double() * ends[-1]
        owner = torch.searchsorted(ends, points).clamp_(max=self.ranks.world - 1)
        begin = ends[self.ranks.rank] - log_q.double().exp().sum()
        cumulative = log_q.double().exp().cumsum(0)
        found = torch.searchsorted(cumulative, points - begin).clamp_(max=max(self.count - 1, 0))
        return self.every(torch.where(owner == self.ranks.rank, found + self.first, 0)).sum(0)

    def outward(self, local: Tensor, dim: int) -> Tensor:
        """A state as the outside sees it: a DTensor."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        group = self.ranks.group or torch.distributed.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, local.device.type)
        shape = torch.Size([*local.shape[:dim], self.total, *local.shape[dim + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(dim)], shape=shape, stride=stride)

    def inward(self, saved: Tensor, dim: int) -> Tensor:
        """The rows of a saved state that lie here."""
        if hasattr(saved, "to_local"):
            return saved.to_local()  # type: ignore[no-any-return]
        return saved.narrow(dim, self.first, self.count)
