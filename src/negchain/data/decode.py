"""Image files to uint8 RGB squares: one definition of "readable" for resident and streamed sets.

`read_image` opens a file of a known format, turns it upright (EXIF), converts it to RGB (alpha
composited on white, 16-bit scaled to 8), and samples its central square at side x side pixels:
the same as resizing the shorter side to `side` and cropping the centre, without ever computing
the pixels that the crop throws away (a 1 x 100,000 banner costs no more than its square).
Colour profiles are ignored, and of an animation the first frame is read.

Files are decoded by a pool of threads: PIL lets go of the interpreter lock while it decodes and
resamples, and processes would have to send the pixels back.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError, features
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor

_AVIF = bool(features.check("avif"))
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm".split()
    + ([".avif"] if _AVIF else [])
)
"""File name endings (lower case) of what is read as an image; other files are not looked at."""

# A list keeps PIL from handing a disguised file to its other readers (EPS starts Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM") + (("AVIF",) if _AVIF else ())
_FILES_PER_TASK = 16


def num_cores() -> int:
    """Cores this process may use.

    >>> num_cores() >= 1
    True
    """
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL mode to RGB; raises where PIL knows no conversion (LAB)."""
    if image.mode.startswith("I;16"):
        levels = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((levels + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):  # 32-bit TIFF: no range is declared, so the image's own is used
        values = np.asarray(image).astype(np.float64)
        low, high = float(values.min()), float(values.max())
        scaled = (values - low) * (255.0 / (high - low)) if high > low else np.zeros_like(values)
        return Image.fromarray(scaled.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def read_image(path: str, side: int) -> npt.NDArray[np.uint8]:  # -> [3,side,side]
    """The central square of an image file, upright, in RGB, at `side` x `side` pixels.

    Bilinear with antialiasing, as `torchvision.transforms.Resize`. A JPEG at least four times too
    large is decoded by libjpeg at 1/2, 1/4 or 1/8 of its size, never below twice `side`, and
    resampled from there: large photos decode several times faster, and a smooth one differs by
    less than one grey level on average.

    >>> import os, tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "a.png")
    ...     Image.new("RGB", (40, 20), "red").save(path)
    ...     pixels = read_image(path, 8)
    >>> pixels.shape, pixels[:, 0, 0].tolist()
    ((3, 8, 8), [255, 0, 0])
    """
    with Image.open(path, formats=_FORMATS) as image:
        image.draft(image.mode, (2 * side, 2 * side))  # does nothing unless it is a JPEG
        ImageOps.exif_transpose(image, in_place=True)
        rgb = _to_rgb(image)
    width, height = rgb.size
    short = min(width, height)
    if (width, height) != (side, side):
        left, top = (width - short) / 2, (height - short) / 2
        box = (left, top, left + short, top + short)
        rgb = rgb.resize((side, side), Image.Resampling.BILINEAR, box=box)
    return np.asarray(rgb).transpose(2, 0, 1)


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file (a broken link?)"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, UnidentifiedImageError):
        return "empty file" if os.path.getsize(path) == 0 else "not an image of a known format"
    return str(error) or type(error).__name__


def try_read(path: str, side: int) -> npt.NDArray[np.uint8] | str:
    """`read_image`, or one phrase that says why the file cannot be read.

    >>> try_read("/nowhere/a.png", 8)
    'no such file (a broken link?)'
    """
    try:
        return read_image(path, side)
    except Exception as error:  # PIL's readers raise nearly every type on damaged files
        return _reason(path, error)


def _run(
    work: Callable[[int], str | None],
    count: int,
    *,
    workers: int,
    title: str | None,
) -> dict[int, str]:
    """`work(0..count-1)` on threads under a progress bar; {number: reason} of those that failed."""

    def some(start: int) -> list[str | None]:
        return [work(i) for i in range(start, min(start + _FILES_PER_TASK, count))]

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=console.is_terminal,  # a log keeps the line
        disable=title is None,
    )
    Image.init()  # registers readers: not safe to happen in several threads at once
    pool = ThreadPoolExecutor(workers)
    failed: dict[int, str] = {}
    try:
        with warnings.catch_warnings(), bar:
            warnings.simplefilter("ignore")  # PIL warns of odd metadata; what matters raises
            task = bar.add_task(title or "", total=count)
            results = pool.map(some, range(0, count, _FILES_PER_TASK))
            for chunk, reasons in enumerate(results):
                first = chunk * _FILES_PER_TASK
                failed |= {first + k: r for k, r in enumerate(reasons) if r is not None}
                bar.advance(task, len(reasons))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for the rest of the folder
    return failed


def decode_files(
    paths: Sequence[str], side: int, *, workers: int, title: str | None = None
) -> tuple[Tensor, dict[int, str]]:
    """All readable files as one uint8 tensor [M,3,side,side], and {number: reason} of the others.

    Row k is the k-th readable file; with `title` a progress bar is shown on stderr.

    >>> images, failed = decode_files(["/nowhere/a.png"], 8, workers=1)
    >>> images.shape, failed
    (torch.Size([0, 3, 8, 8]), {0: 'no such file (a broken link?)'})
    """
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    rows: npt.NDArray[Any] = images.numpy()

    def work(i: int) -> str | None:
        pixels = try_read(paths[i], side)
        if isinstance(pixels, str):
            return pixels
        rows[i] = pixels
        return None

    failed = _run(work, len(paths), workers=workers, title=title)
    if failed:
        images = _close_gaps(images, [i for i in range(len(paths)) if i not in failed])
    return images, failed


def _close_gaps(images: Tensor, keep: list[int], chunk: int = 1024) -> Tensor:
    """Rows `keep` (ascending) moved to the front in place: a copy might not fit in memory."""
    for start in range(0, len(keep), chunk):
        part = keep[start : start + chunk]
        images[start : start + len(part)] = images[part]  # reads at or behind what it writes
    return images[: len(keep)]


def check_files(paths: Sequence[str], *, workers: int, title: str | None = None) -> dict[int, str]:
    """{number: reason} of the files that `read_image` cannot read.

    Each file is decoded to one pixel (a JPEG at 1/8 of its size), since a truncated JPEG passes
    PIL's `verify`; so a set holds the same items whether it is resident or streamed.

    >>> check_files(["/nowhere/a.png"], workers=1)
    {0: 'no such file (a broken link?)'}
    """

    def work(i: int) -> str | None:
        pixels = try_read(paths[i], 1)
        return pixels if isinstance(pixels, str) else None

    return _run(work, len(paths), workers=workers, title=title)


def common_short_side(paths: Iterable[str]) -> int | None:
    """The shorter side that all files share, from their headers; None if two differ.

    Stops at the first that differs. Unreadable files say nothing.

    >>> common_short_side(["/nowhere/a.png"]) is None
    True
    """
    common: int | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths:
            try:
                with Image.open(path, formats=_FORMATS) as image:
                    side = min(image.size)
            except Exception:  # counted and named when it is decoded
                continue
            if common is not None and side != common:
                return None
            common = side
    return common
