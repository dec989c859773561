"""Moving rows of many tensors in one launch.

Shapes: `K` rows to be moved.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, PARTS = 2048, 16  # numbers moved at once, programs of one row


@triton.jit
def move_kernel(
    tensors,  # a tuple of pointers
    widths,  # numbers in a row of each
    source_ptr,  # [K]
    first,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One part of one row of every tensor."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row)
    if source != row:
        for i in tl.static_range(len(tensors)):
            width = widths[i]
            given, taken = tensors[i] + (first + source) * width, tensors[i] + (first + row) * width
            for begin in range(tl.program_id(1) * BLOCK, width, PARTS * BLOCK):
                at = begin + tl.arange(0, BLOCK)
                tl.store(taken + at, tl.load(given + at, mask=at < width), mask=at < width)


def move_rows_triton(tensors: list[Tensor], first: int, source: Tensor) -> None:
    """`recorded.move_rows`; every row lies densely in memory, one after another."""
    assert all(t.stride(0) == t[0].numel() for t in tensors)
    widths = tuple(t[0].numel() for t in tensors)
    move_kernel[(len(source), PARTS)](
        tuple(tensors), widths, source, first, BLOCK=BLOCK, PARTS=PARTS, num_warps=4
    )
