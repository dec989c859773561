"""The context in which an encoder's layers take our functions.

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
from negchain.fast.layers.weight_gradients import WeightGradients

Layer = Callable[[Tensor], Tensor]


@contextmanager
def faster_layers(
    encoder: nn.Module, weights: set[Tensor], gradients: WeightGradients
) -> Iterator[None]:
    """Inside, layers with the given weights, residual blocks and max-pools take our functions.

    Args:
        encoder: whose layers are answered; outside it runs torch's, the readable twin.
        weights: of layers (and biases) whose gradients go to `gradients`, not to their `.grad`;
            looked up when a layer is called, which may be one of `functional_call`.
        gradients: where they go.

    Example:
        >>> layer = torch.nn.Linear(4, 8, bias=False)
        >>> found = WeightGradients(None)
        >>> with faster_layers(layer, {layer.weight}, found):
        ...     layer(torch.ones(1, 4)).sum().backward()
        >>> layer.weight.grad is None, found.join()[layer.weight].shape
        (True, torch.Size([8, 4]))
    """
    answers: dict[type, Any] = {
        nn.Linear: _linear,
        nn.Conv2d: _first_layer,
        nn.MaxPool2d: _max_pool,
    }
    patched: list[nn.Module] = []
    try:
        for module in encoder.modules():
            if "forward" in vars(module):
                continue  # somebody else has changed it, or we have
            if type(module) is ResNet and residual.chain(module) is not None:
                patched += residual.parts(module)
                residual.patch(module, weights, gradients)
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


class FewChannels(torch.autograd.Function):
    """A first layer with stride 2, see `few_channels_triton`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, padding: int, gradients: WeightGradients
    ) -> Tensor:
        """[N,C,H,W] [O,C,K,K] -> [N,O,OH,OW]."""
        from negchain.fast.layers.few_channels_triton import few_channels_forward, fold_of

        y, folded = few_channels_forward(x, weight, padding)
        ctx.save_for_backward(folded, weight)
        ctx.fold, ctx.gradients = fold_of(x, weight, padding), gradients
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        """Gradient of the weights."""
        from negchain.fast.layers.few_channels_triton import few_channels_gradient

        folded, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        # The backward pass ends here: there is nothing to run beside.
        ctx.gradients.add_now(weight, few_channels_gradient(folded, weight, grad, ctx.fold))
        return None, None, None, None


def _first_layer(layer: nn.Conv2d, weights: set[Tensor], gradients: WeightGradients) -> Layer:
    given = (layer.stride, layer.dilation, layer.groups, layer.bias, layer.padding_mode)
    plain = given == ((2, 2), (1, 1), 1, None, "zeros") and len(set(layer.padding)) == 1

    def forward(x: Tensor) -> Tensor:
        weight = layer.weight
        if plain and weight in weights and _few_channels(x.to(weight.dtype), weight, layer.padding):
            padding = layer.padding[0]
            return FewChannels.apply(x.to(weight.dtype), weight, padding, gradients)  # type: ignore[no-any-return]
        return nn.Conv2d.forward(layer, x)

    return forward


def _few_channels(x: Tensor, weight: Tensor, padding: Any) -> bool:
    """Whether `FewChannels` takes it: a first layer (no gradient of its images) on a GPU."""
    if not backends.prefers_triton(x) or x.requires_grad or weight.shape[1] > 4:
        return False
    if x.is_cuda and x.element_size() != 2:  # float32 products of this size compile for minutes
        return False
    from negchain.fast.layers.few_channels_triton import fold_of

    window = fold_of(x, weight, padding[0]).window
    square = weight.shape[2] == weight.shape[3] and window in (1, 2, 4)
    last = torch.channels_last
    laid_out = x.is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last)
    return x.ndim == 4 and square and laid_out and len(weight) <= 128


class MaxPool(torch.autograd.Function):
    """`max_pool2d` with square windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        """[N,C,H,W] -> [N,C,OH,OW]."""
        from negchain.fast.layers.max_pool_triton import max_pool_forward

        y, winner = max_pool_forward(x, size, stride, padding)
        ctx.save_for_backward(winner)
        ctx.shape, ctx.window = x.shape, (size, stride, padding)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of the images."""
        from negchain.fast.layers.max_pool_triton import max_pool_backward

        (winner,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        return max_pool_backward(grad, winner, ctx.shape, *ctx.window), None, None, None


def _max_pool(pool: nn.MaxPool2d, weights: set[Tensor], gradients: WeightGradients) -> Layer:
    window: tuple[Any, ...] = (pool.kernel_size, pool.stride, pool.padding)
    square = all(isinstance(side, int) for side in window) and window[0] <= 15
    plain = (pool.dilation, pool.ceil_mode, pool.return_indices) == (1, False, False)

    def forward(x: Tensor) -> Tensor:
        laid_out = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        if square and plain and laid_out and backends.prefers_triton(x) and x.shape[1] <= 2048:
            pooled: Tensor = MaxPool.apply(x, *window)
            return pooled
        return nn.MaxPool2d.forward(pool, x)  # type: ignore[no-any-return]

    return forward
