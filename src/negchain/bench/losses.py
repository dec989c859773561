"""What needs no encoder: the scan, the losses alone, large batches and large tables.

Inputs are unit vectors in clusters whose inner products no arithmetic rounds (`clustered`), so that
a fast path and its readable twin may differ in the order of sums and in nothing else.

Shapes: `B` batch, `D` embedding.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import negchain
from negchain.bench.record import Check, Row, Settings, Table, rows
from negchain.bench.timing import Timed, graphed, interleaved, peak_bytes, release
from negchain.losses.base import ContrastiveLoss
from negchain.losses.chains import ChainTable
from negchain.methods import METHODS, LossSettings
from negchain.printable import counted
from negchain.weights.metropolis import Backend, mh_scan, scan_reference

BETA = 14.28
BATCHES = (32, 256)
DIM, LARGE_DIM = 128, 512
NUM_SAMPLES = 5_000  # of the losses alone; Negative Cache scores all of them
NUM_LARGE = 1_000_000  # of large batches
SIZES, CPU_SIZES = (8_192, 32_768), (512,)
CHECKED_SIZE = 256
GRADIENT_TOLERANCE = 2e-2  # of its norm; gradients of bf16 embeddings are bf16

# ---------------------------------------------------------------------- inputs and checks


def clustered(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit vectors around 16 centres, [count,dim], whose inner products bf16 does not round.

    As many entries as the largest power of 4 up to `dim` are ± a power of two, the rest 0, so that
    squares sum to one; members of a cluster differ in the signs of a quarter of them.

    >>> z = clustered(8, 512, torch.Generator().manual_seed(0))
    >>> bool((z.norm(dim=1) == 1).all()), bool((z.bfloat16() == z).all())
    (True, True)
    """
    used = 4 ** int(math.log(dim, 4))  # entries 1 / sqrt(used), a power of two
    centres = (torch.randint(2, (16, used), generator=generator) * 2 - 1).float()
    chosen = centres[torch.randint(16, (count,), generator=generator)] / math.sqrt(used)
    turned = torch.rand(count, used, generator=generator) < 0.25
    return F.pad(torch.where(turned, -chosen, chosen), (0, dim - used))


