"""The trainer's step of every method against its InfoNCE step, and what the augmentation takes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from negchain import draws
from negchain.augment import Draws, Pictures
from negchain.augment.pipeline import sides
from negchain.bench.runs import (
    BASE,
    DEFAULT,
    VARIANTS,
    batch_sizes,
    config,
    encoders,
    on_device,
    pictures,
    prepared,
    setting,
    stepper,
)
from negchain.bench.table import Check, Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved, release
from negchain.data import DataBundle
from negchain.data.storage import TIMES
from negchain.losses.request import Want
from negchain.tasks.images import ImageTask
from negchain.train import trainer

AUGMENTATION = "augmentation alone"
WHOLE = "augmentation alone, crops of whole pictures"
NUM_WHOLE = 1024
CHECKED_STEPS = 20
# How far from float32 the captured step may be: so many times as far as the eager one, and so much
# beside. A gradient is many numbers, so the distances of two that round alike are nearly equal. A
# loss is one, and of random pictures so exact in bf16 that what is allowed beside is the bound.
LOSS_ALLOWED = (4.0, 1e-3)
GRADIENT_ALLOWED = (1.5, 1e-3)  # of its norm
WEIGHT_ALLOWED = (3.0, 0.01)  # of its own gradient's norm
NEGLIGIBLE = 1e-3  # of the whole gradient's norm: such a weight's is judged with the whole


@dataclass(frozen=True)
class _Distance:
    """How far the captured step's numbers are from float32's, beside the eager step's."""

    graph: float
    eager: float
    times: float
    plus: float

    @property
    def used(self) -> float:
        """The share of what is allowed, `times` the eager step's distance and `plus`."""
        return self.graph / (self.times * self.eager + self.plus)

    def __str__(self) -> str:
        return f"{self.graph:.2g} (eager {self.eager:.2g})"


def table(settings: Settings) -> Table:
    """Step times at b = 32 and 256 (on a CPU 32)."""
    data = on_device(pictures(settings), settings.device)
    rows: list[Row] = []
    checks: list[Check] = []
    for number, encoder in enumerate(encoders(settings)):
        variants = tuple(VARIANTS) if number == 0 else (BASE, DEFAULT)
        for batch in batch_sizes(settings):
            found, equal = _measured(settings, encoder, batch, variants, data)
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
            f"Whole pictures: {NUM_WHOLE:,} of different sizes, kept at up to {TIMES[0]} times the "
            "side the encoder sees, as of a folder of photographs.",
        ),
    )


def _measured(
    settings: Settings, encoder: str, batch: int, variants: tuple[str, ...], data: DataBundle
) -> tuple[list[Row], list[Check]]:
    where = f"{encoder}, b = {batch}"
    checks: list[Check] = []
    timed: dict[str, Timed] = {}
    with ExitStack() as stack:
        for name in variants:
            settings.say(f"{where}: preparing {name}")
            chosen = config(settings, batch, VARIANTS[name], encoders(settings)[encoder])
            run = stack.enter_context(prepared(chosen, data))
            if settings.on_gpu:
                run.step.capture()
                checks.append(_checked(f"{name}, {where}", run, data))
                release()
            timed[name] = Timed(stepper(run), settings.device)
            if name == BASE and len(variants) == len(VARIANTS):
                timed[AUGMENTATION] = _augmentation(run)
                timed[WHOLE] = _augmentation_of_whole(settings, run)
                if settings.on_gpu:
                    checks.append(_compared_pixels(settings, run))
        settings.say(f"{where}: timing")
        times = interleaved(timed, settings.rounds, window_ms=20.0 if settings.quick else 60.0)
    rows = [
        Row.of(
            f"{name}, {where}",
            times[name],
            "ms",
            against=f"{BASE} step",
            base=times[BASE],
        )
        for name in times
    ]
    return rows, checks


def _augmentation(run: trainer.Run) -> Timed:
    """Both views of a batch: positions to pixels, as the InfoNCE step makes them."""
    step, views = run.step, [Want(run.step.index)] * 2

    def call() -> Tensor:
        pixels: Tensor = run.task.inputs(views, step.step, 0)
        return pixels

    return graphed(call, step.device, calls=10)


def _augmentation_of_whole(settings: Settings, run: trainer.Run) -> Timed:
    """The same of pictures of different sizes, as a folder of photographs is kept."""
    step, task = run.step, _task(run)
    short = TIMES[0] * task.augment.size
    channels, generator = task.data.pretrain.channels, settings.generator()
    longer = torch.randint(short, 2 * short, (NUM_WHOLE,), generator=generator).tolist()
    shapes = [(short, side) if n % 2 else (side, short) for n, side in enumerate(longer)]
    kept = [torch.randint(256, (channels, *s), generator=generator).byte() for s in shapes]
    photos = Pictures.pack(kept).to(step.device)
    index = torch.randperm(NUM_WHOLE, generator=generator)[: len(step.index)].to(step.device)
    drawn = Draws(run.config.seed, step.step, draws.STREAM_AUGMENT)

    def call() -> Tensor:
        dtype = step.autocast or torch.float32
        return task.augment.from_table(photos, (index, index), drawn, dtype)

    return graphed(call, step.device, calls=10)


