"""The trainer: its step with every method, and its images per second against the usual way.

The usual way to train SimCLR: a DataLoader whose workers augment one image at a time with
torchvision's v2 transforms, and an eager step in bf16 on channels-last tensors: what a careful user
of PyTorch writes. Where there was a choice, the faster was taken: crops on bytes, the rest in
float32 (the fastest of six orders, PIL included, on one CPU core), workers that stay, pinned
memory, fused Adam.
"""

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2  # type: ignore[import-untyped]

from negchain import rng
from negchain.augment import Augmentation, Pictures, Uniforms
from negchain.augment.blur import kernel_size
from negchain.bench import runs
from negchain.bench.losses import info_nce
from negchain.bench.record import Row, Settings, Table, rows
from negchain.bench.timing import Timed, graphed, interleaved, release
from negchain.data import DataBundle
from negchain.data.from_files import TIMES
from negchain.losses.request import Want
from negchain.progress import Progress
from negchain.tasks.images import ImageTask, build_run_encoder, run_augmentation
from negchain.train import trainer
from negchain.train.config import TrainConfig

NUM_WHOLE = 1024
OURS = (runs.BASE, runs.DEFAULT)
USUAL = "the usual way"
WINDOWS = 3
WARM_UP = 30  # steps
WORKERS = min(16, os.cpu_count() or 1)
PREFETCH = 2  # batches ahead per worker, the DataLoader's default

Advance = Callable[[int], None]  # makes so many steps and waits for them


# ---------------------------------------------------------------------- a step


def steps(settings: Settings) -> Table:
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


# ---------------------------------------------------------------------- images per second


def images(settings: Settings) -> Table:
    """Training at b = 32 and 256 (on a CPU 32), ours and the usual way, on the same images."""
    data, found = runs.pictures(settings), []
    encoder = next(iter(runs.encoders(settings).values()))
    for batch in runs.batch_sizes(settings):
        with ExitStack() as stack:
            loops: dict[str, Advance] = {}
            for name in OURS:
                settings.say(f"b = {batch}: preparing {name}")
                chosen = runs.config(settings, batch, runs.variants()[name], encoder)
                loops[name] = _loop(stack.enter_context(runs.prepared(chosen, data)))
            ours = _rates(settings, loops, batch)
        release()
        settings.say(f"b = {batch}: {USUAL}")
        chosen = runs.config(settings, batch, runs.variants()[runs.BASE], encoder)
        with ExitStack() as stack:
            base = _rates(settings, {USUAL: _usual(settings, chosen, data, stack)}, batch)[USUAL]
        release()
        found.append(Row.of(f"{USUAL}, {runs.BASE}, b = {batch}", base, "images/s"))
        for name, rate in ours.items():
            found.append(Row.of(f"negchain, {name}, b = {batch}", rate, "images/s", USUAL, base))
    return Table(
        title="The trainer, images per second",
        compares=(
            f"images/s against the usual way: DataLoader with {WORKERS} workers, torchvision v2 "
            f"transforms, eager {'bf16' if settings.on_gpu else 'float32'} step"
        ),
        rows=found,
        notes=(
            f"{runs.setting(settings)}. An image counts once and enters with two views. The usual "
            "way comes last, and its filled queue is used up first: its workers would take cores "
            "from ours. Neither evaluates or writes checkpoints; ours logs every 10 steps.",
        ),
    )


def _rates(settings: Settings, loops: dict[str, Advance], batch: int) -> dict[str, list[float]]:
    """Images per second in windows of some seconds, in turns."""

    def seconds(name: str, steps: int) -> float:
        begin = time.perf_counter()
        loops[name](steps)
        return time.perf_counter() - begin

    window, warm_up = (0.1, 3) if settings.quick else (3.0, WARM_UP)
    counts: dict[str, int] = {}
    for name in loops:
        seconds(name, warm_up)
        counts[name] = math.ceil(window * warm_up / seconds(name, warm_up))
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for _, name in itertools.product(range(WINDOWS), loops):
        rates[name].append(counts[name] * batch / seconds(name, counts[name]))
    return rates


