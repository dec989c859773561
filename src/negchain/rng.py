"""Random numbers as a pure function of (seed, step, use, row, column).

A sampler that keeps hidden generator state cannot be resumed, split over processes or moved into a
GPU kernel without changing its results. Here every draw is a hash of where it is used, so the same
numbers come out on a CPU, on a GPU, in one process or in several, and in a Triton kernel.

    key   = mix(mix(mix(seed) + step) + use * golden)
    bits  = mix( mix(row + key) + mix(column * golden ^ key) )

`mix` is the 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector): eight integer operations
with wrap-around, identical in torch int32 arithmetic and in Triton (`rng_triton`). Rows and
columns are hashed on their own first, so that a matrix of draws costs one `mix` per element.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negchain.fast.backends import prefers_triton

GOLDEN = -1640531527  # 0x9E3779B9 as int32: the odd constant nearest 2^32 / golden ratio
MIX_A = 0x21F0AAAD
MIX_B = 0x735A2D97

# The register: one number per use of random numbers, here and nowhere else. The first seven are
# used by every direction of a loss, direction k (or table k) adding 16 k.
FOR_ORDER = 1  # order in which the columns are proposed
FOR_ACCEPT = 2  # log u of the Metropolis-Hastings steps
FOR_GUMBEL = 3  # Gumbel noise of categorical draws (i-SIR, Negative Cache)
FOR_INIT = 4  # first state of each chain
FOR_PROPOSE = 5  # explicit draws from a proposal distribution
FOR_VIEW = 6  # which view's final state is stored
FOR_COPY = 7  # which copy of an item a row is offered
FOR_AUGMENT = 32  # the views of a step
FOR_STORED = 33  # which stored version of an item a step uses: augmentation, or caption
FOR_PROBE = 34  # views of the fixed set the exact loss is computed on
FOR_POSITIVE = 35  # which of its positives an anchor is shown

AHEAD = 32  # steps whose draws `ahead` makes together
FEW = 2048  # draws of a step, at most, for which it does


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 in place; a bijection of the 2^32 values."""
    x ^= (x >> 16) & 0xFFFF  # >> is arithmetic on signed integers: mask off the copied sign bits
    x *= MIX_A
    x ^= (x >> 15) & 0x1FFFF
    x *= MIX_B
    x ^= (x >> 15) & 0x1FFFF
    return x


def _to_int32(value: int) -> int:
    """Wrap a Python integer into the int32 range."""
    return (value + 2**31) % 2**32 - 2**31


def use_key(seed: int, step: Tensor, use: int) -> Tensor:  # step [] int64 -> [] int32
    """The key all draws of one (seed, step, use) share; computed on `step`'s device."""
    key = _mix(step.to(torch.int32) + seed_key(seed))
    return _mix(key.add_(_to_int32(use * GOLDEN)))


def seed_key(seed: int) -> int:
    """mix(seed), a 64-bit seed folded into int32; in plain integers, which a compiler follows."""
    return _to_int32(_mix_int(seed)) ^ _to_int32(seed >> 32)


def _mix_int(x: int) -> int:
    x %= 2**32
    x = (x ^ (x >> 16)) * MIX_A % 2**32
    x = (x ^ (x >> 15)) * MIX_B % 2**32
    return x ^ (x >> 15)