def _task(run: trainer.Run) -> ImageTask:
    assert isinstance(run.task, ImageTask)
    return run.task


def _checked(name: str, run: trainer.Run, data: DataBundle) -> Check:
    """`_compared` with runs that end here."""
    exact = replace(run.config, precision="float32")
    with prepared(run.config, data) as eager, prepared(exact, data) as yardstick:
        return _compared(name, run, eager, yardstick)


def _compared(name: str, graph: trainer.Run, eager: trainer.Run, exact: trainer.Run) -> Check:
    """Loss and gradient of the first steps, replayed, eagerly and in float32, from the same state.

    The same state anew for every step, because training amplifies rounding. The gradient is read
    from Adam's first moment.

    Float32 is the yardstick: a gradient in bf16 is several per cent from the true one, and how far
    two such gradients may be apart depends on method and batch. The captured step may be as far
    from float32 as the eager one is.

    Args:
        name: of what is compared.
        graph: a run whose step is captured.
        eager: one of the same config that is not.
        exact: one of the same config but for its precision, float32 (convolutions in TF32, as
            torch has them on a GPU).
    """
    runs = (graph, eager, exact)
    advances = [stepper(run) for run in runs]
    losses, squares = [], []
    for number in range(CHECKED_STEPS):
        if number:
            _copy_state(graph, eager)
            _copy_state(graph, exact)
        before = [0.9 * moment for moment in _moments(exact)]
        for advance in advances:
            advance()
        losses.append(torch.stack([run.step.loss for run in runs]).double())
        replayed, plain, true = (_moments(run) for run in runs)
        pairs = ((replayed, true), (plain, true), (true, before))
        squares.append(torch.stack([_squared_distances(*pair) for pair in pairs]))
    names = [key for key, _ in graph.encoder.named_parameters()]
    return _judged(name, names, torch.stack(losses).cpu(), torch.stack(squares).sum(0).cpu())


def _judged(name: str, weights: list[str], losses: Tensor, squares: Tensor) -> Check:
    """The verdict on losses [S,3] and squared distances [3,P] of graph, eager step and float32.

    In root mean squares over all steps: few draws fall otherwise, in steps that differ.
    """
    loss, loss_eager = (losses[:, :2] - losses[:, 2:]).square().mean(0).sqrt().tolist()
    apart = _Distance(loss, loss_eager, *LOSS_ALLOWED)
    size = squares[2].sum()
    graph, eager = (squares[:2].sum(1) / size).sqrt().tolist()
    whole = _Distance(graph, eager, *GRADIENT_ALLOWED)
    found = (squares[:2] / squares[2]).sqrt().T.tolist()
    each = {
        weight: _Distance(graph, eager, *WEIGHT_ALLOWED)
        for weight, (graph, eager), own in zip(weights, found, squares[2], strict=True)
        if not own < NEGLIGIBLE**2 * size  # so that one which is no number counts
    }
    worst = max(each, key=lambda weight: each[weight].used)
    return Check(
        name=f"CUDA graph = eager step, {name}",
        ok=all(distance.used <= 1 for distance in (apart, whole, *each.values())),
        found=f"{len(losses)} losses near {losses[0, 2]:.3f} are {apart} from float32's, gradients "
        f"{whole} of their norm, those of {worst}, the worst weight, {each[worst]} of theirs",
    )


def _moments(run: trainer.Run) -> list[Tensor]:
    """Adam's first moment of every parameter; zero before its first step."""
    state = run.step.optimizer.state
    parameters = list(run.encoder.parameters())
    held = [state[p]["exp_avg"] if state.get(p) else torch.zeros_like(p) for p in parameters]
    return [moment.detach().clone() for moment in held]


def _squared_distances(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """Of each tensor from its partner, [P]."""
    apart = [(a - b).norm() for a, b in zip(some, others, strict=True)]
    return torch.stack(apart).double().square()


def _copy_state(source: trainer.Run, target: trainer.Run) -> None:
    """Weights, chains, tables and moments of one run to another of the same method."""
    target.encoder.load_state_dict(source.encoder.state_dict())
    target.step.loss_fn.load_state_dict(source.step.loss_fn.state_dict())
    pairs = zip(source.encoder.parameters(), target.encoder.parameters(), strict=True)
    for given, taken in pairs:
        for name, value in source.step.optimizer.state[given].items():
            target.step.optimizer.state[taken][name].copy_(value)


def _compared_pixels(settings: Settings, run: trainer.Run) -> Check:
    """Pixels of the augmentation the step uses against its readable twin's, same uniforms."""
    augment, count = _task(run).augment, 256
    images = _task(run).images(torch.arange(count, device=run.device))
    generator = settings.generator()
    u = torch.rand(count, augment.num_uniforms, generator=generator).to(run.device)
    found = augment(images, u)
    params = augment.sample(u, *sides(images))
    tolerance = max(1e-3, 4 * torch.finfo(found.dtype).eps)
    apart = (found.float() - augment.apply(images, params).float()).abs().amax((1, 2, 3))
    differing = int((apart > tolerance).sum())
    return Check(
        name=f"augmentation = its readable twin, batch {run.config.batch_size}",
        ok=differing <= count // 50,  # a crop whose side is rounded may fall the other way
        found=f"{differing} of {count} images differ by more than {tolerance:.2g}",
    )
