"""Forward and backward of every loss alone, against InfoNCE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import negchain
from negchain.bench.equality import difference, exact_clustered, flipped
from negchain.bench.table import Bar, Check, Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved
from negchain.losses.base import ContrastiveLoss
from negchain.pool import Draw

DIM = 128
NUM_SAMPLES = {"cuda": 50_000, "cpu": 5_000}  # Negative Cache scores all of them
CASES = ((32, 14.28), (256, 5.0), (256, 14.28))  # b and beta: the paper's two, and the sharp one
BASE = "InfoNCE"
CHECKED: dict[str, dict[str, Any]] = {
    "EMC², encode": {"carried": "encode"},
    "EMC², cached": {"carried": "cached", "dim": DIM},
    "EMC², score": {"carried": "score"},
    "EMC² i-SIR": {"kernel": "isir"},
}
CHECKED_SIZE = 256
CPU_BAR = Bar(ratio_at_most=6)  # for EMC² as the paper has it, b = 256


def table(settings: Settings) -> Table:
    """Each loss at b = 32 and 256, d = 128."""
    rows: list[Row] = []
    for batch, beta in CASES:
        settings.say(f"b = {batch}, β = {beta:g}")
        calls = _calls(settings, batch, beta)
        timed: dict[str, Timed] = {}
        for name, call in calls.items():
            timed[name] = graphed(call, settings.device)
        times = interleaved(timed, settings.rounds)
        for name, values in times.items():
            barred = not settings.on_gpu and batch == 256 and name == "EMC², encode"
            rows.append(
                Row.of(
                    f"{name}, b = {batch}, β = {beta:g}",
                    values,
                    "ms",
                    against=BASE,
                    base=times[BASE],
                    bar=CPU_BAR if barred else None,
                    headline=barred and beta == 14.28,
                )
            )
    settings.say("comparing with the readable loss")
    graph = "; each call is one replay of a CUDA graph" if settings.on_gpu else ""
    return Table(
        subject="losses",
        title=f"Losses, forward + backward, d = {DIM}",
        compares=f"time against {BASE}'s on the same embeddings",
        rows=tuple(rows),
        checks=tuple(_check(settings, name, mode) for name, mode in CHECKED.items()),
        notes=(f"{NUM_SAMPLES[settings.device.type]:,} samples, shared views, float32{graph}.",),
    )


def _calls(settings: Settings, batch: int, beta: float) -> dict[str, Callable[[], object]]:
    device, generator = settings.device, settings.generator()
    size = NUM_SAMPLES[device.type]
    z_a, z_b, held = (
        torch.randn(batch, DIM, generator=generator).to(device).requires_grad_() for _ in range(3)
    )
    bank = torch.randn(size, DIM, generator=generator).to(device)
    index = torch.randperm(size, generator=generator)[:batch].to(device)

    def call(loss_fn: ContrastiveLoss, carried: Tensor | None = None) -> Callable[[], object]:
        loss_fn = loss_fn.to(device)
        if carried is None:
            return lambda: torch.autograd.grad(loss_fn(z_a, z_b, index), (z_a, z_b))
        inputs = (z_a, z_b, carried)
        return lambda: torch.autograd.grad(loss_fn(z_a, z_b, index, carried=carried), inputs)

    cache = negchain.NegativeCacheLoss(size, DIM, beta).to(device)

    def call_cache() -> object:
        draw = cache.propose(z_a, index, z_b)
        assert isinstance(draw, Draw)
        value = cache(z_a, z_b, index, draw=draw, drawn=bank[draw.ids])
        return torch.autograd.grad(value, (z_a, z_b))

    emc2 = negchain.EMC2Loss
    return {
        BASE: call(negchain.InfoNCELoss(beta)),
        "DCL": call(negchain.DCLLoss(beta)),
        "SogCLR": call(negchain.SogCLRLoss(size, beta)),
        "Negative Cache": call_cache,
        "EMC², encode": call(emc2(size, beta), held),
        "EMC², cached": call(emc2(size, beta, carried="cached", dim=DIM)),
        "EMC², score": call(emc2(size, beta, carried="score")),
        "EMC², sequential": call(emc2(size, beta, walk="sequential"), held),
        "EMC² i-SIR": call(emc2(size, beta, kernel="isir"), held),
    }


def _check(settings: Settings, name: str, mode: dict[str, Any]) -> Check:
    """The loss as training uses it against its readable twin, inputs without rounding."""
    device, generator = settings.device, settings.generator()
    size = NUM_SAMPLES[device.type]
    z_a, held = (exact_clustered(CHECKED_SIZE, DIM, 16, 1.0, generator) for _ in range(2))
    z_b = flipped(z_a, 0.1, generator)
    given = [z.to(device).requires_grad_() for z in (z_a, z_b, held)]
    index = torch.randperm(size, generator=generator)[:CHECKED_SIZE].to(device)
    fast = negchain.EMC2Loss(size, 14.28, **mode).to(device)
    slow = negchain.EMC2Loss(size, 14.28, backend="reference", **mode).to(device)
    carried = given[2] if fast.carried_mode == "encode" else None
    found = difference(fast, slow, given[0], given[1], carried, index)
    return Check(
        name=f"{name} = its readable twin, b = {CHECKED_SIZE}",
        ok=found.value <= 1e-4 and found.chains <= 1 / CHECKED_SIZE and found.gradient <= 1e-2,
        found=str(found),
    )
