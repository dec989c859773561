"""The trainer's step of every method against its InfoNCE step, and what the augmentation takes."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from negchain.bench.runs import (
    METHODS,
    batch_sizes,
    config,
    on_device,
    pictures,
    prepared,
    setting,
    stepper,
)
from negchain.bench.table import Bar, Check, Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved, release
from negchain.data import DataBundle
from negchain.train import trainer

BASE = "InfoNCE"
AUGMENTATION = "augmentation alone"
BARS = {
    "EMC², score": Bar(ratio_at_most=1.03),
    "EMC², cached": Bar(ratio_at_most=1.03),
    "EMC², encode": Bar(ratio_at_most=1.30),
    "EMC², encode, sampled gradient": Bar(ratio_at_most=1.30),
}
CHECKED_STEPS = 20  # of seed 0's, 14 and 18 train survivors
TOLERANCE = 5e-3  # of a loss near 4: bf16 kernels may round differently, and training amplifies it


def table(settings: Settings) -> Table:
    """Step times at b = 32 and 256 (on a CPU 32)."""
    data = on_device(pictures(settings), settings.device)
    rows: list[Row] = []
    checks: list[Check] = []
    for batch in batch_sizes(settings):
        found, equal = _measured(settings, batch, data)
        rows += found
        checks += equal
        release()
    graph = " A step is one replay of a CUDA graph." if settings.on_gpu else ""
    return Table(
        subject="step",
        title="The trainer's step",
        compares=f"time against the {BASE} step of the same trainer",
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(
            f"{setting(settings)}.{graph}",
            "Negative Cache and informed proposals re-encode a share of the data set per step.",
        ),
    )


def _measured(settings: Settings, batch: int, data: DataBundle) -> tuple[list[Row], list[Check]]:
    checks: list[Check] = []
    timed: dict[str, Timed] = {}
    with ExitStack() as stack:
        for name, method in METHODS.items():
            settings.say(f"b = {batch}: preparing {name}")
            chosen = config(settings, batch, method)
            run = stack.enter_context(prepared(chosen, data))
            if settings.on_gpu:
                run.step.capture()
                with prepared(chosen, data) as eager:
                    checks.append(_compared(f"{name}, b = {batch}", run, eager))
            timed[name] = Timed(stepper(run), settings.device)
            if name == BASE:
                timed[AUGMENTATION] = _augmentation(run)
                if settings.on_gpu:
                    checks.append(_compared_pixels(settings, run))
        settings.say(f"b = {batch}: timing")
        times = interleaved(timed, settings.rounds, window_ms=20.0 if settings.quick else 60.0)
    rows = [
        Row.of(
            f"{name}, b = {batch}",
            times[name],
            "ms",
            against=f"{BASE} step",
            base=times[BASE],
            bar=_bar(name, batch) if settings.on_gpu else None,
            headline=name in BARS,
        )
        for name in (*METHODS, AUGMENTATION)
    ]
    return rows, checks


def _bar(name: str, batch: int) -> Bar | None:
    if name == AUGMENTATION:
        return Bar(ratio_at_most=0.15) if batch == 32 else None
    return BARS.get(name)


def _augmentation(run: trainer.Run) -> Timed:
    """Both views of a batch: positions to pixels, as the InfoNCE step makes them."""
    step = run.step

    def call() -> Tensor:
        return step.pixels((step.index, step.index))

    return graphed(call, step.device, calls=10)


def _compared(name: str, graph: trainer.Run, eager: trainer.Run) -> Check:
    """Losses of the first steps, replayed and eagerly."""
    losses = []
    for run in (graph, eager):
        advance, found = stepper(run), []
        for _ in range(CHECKED_STEPS):
            advance()
            found.append(float(run.step.loss))
        losses.append(found)
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return Check(
        name=f"CUDA graph = eager step, {name}",
        ok=worst <= TOLERANCE,
        found=f"{CHECKED_STEPS} losses near {losses[1][0]:.3f} differ by at most {worst:.2g}",
    )


def _compared_pixels(settings: Settings, run: trainer.Run) -> Check:
    """Pixels of the augmentation the step uses against its readable twin's, same uniforms."""
    augment, count = run.step.augment, 256
    images = run.step.images(torch.arange(count, device=run.device))
    generator = settings.generator()
    u = torch.rand(count, augment.num_uniforms, generator=generator).to(run.device)
    found = augment(images, u)
    params = augment.sample(u, images.shape[2], images.shape[3])
    tolerance = max(1e-3, 4 * torch.finfo(found.dtype).eps)
    apart = (found.float() - augment.apply(images, params).float()).abs().amax((1, 2, 3))
    differing = int((apart > tolerance).sum())
    return Check(
        name=f"augmentation = its readable twin, batch {run.config.batch_size}",
        ok=differing <= count // 50,  # a crop whose side is rounded may fall the other way
        found=f"{differing} of {count} images differ by more than {tolerance:.2g}",
    )
