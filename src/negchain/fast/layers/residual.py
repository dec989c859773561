"""The residual blocks of a ResNet without normalisation, and its pooling, as one function.

    a_0 = x,   a_i = ReLU(w_i * a_{i-1}),   y = ReLU(w_n * a_{n-1} + x')      x' = x or w_down * x

cuDNN adds the shortcut and rectifies before it writes a convolution's result, and in the backward
pass adding the shortcut's gradient and passing the ReLU below is one launch. Torch's modules launch
these one by one: 64 images of 24 x 24 pixels, 0.0196 ms for a convolution, the addition and ReLU,
0.0139 for the convolution (records/2026-11-15_layers_h200.md). The backward pass is written out,
since autograd cannot look inside a fused convolution.

Shapes: `N` images of `C` channels, [N,C,H,W], channels-last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # type: ignore[import-untyped]

from negchain.fast import backends
from negchain.fast.layers.convolution import Sizes
from negchain.fast.layers.weight_gradients import WeightGradients


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
        """Gradients of x, on both ways, from that before y's ReLU; `inputs` a_0, ..., a_{n-1}."""
        through = grad
        for i in reversed(range(len(self.sizes))):
            if i < len(self.sizes) - 1:
                through = masked(through, inputs[i + 1])
            self.sizes[i].add_weight_gradient(found, weights[i], through, inputs[i])
            through = self.sizes[i].image_gradient(through, inputs[i], weights[i])
        if self.down is not None:
            self.down.add_weight_gradient(found, weights[-1], grad, inputs[0])
            grad = self.down.image_gradient(grad, inputs[0], weights[-1])
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
    """Blocks one after another, then the mean over the pixels; weights' gradients go their way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        blocks: tuple[Block, ...],
        found: WeightGradients,
        *weights: Tensor,
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
            # below a block is a ReLU of ours, except below the first
            grad = masked(through, inputs[0], around) if number else through.add_(around)
        return grad, None, None, *(None for _ in range(num_weights))


# ---------------------------------------------------------------------- finding the blocks


def _convolutions(block: nn.Module) -> tuple[list[nn.Conv2d], nn.Conv2d | None] | None:
    """A block's convolutions and that of its shortcut; None: something else is in between."""
    if type(block) not in (BasicBlock, Bottleneck) or type(block.relu) is not nn.ReLU:
        return None
    count = 3 if type(block) is Bottleneck else 2
    layers = [getattr(block, f"conv{i + 1}") for i in range(count)]
    norms = [getattr(block, f"bn{i + 1}") for i in range(count)]
    down = None
    if block.downsample is not None:
        steps = list(block.downsample.children())  # type: ignore[union-attr]
        if type(block.downsample) is not nn.Sequential or len(steps) != 2:
            return None
        down, norm = steps
        norms.append(norm)
    convolutions = [*layers, *([] if down is None else [down])]
    plain = all(
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and layer.padding not in ("same", "valid")
        for layer in convolutions
    )
    return (layers, down) if plain and all(type(norm) is nn.Identity for norm in norms) else None


_WATCHED = (
    "forward",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _watched(modules: list[nn.Module]) -> bool:
    """Whether somebody looks at what goes in or out of a module, or has changed what it does."""
    return any(module.__dict__.get(name) for module in modules for name in _WATCHED)


def _sizes(layer: nn.Conv2d) -> Sizes:
    return Sizes(layer.stride, layer.padding, layer.dilation, layer.groups)  # type: ignore[arg-type]


def _chain(network: ResNet) -> list[tuple[list[nn.Conv2d], nn.Conv2d | None]] | None:
    """The convolutions of all blocks; None where one of them is of another kind, or watched."""
    *stages, _ = _parts(network)
    found = [_convolutions(block) for stage in stages for block in stage.children()]
    parts = [part for stage in _parts(network) for part in stage.modules()]
    pools = isinstance(network.avgpool, nn.AdaptiveAvgPool2d)
    if (
        _watched(parts)
        or not pools
        or network.avgpool.output_size not in (1, (1, 1))
        or None in found
    ):
        return None
    return [layers for layers in found if layers is not None]


def is_fused(encoder: nn.Module) -> bool:
    """Whether `fused_blocks` finds a network in it."""
    networks = [module for module in encoder.modules() if type(module) is ResNet]
    return any(_chain(network) is not None for network in networks)


@contextmanager
def fused_blocks(
    encoder: nn.Module,
    weights: set[Tensor],
    gradients: WeightGradients,
) -> Iterator[None]:
    """Inside, torchvision's ResNets without normalisation run their blocks as `Residuals`.

    Args:
        encoder: where they are looked for.
        weights: a network runs so if all its blocks' weights are among these when it is called.
        gradients: where their gradients go.
    """
    patched: list[nn.Module] = []
    try:
        for network in [module for module in encoder.modules() if type(module) is ResNet]:
            chain = _chain(network)
            if chain is not None:
                patched += _parts(network)
                _patch(network, chain, weights, gradients)
        yield
    finally:
        for part in patched:
            part.__dict__.pop("forward", None)


def _patch(
    network: ResNet,
    chain: list[tuple[list[nn.Conv2d], nn.Conv2d | None]],
    weights: set[Tensor],
    gradients: WeightGradients,
) -> None:
    """The first stage runs all of them and the pooling; the others pass on what they get."""
    blocks = tuple(
        Block(tuple(map(_sizes, layers)), None if down is None else _sizes(down))
        for layers, down in chain
    )
    parts = _parts(network)

    def run(x: Tensor) -> Tensor:
        # Weights are looked up now: the call may be one of `functional_call`.
        own = [
            layer.weight for layers, down in chain for layer in (*layers, down) if layer is not None
        ]
        if not all(weight in weights for weight in own):
            for part in parts:
                x = type(part).forward(part, x)
            return x
        y: Tensor = Residuals.apply(x.to(own[0].dtype), blocks, gradients, *own)
        return y

    for part in parts:
        part.forward = run if part is network.layer1 else _same


def _parts(network: ResNet) -> list[nn.Module]:
    return [network.layer1, network.layer2, network.layer3, network.layer4, network.avgpool]


def _same(x: Tensor) -> Tensor:
    return x
