"""A convolution's parts, and a first layer whose weight gradient goes to a `WeightGradients`.

Shapes: images [N,C,H,W], channels-last; weights [O,C,KH,KW].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[N,C,H,W] [O,C,KH,KW] -> [N,O,OH,OW]."""
        y: Tensor = aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, (0, 0), self.groups
        )
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

    def image_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of x."""
        found: Tensor = self._gradient(grad, x, weight, (True, False, False))[0]
        return found

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the weight."""
        found: Tensor = self._gradient(grad, x, weight, (False, True, False))[1]
        return found

    def add_weight_gradient(
        self, found: WeightGradients, weight: Tensor, grad: Tensor, x: Tensor
    ) -> None:
        """The same, on its own way."""
        found.add(weight, lambda: self.weight_gradient(grad, x, weight), (grad, x))

    def _gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> Any:
        sizes = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        return aten.convolution_backward(grad, x, weight, None, *sizes, wanted)


@functools.cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    zeros = torch.zeros(count, dtype=dtype, device=device)
    torch.cuda.synchronize(device)  # once, before any capture: every stream may read it
    return zeros


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


def has_few_channels(x: Tensor, weight: Tensor, sizes: Sizes) -> bool:
    """Whether `FewChannels` takes it: a first layer (no gradient of its images) on a GPU."""
    if not backends.prefers_triton(x) or x.requires_grad or weight.shape[1] > 4:
        return False
    if x.is_cuda and x.element_size() != 2:  # float32 products of this size compile for minutes
        return False
    from negchain.fast.layers.few_channels_triton import fold_of

    padding = sizes.padding[0]
    plain = sizes == Sizes((2, 2), (padding, padding), (1, 1), 1)
    window = fold_of(x, weight, padding).window
    square = weight.shape[2] == weight.shape[3] and window in (1, 2, 4)
    last = torch.channels_last
    laid_out = x.is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last)
    return plain and square and laid_out and len(weight) <= 128
