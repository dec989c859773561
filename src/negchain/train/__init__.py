"""The trainer: configuration, presets, run folders and checkpoints."""

from os import PathLike, fspath
from pathlib import Path
from typing import Any


def run(*, show: bool = False, **settings: Any) -> Path:
    """Train as `negchain train` does, in this process; returns the folder with its report.

    Methods you registered (`negchain.methods.register`) can be named too.

    Args:
        show: a progress bar on stderr.
        settings: of `negchain.train.config.TrainConfig`, by name, such as `method`, `data`, `out`.

    Example:
        >>> import tempfile
        >>> folder = run(method="dcl", steps=2, subset=64, out=Path(tempfile.mkdtemp()) / "run")
        >>> (folder / "report.html").exists()
        True
    """
    from negchain.train.progress import Progress
    from negchain.train.resolve import resolve
    from negchain.train.start import start

    settings = {k: fspath(v) if isinstance(v, PathLike) else v for k, v in settings.items()}
    begun, _ = start(resolve(settings.pop("preset", None), settings), show)
    with begun.folder:
        begun.train(Progress(show))
    return begun.folder.path
