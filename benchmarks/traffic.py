"""Bytes a rank sends per step with sharded state, counted, against docs/several_gpus.md's formula.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/traffic.py

For 2, 4 and 8 gloo processes and data sets of 10^5 and 10^7: EMC² (a chain table) and informed
importance weights (a stale table), one step each. Means over ranks: which
rank is asked for how many rows depends on chance, their sum does not.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
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
    main()
