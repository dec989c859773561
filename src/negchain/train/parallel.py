"""An encoder under several ranks: BatchNorm over all of them, and weights in parts.

`join_norms` computes what one process does on the whole batch, on any device (torch's SyncBatchNorm
is for GPUs only): plain arithmetic and two sums over ranks per layer. Parameters, running
statistics and their names stay those of the layer.

`Shards` (`--shard-encoder`): a rank keeps 1/W of weights, gradients and moments. FSDP2 gathers the
weights of a block when it runs and drops them afterwards. A rank gets the mean gradient of its own
part. Rank 0, which evaluates and writes, has a whole copy in host memory; all ranks bring it up to
date together. Checkpoints are those of any other run.

Shapes: `R` rows of a rank, `C` channels.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from negchain.optim import load_optimizer
from negchain.train.team import Team

BLOCK = 1 << 20  # a block of at least so many parameters is gathered by itself


def join_norms(encoder: nn.Module) -> int:
    """Let every BatchNorm of an encoder see all ranks while it trains; returns how many."""
    layers = [layer for layer in encoder.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        layer.forward = partial(_forward, layer, layer.forward)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: _BatchNorm, alone: Any, x: Tensor) -> Tensor:  # [R,C,...]
    if not layer.training:
        return alone(x)  # type: ignore[no-any-return]
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    wide = x if x.dtype == torch.float64 else x.float()
    size = wide.new_tensor([x.numel() // x.shape[1]])
    sums: Tensor = _Sum.apply(torch.cat([wide.sum(dims), size]))  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    squares: Tensor = _Sum.apply(centred.square().sum(dims))  # type: ignore[no-untyped-call]
    var = squares / count
    _remember(layer, mean.detach(), var.detach() * count / (count - 1))
    found = centred * torch.rsqrt(var + layer.eps).view(shape)
    if layer.weight is not None:
        found = found * layer.weight.view(shape) + layer.bias.view(shape)
    found = found.to(x.dtype)
    for name in ("drop", "act"):  # timm's, which is one layer with its activation
        if isinstance(after := getattr(layer, name, None), nn.Module):
            found = after(found)
    return found


def _remember(layer: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    layer.num_batches_tracked.add_(1)  # type: ignore[union-attr]
    share = layer.momentum
    if share is None:
        share = 1 / float(layer.num_batches_tracked)  # type: ignore[arg-type]
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(var.to(layer.running_var.dtype), share)


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of all ranks' gradients.

    (torch.distributed.nn's all_reduce, which torch 2.15 deprecates for a private one.)
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Shards:
    """The parts ranks train, beside the whole encoder.

    The encoder is alike on every rank. Its `towers` are cut, in place; the rest stays whole.
    """

    def __init__(
        self, encoder: nn.Module, towers: Iterable[nn.Module], team: Team, device: torch.device
    ) -> None:
        self.parts, self.team, self.device = encoder, team, device
        self.whole = copy.deepcopy(encoder).cpu() if team.leads else encoder
        self.moments: dict[str, Any] = {}  # `state_dict` of the optimizer, whole, on rank 0
        # FSDP2 takes weights in their plain layout alone
        encoder.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        mesh = init_device_mesh(device.type, (team.world,))
        for tower in dict.fromkeys(towers):
            lists = [m for m in tower.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]
            scalars = {p for p in tower.parameters() if p.ndim == 0}  # FSDP2 takes none
            for block in reversed([block for each in lists for block in each]):  # inner ones first
                left = [p for p in block.parameters() if type(p) is nn.Parameter]
                if sum(p.numel() for p in left) >= BLOCK and _can_be_cut(block):
                    fully_shard(block, mesh=mesh, ignored_params=scalars)
            fully_shard(tower, mesh=mesh, ignored_params=scalars)

    def collected(
        self, optimizer: torch.optim.Optimizer, work: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Work of rank 0 that finds the whole encoder and its moments; all ranks call this."""
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.parts, options=full)
        # not get_optimizer_state_dict: before the first step it takes one, and Adam counts it
        state = optimizer.state_dict()
        state["state"] = {
            number: {name: self._full(value) for name, value in moments.items()}
            for number, moments in state["state"].items()
        }

        def on_the_device() -> Any:
            self.whole.load_state_dict(weights)
            self.moments = state
            self.whole.to(self.device)
            try:
                return work()
            finally:
                self.whole.cpu()
                self.moments = {}

        return on_the_device

    def _full(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full.cpu() if self.team.leads else None

    def load(
        self,
        weights: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        moments: dict[str, Any],
    ) -> None:
        """Take this rank's parts of a whole encoder and of its moments."""
        set_model_state_dict(self.parts, weights, options=StateDictOptions(full_state_dict=True))
        own = [p for group in optimizer.param_groups for p in group["params"]]

        def part(value: Any, like: Tensor) -> Any:
            if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
                return value
            return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

        state = {
            number: {name: part(value, own[number]) for name, value in each.items()}
            for number, each in moments["state"].items()
        }
        load_optimizer(optimizer, {**moments, "state": state})


def _can_be_cut(module: nn.Module) -> bool:
    """Whether FSDP2 can change a module's class, as it must; sentence-transformers' cannot be."""
    try:
        copy.copy(module).__class__ = type("Cut", (FSDPModule, type(module)), {})
    except TypeError:
        return False
    return True
