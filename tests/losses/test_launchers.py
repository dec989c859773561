"""Two and four processes under other people's wrappers: the numbers of one process.

Every loss and way of asking of `FEWER`, uneven batches, and both losses inside one wrapped module.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import losses_under_test as under_test
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_distributed import FEWER, Trained, batches, built, same, wrapped
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow  # imports of these packages take seconds in every process

Seen = list[dict[str, Tensor]]


class One(nn.Module):
    """An encoder and a loss, as `Trained`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        loss_fn, self.net, self.items = built(name)
        self.losses = nn.ModuleList([loss_fn])

    def forward(self, index: Tensor) -> Tensor:
        loss = under_test.run(self.losses[0], self.net, self.items, index)
        # whatever a loss leaves out is in the graph, so that DDP need not look for it
        return loss + 0 * sum(p.sum() for p in self.parameters())


def module_of(name: str) -> nn.Module:
    return Trained() if name == "both" else One(name)


def noted(module: nn.Module) -> dict[str, Tensor]:
    """Gradients and state after a backward pass."""
    grads = {n: _whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    return grads | {n: v.clone() for n, v in module.losses.state_dict().items()}  # type: ignore[union-attr]


def _whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


def stepped(
    module: nn.Module, setup: Callable[[Any], Any], backward: Callable[[Tensor], Any]
) -> Callable[[list[Tensor]], Seen]:
    """A loop of one's own."""
    parallel = setup(module)

    def play(own: list[Tensor]) -> Seen:
        seen = []
        for index in own:
            module.zero_grad()
            backward(parallel(index))
            seen.append(noted(module))
        return seen

    return play


def accelerate(world: int) -> Any:
    from accelerate import Accelerator

    launched = Accelerator(cpu=True)
    return lambda module: stepped(module, launched.prepare, launched.backward)


def fabric(world: int) -> Any:
    from lightning.fabric import Fabric

    launched = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    launched.launch()
    return lambda module: stepped(module, launched.setup, launched.backward)


def lightning(world: int) -> Any:
    from lightning import LightningModule, Trainer

    class Fitted(LightningModule):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.seen = inner, list[dict[str, Tensor]]()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.inner(batch)

        def on_after_backward(self) -> None:
            self.seen.append(noted(self.inner))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def prepared(module: nn.Module) -> Callable[[list[Tensor]], Seen]:
        def play(own: list[Tensor]) -> Seen:
            fitted = Fitted(module)
            trainer = Trainer(
                accelerator="cpu", devices=world, strategy="ddp", max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            trainer.fit(fitted, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
            return fitted.seen

        return play

    return prepared


def fsdp(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))

    def setup(module: Any) -> Any:
        fully_shard(module.net, mesh=mesh)  # the encoder; beta, a scalar, needs no averaging
        return module

    return lambda module: stepped(module, setup, Tensor.backward)


LAUNCHERS = {"accelerate": accelerate, "fabric": fabric, "lightning": lightning, "fsdp": fsdp}


def one_rank(rank: int, world: int, name: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # advice about loaders
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun tells it
    told |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0, "NODE_RANK": 0}
    os.environ.update({key: str(value) for key, value in told.items()})
    prepared, own = LAUNCHERS[name](world), list(batches(rank, world))
    seen = {case: prepared(module_of(case))(own) for case in ("both", *FEWER)}
    torch.save(seen, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    found = {
        case: stepped(One(case), lambda module: module, Tensor.backward)(list(batches(0, 1)))
        for case in FEWER
    }
    return found | {"both": wrapped(0, 1)[:-1]}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_numbers_are_those_of_one_process(
    name: str, world: int, tmp_path: Path, alone: dict[str, Seen]
) -> None:
    pytest.importorskip({"fabric": "lightning", "fsdp": "torch"}.get(name, name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = (world, name, port, str(tmp_path))
    mp.start_processes(one_rank, args, nprocs=world, start_method="spawn")
    for rank in range(world):
        seen = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for case, expected in alone.items():
            same(seen[case], expected)
