"""Inside a module wrapped by DistributedDataParallel every rank keeps its own chains.

DDP broadcasts rank 0's buffers at every forward pass; state must not be among them.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from negchain import EMC2Loss, NegativeCacheLoss, SogCLRLoss

RANKS, STEPS, M, DIM = 2, 4, 48, 4


class Trained(nn.Module):
    """An encoder and its losses in one module, as people (and Lightning) write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, DIM)
        self.register_buffer("shared", torch.zeros(1))  # a buffer DDP does broadcast
        self.losses = nn.ModuleList(
            [
                EMC2Loss(M, 5.0),
                EMC2Loss(M, 5.0, "isir", carried="cached", denominator="all"),
                SogCLRLoss(M, 5.0),
                NegativeCacheLoss(M, 5.0),
            ]
        )

    def forward(self, items: Tensor, index: Tensor) -> Tensor:
        z_a, z_b = self.net(items[index]), self.net(items[index] + 0.1)
        values = [f(z_a, z_b, index, encode=lambda i: self.net(items[i])) for f in self.losses]
        return torch.stack(values).sum()


def items_and_batches(rank: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    items = torch.randn(M, 6, generator=generator)
    generator.manual_seed(10 + rank)
    mine = torch.arange(rank * M // RANKS, (rank + 1) * M // RANKS)  # a sampler's share
    return items, [mine[torch.randperm(len(mine), generator=generator)[:6]] for _ in range(STEPS)]


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    module = Trained()
    wrapped = nn.parallel.DistributedDataParallel(module)
    items, batches = items_and_batches(rank)
    seen: list[dict[str, Tensor]] = []
    module.shared += rank
    for index in batches:
        wrapped(items, index).backward()
        seen.append({name: t.clone() for name, t in module.losses.state_dict().items()})
    torch.save({"seen": seen, "shared": module.shared}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_keeps_its_state(tmp_path: Path) -> None:
    mp.start_processes(one_rank, (str(tmp_path),), nprocs=RANKS, start_method="spawn")
    for rank in range(RANKS):
        saved = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert saved["shared"].item() == 0  # what DDP does to a buffer
        _, batches = items_and_batches(rank)
        visited = torch.zeros(M, dtype=torch.bool)
        moved = torch.zeros(M, dtype=torch.bool)
        for index, state in zip(batches, saved["seen"], strict=True):
            visited[index] = True
            held = state["0.chains.states"][0] >= 0
            assert not (moved & ~held).any(), "a chain that had moved was lost"
            assert not (held & ~visited).any(), "a chain of another rank appeared"
            moved |= held
            assert torch.equal(torch.isfinite(state["2.log_u"][0]), visited)
            assert torch.equal(torch.isfinite(state["1.log_partition"][0]), visited)
        assert moved.sum() > 10
    assert int(state["0.step"]) == STEPS
