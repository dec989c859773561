"""The streaming EMC² loss at large batches against InfoNCE by autograd and one matrix product.

Inputs are unit vectors in clusters, so that the softmax over negatives is neither flat nor on one
column, and one flat case. Equality with the dense loss is checked twice: on vectors whose inner
products no arithmetic rounds (then nothing but the order of sums may differ) and on ordinary ones
(then a comparison within rounding may fall the other way, and that row's chain goes elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import negchain
from negchain.bench import usual
from negchain.bench.equality import clustered, difference, exact_clustered, flipped
from negchain.bench.table import Check, Row, Settings, Table
from negchain.bench.timing import graphed, interleaved, peak_bytes, release

DIM = 512
NUM_SAMPLES = 1_000_000
CLUSTERS, SPREAD = 64, 1.0  # in a cluster inner products are about 1 / (1 + SPREAD^2)
SIZES = (8_192, 32_768)
CPU_SIZE = 512
CHECKED_SIZE = 512
TILE, COUNTED = 128, 128  # every 128th state, at large batches 128 states of a row in all
GROUPS = 32  # of columns, one of which speaks for all: i-SIR's weights that are not zero
MATMUL = "one matrix product"
VALUE_TOLERANCE, SHARED_VALUE_TOLERANCE = 1e-3, 5e-2
GRADIENT_TOLERANCE = 2e-2  # of the norm, where nothing is rounded
MOST_DIFFERING = 0.05  # of the rows, on inputs that rounding can tip


@dataclass(frozen=True)
class Case:
    """A setting of the streaming loss."""

    name: str
    beta: float
    kernel: Literal["mh", "isir"] = "mh"
    flat: bool = False
    views: Literal["shared", "paired"] = "paired"
    all_weights: bool = False  # of i-SIR

    def count_every(self, size: int) -> int:
        """MH: steps from counted state to counted state; i-SIR: columns one speaks for."""
        if self.kernel == "mh":
            return max(TILE, size // COUNTED)
        return 1 if self.all_weights else max(2, -(-size // (GROUPS * TILE))) * TILE

    def loss(self, size: int, *, streaming: bool) -> negchain.EMC2Loss:
        """The loss for B = size; streaming=False is the dense, readable twin."""
        every = self.count_every(size)
        make = negchain.StreamingEMC2Loss if streaming else negchain.EMC2Loss
        return make(
            NUM_SAMPLES,
            self.beta,
            negchain.MH(count_every=every) if self.kernel == "mh" else negchain.ISIR(every),
            views=self.views,
            symmetric=self.views == "shared",
            backend="auto" if streaming else "torch",
        )

    @property
    def value_tolerance(self) -> float:
        """Of the relative difference of the values; with shared views the dense loss's counts two
        copies of every item, the streaming one's one.
        """
        return VALUE_TOLERANCE if self.views == "paired" else SHARED_VALUE_TOLERANCE


CASES = (
    Case("MH, β = 14.28", 14.28),
    Case("MH, β = 50", 50.0),
    Case("i-SIR, β = 14.28", 14.28, kernel="isir"),
    Case("MH, β = 14.28, random directions", 14.28, flat=True),
    Case("i-SIR, all weights", 14.28, kernel="isir", all_weights=True),
)
SHARED = Case("MH, β = 14.28, shared views", 14.28, views="shared")


def table(settings: Settings) -> Table:
    """Forward + backward at B = 8,192 and 32,768 (on a CPU 512), d = 512, bf16 embeddings."""
    settings.say("comparing with the dense loss")
    checks = [_check(settings, case, exact) for case in (*CASES, SHARED) for exact in (True, False)]
    rows: list[Row] = []
    for size in SIZES if settings.on_gpu else (CPU_SIZE,):
        rows += _rows(settings, size, CASES)
        release()
        if size == SIZES[0] or not settings.on_gpu:
            rows += _rows(settings, size, (SHARED,))
            release()
    return Table(
        subject="large",
        title=f"Streaming EMC² loss, forward + backward, d = {DIM}",
        compares=(
            "time and memory against InfoNCE by autograd on the same embeddings, and time against "
            "one B × B × d product of them"
        ),
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(
            f"bf16 embeddings in {CLUSTERS} clusters, carried states encoded, {NUM_SAMPLES:,} "
            "samples, paired views in one direction unless said otherwise; MH counts every "
            f"{TILE}th state (every {SIZES[-1] // COUNTED}th at B = {SIZES[-1]:,}).",
            f"i-SIR: one column of every {2 * TILE} has their weight (of every "
            f"{SIZES[-1] // GROUPS} at B = {SIZES[-1]:,}), which adds variance and no bias; “all "
            "weights” is the softmax over all columns, whose backward pass is two dense products.",
            "Memory: the peak above the inputs, gradients of the inputs included.",
        ),
    )


# ---------------------------------------------------------------------- inputs


def _inputs(
    settings: Settings, size: int, *, flat: bool = False, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z_a, z_b and carried embeddings [B,D] in bf16, and data set positions [B]."""
    generator, device = settings.generator(), settings.device
    make = exact_clustered if exact else clustered
    spread = (2.0 if exact else 1e3) if flat else SPREAD  # so wide that clusters vanish
    z_a, held = (make(size, DIM, CLUSTERS, spread, generator) for _ in range(2))
    if exact:
        z_b = flipped(z_a, 0.1, generator)
    else:
        z_b = F.normalize(z_a + 0.5 * torch.randn(z_a.shape, generator=generator) / DIM**0.5, dim=1)
    index = torch.randperm(NUM_SAMPLES, generator=generator)[:size].to(device)
    given = [z.to(device, torch.bfloat16).requires_grad_() for z in (z_a, z_b, held)]
    return given[0], given[1], given[2], index


