"""A convolution with stride 2 and few input channels: the first layer of an image network.

    y[n,o,i,j] = sum_{c,a,b} w[o,c,a,b] x[n, c, 2 i - p + a, 2 j - p + b]

cuDNN pads three channels to eight and takes 0.107 and 0.072 ms, forward and backward, for 64 images
on an H200, these kernels 0.026 and 0.034. Here two by two pixels are first folded into one of 16
channels (four times C, padded with zeros), with a border of zeros for the padding. On the folded
image the layer has stride 1 and a window of F x F, F about half the side; in channels-last memory a
row of a window is F 16 neighbours, aligned. So the layer is a product of [pixels, F F 16] and [F F
16, O] whose left side is read in wide pieces. There is no gradient of the images: a first layer
needs none.

Shapes: `N` images [N,C,H,W] and `O` kernels [O,C,K,K], both channels-last; folded images
[N,FH,FW,16] and kernels [F F 16, O]; `R` = N OH OW pixels of the output.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from negchain.fast.backends import float32_products, on_its_device
from negchain.fast.streams import WeightGradients

FOLDED = tl.constexpr(16)  # channels
PIXELS, GRADIENT_PIXELS = 128, 64  # per product
PROGRAMS, STAGES = 132, 3  # of the gradient: one program per multiprocessor of an H200


def window_of(side: int, padding: int) -> tuple[int, int]:
    """Rows of zeros above a kernel that make its padding even; side F of the folded window."""
    shift = padding % 2
    return shift, (side + shift + 1) // 2


@triton.jit
def fold_kernel(
    folded_ptr,  # [N,FH,FW,16] out
    x_ptr,  # [N,H,W,C]
    num_pixels, height, width, folded_height, folded_width, C: tl.constexpr, MARGIN: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Two by two pixels become one."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, FOLDED)
    column, row = pixel % folded_width, (pixel // folded_width) % folded_height
    image = (pixel // (folded_width * folded_height)).to(tl.int64)
    corner = channel // C
    y = (row - MARGIN)[:, None] * 2 + (corner // 2)[None, :]
    x = (column - MARGIN)[:, None] * 2 + (corner % 2)[None, :]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & (channel < 4 * C)[None, :]
    at = (y * width + x) * C + (channel % C)[None, :]
    start = x_ptr + image * height * width * C
    some = (pixel < num_pixels)[:, None]
    value = tl.load(start[:, None] + at, mask=inside & some, other=0.0)
    at = pixel.to(tl.int64)[:, None] * FOLDED + channel[None, :]
    tl.store(folded_ptr + at, value, mask=some)


@triton.jit
def fold_weight_kernel(
    folded_ptr,  # [F*F*16,O] out
    weight_ptr,  # [O,K,K,C]
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr, F: tl.constexpr, SHIFT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """A pixel of the folded kernels."""
    place = tl.program_id(0)
    channel, out = tl.arange(0, FOLDED), tl.arange(0, OUT)
    corner = channel // C
    a, b = (place // F) * 2 + corner // 2 - SHIFT, (place % F) * 2 + corner % 2 - SHIFT
    inside = (a >= 0) & (a < K) & (b >= 0) & (b < K) & (channel < 4 * C)
    at = out[None, :] * (K * K * C) + ((a * K + b) * C + channel % C)[:, None]
    mask = inside[:, None] & (out < O)[None, :]
    value = tl.load(weight_ptr + at, mask=mask, other=0.0)
    at = (place * FOLDED + channel)[:, None] * O + out[None, :]
    tl.store(folded_ptr + at, value, mask=(out < O)[None, :])


@triton.jit
def _starts(pixel, some, out_height, out_width, F: tl.constexpr):
    """Where the windows of some output pixels begin in the folded images."""
    pixel = tl.where(some, pixel, 0)
    x, y = pixel % out_width, (pixel // out_width) % out_height
    image = (pixel // (out_width * out_height)).to(tl.int64)
    return ((image * (out_height + F - 1) + y) * (out_width + F - 1) + x) * FOLDED


@triton.jit
def forward_kernel(
    y_ptr,  # [R,O] out
    folded_ptr, weight_ptr,  # [N,FH,FW,16], [F*F*16,O]
    num_pixels, out_height, out_width,
    O: tl.constexpr,  # noqa: E741
    F: tl.constexpr, OUT: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of pixels, all output channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    some = pixel < num_pixels
    start = _starts(pixel, some, out_height, out_width, F)
    tap, out = tl.arange(0, F * FOLDED), tl.arange(0, OUT)
    total = tl.zeros((PIXELS, OUT), tl.float32)
    for row in tl.static_range(F):
        at = tl.multiple_of(start + row * (out_width + F - 1) * FOLDED, FOLDED)
        window = tl.load(folded_ptr + at[:, None] + tap[None, :])
        kernel_at = (tap + row * F * FOLDED)[:, None] * O + out[None, :]
        kernel = tl.load(weight_ptr + kernel_at, mask=(out < O)[None, :], other=0.0)
        total = tl.dot(window, kernel, total, input_precision=PRECISION)
    at = pixel.to(tl.int64)[:, None] * O + out[None, :]
    mask = some[:, None] & (out < O)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gradient_kernel(
    partial_ptr,  # [programs,F*F*16,OUT] out, float32
    folded_ptr, grad_ptr,  # [N,FH,FW,16], [R,O]
    num_pixels, out_height, out_width,
    O: tl.constexpr,  # noqa: E741
    F: tl.constexpr, OUT: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the folded kernels from every programs-th block of pixels."""
    column, out = tl.arange(0, F * F * FOLDED), tl.arange(0, OUT)
    offset = (column // (F * FOLDED)) * ((out_width + F - 1) * FOLDED) + column % (F * FOLDED)
    total = tl.zeros((F * F * FOLDED, OUT), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_pixels, PIXELS), tl.num_programs(0)):
        pixel = block * PIXELS + tl.arange(0, PIXELS)
        some = pixel < num_pixels
        start = tl.multiple_of(_starts(pixel, some, out_height, out_width, F), FOLDED)
        windows = tl.load(folded_ptr + start[:, None] + offset[None, :])
        at = pixel.to(tl.int64)[:, None] * O + out[None, :]
        grad = tl.load(grad_ptr + at, mask=some[:, None] & (out < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(windows), grad, total, input_precision=PRECISION)
    at = (tl.program_id(0) * F * F * FOLDED + column)[:, None] * OUT + out[None, :]
    tl.store(partial_ptr + at, total)


@triton.jit
def collect_kernel(
    grad_weight_ptr,  # [O,K,K,C] out
    partial_ptr,  # [programs,F*F*16,OUT]
    programs, C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    K: tl.constexpr, F: tl.constexpr, SHIFT: tl.constexpr, OUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum the programs' parts, one element of the window per program: always in one order."""
    element, out = tl.program_id(0), tl.arange(0, OUT)
    a, b, channel = element // (K * C) + SHIFT, (element // C) % K + SHIFT, element % C
    corner = (a % 2) * 2 + b % 2
    column = ((a // 2) * F + b // 2) * FOLDED + corner * C + channel
    total = tl.zeros((CHUNK, OUT), tl.float32)
    for begin in range(0, programs, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        at = (part * (F * F * FOLDED) + column)[:, None] * OUT + out[None, :]
        total += tl.load(partial_ptr + at, mask=(part < programs)[:, None], other=0.0)
    value = tl.sum(total, 0).to(grad_weight_ptr.dtype.element_ty)
    tl.store(grad_weight_ptr + out * (K * K * C) + element, value, mask=out < O)


def _width(out: int) -> int:
    return max(16, int(triton.next_power_of_2(out)))


@on_its_device
def few_channels_forward(x: Tensor, weight: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """[N,C,H,W] [O,C,K,K], both channels-last -> [N,O,OH,OW], channels-last; folded images."""
    (out, channels, side, _), (count, _, *size) = weight.shape, x.shape
    shift, window = window_of(side, padding)
    height, width = ((length + 2 * padding - side) // 2 + 1 for length in size)
    folded = x.new_empty(count, height + window - 1, width + window - 1, 16)
    num_folded = folded[..., 0].numel()
    fold_kernel[(triton.cdiv(num_folded, 256),)](
        folded, x, num_folded, *size, *folded.shape[1:3],
        C=channels, MARGIN=(padding + shift) // 2, PIXELS=256, num_warps=4,
    )  # fmt: skip
    kernels = weight.new_empty(window**2 * 16, out)
    fold_weight_kernel[(window**2,)](
        kernels, weight,
        C=channels, O=out, K=side, F=window, SHIFT=shift, OUT=_width(out), num_warps=4,
    )  # fmt: skip
    shape = (count, out, height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    num_pixels = count * height * width
    forward_kernel[(triton.cdiv(num_pixels, PIXELS),)](
        y, folded, kernels, num_pixels, height, width,
        O=out, F=window, OUT=_width(out), PIXELS=PIXELS, PRECISION=float32_products(),
        num_warps=4,
    )  # fmt: skip
    return y, folded


def few_channels_gradient(folded: Tensor, weight: Tensor, grad: Tensor, padding: int) -> Tensor:
    """Gradient of the kernels, shaped and laid out as they are; `grad` [N,O,OH,OW]."""
    (out, channels, side, _), (count, _, height, width) = weight.shape, grad.shape
    shift, window = window_of(side, padding)
    num_pixels = count * height * width
    programs = min(PROGRAMS, triton.cdiv(num_pixels, GRADIENT_PIXELS))
    partial = torch.empty(programs, window**2 * 16, _width(out), device=folded.device)
    gradient_kernel[(programs,)](
        partial, folded, grad, num_pixels, height, width,
        O=out, F=window, OUT=_width(out), PIXELS=GRADIENT_PIXELS, PRECISION=float32_products(),
        num_warps=8, num_stages=STAGES,
    )  # fmt: skip
    grad_weight = torch.empty_like(weight)
    collect_kernel[(weight[0].numel(),)](
        grad_weight, partial, programs,
        C=channels, O=out, K=side, F=window, SHIFT=shift, OUT=_width(out), CHUNK=32, num_warps=4,
    )  # fmt: skip
    return grad_weight


def applies(x: Tensor, weight: Tensor, padding: int) -> bool:
    """Whether these kernels take it: no gradient of the images, few channels, 16-bit numbers."""
    if x.requires_grad or x.ndim != 4 or weight.shape[1] > 4:
        return False
    if x.is_cuda and x.element_size() != 2:  # float32 products of this size compile for minutes
        return False
    height, width = weight.shape[2:]
    square = height == width and window_of(height, padding)[1] in (1, 2, 4)
    last = torch.channels_last
    laid_out = x.is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last)
    return square and laid_out and len(weight) <= 128


class FewChannels(torch.autograd.Function):
    """A first layer: the gradient of its weights goes to a `WeightGradients`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, padding: int, gradients: WeightGradients
    ) -> Tensor:
        """[N,C,H,W] [O,C,K,K] -> [N,O,OH,OW]."""
        y, folded = few_channels_forward(x, weight, padding)
        ctx.save_for_backward(folded, weight)
        ctx.padding, ctx.gradients = padding, gradients
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        """Gradient of the weights."""
        folded, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        # The backward pass ends here, so there is nothing left to run beside it.
        ctx.gradients.add_now(weight, few_channels_gradient(folded, weight, grad, ctx.padding))
        return None, None, None, None
