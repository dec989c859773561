"""The gradient below a ReLU, with what is added to it, in one launch.

Shapes: `N` images of `C` channels, [N,C,H,W], dense and laid out in memory alike.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers of a program


@triton.jit
def masked_kernel(
    out_ptr, grad_ptr, rectified_ptr, added_ptr, count, channels, numbers_per_image,
    POOLED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = grad + added where rectified > 0, in the order of memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    some = at < count
    grad_at = at
    if POOLED:  # [N,C] for every pixel
        grad_at = (at // numbers_per_image) * channels + at % channels
    grad = tl.load(grad_ptr + grad_at, mask=some, other=0.0).to(tl.float32)
    if ADDED:
        grad += tl.load(added_ptr + at, mask=some, other=0.0).to(tl.float32)
    rectified = tl.load(rectified_ptr + at, mask=some, other=0.0).to(tl.float32)
    grad = tl.where(rectified > 0, grad, 0.0)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=some)


def masked_triton(grad: Tensor, rectified: Tensor, added: Tensor | None) -> Tensor:
    """`residual.masked`."""
    pooled = grad.shape != rectified.shape
    last = torch.channels_last
    grad = grad.contiguous() if pooled else grad.contiguous(memory_format=last)
    if added is not None:
        added = added.contiguous(memory_format=last)
    assert rectified.is_contiguous(memory_format=last)
    out = torch.empty_like(rectified, dtype=grad.dtype)
    count, channels = rectified.numel(), rectified.shape[1]
    masked_kernel[(triton.cdiv(count, BLOCK),)](
        out, grad, rectified, grad if added is None else added, count, channels,
        rectified[0].numel(), POOLED=pooled, ADDED=added is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