# ---------------------------------------------------------------------- times and memory


def _rows(settings: Settings, size: int, cases: tuple[Case, ...]) -> list[Row]:
    settings.say(f"B = {size:,}, {cases[0].views} views")
    calls = _calls(settings, size, cases)
    peaks = {n: peak_bytes(c) / 2**20 for n, c in calls.items()} if settings.on_gpu else {}
    timed = {name: graphed(call, settings.device) for name, call in calls.items()}
    times = interleaved(timed, settings.rounds, window_ms=20.0 if settings.quick else 50.0)
    base = next(iter(calls))

    def row(name: str, unit: str, against: str = "") -> Row:
        values = [peaks[name]] if unit == "MiB" else times[name]
        held = [peaks[against]] if unit == "MiB" and against else times.get(against)
        return Row.of(f"{name}, B = {size:,}", values, unit, against=against, base=held)

    rows = [row(base, "ms"), *([row(base, "MiB")] if settings.on_gpu else [])]
    for case in cases:
        rows.append(row(case.name, "ms", base))
        if settings.on_gpu:
            rows.append(row(case.name, "MiB", base))
        if MATMUL in times:
            rows.append(row(case.name, "ms", MATMUL))
    return rows


def _calls(
    settings: Settings, size: int, cases: tuple[Case, ...]
) -> dict[str, Callable[[], object]]:
    """InfoNCE first, then the cases, then, for paired views, the matrix product."""
    z_a, z_b, held, index = _inputs(settings, size)
    beta = cases[0].beta
    calls: dict[str, Callable[[], object]] = {}
    if cases[0].views == "shared":
        calls["InfoNCE, shared views"] = lambda: _gradients(_info_nce_shared, z_a, z_b, beta)
    else:
        calls["InfoNCE"] = lambda: _gradients(_info_nce, z_a, z_b, beta)
    for case in cases:
        given = _inputs(settings, size, flat=True) if case.flat else (z_a, z_b, held, index)
        calls[case.name] = _streaming(case, *given)
    if cases[0].views == "paired":
        a, b = z_a.detach(), z_b.detach()
        calls[MATMUL] = lambda: a @ b.T
    return calls


def _streaming(
    case: Case, z_a: Tensor, z_b: Tensor, held: Tensor, index: Tensor
) -> Callable[[], object]:
    loss_fn = case.loss(len(z_a), streaming=True).to(z_a.device)
    inputs = (z_a, z_b, held)
    return lambda: torch.autograd.grad(loss_fn(z_a, z_b, index, encode=lambda ids: held), inputs)


def _gradients(
    loss: Callable[[Tensor, Tensor, float], Tensor], z_a: Tensor, z_b: Tensor, beta: float
) -> tuple[Tensor, ...]:
    with torch.autocast(z_a.device.type, torch.bfloat16):
        value = loss(z_a, z_b, beta)
    return torch.autograd.grad(value, (z_a, z_b))


def _info_nce(z_a: Tensor, z_b: Tensor, beta: float) -> Tensor:
    z_a, z_b = F.normalize(z_a, dim=1), F.normalize(z_b, dim=1)
    return F.cross_entropy(beta * z_a @ z_b.T, torch.arange(len(z_a), device=z_a.device))


def _info_nce_shared(z_a: Tensor, z_b: Tensor, beta: float) -> Tensor:
    return usual.info_nce(z_a, z_b, beta)


# ---------------------------------------------------------------------- equality


def _check(settings: Settings, case: Case, exact: bool) -> Check:
    """Value and gradients of the streaming loss against the dense one, same draws."""
    inputs = _inputs(settings, CHECKED_SIZE, flat=case.flat, exact=exact)
    fast, slow = (
        case.loss(CHECKED_SIZE, streaming=streaming).to(settings.device)
        for streaming in (True, False)
    )
    found = difference(fast, slow, *inputs)
    ok = found.value <= case.value_tolerance
    ok = ok and found.rows <= (1 / CHECKED_SIZE if exact else MOST_DIFFERING)
    kind = "inputs without rounding" if exact else "ordinary inputs"
    return Check(
        name=f"streaming = dense, {case.name}, B = {CHECKED_SIZE}, {kind}",
        ok=ok and (not exact or found.gradient <= GRADIENT_TOLERANCE),
        found=f"{found}; allowed for the value {case.value_tolerance:g}",
    )
