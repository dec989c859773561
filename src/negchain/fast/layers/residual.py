"""The residual blocks of a ResNet without normalisation, and its pooling, as one function.

    a_0 = x,   a_i = ReLU(w_i * a_{i-1}),   y = ReLU(w_n * a_{n-1} + x')      x' = x or w_down * x

cuDNN adds the shortcut and rectifies before it writes a convolution's result, and in the backward
pass adding the shortcut's gradient and passing the ReLU below is one launch. Torch's modules launch
these one by one: 64 images of 24 x 24 pixels, 0.0196 ms for a convolution, the addition and ReLU,
0.0139 for the convolution. The backward pass is written out, since autograd cannot look inside a
fused convolution.

Shapes: `N` images of `C` channels, [N,C,H,W], channels-last; weights [O,C,KH,KW].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # type: ignore[import-untyped]

from negchain.fast import backends
from negchain.fast.layers.weight_gradients import WeightGradients

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Stride, padding, dilation and groups of a convolution, and what it computes."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N,C,H,W] [O,C,KH,KW] -> [N,O,OH,OW]."""
        sizes = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        y: Tensor = aten.convolution(x, weight, None, *sizes)
        return y

    def rectified(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """ReLU(weight * x + added); on a GPU one launch of cuDNN."""
        if not x.is_cuda:
            y = self.convolve(x, weight)
            return torch.relu_(y if added is None else y.add_(added))
        bias = _zeros(len(weight), weight.dtype, weight.device)
        sizes = (self.stride, self.padding, self.dilation, self.groups)
        if added is None:
            return torch.cudnn_convolution_relu(x, weight, bias, *sizes)
        return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, *sizes)

    def gradient(self, of: int, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of x (0) or of the weight (1)."""
        sizes = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        wanted = (of == 0, of == 1, False)
        found: Tensor = aten.convolution_backward(grad, x, weight, None, *sizes, wanted)[of]
        return found


@functools.cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    zeros = torch.zeros(count, dtype=dtype, device=device)
    torch.cuda.synchronize(device)  # once, before any capture: every stream may read it
    return zeros


@dataclass(frozen=True)
class Block:
    """Sizes of a block's convolutions and of its shortcut's; their weights are in this order."""

    sizes: tuple[Sizes, ...]
    down: Sizes | None

    @property
    def num_weights(self) -> int:
        """Of the convolutions and the shortcut."""
        return len(self.sizes) + (self.down is not None)

    def forward(self, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        """a_1, ..., a_{n-1}, y."""
        states = [x]
        for size, weight in zip(self.sizes[:-1], weights, strict=False):
            states.append(size.rectified(states[-1], weight))
        shortcut = x if self.down is None else self.down.convolve(x, weights[-1])
        last = len(self.sizes) - 1
        return [*states[1:], self.sizes[last].rectified(states[-1], weights[last], shortcut)]

    def backward(
        self, grad: Tensor, inputs: list[Tensor], weights: list[Tensor], found: WeightGradients
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x through the convolutions and through the shortcut.

        `grad` is that of the sum before the last ReLU, `inputs` are a_0, ..., a_{n-1}.
        """

        def down(size: Sizes, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            found.add(weight, lambda: size.gradient(1, grad, x, weight), (grad, x))
            return size.gradient(0, grad, x, weight)

        through = grad
        for i in reversed(range(len(self.sizes))):
            if i < len(self.sizes) - 1:
                through = masked(through, inputs[i + 1])
            through = down(self.sizes[i], through, inputs[i], weights[i])
        if self.down is not None:
            grad = down(self.down, grad, inputs[0], weights[-1])
        return through, grad


def masked(grad: Tensor, rectified: Tensor, added: Tensor | None = None) -> Tensor:
    """(grad + added) where `rectified` > 0, else 0; a `grad` [N,C,1,1] counts for all pixels.

    Example:
        >>> y = torch.tensor([0.0, 2.0]).view(1, 1, 1, 2)
        >>> masked(torch.ones(1, 1, 1, 1), y).flatten(), masked(y + 1, y, added=y).flatten()
        (tensor([0., 1.]), tensor([0., 5.]))
    """
    if backends.prefers_triton(rectified):
        from negchain.fast.layers.masked_triton import masked_triton

        return masked_triton(grad, rectified, added)
    if added is not None:
        grad = grad + added
    return torch.where(rectified > 0, grad, 0.0)


class Residuals(torch.autograd.Function):
    """Blocks one after another, then the mean over the pixels.

    Gradients of the weights go to a `WeightGradients`, not to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, blocks: tuple[Block, ...], found: WeightGradients, *weights: Tensor
    ) -> Tensor:
        """[N,C,H,W] -> [N,O,1,1]."""
        states, left = [x], list(weights)
        for block in blocks:
            states += block.forward(states[-1], left[: block.num_weights])
            left = left[block.num_weights :]
        ctx.save_for_backward(*states, *weights)
        ctx.blocks, ctx.found = blocks, found
        return states[-1].mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of x."""
        saved = list(ctx.saved_tensors)
        num_weights = sum(block.num_weights for block in ctx.blocks)
        states, weights = saved[:-num_weights], saved[-num_weights:]
        y = states.pop()
        grad = masked(grad / (y.shape[2] * y.shape[3]), y)
        for number, block in reversed(list(enumerate(ctx.blocks))):
            inputs, states = states[-len(block.sizes) :], states[: -len(block.sizes)]
            own, weights = weights[-block.num_weights :], weights[: -block.num_weights]
            through, around = block.backward(grad, inputs, own, ctx.found)
            # every block but the first follows a ReLU of the block before it
            grad = masked(through, inputs[0], around) if number else through.add_(around)
        return grad, None, None, *(None for _ in range(num_weights))


# ---------------------------------------------------------------------- finding the blocks

_WATCHED = (
    "forward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def parts(network: ResNet) -> list[nn.Module]:
    """Stages and pooling, in the order they run."""
    return [network.layer1, network.layer2, network.layer3, network.layer4, network.avgpool]


def _convolutions(block: nn.Module) -> tuple[list[nn.Conv2d], nn.Conv2d | None] | None:
    """A block's convolutions and that of its shortcut; None: something else is in between."""
    if type(block) not in (BasicBlock, Bottleneck) or type(block.relu) is not nn.ReLU:
        return None
    numbers = range(1, 4 if type(block) is Bottleneck else 3)
    layers = [getattr(block, f"conv{i}") for i in numbers]
    norms = [getattr(block, f"bn{i}") for i in numbers]
    down = None
    if block.downsample is not None:
        steps = list(block.downsample.children())  # type: ignore[union-attr]
        if type(block.downsample) is not nn.Sequential or len(steps) != 2:
            return None
        down = steps[0]
        norms.append(steps[1])
    plain = all(
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and layer.padding not in ("same", "valid")
        for layer in [*layers, *([] if down is None else [down])]
    )
    return (layers, down) if plain and all(type(norm) is nn.Identity for norm in norms) else None


def chain(network: ResNet) -> list[tuple[list[nn.Conv2d], nn.Conv2d | None]] | None:
    """The convolutions of all blocks; None if one is of another kind, or a hook watches one."""
    *stages, pool = parts(network)
    found = [_convolutions(block) for stage in stages for block in stage.children()]
    modules = [module for part in parts(network) for module in part.modules()]
    watched = any(module.__dict__.get(name) for module in modules for name in _WATCHED)
    pools = isinstance(pool, nn.AdaptiveAvgPool2d) and pool.output_size in (1, (1, 1))
    if watched or not pools or None in found:
        return None
    return [layers for layers in found if layers is not None]


def is_fused(encoder: nn.Module) -> bool:
    """Whether there is a torchvision ResNet without normalisation in it."""
    return any(type(module) is ResNet and chain(module) is not None for module in encoder.modules())


def patch(network: ResNet, weights: set[Tensor], gradients: WeightGradients) -> list[nn.Module]:
    """The first stage runs all blocks and the pooling; the others pass on what they get.

    Returns the modules whose `forward` is another now: none if the blocks are of another kind.
    """
    found = chain(network)
    if found is None:
        return []

    def sizes(layer: nn.Conv2d) -> Sizes:
        return Sizes(layer.stride, layer.padding, layer.dilation, layer.groups)  # type: ignore[arg-type]

    layers = [layer for own, down in found for layer in (*own, down) if layer is not None]
    blocks = tuple(
        Block(tuple(map(sizes, own)), None if down is None else sizes(down)) for own, down in found
    )

    def run(x: Tensor) -> Tensor:
        own = [layer.weight for layer in layers]
        if not all(weight in weights for weight in own):
            for part in parts(network):
                x = type(part).forward(part, x)
            return x
        y: Tensor = Residuals.apply(x.to(own[0].dtype), blocks, gradients, *own)
        return y

    for part in parts(network):
        part.forward = run if part is network.layer1 else lambda x: x
    return parts(network)
