"""Two processes under other people's wrappers: the gradient of one process."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_distributed import Trained, batches, same, wrapped
from torch import Tensor

pytestmark = pytest.mark.slow  # imports of these packages take seconds in every process


def accelerate() -> Any:
    from accelerate import Accelerator

    launched = Accelerator(cpu=True)
    return launched.prepare, launched.backward


def fabric() -> Any:
    from lightning.fabric import Fabric

    launched = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    launched.launch()
    return launched.setup, launched.backward


def fsdp() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def setup(module: Trained) -> Trained:
        fully_shard(module.net, mesh=mesh)  # the encoder; beta, a scalar, needs no averaging
        return module

    return setup, Tensor.backward


LAUNCHERS = {"accelerate": accelerate, "fabric": fabric, "fsdp": fsdp}


def one_rank(rank: int, name: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun tells it
    told |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0, "NODE_RANK": 0}
    os.environ.update({key: str(value) for key, value in told.items()})
    setup, backward = LAUNCHERS[name]()
    module = Trained()
    parallel = setup(module)
    seen = []
    for index in batches(rank, 2):
        module.zero_grad()
        backward(parallel(index))
        grads = {n: _whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        seen.append(grads | {n: v.clone() for n, v in module.losses.state_dict().items()})
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_gradient_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"fabric": "lightning", "fsdp": "torch"}.get(name, name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(one_rank, (name, port, str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in range(2):
        seen = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        same(seen, wrapped(0, 1)[:-1])
