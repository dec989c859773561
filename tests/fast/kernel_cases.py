"""Small Triton kernels against what they must equal; run by `fused_cases`, and on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain import EMC2Loss, mh_scan, rng
from negchain.augment import Pictures, Uniforms, augmentation
from negchain.fast import rng_triton
from negchain.fast.augment.fused_triton import augment_fused
from negchain.fast.layers import few_channels_triton, max_pool_triton
from weights.scan_cases import disagreement, scan_cases

Sizes = tuple[tuple[int, int], ...]
Drawn = tuple[int, int, tuple[int, int]]  # seed, use, (step, columns)


def scan() -> list[str]:
    """Some of `scan_cases`; tests/weights/test_scan.py has them all, slowly."""
    return disagreement("triton", thin=True)


def thinned_scan(device: str = "cpu", sizes: Sizes = ((1, 2), (7, 3), (17, 4))) -> list[str]:
    """`mh_scan` with count_every > 1: Triton's equals the reference to the bit."""
    found = []
    for columns, every in sizes:
        for name, inputs in scan_cases((columns,)):
            if isinstance(inputs[3], Tensor) or "14.28" not in name + "14.28" * (columns < 9):
                continue
            few = [x[:2] if isinstance(x, Tensor) else x for x in inputs]
            there = [x.to(device) if isinstance(x, Tensor) else x for x in few]
            got = mh_scan(*there, backend="triton", count_every=every)
            expected = mh_scan(*few, backend="reference", count_every=every)
            for part in expected._fields:
                if not torch.equal(getattr(got, part).cpu(), getattr(expected, part)):
                    found.append(f"{name}, every {every}: {part}")
    return found


def thinned_scan_at_length(device: str = "cpu") -> list[str]:
    return thinned_scan(device, ((41, 4), (41, 100), (1100, 128)))


# ---------------------------------------------------------------------------- draws

SEEDS, STREAMS = (0, 3, 2**40 + 5, 2**64 - 1), (1, 2, 3 + 16)
STEPS = ((0, 1), (7, 37), (2**31 + 9, 1030), (2**33, 3))  # and how many columns


def draw_bits(device: str = "cpu", drawn: Iterable[Drawn] | None = None) -> list[str]:
    """`bits_triton` against the torch twin, to the bit."""
    found = []
    strided = torch.tensor([0, 5, 2**31 - 1, 2**31 + 7, 2**32 + 7, 12345]).repeat_interleave(2)[::2]
    for seed, use, (number, columns) in drawn or zip(SEEDS, (1, 2, 19, 1), STEPS, strict=True):
        step, rows = torch.tensor(number), strided
        if use == 2:  # a step for every row: the initial draws of more than 2^32 chains
            step = step + 2 * (rows >> 32)
        expected = rng._bits_torch(seed, step, use, rows, columns)
        got = rng_triton.bits_triton(
            rng.seed_key(seed), step.to(device), use, rows.to(device), columns
        )
        if not torch.equal(expected, got.cpu()):
            found.append(f"seed={seed} step={number} use={use} K={columns}")
    return found


def draw_bits_of_all_streams(device: str = "cpu") -> list[str]:
    return draw_bits(device, itertools.product(SEEDS, STREAMS, STEPS))


