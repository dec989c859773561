"""The context in which an encoder's layers take our functions.

Shapes: images [N,C,H,W], channels-last; weights [O,C,KH,KW].
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from negchain.fast import backends
from negchain.fast.layers.convolution import FewChannels, Sizes, has_few_channels
from negchain.fast.layers.residual import fused_blocks
from negchain.fast.layers.weight_gradients import WeightGradients


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


class Linear(torch.autograd.Function):
    """`linear` whose weight's and bias's gradients go to a `WeightGradients`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradients: WeightGradients,
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


class FasterLayers(TorchFunctionMode):
    """Inside: layers with the given weights, residual blocks and max-pools take our functions.

    Args:
        encoder: whose blocks are fused.
        weights: of layers (and biases) whose gradients go to `gradients`, not to their `.grad`.
        gradients: where they go.

    Example:
        >>> layer = torch.nn.Linear(4, 8, bias=False)
        >>> found = WeightGradients(None)
        >>> with FasterLayers(layer, {layer.weight}, found):
        ...     layer(torch.ones(1, 4)).sum().backward()
        >>> layer.weight.grad is None, found.join()[layer.weight].shape
        (True, torch.Size([8, 4]))
    """

    def __init__(
        self, encoder: nn.Module, weights: set[Tensor], gradients: WeightGradients
    ) -> None:
        super().__init__()
        self.weights = weights
        self.gradients = gradients
        self._encoder = encoder
        self._blocks = ExitStack()

    def __enter__(self) -> FasterLayers:
        """Begin to answer."""
        self._blocks.enter_context(fused_blocks(self._encoder, self.weights, self.gradients))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """The encoder is as it was."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._blocks.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the calls we can answer."""
        kwargs = kwargs or {}
        if func is torch.conv2d:
            call = _first_layer(*args, **kwargs)
            if call is not None and call[1] in self.weights:
                return FewChannels.apply(*call, self.gradients)
        if func is torch.nn.functional.max_pool2d:
            window = _pool_window(*args, **kwargs)
            if window is not None:
                return MaxPool.apply(args[0], *window)
        if func is torch.nn.functional.linear:
            x, weight, bias = _linear(*args, **kwargs)
            own = [weight] if bias is None else [weight, bias]
            if x.ndim > 1 and all(tensor in self.weights for tensor in own):
                return Linear.apply(x.to(weight.dtype), weight, bias, self.gradients)
        return func(*args, **kwargs)


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _first_layer(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, int] | None:
    """Images, weight and padding of a `conv2d` that `FewChannels` takes; None: torch's."""
    if isinstance(padding, str) or input.ndim != 4 or bias is not None:
        return None
    sizes = Sizes(_pair(stride), _pair(padding), _pair(dilation), groups)
    x = input.to(weight.dtype)
    return (x, weight, sizes.padding[0]) if has_few_channels(x, weight, sizes) else None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def _pool_window(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[int, int, int] | None:
    """Side, stride and padding of a pool our kernel takes; None: torch's."""
    if not backends.prefers_triton(x) or x.ndim != 4 or ceil_mode or return_indices:
        return None
    sides, steps, margins, gaps = (
        _pair(v) for v in (kernel_size, stride or kernel_size, padding, dilation)
    )
    square = all(pair[0] == pair[1] for pair in (sides, steps, margins))
    laid_out = x.is_contiguous(memory_format=torch.channels_last)
    if not square or gaps != (1, 1) or not laid_out or x.shape[1] > 2048 or sides[0] > 15:
        return None
    return sides[0], steps[0], margins[0]
