"""`faster_layers`: the context in which an encoder's own layers run our functions.

Every layer keeps its place, its weights and its name; only its `forward` is another while the
context lasts. A layer whose sizes or inputs a kernel does not take runs torch's.

Shapes: images [N,C,H,W], channels-last; weights [O,C,KH,KW].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import ResNet  # type: ignore[import-untyped]

from negchain.fast import backends
from negchain.fast.layers import residual
from negchain.fast.streams import WeightGradients

Layer = Callable[[Tensor], Tensor]


@contextmanager
def faster_layers(
    encoder: nn.Module, weights: set[Tensor], gradients: WeightGradients
) -> Iterator[None]:
    """Inside, layers with the given weights, residual blocks and max-pools take our functions.

    Args:
        encoder: whose layers these are; outside the context they run torch's functions.
        weights: of layers (and biases) whose gradients go to `gradients`, not to their `.grad`;
            looked up when a layer is called, which may be one of `functional_call`.
        gradients: where they go.
    """
    answers: Any = {nn.Linear: _linear, nn.Conv2d: _first_layer, nn.MaxPool2d: _max_pool}
    patched: list[nn.Module] = []
    try:
        for module in encoder.modules():
            if "forward" in vars(module):
                continue  # it is replaced already, by us or by somebody else
            if type(module) is ResNet:
                patched += residual.patch(module, weights, gradients)
            elif type(module) in answers:
                patched.append(module)
                module.forward = answers[type(module)](module, weights, gradients)
        yield
    finally:
        for module in patched:
            del module.forward


class Linear(torch.autograd.Function):
    """`linear` whose weight's and bias's gradients go to a `WeightGradients`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients
    ) -> Tensor:
        """[..., I] [O,I] [O] -> [..., O]."""
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.gradients = bias, gradients
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Gradient of x."""
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        ctx.gradients.add(weight, lambda: rows.T @ inputs, (rows, inputs))
        if ctx.bias is not None:
            ctx.gradients.add(ctx.bias, lambda: rows.sum(0), (rows,))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


def _linear(layer: nn.Linear, weights: set[Tensor], gradients: WeightGradients) -> Layer:
    def forward(x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        if x.ndim > 1 and weight in weights and (bias is None or bias in weights):
            return Linear.apply(x.to(weight.dtype), weight, bias, gradients)  # type: ignore[no-any-return]
        return nn.Linear.forward(layer, x)

    return forward


def _first_layer(layer: nn.Conv2d, weights: set[Tensor], gradients: WeightGradients) -> Layer:
    given = (layer.stride, layer.dilation, layer.groups, layer.bias, layer.padding_mode)
    plain = given == ((2, 2), (1, 1), 1, None, "zeros") and len(set(layer.padding)) == 1

    def forward(x: Tensor) -> Tensor:
        weight = layer.weight
        if plain and weight in weights and backends.prefers_triton(x):
            from negchain.fast.layers.few_channels_triton import FewChannels, applies

            padding, narrow = int(layer.padding[0]), x.to(weight.dtype)
            if applies(narrow, weight, padding):
                return FewChannels.apply(narrow, weight, padding, gradients)  # type: ignore[no-any-return]
        return nn.Conv2d.forward(layer, x)

    return forward


def _max_pool(pool: nn.MaxPool2d, weights: set[Tensor], gradients: WeightGradients) -> Layer:
    window: tuple[Any, ...] = (pool.kernel_size, pool.stride, pool.padding)
    square = all(isinstance(side, int) for side in window) and window[0] <= 15
    plain = (pool.dilation, pool.ceil_mode, pool.return_indices) == (1, False, False)

    def forward(x: Tensor) -> Tensor:
        laid_out = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if square and plain and laid_out and backends.prefers_triton(x) and x.shape[1] <= 2048:
            from negchain.fast.layers.max_pool_triton import MaxPool

            pooled: Tensor = MaxPool.apply(x, *window)
            return pooled
        return nn.MaxPool2d.forward(pool, x)  # type: ignore[no-any-return]

    return forward
