"""The draws of `negchain.rng` inside a Triton kernel: the same bits for the same arguments.

    key   = use_key(seed_key, step, use)          one scalar per kernel
    bits  = hash_pair(hash_row(row, key), hash_column(column, key))

Shapes are the caller's: rows and columns broadcast.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from negchain.fast.backends import on_its_device

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no libdevice


@triton.jit
def mix(x):  # uint32 -> uint32
    """`negchain.rng._mix`."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    return x


@triton.jit
def use_key(seed_key, step, USE: tl.constexpr):  # int32, int64 -> uint32
    """`negchain.rng.use_key`, the seed already hashed by `rng.seed_key`."""
    offset: tl.constexpr = USE * 0x9E3779B9 % 2**32
    return mix(mix((step + seed_key).to(tl.uint32)) + offset)


@triton.jit
def hash_row(row, key):
    """The row's part of the hash, uint32."""
    return mix(row.to(tl.uint32) + key)


@triton.jit
def hash_column(column, key):
    """The column's part of the hash, uint32."""
    return mix((column.to(tl.uint32) * 0x9E3779B9) ^ key)


@triton.jit
def bits(row_hash, column_hash):  # uint32, uint32 -> int32 in [0, 2^31)
    """31 random bits."""
    return (mix(row_hash + column_hash) >> 1).to(tl.int32)


@triton.jit
def _log2(x):
    """Base-2 logarithm; on a GPU one instruction, right to 2^-22."""
    if INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def uniform(row_hash, column_hash):
    """float32 uniforms in (0, 1]."""
    return (bits(row_hash, column_hash).to(tl.float32) + 0.5) * 4.656612873077393e-10


@triton.jit
def log_uniform(row_hash, column_hash):
    """Logarithms of uniforms, float32."""
    scaled = bits(row_hash, column_hash).to(tl.float32) + 0.5  # 2^31 u
    return _log2(scaled) * 0.6931471805599453 - 21.487562597358306


@triton.jit
def gumbel(row_hash, column_hash):
    """Gumbel noise -log(-log(1 - v)), float32."""
    v = uniform(row_hash, column_hash)
    # 1 - v loses what decides an argmax, the small v: there the series is exact to rounding
    series = v * (1 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    exponential = tl.where(v < 0.01, series, _log2(1 - v) * -0.6931471805599453)
    return _log2(exponential) * -0.6931471805599453


@triton.jit
def _bits_kernel(
    bits_ptr, rows_ptr,  # [N,K], [N]
    step_ptr,  # [], or [N] where EACH
    seed_key, num_columns, USE: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    key = use_key(seed_key, tl.load(step_ptr + (row if EACH else 0)), USE)
    drawn = bits(hash_row(tl.load(rows_ptr + row), key), hash_column(column, key))
    at = row.to(tl.int64) * num_columns + column
    tl.store(bits_ptr + at, drawn, mask=column < num_columns)


@on_its_device
def bits_triton(
    seed_key: int, step: Tensor, use: int, rows: Tensor, num_columns: int
) -> Tensor:  # [N,K] int32
    """`negchain.rng.bits` in one launch; `step` [], or one per row."""
    drawn = torch.empty(len(rows), num_columns, dtype=torch.int32, device=rows.device)
    width = min(1024, triton.next_power_of_2(max(num_columns, 1)))
    grid = (len(rows), triton.cdiv(num_columns, width))
    if drawn.numel():
        _bits_kernel[grid](
            drawn, rows.contiguous(), step.contiguous(), seed_key, num_columns, USE=use,
            EACH=step.dim() > 0, WIDTH=width, num_warps=1,
        )  # fmt: skip
    return drawn