@triton.jit
def _draws_kernel(hash_ptr, log_u_ptr, gumbel_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    column_hash = tl.load(hash_ptr + at).to(tl.uint32)
    row_hash = column_hash * 0
    tl.store(log_u_ptr + at, rng_triton.log_uniform(row_hash, column_hash))
    tl.store(gumbel_ptr + at, rng_triton.gumbel(row_hash, column_hash))


def draw_logarithms(device: str = "cpu") -> list[str]:
    """`log_uniform` and `gumbel` in float32 against float64, for chosen bits.

    With a row hash of 0 the bits are mix(column hash) >> 1, and `mix` can be inverted: the test
    chooses the bits, the rarest (a uniform of 2^-32) among them.
    """
    edges = [0, 1, 2, 3, 5, 9, 100, 2**16, 2**24 - 1, 2**24 + 1, 2**30, 2**31 - 1]
    edges += [int(0.01 * 2**31) + k for k in (-300, -1, 0, 1, 300)]
    random = torch.randint(0, 2**31, (2048 - len(edges),), generator=torch.manual_seed(1))
    bits = torch.cat([torch.tensor(edges), random])
    hashes = torch.tensor([_unmix(2 * int(b)) for b in bits], dtype=torch.int64)
    log_u, gumbel = torch.empty(2048, device=device), torch.empty(2048, device=device)
    _draws_kernel[(1,)](hashes.to(device), log_u, gumbel, SIZE=2048)
    u = (bits.double() + 0.5) * 2.0**-31
    found = []
    error = (log_u.cpu().double() - u.log()).abs().max()
    if not error <= 1e-5:
        found.append(f"log_uniform is off by {float(error):.1e}")
    expected = -(-torch.log1p(-u)).log()
    # float32 cannot tell uniforms near 1 apart: the smallest Gumbels, which never win
    usual = u < 0.999
    error = (gumbel.cpu().double() - expected)[usual].abs().max()
    # a GPU's log2 is exact to 2^-22, of log2(0.99) in the worst case
    if not error <= (1e-5 if device == "cpu" else 2e-5):
        found.append(f"gumbel is off by {float(error):.1e}")
    if not bool((gumbel.cpu()[~usual] <= float(expected[usual].min()) + 1e-3).all()):
        found.append("gumbel of a uniform near 1 is too large")
    return found


def _unmix(x: int) -> int:
    """The inverse of `rng._mix` on unsigned 32-bit integers."""

    def unshift(y: int, by: int) -> int:
        x = y
        for _ in range(32 // by):
            x = y ^ (x >> by)
        return x

    x = unshift(x, 15) * pow(rng.MIX_B, -1, 2**32) % 2**32
    x = unshift(x, 15) * pow(rng.MIX_A, -1, 2**32) % 2**32
    return unshift(x, 16)


# ---------------------------------------------------------------------------- devices


def launched_elsewhere() -> list[str]:
    """Paths that launch a kernel without making the device of their tensors the current one."""
    from triton.runtime.interpreter import GridExecutor

    launch, inside, found = GridExecutor.__call__, [0], list[str]()

    @contextlib.contextmanager
    def guard(device: object) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def watched(self: Any, *args: Any, **options: Any) -> None:
        if not inside[0]:
            found.append(f"{path.__name__}: {self.fn.__name__}")
        launch(self, *args, **options)

    with (
        mock.patch("torch.cuda.device", guard),
        mock.patch.object(GridExecutor, "__call__", watched),
    ):
        for path in (_lost_loss, _lost_scan, _lost_draws, _lost_views, _lost_layers):
            path()
    return found


def _lost_loss() -> None:
    index, loss_fn = torch.arange(4), EMC2Loss(9, 5.0, backend="fused")
    loss_fn(*torch.randn(2, 4, 5), index, loss_fn.request(index).answer(torch.randn(4, 5)))


def _lost_scan() -> None:
    mh_scan(torch.zeros(2, 3), torch.zeros(2), -torch.ones(2, 3), 1, backend="triton")


def _lost_draws() -> None:
    rng_triton.bits_triton(7, torch.tensor(3), 2, torch.arange(2), 3)


def _lost_views() -> None:
    images = torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
    for pictures in (images, Pictures.of(images)):
        augment_fused(
            augmentation("simclr-stl10", size=8), pictures, Uniforms(0, torch.tensor(3), 0)
        )


def _lost_layers() -> None:
    x, weight = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    few_channels_triton.few_channels_forward(x, weight, 1)
    max_pool_triton.max_pool_forward(x, 3, 2, 1)
