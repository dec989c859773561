"""Training runs to measure: the trainer's own, on synthetic pictures, in temporary folders."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.bench.record import Settings
from negchain.data import DataBundle, ImageSet
from negchain.methods import METHODS, trained
from negchain.optim import set_lr
from negchain.tasks.images import ImageTask, load_images
from negchain.tasks.task import Task
from negchain.train import start, trainer
from negchain.train.config import TrainConfig
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder

NUM_IMAGES, SIDE = 4_000, 96  # 110 MB
STEADY_LR = 1e-4  # small enough for every method without a warm-up
ENCODERS: dict[str, dict[str, object]] = {
    "ResNet-18": {"encoder": "resnet18", "norm": "batch"},
    "ResNet-18 without normalisation": {"encoder": "resnet18", "norm": "none"},
    "ViT-Tiny": {"encoder": "vit_tiny_patch16_224"},
}
"""Of the runs on a GPU; the first, which people get by default, comes with every method."""


def variants() -> dict[str, dict[str, object]]:
    """Settings of every method the trainer knows and of its options, by the name in tables."""
    found: dict[str, dict[str, object]] = {}
    for name in trained():
        title, options = METHODS[name].title, METHODS[name].options
        found[title] = {"method": name}
        others = ("carried", "cached"), ("proposal", "both"), ("proposal", "informed")
        for option, value in others:
            if option in options:
                found[f"{title}, {value}"] = {"method": name, option: value}
    return found


BASE = METHODS[trained()[0]].title
DEFAULT = METHODS[TrainConfig.method].title


def encoders(settings: Settings) -> dict[str, dict[str, object]]:
    """What is trained, by the name it has in tables."""
    return ENCODERS if settings.on_gpu else {"small-cnn": {"norm": "batch"}}


def setting(settings: Settings) -> str:
    """What `config` and `pictures` choose, in words."""
    if settings.on_gpu:
        return (
            f"{SIDE} px, recipe simclr-stl10 with blur, bf16, Adam, {NUM_IMAGES:,} pictures with "
            "the spectrum of photographs; ResNet-18 has BatchNorm unless said otherwise"
        )
    return "small-cnn with BatchNorm on scikit-learn's digits, 8 px, recipe digits, float32, Adam"


def batch_sizes(settings: Settings) -> tuple[int, ...]:
    """The paper's two on a GPU; on a CPU the small one."""
    return (32, 256) if settings.on_gpu else (32,)


def config(
    settings: Settings, batch: int, method: dict[str, object], encoder: dict[str, object]
) -> TrainConfig:
    """The paper's STL-10 preset on a GPU, digits on a CPU; no evaluations, no checkpoints."""
    common = {**method, **encoder, "batch_size": batch, "eval_every": 0, "checkpoint_every": 0}
    if settings.on_gpu:
        return resolve(f"stl10-b{batch}", {**common, "device": "cuda"})
    return resolve(None, {**common, "data": "digits", "device": "cpu"})


def pictures(settings: Settings, shared: bool = False) -> DataBundle:
    """The images of all runs: synthetic ones on a GPU (nothing to download), else the digits.

    `shared`: on the device, one copy for all runs.
    """
    if not settings.on_gpu:
        return load_images(resolve(None, {"data": "digits"}))
    pixels = pictures_like_photographs(NUM_IMAGES, SIDE, settings.seed)
    return bundle(pixels.to(settings.device) if shared else pixels)


def bundle(pixels: Tensor) -> DataBundle:
    """Images as a data set without labels."""
    names = tuple(map(str, range(len(pixels))))
    return DataBundle("made up", ImageSet(names, None, pixels), None, None, (), (), "0" * 16)


def pictures_like_photographs(count: int, side: int, seed: int) -> Tensor:
    """uint8 [count,3,side,side] whose neighbours are alike, as in photographs (1/f amplitudes).

    Noise at every scale, the coarser the stronger. Pixels drawn one by one make every crop look
    the same to an encoder, and a GPU's multipliers switch more than on real pictures.

    >>> pictures_like_photographs(2, 96, seed=0).shape
    torch.Size([2, 3, 96, 96])
    """
    generator = torch.Generator().manual_seed(seed)
    total, scale = torch.zeros(count, 3, side, side), 1
    while scale < side:
        cells = -(-side // scale)
        noise = torch.randn(count, 3, cells, cells, generator=generator) * scale
        total += F.interpolate(noise, size=side, mode="nearest")
        scale *= 2
    return (128 + total * (64 / total.std())).clamp(0, 255).to(torch.uint8)


@contextmanager
def vanishing(task: Task) -> Iterator[trainer.Run]:
    """A run of a task as `negchain train` prepares it, not captured yet; its folder goes after."""
    with tempfile.TemporaryDirectory(prefix="negchain-bench-") as folder:
        path = Path(folder) / "run"
        run = start.prepare(task, lambda: RunFolder.create(path, config="{}\n"))
        with run.folder:
            yield run


def prepared(settings: TrainConfig, data: DataBundle) -> AbstractContextManager[trainer.Run]:
    """`vanishing` for images."""
    return vanishing(ImageTask(settings, data))


def stepper(run: trainer.Run) -> Callable[[], None]:
    """Calls that each make the run's next step, as the trainer's loop does."""
    numbers = itertools.count()

    def advance() -> None:
        number = next(numbers)
        set_lr(run.step.optimizer, STEADY_LR)
        run.step(number, run.order.batch(number))

    return advance
