"""Images per second of the trainer against the usual way to train."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from negchain.bench import usual
from negchain.bench.runs import (
    BASE,
    DEFAULT,
    VARIANTS,
    batch_sizes,
    config,
    encoders,
    pictures,
    prepared,
    setting,
)
from negchain.bench.table import Row, Settings, Table
from negchain.bench.timing import release
from negchain.data import DataBundle
from negchain.tasks.images import build_run_encoder, run_augmentation
from negchain.train import trainer
from negchain.train.config import TrainConfig
from negchain.train.progress import Progress

OURS = (BASE, DEFAULT)
WINDOWS = 3
WARM_UP = 30  # steps

Advance = Callable[[int], None]  # makes so many steps and waits for them


def table(settings: Settings) -> Table:
    """Training at b = 32 and 256 (on a CPU 32), ours and the usual way, on the same images."""
    data = pictures(settings)
    rows: list[Row] = []
    for batch in batch_sizes(settings):
        rates = _ours(settings, batch, data)
        release()
        settings.say(f"b = {batch}: the usual way")
        chosen = config(settings, batch, VARIANTS[BASE], _encoder(settings))
        base = _usual(settings, chosen, data)
        release()
        rows.append(Row.of(f"the usual way, {BASE}, b = {batch}", base, "images/s"))
        for name in OURS:
            rows.append(
                Row.of(
                    f"negchain, {name}, b = {batch}",
                    rates[name],
                    "images/s",
                    against="the usual way",
                    base=base,
                )
            )
    return Table(
        subject="trainer",
        title="The trainer, images per second",
        compares=(
            f"images/s against the usual way: DataLoader with {usual.num_workers()} workers, "
            f"torchvision v2 transforms, eager {'bf16' if settings.on_gpu else 'float32'} step"
        ),
        rows=tuple(rows),
        notes=(
            f"{setting(settings)}. An image counts once and enters with two views.",
            f"Windows of {_seconds(settings):g} s after warm-up. The usual way comes last, and "
            "its filled queue is used up first: its workers would take cores from ours.",
            "Neither evaluates or writes checkpoints; ours logs every 10 steps.",
        ),
    )


def _encoder(settings: Settings) -> dict[str, object]:
    return next(iter(encoders(settings).values()))


def _seconds(settings: Settings) -> float:
    if settings.quick:
        return 0.2
    return 3.0 if settings.on_gpu else 2.0


def _ours(settings: Settings, batch: int, data: DataBundle) -> dict[str, list[float]]:
    """Windows of the trainer's own loop, methods in turn."""
    rates: dict[str, list[float]] = {name: [] for name in OURS}
    with ExitStack() as stack:
        counts: dict[str, int] = {}
        loops: dict[str, Advance] = {}
        for name in OURS:
            settings.say(f"b = {batch}: preparing {name}")
            chosen = config(settings, batch, VARIANTS[name], _encoder(settings))
            loops[name] = _loop(stack.enter_context(prepared(chosen, data)))
            counts[name] = _steps_for(loops[name], _seconds(settings))
        for window, name in itertools.product(range(WINDOWS), OURS):
            settings.say(f"b = {batch}: {name}, window {window + 1} of {WINDOWS}")
            rates[name].append(_rate(loops[name], counts[name], batch))
    return rates


def _loop(run: trainer.Run) -> Advance:
    """The loop of `Run.train` without the evaluation, logging included."""
    if run.device.type == "cuda":
        run.step.capture()

    def advance(steps: int) -> None:
        run.total_steps = run.done + steps
        run._loop(Progress(show=False))  # reads the loss of its last step, so it waits

    return advance


def _usual(settings: Settings, chosen: TrainConfig, data: DataBundle) -> list[float]:
    encoder = build_run_encoder(chosen, data).to(settings.device)
    if settings.on_gpu:
        encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = usual.UsualStep(
        encoder,
        beta=chosen.beta,
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        bf16=settings.on_gpu,
    )
    assert data.pretrain.images is not None
    augment = run_augmentation(chosen, data)
    batches = usual.batches(data.pretrain.images, augment, chosen.batch_size, settings.on_gpu)

    def advance(steps: int) -> None:
        for views in itertools.islice(batches, steps):
            step(views)
        if settings.on_gpu:
            torch.cuda.synchronize()

    advance(usual.num_workers() * usual.PREFETCH)
    steps = _steps_for(advance, _seconds(settings))
    rates = [_rate(advance, steps, chosen.batch_size) for _ in range(WINDOWS)]
    batches.close()  # type: ignore[attr-defined]  # ends the workers
    return rates


def _steps_for(advance: Advance, seconds: float) -> int:
    """Warm up; how many steps last so long."""
    advance(WARM_UP)
    begin = time.perf_counter()
    advance(WARM_UP)
    return math.ceil(seconds * WARM_UP / (time.perf_counter() - begin))


def _rate(advance: Advance, steps: int, batch: int) -> float:
    begin = time.perf_counter()
    advance(steps)
    return steps * batch / (time.perf_counter() - begin)
