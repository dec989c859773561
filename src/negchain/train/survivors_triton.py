"""`survivors.gradient_of_survivors` in three launches instead of thirty.

Shapes: `B` carried images, room for `K`, `D` embedding.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain import draws
from negchain.augment import Draws
from negchain.fast.draws_triton import hash_column, hash_row, stream_key, uniform

CHUNK = 32  # images compared with all others at once


@triton.jit
def length_kernel(length_ptr, grad_ptr, first, dim, WIDTH: tl.constexpr):
    """Length of one image's gradient."""
    row = tl.program_id(0)
    start = grad_ptr + (first + row).to(tl.int64) * dim
    total = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, dim, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        g = tl.load(start + at, mask=at < dim, other=0.0).to(tl.float32)
        total += g * g
    tl.store(length_ptr + row, tl.sqrt_rn(tl.sum(total, 0)))


@triton.jit
def _priority(length, image, first_row, key):
    u = uniform(hash_row(first_row + image, key), hash_column(image * 0, key))
    return tl.div_rn(length, u)


@triton.jit
def choose_kernel(
    source_ptr,  # [K] out
    weight_ptr,  # [K] out
    place_ptr,  # [K] workspace
    length_ptr,  # [B]
    step_ptr,
    seed_key,
    first_row,
    count,
    room,
    STREAM: tl.constexpr,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`survivors.choose`, with the rank of an image counted by comparing it with every other."""
    key = stream_key(seed_key, tl.load(step_ptr), STREAM)
    image = tl.arange(0, ALL)
    length = tl.load(length_ptr + image, mask=image < count, other=0.0)
    priority = _priority(length, image, first_row, key)
    rank = tl.zeros((ALL,), tl.int32)
    for begin in range(0, count, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        theirs = tl.load(length_ptr + other, mask=other < count, other=-1.0)  # last of all
        theirs = _priority(theirs, other, first_row, key)[None, :]
        before = (theirs == priority[:, None]) & (other[None, :] < image[:, None])
        rank += tl.sum((before | (theirs > priority[:, None])).to(tl.int32), 1)
    left_out = tl.sum(tl.where((rank == room) & (image < count), priority, 0.0), 0)
    chosen = (rank < room) & (length > 0) & (image < count)
    divisor = tl.where(chosen, length, 1.0)
    weight = tl.where(chosen, tl.div_rn(tl.maximum(length, left_out), divisor), 0.0)
    stays, moves = image < room, chosen & (image >= room)
    tl.store(source_ptr + image, image.to(tl.int64), mask=stays)
    tl.store(weight_ptr + image, weight, mask=stays)
    free = stays & (chosen == 0)
    tl.store(place_ptr + tl.cumsum(free.to(tl.int32), 0) - 1, image, mask=free)
    tl.debug_barrier()
    number = tl.cumsum(moves.to(tl.int32), 0) - 1
    place = tl.load(place_ptr + number, mask=moves, other=0)
    tl.store(source_ptr + place, image.to(tl.int64), mask=moves)
    tl.store(weight_ptr + place, weight, mask=moves)


@triton.jit
def weight_kernel(grad_ptr, source_ptr, weight_ptr, first, dim, WIDTH: tl.constexpr):
    """One chosen image's gradient, weighted and in its place; a row that is read is not written."""
    row = tl.program_id(0).to(tl.int64)
    source, weight = tl.load(source_ptr + row), tl.load(weight_ptr + row)
    for begin in range(0, dim, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        g = tl.load(grad_ptr + (first + source) * dim + at, mask=at < dim, other=0.0)
        g = g.to(tl.float32) * weight
        out = grad_ptr + (first + row) * dim + at
        tl.store(out, g.to(grad_ptr.dtype.element_ty), mask=at < dim)


def gradient_of_survivors_triton(
    grad: Tensor, first: int, room: int, drawn: Draws
) -> tuple[Tensor, Tensor]:
    """`survivors.gradient_of_survivors`, in place."""
    assert grad.is_contiguous()
    count, dim = len(grad) - first, grad.shape[1]
    width = min(1024, int(triton.next_power_of_2(dim)))
    length = torch.empty(count, device=grad.device)
    source = torch.empty(room, dtype=torch.int64, device=grad.device)
    weight = torch.empty(room, device=grad.device)
    place = torch.empty(room, dtype=torch.int32, device=grad.device)
    length_kernel[(count,)](length, grad, first, dim, WIDTH=width, num_warps=1)
    choose_kernel[(1,)](
        source, weight, place, length, drawn.step, draws.seed_key(drawn.seed), drawn.first_row,
        count, room,
        STREAM=drawn.stream, ALL=max(16, int(triton.next_power_of_2(count))), CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip
    weight_kernel[(room,)](grad, source, weight, first, dim, WIDTH=width, num_warps=1)
    return source, grad[: first + room]
