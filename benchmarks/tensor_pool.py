"""TorchRec's TensorPool beside our shards: rows looked up and written over two processes.

    python -m venv V; V/bin/pip install torch==2.14.0 fbgemm-gpu-cpu==1.9.0
    V/bin/pip install --no-deps torchrec==1.9.2 tensordict torchmetrics pyre-extensions ...
    B=512 OMP_NUM_THREADS=1 PYTHONPATH=src V/bin/python benchmarks/tensor_pool.py

(fbgemm's newest release does not load beside torch 2.15.)
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from negchain import EMC2Loss
from negchain.losses.distributed import Ranks
from negchain.losses.state import Rows

M, D, B = 10**6, 128, int(os.environ.get("B", "512"))
CPU = torch.device("cpu")


def timed(call: Callable[[], Any], times: int = 30) -> float:
    """Milliseconds of a call."""
    for _ in range(3):
        call()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    dist.barrier()
    return (time.perf_counter() - begun) / times * 1e3


def there(found: Any) -> Any:
    """What a look-up promised."""
    while hasattr(found, "wait"):
        found = found.wait()
    return found


def every(rows: torch.Tensor, world: int) -> torch.Tensor:
    """The rows of all ranks."""
    found = rows.new_empty(world * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(found, rows)
    return found


def one_rank(rank: int, world: int, folder: str) -> None:
    """Both, in turn."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    from torchrec.distributed.tensor_pool import TensorPoolSharder
    from torchrec.distributed.types import (
        ObjectPoolShardingPlan,
        ObjectPoolShardingType,
        ShardingEnv,
    )
    from torchrec.modules.tensor_pool import TensorPool

    g = torch.Generator().manual_seed(rank)
    ids, values = torch.randperm(M // 2, generator=g)[:B] * 2 + rank, torch.randn(B, D, generator=g)
    plan = ObjectPoolShardingPlan(sharding_type=ObjectPoolShardingType.ROW_WISE)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    pool = TensorPoolSharder().shard(
        TensorPool(pool_size=M, dim=D, dtype=torch.float32, device=CPU), plan, env, CPU
    )
    rows = Rows.of(M, Ranks(rank, world, None, EMC2Loss(8)))
    table, yes = torch.zeros(rows.count, D), torch.ones(world * B, dtype=torch.bool)
    all_ids, all_values = every(ids, world), every(values, world)
    calls: list[Callable[[], Any]] = [
        lambda: there(pool.lookup(ids)),
        lambda: rows.read(table, ids),
        lambda: there(pool.update(ids, values)),
        lambda: rows.write(table, all_ids, all_values, yes),
        lambda: rows.write(table, every(ids, world), every(values, world), yes),
    ]
    calls[2](), calls[3]()
    assert torch.equal(calls[0](), values) and torch.equal(calls[1](), values)
    best = [min(t) for t in zip(*([timed(call) for call in calls] for _ in range(8)), strict=True)]
    if rank == 0:
        print(f"| {B} | " + " | ".join(f"{value:.2f}" for value in best) + " |")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (2, folder), nprocs=2, start_method="spawn")
