"""The trainer. It knows no task by name.

| file | what it holds |
|---|---|
| `config.py`, `presets.py`, `resolve.py` | settings: each with its rule; by name; what counts |
| `start.py` | a new run, or one to resume, from settings to `trainer.Run` |
| `trainer.py`, `step.py`, `reading.py` | the loop; one step of it; its numbers, for the log |
| `run_folder.py`, `checkpoint.py`, `loggers.py` | what a run writes |
| `stopping.py` | signals and divergence |
| `team.py`, `parallel.py` | several processes: ranks, BatchNorm, FSDP2 |
| `pretrained.py`, `trained.py` | weights to start from; a finished encoder at work |
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor


def run(
    *, show: bool = False, augment: Callable[[Tensor], Tensor] | None = None, **settings: Any
) -> Path:
    """Train as `negchain train` does, in this process; returns the folder with its report.

    Methods you registered (`negchain.methods.register`) can be named too.

    Args:
        show: a progress bar on stderr.
        augment: an augmentation of your own: a batch of uint8 images [N,C,H,W] on the training
            device to one view of each, [N,C,S,S] with S the side the encoder sees; uint8, or floats
            in [0, 1]. Random numbers are to come from torch, which is seeded for each call.
            Pictures of different sizes come as central squares of side 2 S.
        settings: of `negchain.train.config.TrainConfig`, by name, such as `method`, `data`, `out`.

    Example:
        >>> import tempfile, torch
        >>> folder = run(method="dcl", steps=2, subset=64, out=Path(tempfile.mkdtemp()) / "run")
        >>> (folder / "report.html").exists()
        True

        >>> def mirrored(images):
        ...     return images.flip(-1) if torch.rand(()) < 0.5 else images
        >>> folder = run(augment=mirrored, steps=2, subset=64, out=tempfile.mkdtemp() + "/own")
    """
    from negchain.progress import Progress
    from negchain.train.resolve import resolve
    from negchain.train.start import start
    from negchain.train.team import joined

    settings = {k: fspath(v) if isinstance(v, PathLike) else v for k, v in settings.items()}
    config = resolve(None, settings)
    with joined() as team:
        begun = start(config, show, augment)
        with begun.folder:
            begun.train(Progress(show and team.leads))
    return begun.folder.path
