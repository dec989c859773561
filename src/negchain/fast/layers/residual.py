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
from negchain.fast.streams import WeightGradients

aten = torch.ops.aten


def _sizes(layer: nn.Conv2d) -> tuple[Any, ...]:
    """As `aten.convolution` takes them."""
    return layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups


def _convolved(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = aten.convolution(x, weight, None, *_sizes(layer))
    return y


def _rectified(layer: nn.Conv2d, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """ReLU(weight * x + added); on a GPU one launch of cuDNN."""
    if not x.is_cuda:
        y = _convolved(layer, x, weight)
        return torch.relu_(y if added is None else y.add_(added))
    bias = _zeros(len(weight), weight.dtype, weight.device)
    sizes: Any = (layer.stride, layer.padding, layer.dilation, layer.groups)
    if added is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *sizes)
    return torch.cudnn_convolution_add_relu(x, weight, added, 1.0, bias, *sizes)


@functools.cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    zeros = torch.zeros(count, dtype=dtype, device=device)
    torch.cuda.synchronize(device)  # once, before any capture: every stream may read it
    return zeros


def _back(
    layer: nn.Conv2d, grad: Tensor, x: Tensor, weight: Tensor, found: WeightGradients
) -> Tensor:
    """Gradient of a convolution's x; that of its weight goes to `found`."""

    def gradient(of: int) -> Tensor:
        wanted = (of == 0, of == 1, False)
        both = aten.convolution_backward(grad, x, weight, None, *_sizes(layer), wanted)
        return both[of]  # type: ignore[no-any-return]

    found.add(weight, lambda: gradient(1), (grad, x))
    return gradient(0)


@dataclass(frozen=True)
class Block:
    """A block's convolutions and that of its shortcut."""

    layers: tuple[nn.Conv2d, ...]
    down: nn.Conv2d | None

    @property
    def all(self) -> tuple[nn.Conv2d, ...]:
        """In the order of their weights."""
        return self.layers if self.down is None else (*self.layers, self.down)

    def forward(self, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        """a_1, ..., a_{n-1}, y."""
        states, last = [x], len(self.layers) - 1
        for layer, weight in zip(self.layers[:-1], weights, strict=False):
            states.append(_rectified(layer, states[-1], weight))
        shortcut = x if self.down is None else _convolved(self.down, x, weights[-1])
        return [*states[1:], _rectified(self.layers[last], states[-1], weights[last], shortcut)]

    def backward(
        self, grad: Tensor, inputs: list[Tensor], weights: list[Tensor], found: WeightGradients
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x through the convolutions and through the shortcut.

        `grad` is that of the sum before the last ReLU, `inputs` are a_0, ..., a_{n-1}.
        """
        through = grad
        for i in reversed(range(len(self.layers))):
            if i < len(self.layers) - 1:
                through = masked(through, inputs[i + 1])
            through = _back(self.layers[i], through, inputs[i], weights[i], found)
        if self.down is not None:
            grad = _back(self.down, grad, inputs[0], weights[-1], found)
        return through, grad


def masked(grad: Tensor, rectified: Tensor, added: Tensor | None = None) -> Tensor:
    """(grad + added) where `rectified` > 0, else 0; a `grad` [N,C,1,1] counts for all pixels."""
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
        ctx: Any, x: Tensor, blocks: list[Block], found: WeightGradients, *weights: Tensor
    ) -> Tensor:
        """[N,C,H,W] -> [N,O,1,1]."""
        states, left = [x], list(weights)
        for block in blocks:
            count = len(block.all)
            states += block.forward(states[-1], left[:count])
            left = left[count:]
        ctx.save_for_backward(*states, *weights)
        ctx.blocks, ctx.found = blocks, found
        return states[-1].mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of x."""
        saved = list(ctx.saved_tensors)
        num_weights = sum(len(block.all) for block in ctx.blocks)
        states, weights = saved[:-num_weights], saved[-num_weights:]
        y = states.pop()
        grad = masked(grad / (y.shape[2] * y.shape[3]), y)
        for number, block in reversed(list(enumerate(ctx.blocks))):
            size, count = len(block.layers), len(block.all)
            inputs, states = states[-size:], states[:-size]
            own, weights = weights[-count:], weights[:-count]
            through, around = block.backward(grad, inputs, own, ctx.found)
            # every block but the first follows a ReLU of the block before it
            grad = masked(through, inputs[0], around) if number else through.add_(around)
        return grad, None, None, *(None for _ in range(num_weights))


# ---------------------------------------------------------------------- finding the blocks

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parts(network: ResNet) -> list[nn.Module]:
    """Stages and pooling, in the order they run."""
    return [network.layer1, network.layer2, network.layer3, network.layer4, network.avgpool]


def _found(block: nn.Module) -> Block | None:
    """A block's convolutions; None: something else is in between."""
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
    found = Block(tuple(layers), down)
    plain = all(
        type(layer) is nn.Conv2d
        and layer.bias is None
        and layer.padding_mode == "zeros"
        and layer.padding not in ("same", "valid")
        for layer in found.all
    )
    return found if plain and all(type(norm) is nn.Identity for norm in norms) else None


def chain(network: ResNet) -> list[Block] | None:
    """All blocks; None if one is of another kind, or a hook watches one."""
    *stages, pool = parts(network)
    if any(type(stage) is not nn.Sequential for stage in stages):
        return None
    found = [_found(block) for stage in stages for block in stage]  # type: ignore[attr-defined]
    of_modules = [vars(module) for part in parts(network) for module in part.modules()]
    of_modules.append({"forward": vars(network).get("_forward_impl")})
    watched = any(own.get(name) for own in of_modules for name in ("forward", *_HOOKS))
    pools = type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in (1, (1, 1))
    if watched or not pools or None in found:
        return None
    return [block for block in found if block is not None]


def is_fused(encoder: nn.Module) -> bool:
    """Whether there is a torchvision ResNet without normalisation in it."""
    return any(type(module) is ResNet and chain(module) is not None for module in encoder.modules())


def patch(network: ResNet, weights: set[Tensor], gradients: WeightGradients) -> list[nn.Module]:
    """The network runs all blocks and the pooling as one; called by itself, a stage is torch's.

    Returns the modules whose `forward` is another now: none if the blocks are of another kind.
    """
    blocks = chain(network)
    if blocks is None:
        return []
    layers = [layer for block in blocks for layer in block.all]

    def run(x: Tensor) -> Tensor:
        own = [layer.weight for layer in layers]
        if not all(weight in weights for weight in own):
            return ResNet.forward(network, x)  # type: ignore[no-any-return]
        x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
        x = Residuals.apply(x.to(own[0].dtype), blocks, gradients, *own)
        return network.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]

    network.forward = run
    return [network]
