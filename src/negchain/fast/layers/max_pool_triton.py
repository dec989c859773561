"""Max-pooling of channels-last images, forward and backward.

    y[n,c,i,j] = max_{a,b} x[n, c, s i - p + a, s j - p + b]

torch's kernels for this layout take longer than the convolution before them: 0.048 and 0.088 ms for
64 images on an H200, these 0.013 and 0.017. Here the forward pass notes the winner's place in its
window in one byte (the first of equals, as torch), and the backward pass asks, for every input
pixel, the few windows it lies in: each number is read once and nothing is added atomically.

Shapes: `N` images [N,C,H,W] -> [N,C,OH,OW], channels-last; `K` side of the window, `S` stride.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from negchain.fast.backends import on_its_device

NUMBERS, GRADIENT_NUMBERS = 1024, 2048  # per program


@triton.jit
def forward_kernel(
    y_ptr,  # [N,OH,OW,C] out
    winner_ptr,  # [N,OH,OW,C] uint8, out
    x_ptr,  # [N,H,W,C]
    num_pixels, height, width, out_height, out_width, C: tl.constexpr, CHANNELS: tl.constexpr,
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """A block of output pixels, all channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    out_x, out_y = pixel % out_width, (pixel // out_width) % out_height
    image = (pixel // (out_width * out_height)).to(tl.int64)
    some = (pixel < num_pixels)[:, None] & (channel < C)[None, :]
    best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
    winner = tl.zeros((PIXELS, CHANNELS), tl.int32)
    begun = pixel < 0
    for place in tl.static_range(K * K):
        in_y, in_x = out_y * STRIDE - PAD + place // K, out_x * STRIDE - PAD + place % K
        inside = (in_x >= 0) & (in_x < width) & (in_y >= 0) & (in_y < height)
        at = ((image * height + in_y) * width + in_x)[:, None] * C + channel[None, :]
        x = tl.load(x_ptr + at, mask=some & inside[:, None], other=float("-inf")).to(tl.float32)
        # as in torch: NaN wins, and of nothing but -inf the first inside the image
        larger = (x > best) | (x != x) | (inside & ~begun)[:, None]
        begun = begun | inside
        best = tl.where(larger, x, best)
        winner = tl.where(larger, place, winner)
    at = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y_ptr + at, best.to(y_ptr.dtype.element_ty), mask=some)
    tl.store(winner_ptr + at, winner.to(tl.uint8), mask=some)


@triton.jit
def backward_kernel(
    grad_x_ptr,  # [N,H,W,C] out
    grad_y_ptr, winner_ptr,  # [N,OH,OW,C]
    num_pixels, height, width, out_height, out_width, C: tl.constexpr, CHANNELS: tl.constexpr,
    K: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PIXELS: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """A block of input pixels: the sum over the windows each of them won."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, CHANNELS)
    in_x, in_y = pixel % width, (pixel // width) % height
    image = (pixel // (width * height)).to(tl.int64)
    some = (pixel < num_pixels)[:, None] & (channel < C)[None, :]
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for window in tl.static_range(WINDOWS * WINDOWS):
        out_y = (in_y + PAD) // STRIDE - window // WINDOWS
        out_x = (in_x + PAD) // STRIDE - window % WINDOWS
        down, right = in_y + PAD - out_y * STRIDE, in_x + PAD - out_x * STRIDE
        inside = (out_x >= 0) & (out_x < out_width) & (out_y >= 0) & (out_y < out_height)
        inside &= (down < K) & (right < K)
        at = ((image * out_height + out_y) * out_width + out_x)[:, None] * C + channel[None, :]
        mask = some & inside[:, None]
        winner = tl.load(winner_ptr + at, mask=mask, other=255).to(tl.int32)
        grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(winner == (down * K + right)[:, None], grad, 0.0)
    at = pixel.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(grad_x_ptr + at, total.to(grad_x_ptr.dtype.element_ty), mask=some)


def _block(channels: int, numbers: int) -> tuple[int, int]:
    """Channels and pixels of a program."""
    wide = triton.next_power_of_2(channels)
    return wide, max(1, numbers // wide)


@on_its_device
def max_pool_forward(x: Tensor, size: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """[N,C,H,W] channels-last -> pooled [N,C,OH,OW] and the winners' places in their windows."""
    count, channels, height, width = x.shape
    out_height, out_width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    shape = (count, channels, out_height, out_width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    winner = torch.empty_like(y, dtype=torch.uint8)
    wide, pixels = _block(channels, NUMBERS)
    num_pixels = count * out_height * out_width
    forward_kernel[(triton.cdiv(num_pixels, pixels),)](
        y, winner, x, num_pixels, height, width, out_height, out_width,
        C=channels, CHANNELS=wide, K=size, STRIDE=stride, PAD=padding, PIXELS=pixels, num_warps=4,
    )  # fmt: skip
    return y, winner


def max_pool_backward(
    grad: Tensor, winner: Tensor, shape: torch.Size, size: int, stride: int, padding: int
) -> Tensor:
    """Gradient of x [N,C,H,W] from that of the pooled images, both channels-last."""
    count, channels, height, width = shape
    grad_x = torch.empty(
        shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last
    )
    wide, pixels = _block(channels, GRADIENT_NUMBERS)
    num_pixels = count * height * width
    backward_kernel[(triton.cdiv(num_pixels, pixels),)](
        grad_x, grad, winner, num_pixels, height, width, *winner.shape[2:],
        C=channels, CHANNELS=wide, K=size, STRIDE=stride, PAD=padding, PIXELS=pixels,
        WINDOWS=triton.cdiv(size, stride), num_warps=4,
    )  # fmt: skip
    return grad_x


class MaxPool(torch.autograd.Function):
    """`max_pool2d` with square windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        """[N,C,H,W] -> [N,C,OH,OW]."""
        y, winner = max_pool_forward(x, size, stride, padding)
        ctx.save_for_backward(winner)
        ctx.shape, ctx.window = x.shape, (size, stride, padding)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient of the images."""
        (winner,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        return max_pool_backward(grad, winner, ctx.shape, *ctx.window), None, None, None