def inputs(
    settings: Settings, size: int, dim: int, num_samples: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z_a, z_b and carried embeddings [B,D], and data set positions [B]."""
    generator = settings.generator()
    z_a, held = clustered(size, dim, generator), clustered(size, dim, generator)
    z_b = torch.where(torch.rand(z_a.shape, generator=generator) < 0.1, -z_a, z_a)
    index = torch.randperm(num_samples, generator=generator)[:size].to(settings.device)
    given = [z.to(settings.device, dtype).requires_grad_() for z in (z_a, z_b, held)]
    return given[0], given[1], given[2], index


def check(
    name: str,
    fast: negchain.EMC2Loss,
    slow: negchain.EMC2Loss,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    tolerance: float,
) -> Check:
    """A fast loss against its twin: value, chains and gradients of the second of two visits."""
    z_a, z_b, held, index = given
    wanted = (z_a, z_b, held) if fast.carried == "encode" else (z_a, z_b)
    values, grads, ends = [], [], []
    for loss_fn in (fast.to(z_a.device), slow.to(z_a.device)):
        for _ in range(2):  # the second starts where the first one's chains ended
            value = loss_fn(z_a, z_b, index, encode=lambda ids: held)
        values.append(float(value.detach()))
        grads.append([g.double() for g in torch.autograd.grad(value, wanted)])
        ends.append(loss_fn.chains.ids(0, index))
    apart = abs(values[0] - values[1]) / abs(values[1])
    elsewhere = int((ends[0] != ends[1]).sum())
    pairs = zip(*grads, strict=True)
    gradient = max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs)
    return Check(
        f"{name} = its readable twin, B = {len(z_a)}",
        apart <= tolerance and elsewhere <= 1 and gradient <= GRADIENT_TOLERANCE,
        f"value within {apart:.1g}, {counted(elsewhere, 'chain', 'chains')} ended elsewhere, "
        f"gradients within {gradient:.1g} of their norm",
    )


# ---------------------------------------------------------------------- the scan


def scan(settings: Settings) -> Table:
    """`mh_scan` of 2b chains over 2b columns against the loop over columns it replaces."""
    found: list[Row] = []
    checks: list[Check] = []
    for batch in BATCHES:
        settings.say(f"b = {batch}")
        drawn, size = _scan_inputs(settings, batch), 2 * batch
        logits, start, log_u = (tensor.to(settings.device) for tensor in drawn)
        given = logits, start, log_u, batch - 1
        here = "the loop on this GPU" if settings.on_gpu else "the loop"
        timed = {here: Timed(partial(scan_reference, *given), settings.device)}
        if settings.on_gpu:
            on_cpu = partial(scan_reference, *drawn, batch - 1)
            timed["the loop on the CPU"] = Timed(on_cpu, torch.device("cpu"))
        backends: list[Backend] = ["triton", "torch"] if settings.on_gpu else ["torch"]
        for backend in backends:
            run = partial(mh_scan, *given, backend)
            pairs = zip(run(), scan_reference(*given), strict=True)
            differs = torch.stack([(a != b).view(size, -1).any(1) for a, b in pairs]).any(0)
            name = f"{backend} equals the loop to the last bit, b = {batch}"
            text = f"{int(differs.sum())} of {size} chains with a difference"
            checks.append(Check(name, not differs.any(), text))
            timed[backend] = graphed(run, settings.device, calls=50)
        found += rows(interleaved(timed, settings.rounds, settings.window_ms), f"b = {batch}")
    return Table(
        title="mh_scan, 2b chains over 2b columns",
        compares="time against the loop over columns (`scan_reference`, all chains at once)",
        rows=found,
        checks=checks,
        notes=(f"float32 logits of spread 0.3 β, β = {BETA}, burn-in b - 1.",),
    )


def _scan_inputs(settings: Settings, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with each chain's own two columns excluded, starts, log-uniforms; on the CPU."""
    generator, size = settings.generator(), 2 * batch
    logits = BETA * 0.3 * torch.randn(size, size, generator=generator)
    own = torch.arange(size)
    logits[own, own] = logits[own, (own + batch) % size] = -math.inf
    start = BETA * 0.3 * torch.randn(size, generator=generator)
    return logits, start, torch.rand(size, size, generator=generator).log()


# ---------------------------------------------------------------------- losses alone


def alone(settings: Settings) -> Table:
    """Forward and backward of every registered loss against the first one's, InfoNCE's."""
    found: list[Row] = []
    for batch in BATCHES:
        settings.say(f"b = {batch}")
        z_a, z_b, _, index = inputs(settings, batch, DIM, NUM_SAMPLES)
        build = LossSettings(NUM_SAMPLES, BETA, DIM)
        timed = {
            method.title: graphed(
                _gradients(method.build(build).to(settings.device), z_a, z_b, index.detach),
                settings.device,
            )
            for method in METHODS.values()
        }
        found += rows(interleaved(timed, settings.rounds, settings.window_ms), f"b = {batch}")
    settings.say("comparing with the readable loss")
    given = inputs(settings, CHECKED_SIZE, DIM, NUM_SAMPLES)
    modes: dict[str, dict[str, Any]] = {
        "EMC²": {},
        "EMC², cached": {"carried": "cached", "dim": DIM},
        "EMC² i-SIR": {"kernel": "isir"},
    }
    checks = []
    for name, mode in modes.items():
        fast = negchain.EMC2Loss(NUM_SAMPLES, BETA, **mode)
        slow = negchain.EMC2Loss(NUM_SAMPLES, BETA, backend="reference", **mode)
        checks.append(check(name, fast, slow, given, 1e-4))
    return Table(
        title=f"Losses, forward + backward, d = {DIM}",
        compares=f"time against {next(iter(METHODS.values())).title}'s on the same embeddings",
        rows=found,
        checks=checks,
        notes=(
            f"{NUM_SAMPLES:,} samples, shared views, float32, β = {BETA}. What a loss asks for is "
            "looked up, not encoded.",
        ),
    )


def _gradients(
    loss_fn: ContrastiveLoss, z_a: Tensor, z_b: Tensor, index: Callable[[], Tensor]
) -> Callable[[], object]:
    """Forward and backward; what the loss asks for comes from a table of embeddings."""
    bank = torch.randn(4096, z_a.shape[1], device=z_a.device)

    def run() -> object:
        asked: list[Tensor] = []

        def encode(ids: Tensor) -> Tensor:
            found = bank[ids % len(bank)]  # that ids share rows does not change the time
            if torch.is_grad_enabled():  # its gradient belongs to the work of the loss
                asked.append(found.requires_grad_())
            return found

        value = loss_fn(z_a, z_b, index(), encode=encode)
        return torch.autograd.grad(value, (z_a, z_b, *asked))

    return run


# ---------------------------------------------------------------------- large batches


def _cases(size: int) -> dict[str, dict[str, Any]]:
    """Settings of the losses for large batches at B = size."""
    mh = negchain.MH(count_every=max(128, size // 128))  # 128 counted states of a row at most
    groups = negchain.ISIR(max(2, -(-size // 4096)) * 128)  # 32 columns that have weight
    common = {"num_samples": NUM_LARGE, "beta": BETA, "views": "paired", "symmetric": False}
    return {
        "MH": {**common, "kernel": mh},
        "MH, β = 50": {**common, "kernel": mh, "beta": 50.0},
        "i-SIR": {**common, "kernel": groups},
        "i-SIR, all weights": {**common, "kernel": negchain.ISIR()},
        "MH, shared views": {**common, "kernel": mh, "views": "shared", "symmetric": True},
    }


def large(settings: Settings) -> Table:
    """The EMC² loss for large batches against InfoNCE by autograd: time and memory."""
    settings.say("comparing with the dense loss")
    given = inputs(settings, CHECKED_SIZE, LARGE_DIM, NUM_LARGE, torch.bfloat16)
    checks = []
    for name, case in _cases(CHECKED_SIZE).items():
        fast, slow = negchain.LargeBatchEMC2Loss(**case), negchain.EMC2Loss(**case, backend="torch")
        # with shared views the dense value counts two copies of every item, the tiled one one
        tolerance = 1e-3 if case["views"] == "paired" else 0.05
        checks.append(check(f"large batch, {name}", fast, slow, given, tolerance))
    found: list[Row] = []
    sizes = SIZES if settings.on_gpu else CPU_SIZES
    for size, views in ((sizes[0], "shared"), *((size, "paired") for size in sizes)):
        settings.say(f"B = {size:,}")
        found += _large_rows(settings, size, views)
        release()
    return Table(
        title=f"EMC² loss for large batches, forward + backward, d = {LARGE_DIM}",
        compares="time and memory against InfoNCE by autograd on the same embeddings",
        rows=found,
        checks=checks,
        notes=(
            f"bf16 embeddings in clusters, carried states encoded, {NUM_LARGE:,} samples, β = "
            f"{BETA} and paired views in one direction unless said otherwise. MH counts 128 states "
            "of a row at most, i-SIR weighs 32 columns (16 at B = 8,192's groups of 256), “all "
            "weights” the whole softmax. Memory: the peak above the inputs, gradients included.",
        ),
    )


def _large_rows(settings: Settings, size: int, views: str) -> list[Row]:
    z_a, z_b, held, index = inputs(settings, size, LARGE_DIM, NUM_LARGE, torch.bfloat16)

    def baseline() -> object:
        with torch.autocast(settings.device.type, torch.bfloat16):
            value = info_nce(z_a, z_b, BETA, shared=views == "shared")
        return torch.autograd.grad(value, (z_a, z_b))

    def tiled(loss_fn: negchain.EMC2Loss) -> Callable[[], object]:
        wanted = (z_a, z_b, held)
        return lambda: torch.autograd.grad(
            loss_fn(z_a, z_b, index, encode=lambda ids: held), wanted
        )

    calls: dict[str, Callable[[], object]] = {"InfoNCE": baseline}
    for name, case in _cases(size).items():
        if case["views"] == views:
            calls[name] = tiled(negchain.LargeBatchEMC2Loss(**case).to(settings.device))
    if views == "paired":
        a, b = z_a.detach(), z_b.detach()
        calls["one matrix product"] = lambda: a @ b.T
    where = f"{views} views, B = {size:,}"
    peaks = {name: [peak_bytes(call) / 2**20] for name, call in calls.items() if settings.on_gpu}
    timed = {name: graphed(call, settings.device) for name, call in calls.items()}
    times = interleaved(timed, settings.rounds, settings.window_ms)
    return rows(times, where) + (rows(peaks, where, "MiB") if peaks else [])


def info_nce(z_a: Tensor, z_b: Tensor, beta: float, shared: bool = True) -> Tensor:
    """InfoNCE in a few lines of torch: both views against all others, or z_a against z_b.

    >>> z_a, z_b = torch.randn(2, 6, 4)
    >>> torch.allclose(info_nce(z_a, z_b, 5.0), negchain.InfoNCELoss(beta=5.0)(z_a, z_b), atol=1e-5)
    True
    """
    z_a, z_b = F.normalize(z_a, dim=1), F.normalize(z_b, dim=1)
    own = torch.arange(len(z_a), device=z_a.device)
    if not shared:
        return F.cross_entropy(beta * z_a @ z_b.T, own)
    z = torch.cat([z_a, z_b])
    logits = (z @ z.T * beta).fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits, torch.cat([own + len(own), own]))


# ---------------------------------------------------------------------- large tables


def tables(settings: Settings) -> Table:
    """A step of the EMC² loss with tables of 10^5 and 10^8 (on a CPU 10^7) samples."""
    batch, steps, device = 256, 512, settings.device
    timed = {}
    for power in (5, 8 if settings.on_gpu else 6 if settings.quick else 7):
        settings.say(f"10^{power} samples")
        z_a, z_b, _, _ = inputs(settings, batch, DIM, NUM_SAMPLES)
        ahead = torch.randint(10**power, (steps, batch), generator=settings.generator()).to(device)
        number = torch.zeros(1, dtype=torch.int64, device=device)

        def index(ahead: Tensor = ahead, number: Tensor = number) -> Tensor:
            return ahead[number.add_(1) % steps][0]

        loss_fn = negchain.EMC2Loss(10**power, BETA).to(device)
        timed[f"10^{power} samples"] = graphed(_gradients(loss_fn, z_a, z_b, index), device)
    times = interleaved(timed, settings.rounds, settings.window_ms)
    held = []
    for name, states in (("up to 2^31 samples", 1000), ("beyond 2^31 samples", 2**31 + 1)):
        shape: dict[str, Any] = {"num_states": states, "ids_per_item": 1, "own": True}
        chains = ChainTable(1, 1000, **shape, keep="encode", seed=0)
        size = sum(state.nbytes for state in chains.state_tensors()) / 1000
        held.append(Row.of(f"state per sample, {name}", [size], "bytes"))
    return Table(
        title=f"Chain tables, EMC² loss step, b = {batch}, d = {DIM}",
        compares="time against the same step with the small table",
        rows=(*rows(times, "one step"), *held),
        notes=(
            "Loss forward + backward at positions drawn anew for every step, carried states "
            "looked up; bytes are those of the state of actual tables.",
        ),
    )
