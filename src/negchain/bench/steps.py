"""The trainer's step of every method against its InfoNCE step, and what the augmentation takes."""

from contextlib import ExitStack

import torch
from torch import Tensor

from negchain import rng
from negchain.augment import Pictures, Uniforms
from negchain.bench import runs
from negchain.bench.record import Row, Settings, Table, rows
from negchain.bench.timing import Timed, graphed, interleaved, release
from negchain.data import DataBundle
from negchain.data.from_files import TIMES
from negchain.losses.request import Want
from negchain.tasks.images import ImageTask
from negchain.train import trainer

NUM_WHOLE = 1024


def table(settings: Settings) -> Table:
    """Step times at b = 32 and 256 (on a CPU 32)."""
    data = runs.pictures(settings, shared=True)
    found: list[Row] = []
    for encoder in runs.encoders(settings):
        every = not found  # the first encoder comes with every method
        for batch in runs.batch_sizes(settings):
            found += _measured(settings, encoder, batch, every, data)
            release()
    graph = " A step is one replay of a CUDA graph." if settings.on_gpu else ""
    return Table(
        title="The trainer's step",
        compares=f"time against the {runs.BASE} step of the same trainer",
        rows=found,
        notes=(
            f"{runs.setting(settings)}.{graph} Negative Cache and informed proposals re-encode a "
            f"share of the data set per step. Whole pictures: {NUM_WHOLE:,} of different sizes, "
            f"kept at up to {TIMES[0]} times the side the encoder sees, as of a folder of "
            "photographs.",
        ),
    )


def _measured(
    settings: Settings, encoder: str, batch: int, every: bool, data: DataBundle
) -> list[Row]:
    where = f"{encoder}, b = {batch}"
    timed: dict[str, Timed] = {}
    with ExitStack() as stack:
        for name, variant in runs.variants().items():
            if not every and name not in (runs.BASE, runs.DEFAULT):
                continue
            settings.say(f"{where}: preparing {name}")
            chosen = runs.config(settings, batch, variant, runs.encoders(settings)[encoder])
            run = stack.enter_context(runs.prepared(chosen, data))
            if settings.on_gpu:
                run.step.capture()
            timed[name] = Timed(runs.stepper(run), settings.device)
            if every and name == runs.BASE:
                timed |= _augmentation(settings, run)
        settings.say(f"{where}: timing")
        return rows(interleaved(timed, settings.rounds, settings.window_ms), where)


def _augmentation(settings: Settings, run: trainer.Run) -> dict[str, Timed]:
    """Both views of a batch, positions to pixels: of squares and of pictures of many sizes."""
    step, task, generator = run.step, run.task, settings.generator()
    assert isinstance(task, ImageTask)
    short, views = TIMES[0] * task.augment.size, [Want(step.index)] * 2
    longer = torch.randint(short, 2 * short, (NUM_WHOLE,), generator=generator).tolist()
    shapes = [(short, side) if n % 2 else (side, short) for n, side in enumerate(longer)]
    channels = task.data.pretrain.channels
    kept = [torch.randint(256, (channels, *s), generator=generator).byte() for s in shapes]
    photos = Pictures.pack(kept).to(step.device)
    index = torch.randperm(NUM_WHOLE, generator=generator)[: len(step.index)].to(step.device)
    drawn = Uniforms(run.config.seed, step.step, rng.FOR_AUGMENT)

    def whole() -> Tensor:
        dtype = step.autocast or torch.float32
        return task.augment.from_table(photos, torch.cat([index, index]), drawn, dtype)

    def square() -> Tensor:
        pixels: Tensor = task.inputs(views, step.step, 0)
        return pixels

    calls = {"augmentation alone": square, "augmentation alone, crops of whole pictures": whole}
    return {name: graphed(call, step.device, calls=10) for name, call in calls.items()}
