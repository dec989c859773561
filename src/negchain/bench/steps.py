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
CHECKED_STEPS = 20
TOLERANCE = 5e-3  # of a loss near 4: bf16 kernels may round differently
GRADIENT_TOLERANCE = 0.05  # of the largest gradient's norm


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
    """Loss and gradient of the first steps, replayed and eagerly, each from the same state.

    The same state anew for every step, because training amplifies rounding: an eager run whose
    first weights are changed by 1e-4 of themselves loses Negative Cache's losses within ten steps
    (records/2026-11-15_layers_h200.md). The gradient is read from Adam's first moment.
    """
    runs = (graph, eager)
    advances = [stepper(run) for run in runs]
    first, worst, apart, largest = 0.0, 0.0, 0.0, 0.0
    for number in range(CHECKED_STEPS):
        if number:
            _copy_state(graph, eager)
        before = _moments(eager)
        for advance in advances:
            advance()
        losses = [float(run.step.loss) for run in runs]
        first = first or losses[1]
        worst = max(worst, abs(losses[0] - losses[1]))
        after = [_moments(run) for run in runs]
        step = after[1] - (0.9 * before if number else 0.0)
        apart = max(apart, float((after[0] - after[1]).norm()))
        largest = max(largest, float(step.norm()))
    return Check(
        name=f"CUDA graph = eager step, {name}",
        ok=worst <= TOLERANCE and apart <= GRADIENT_TOLERANCE * largest,
        found=f"{CHECKED_STEPS} losses near {first:.3f} differ by at most {worst:.2g}, gradients "
        f"by at most {apart / largest:.2g} of the largest one's norm",
    )


def _moments(run: trainer.Run) -> Tensor:
    """Adam's first moments, all in one; a zero before the first step."""
    state = run.step.optimizer.state
    found = [state[p]["exp_avg"].flatten() for p in run.encoder.parameters() if state.get(p)]
    return torch.cat(found).clone() if found else torch.zeros(1, device=run.device)


def _copy_state(source: trainer.Run, target: trainer.Run) -> None:
    """Weights, chains, tables and moments of one run to another of the same config."""
    target.encoder.load_state_dict(source.encoder.state_dict())
    target.step.loss_fn.load_state_dict(source.step.loss_fn.state_dict())
    pairs = zip(source.encoder.parameters(), target.encoder.parameters(), strict=True)
    for given, taken in pairs:
        for name, value in source.step.optimizer.state[given].items():
            target.step.optimizer.state[taken][name].copy_(value)


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
