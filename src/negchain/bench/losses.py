"""Forward and backward of every loss alone, against InfoNCE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import negchain
from negchain.bench.equality import difference, exact_clustered, flipped
from negchain.bench.table import Check, Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved
from negchain.losses.base import ContrastiveLoss
from negchain.methods import METHODS, LossSettings

DIM = 128
NUM_SAMPLES = {"cuda": 50_000, "cpu": 5_000}  # Negative Cache scores all of them
CASES = ((32, 14.28), (256, 5.0), (256, 14.28))  # b and beta: the paper's two, and the sharp one
BASE = next(iter(METHODS.values())).title
CHECKED: dict[str, dict[str, Any]] = {
    "EMC², encode": {"carried": "encode"},
    "EMC², cached": {"carried": "cached", "dim": DIM},
    "EMC² i-SIR": {"kernel": "isir"},
}
CHECKED_SIZE = 256


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
            rows.append(
                Row.of(
                    f"{name}, b = {batch}, β = {beta:g}",
                    values,
                    "ms",
                    against=BASE,
                    base=times[BASE],
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
        notes=(
            f"{NUM_SAMPLES[settings.device.type]:,} samples, shared views, float32{graph}. What a "
            "loss asks for is looked up, not encoded.",
        ),
    )


def _calls(settings: Settings, batch: int, beta: float) -> dict[str, Callable[[], object]]:
    """Every method of the register; what it asks for comes from a table of embeddings."""
    device, generator = settings.device, settings.generator()
    size = NUM_SAMPLES[device.type]
    z_a, z_b = (
        torch.randn(batch, DIM, generator=generator).to(device).requires_grad_() for _ in range(2)
    )
    bank = torch.randn(size, DIM, generator=generator).to(device)
    index = torch.randperm(size, generator=generator)[:batch].to(device)

    def call(loss_fn: ContrastiveLoss) -> Callable[[], object]:
        def run() -> object:
            asked: list[Tensor] = []

            def encode(ids: Tensor) -> Tensor:
                found = bank[ids]
                if torch.is_grad_enabled():  # its gradient belongs to the work of the loss
                    asked.append(found.requires_grad_())
                return found

            value = loss_fn(z_a, z_b, index, encode=encode)
            return torch.autograd.grad(value, (z_a, z_b, *asked))

        return run

    settings_of = LossSettings(size, beta, DIM)
    return {m.title: call(m.build(settings_of).to(device)) for m in METHODS.values()}


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
    carried = given[2] if fast.carried == "encode" else None
    found = difference(fast, slow, given[0], given[1], carried, index)
    return Check(
        name=f"{name} = its readable twin, b = {CHECKED_SIZE}",
        ok=found.value <= 1e-4 and found.chains <= 1 / CHECKED_SIZE and found.gradient <= 1e-2,
        found=str(found),
    )
