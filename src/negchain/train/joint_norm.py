"""BatchNorm over the rows of all ranks, on any device.

Torch's SyncBatchNorm is for GPUs only; this is plain arithmetic and two sums over ranks per layer,
so that several processes compute what one does on the whole batch. Parameters, running statistics
and their names stay those of the layer.

Shapes: `R` rows of a rank, `C` channels.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