def bits(
    seed: int, step: Tensor, use: int, rows: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """31 random bits for every (row, column): [N, K] int32 in [0, 2^31).

    Args:
        seed: the user's seed.
        step: [] int64 tensor, the number of the training step; its device is the result's.
        use: one of the FOR constants.
        rows: [N] integer row numbers, global over all processes.
        num_columns: K.
        first_column: number of the first column.

    Example:
        >>> whole = bits(0, torch.tensor(7), FOR_ACCEPT, torch.arange(4), 5)
        >>> part = bits(0, torch.tensor(7), FOR_ACCEPT, torch.arange(2, 4), 5)
        >>> torch.equal(whole[2:], part)   # a row's draws do not depend on its neighbours
        True
    """
    if fit_for_numpy(step) and fit_for_numpy(rows):
        return _bits_numpy(seed, step, use, rows, num_columns, first_column)
    if step.is_cuda and first_column == 0 and prefers_triton(rows):
        from negchain.fast.rng_triton import bits_triton

        return bits_triton(seed_key(seed), step, use, rows, num_columns)
    return _bits_torch(seed, step, use, rows, num_columns, first_column)


def fit_for_numpy(tensor: Tensor) -> bool:
    """Whether numpy can read it: on a CPU, known to it, neither torch.compile nor func at work."""
    return (
        tensor.is_cpu
        and tensor.dtype != torch.bfloat16
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _bits_numpy(
    seed: int, step: Tensor, use: int, rows: Tensor, num_columns: int, first_column: int
) -> Tensor:
    """The same on a CPU, where torch takes several times as long over small integers."""
    first, more, count = seed_key(seed), use * GOLDEN, rows.shape[0]
    key = _mix_numpy(step.numpy().reshape(-1).astype(np.uint32) + np.uint32(first % 2**32))
    key = _mix_numpy(key + np.uint32(more % 2**32))
    columns = np.arange(first_column, first_column + num_columns, dtype=np.uint32)
    columns = columns * np.uint32(GOLDEN % 2**32) ^ key[:, None]
    x = _mix_numpy(np.concatenate([rows.numpy().astype(np.uint32) + key, columns.ravel()]))
    x = _mix_numpy(x[:count, None] + x[count:].reshape(columns.shape))
    x >>= 1
    return torch.from_numpy(x.view(np.int32))


def _mix_numpy(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x ^= x >> 16
    x *= MIX_A
    x ^= x >> 15
    x *= MIX_B
    x ^= x >> 15
    return x


def _bits_torch(
    seed: int, step: Tensor, use: int, rows: Tensor, num_columns: int, first_column: int = 0
) -> Tensor:
    """The readable twin of `rng_triton.bits_triton`."""
    key = use_key(seed, step, use)  # [], or one per row
    last = first_column + num_columns
    columns = torch.arange(first_column, last, dtype=torch.int32, device=rows.device) * GOLDEN
    row_hash = _mix(rows.to(torch.int32) + key)
    column_hash = _mix(columns ^ (key[:, None] if key.dim() else key))
    x = _mix(row_hash[:, None] + column_hash)
    return (x >> 1) & 0x7FFFFFFF


def uniform(
    seed: int,
    step: Tensor,
    use: int,
    rows: Tensor,
    num_columns: int,
    dtype: torch.dtype,
    first_column: int = 0,
) -> Tensor:
    """Uniforms in (0, 1], [N, K]: never 0, so that their logarithm is finite."""
    drawn = bits(seed, step, use, rows, num_columns, first_column)
    return drawn.to(dtype).add_(0.5).mul_(2.0**-31)


def log_uniform(*where: Any, **more: Any) -> Tensor:
    """Logarithms of uniforms, [N, K], between -22.2 and 0; arguments as of `uniform`."""
    return uniform(*where, **more).log_()


def gumbel(*where: Any, **more: Any) -> Tensor:
    """Gumbel noise, [N, K]: `argmax(logits + gumbel)` is a draw from `softmax(logits)`.

    Arguments as of `uniform`. Written as -log(-log(1 - v)) because uniforms have their resolution
    near zero, and it is the large values of the noise (small v) that decide an argmax.
    """
    return uniform(*where, **more).neg_().log1p_().neg_().log_().neg_()


def coins(*where: Any) -> Tensor:
    """Fair coins, [N, K] bool; arguments as of `bits`."""
    return bits(*where) & 1 == 0


def permutation(seed: int, step: Tensor, use: int, num_columns: int) -> Tensor:
    """A uniformly random order of `num_columns` columns for this step, [K] int64.

    A stable sort of 31-bit keys: the same order on every device. Two equal keys (probability
    K^2 / 2^32) keep their relative order, a departure from uniformity too small to measure.
    """
    row = torch.zeros(1, dtype=torch.int64, device=step.device)
    return orders(seed, step, use, row, num_columns)[0]


def orders(*where: Any) -> Tensor:
    """Random orders of K columns, [N, K] int64; arguments as of `bits`."""
    return torch.argsort(bits(*where), stable=True)


def ahead(
    draw: Callable[..., Tensor],
    seed: int,
    step: Tensor,
    use: int,
    rows: Tensor,
    num_columns: int,
    *more: Any,
) -> Tensor:
    """`draw` of the same arguments, for a function above whose rows are the same at every step.

    On a CPU a few numbers cost what calling the operations costs. So those of AHEAD steps are made
    together, and kept: a step is then one look-up. What comes back must not be changed in place.

    Example:
        >>> where = (0, torch.tensor(7), FOR_ACCEPT, torch.arange(4), 5)
        >>> torch.equal(ahead(bits, *where), bits(*where))
        True
    """
    few = rows.shape[0] * num_columns <= FEW and step.dim() == 0
    if not few or not fit_for_numpy(step) or not fit_for_numpy(rows):
        return draw(seed, step, use, rows, num_columns, *more)
    block, place = divmod(int(step), AHEAD)
    numbers = rows.numpy().astype(np.int64).tobytes()
    return _block(draw, seed, block, use, numbers, num_columns, *more)[place]


@lru_cache(maxsize=32)
def _block(
    draw: Callable[..., Tensor], seed: int, block: int, use: int, rows: bytes, *more: Any
) -> Tensor:  # [AHEAD,N,K]
    with torch.inference_mode(False):  # kept, and used when that is over
        numbers = torch.from_numpy(np.frombuffer(rows, dtype=np.int64).copy())
        steps = torch.arange(block * AHEAD, (block + 1) * AHEAD, device="cpu")
        where = steps.repeat_interleave(len(numbers)), use, numbers.repeat(AHEAD)
        return draw(seed, *where, *more).view(AHEAD, len(numbers), -1)


def integers_below(bound: Tensor, u: Tensor) -> Tensor:  # [N] int64, [N] float64 -> [N] int64
    """Uniform integers in [0, bound) from uniforms `u` in (0, 1]."""
    return torch.minimum((u * bound).long(), bound - 1)