def _loop(run: trainer.Run) -> Advance:
    """The loop of `Run.train` without the evaluation, logging included."""
    if run.device.type == "cuda":
        run.step.capture()

    def advance(steps: int) -> None:
        run.total_steps = run.done + steps
        run._loop(Progress(show=False))  # reads the loss of its last step, so it waits

    return advance


# ---------------------------------------------------------------------- the usual way


def _usual(settings: Settings, chosen: TrainConfig, data: DataBundle, stack: ExitStack) -> Advance:
    encoder = build_run_encoder(chosen, data).to(settings.device)
    if settings.on_gpu:
        encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(
        encoder.parameters(),
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        fused=settings.on_gpu or None,
    )
    assert data.pretrain.images is not None
    augment = run_augmentation(chosen, data)
    views = batches(data.pretrain.images, augment, chosen.batch_size, settings.on_gpu)
    stack.callback(views.close)  # type: ignore[attr-defined]  # ends the workers

    def advance(steps: int) -> None:
        for pair in itertools.islice(views, steps):
            usual_step(encoder, optimizer, pair, chosen.beta)
        if settings.on_gpu:
            torch.cuda.synchronize()

    advance(WORKERS * PREFETCH)
    return advance


def usual_step(
    encoder: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    views: tuple[Tensor, Tensor],
    beta: float,
) -> None:
    """Move a pair of views to the encoder's device and train on it."""
    device = next(encoder.parameters()).device
    on_gpu = device.type == "cuda"
    pixels = torch.cat([view.to(device, non_blocking=True) for view in views])
    if on_gpu:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        z_a, z_b = encoder(pixels).float().chunk(2)
    optimizer.zero_grad()
    torch.autograd.backward(info_nce(z_a, z_b, beta))
    optimizer.step()


def transforms(augment: Augmentation) -> Callable[[Tensor], Tensor]:
    """torchvision's transforms of the same recipe, for one uint8 image [C,H,W].

    >>> augment = Augmentation(size=8, crop_scale=(0.5, 1.0), flip=True, blur_sigma=(0.1, 2.0))
    >>> transforms(augment)(torch.zeros(3, 9, 9, dtype=torch.uint8)).shape
    torch.Size([3, 8, 8])
    """
    steps: list[Any] = [v2.Resize([augment.size, augment.size])]
    if augment.crop_scale is not None:
        steps = [v2.RandomResizedCrop(augment.size, augment.crop_scale, augment.crop_ratio)]
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip())
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if augment.jitter is not None:
        steps.append(v2.RandomApply([v2.ColorJitter(*augment.jitter)], augment.jitter_p))
    if augment.grey_p:
        steps.append(v2.RandomGrayscale(augment.grey_p))
    if augment.blur_sigma is not None:
        blur = v2.GaussianBlur(kernel_size(augment.size), augment.blur_sigma)
        steps.append(blur if augment.blur_p == 1 else v2.RandomApply([blur], augment.blur_p))
    if augment.normalize is not None:
        steps.append(v2.Normalize(*augment.normalize))
    composed: Callable[[Tensor], Tensor] = v2.Compose(steps)
    return composed


def batches(
    images: Tensor, augment: Augmentation, batch_size: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views, epoch after epoch, without end."""
    transform = transforms(augment)

    def two_views(positions: list[int]) -> tuple[Tensor, Tensor]:  # in a worker, one by one
        first, second = ([transform(images[p]) for p in positions] for _ in range(2))
        return torch.stack(first), torch.stack(second)

    loader: DataLoader[Any] = DataLoader(
        range(len(images)),  # type: ignore[arg-type]
        collate_fn=two_views,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=PREFETCH,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(0),
    )
    while True:
        with warnings.catch_warnings():
            # Python 3.12 warns of every fork beside threads; these workers only augment.
            warnings.simplefilter("ignore", DeprecationWarning)
            epoch = iter(loader)
        yield from epoch
