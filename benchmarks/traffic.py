"""Bytes a rank sends per step with sharded state, counted, against docs/several_gpus.md's formula.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/traffic.py
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/traffic.py chains  # 10^9, in files

For 2, 4 and 8 gloo processes and data sets of 10^5 and 10^7: EMC² (a chain table) and informed
importance weights (a stale table), one step each. Means over ranks: which
rank is asked for how many rows depends on chance, their sum does not.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from negchain import EMC2Loss, ImportanceLoss, Informed

B, D, DRAWS, DUE = 8, 8, 16, 16  # of a rank; draws and refreshed rows of all ranks
OPTIONS = {"views": "paired", "symmetric": False, "dim": D, "shard_state": True}


def formula(world: int, table: bool) -> float:
    """Bytes one rank sends."""

    def read(rows: int) -> float:  # of 4 bytes each
        return 8 * world * (world - 1) + (world - 1) / world * rows * (8 + 4)

    head, ids, z = 80, 8 * B, 4 * D * 2 * B
    if not table:
        return (world - 1) * (head + 2 * ids + z + 4 * D * B) + read(B)
    seen = head + ids + z
    drawn = 4 * world * B + 8 + 8 * DRAWS
    answers = 4 * D * (DRAWS + DUE) // world
    return (world - 1) * (seen + drawn + seen + answers) + read(DRAWS)


def one_rank(rank: int, world: int, size: int, folder: str) -> None:
    """One step of both losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(rank)
    index = torch.arange(B) * (size // B) + rank
    z = torch.randn(2, B, D)
    proposals = Informed(DRAWS, refresh=DUE / size, alone=True)
    counted = []
    for loss_fn in (EMC2Loss(size, **OPTIONS), ImportanceLoss(size, 1.0, proposals, **OPTIONS)):
        loss_fn(*z, index, encode=lambda ids: torch.randn(len(ids), D))
        counted.append(loss_fn.bytes_sent)
    torch.save(counted, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def mapped_rank(rank: int, world: int, folder: str) -> None:
    """Steps over 10^9 chains in a mapped file per rank, and whether the files go on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    size, visited, before = 10**9, list[torch.Tensor](), time.perf_counter()
    make = partial(EMC2Loss, size, chain_file=f"{folder}/chains.bin", **OPTIONS)
    loss_fn = make()
    built = time.perf_counter() - before
    draws = torch.Generator().manual_seed(rank)
    for _ in range(20):
        visited.append(torch.randint(0, size, (B,), generator=draws))
        z = torch.randn(3, B, D, generator=draws)
        loss_fn(z[0], z[1], visited[-1], encode=lambda ids, z=z: z[2])
    sent, memory = loss_fn.bytes_sent / 20, resource.getrusage(resource.RUSAGE_SELF)
    held = loss_fn.held(torch.cat(visited))[0]
    dist.barrier()
    assert torch.equal(make().held(torch.cat(visited))[0], held)
    file = Path(f"{folder}/chains.bin.{rank}-of-{world}")
    print(
        f"| {world} | {rank} | {file.stat().st_size:,} | {built:.0f} s | "
        f"{memory.ru_maxrss >> 10:,} MB | {sent:,.0f} | {formula(world, False):,.0f} |",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


def chains() -> None:
    """The table of 10^9 chains."""
    print("| ranks | rank | bytes of its file | built in | memory at most | sent per step "
          "| formula |")  # fmt: skip
    print("|---|---|---|---|---|---|---|", flush=True)
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            args = (world, folder)
            mp.start_processes(mapped_rank, args, nprocs=world, start_method="forkserver")


def main() -> None:
    """The table."""
    multiprocessing.set_forkserver_preload(["torch"])
    print("| ranks | samples | EMC², counted | formula | importance, counted | formula |")
    print("|---|---|---|---|---|---|")
    for world in (2, 4, 8):
        for size in (10**5, 10**7):
            with tempfile.TemporaryDirectory() as folder:
                args = (world, size, folder)
                mp.start_processes(one_rank, args, nprocs=world, start_method="forkserver")
                every = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
            chains, table = (sum(values) / world for values in zip(*every, strict=True))
            print(
                f"| {world} | 10^{round(math.log10(size))} | {chains:,.0f} "
                f"| {formula(world, False):,.0f} | {table:,.0f} | {formula(world, True):,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    chains() if "chains" in sys.argv else main()
