"""Many image files at once, under a progress bar.

Files are decoded by a pool of threads: PIL lets go of the interpreter lock while it decodes and
resamples, and processes would have to send the pixels back.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from negchain.augment.pictures import Pictures
from negchain.data.decode import (
    Size,
    read_both,
    read_image,
    read_size,
    stored_size,
    why_unreadable,
)
from negchain.data.places import Where
from negchain.progress import Progress

_FILES_PER_TASK = 16


def _run(
    work: Callable[[int], None],
    places: Sequence[Where | str],
    *,
    workers: int,
    title: str | None,
) -> dict[int, str]:
    """`work(0..)` on threads under a progress bar; {number: reason} of the files that failed."""

    def one(i: int) -> str | None:
        try:
            work(i)
        except Exception as error:  # PIL's readers raise nearly every type on damaged files
            return why_unreadable(places[i], error)
        return None

    count = len(places)

    def some(start: int) -> list[str | None]:
        return [one(i) for i in range(start, min(start + _FILES_PER_TASK, count))]

    Image.init()  # registers readers: not safe to happen in several threads at once
    pool = ThreadPoolExecutor(workers)
    failed: dict[int, str] = {}
    try:
        with warnings.catch_warnings(), Progress(title is not None) as progress:
            warnings.simplefilter("ignore")  # PIL warns of odd metadata; what matters raises
            progress.begin(count, "files", title or "")
            results = pool.map(some, range(0, count, _FILES_PER_TASK))
            for chunk, reasons in enumerate(results):
                first = chunk * _FILES_PER_TASK
                failed |= {first + k: r for k, r in enumerate(reasons) if r is not None}
                progress.at(first + len(reasons))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for the rest of the folder
    return failed


def read_sizes(
    places: Sequence[Where | str], *, workers: int, title: str | None = None
) -> list[Size]:
    """Width and height of every file, from its header; (0, 0) where that cannot be read.

    >>> read_sizes(["/nowhere/a.png"], workers=1)
    [(0, 0)]
    """
    sizes = [(0, 0)] * len(places)

    def work(i: int) -> None:
        sizes[i] = read_size(places[i])

    _run(work, places, workers=workers, title=title)
    return sizes


def decode_files(
    places: Sequence[Where | str],
    side: int,
    *,
    whole: tuple[Sequence[Size], int] | None = None,
    workers: int,
    title: str | None = None,
) -> tuple[Tensor, Pictures | None, dict[int, str]]:
    """All readable files as squares, uint8 [M,3,side,side], and {number: reason} of the others.

    Between the two, where `whole` is given: the same files as whole pictures. It holds the sizes
    of all files (`read_sizes`) and the length up to which shorter sides are kept. Row k is the k-th
    readable file; with `title` a progress bar is shown on stderr.

    >>> images, pictures, failed = decode_files(["/nowhere/a.png"], 8, workers=1)
    >>> images.shape, failed
    (torch.Size([0, 3, 8, 8]), {0: 'no such file (a broken link?)'})
    """
    squares = torch.empty(len(places), 3, side, side, dtype=torch.uint8)
    sizes, short = whole or ((), 0)
    stored = [stored_size(size, short) for size in sizes]
    shapes = torch.tensor(stored, dtype=torch.int64).view(-1, 2)
    ends = (3 * shapes.prod(1)).cumsum(0)
    begins = ends - 3 * shapes.prod(1)
    flat = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
    sizes_hw = torch.zeros(len(places), 2, dtype=torch.int32)
    rows: npt.NDArray[Any] = squares.numpy()
    slots: npt.NDArray[Any] = flat.numpy()
    spans = list(zip(begins.tolist(), ends.tolist(), strict=True))

    def work(i: int) -> None:
        if whole is None:
            rows[i] = read_image(places[i], side)
            return
        begin, end = spans[i]
        rows[i], picture = read_both(places[i], side, short)
        if picture.size != end - begin:
            raise OSError("its size is not what its header says")
        slots[begin:end] = picture.reshape(-1)
        sizes_hw[i] = torch.tensor(picture.shape[1:])

    failed = _run(work, places, workers=workers, title=title)
    keep = torch.tensor([i for i in range(len(places)) if i not in failed], dtype=torch.int64)
    # The bytes of unreadable files stay where they are: nobody's offset leads there.
    pictures = Pictures(flat, begins[keep], sizes_hw[keep]) if whole else None
    return _close_gaps(squares, failed), pictures, failed


def _close_gaps(images: Tensor, failed: dict[int, str], chunk: int = 1024) -> Tensor:
    """Rows that did not fail moved to the front in place: a copy might not fit in memory."""
    if not failed:
        return images
    keep = [i for i in range(len(images)) if i not in failed]
    for start in range(0, len(keep), chunk):
        part = keep[start : start + chunk]
        images[start : start + len(part)] = images[part]  # reads at or behind what it writes
    return images[: len(keep)]


def check_files(
    places: Sequence[Where | str], *, workers: int, title: str | None = None
) -> dict[int, str]:
    """{number: reason} of the files that `read_image` cannot read.

    Each file is decoded to one pixel (a JPEG at 1/8 of its size), since a truncated JPEG passes
    PIL's `verify`; so a set holds the same items whether it is resident or on disk.

    >>> check_files(["/nowhere/a.png"], workers=1)
    {0: 'no such file (a broken link?)'}
    """

    def work(i: int) -> None:
        read_image(places[i], 1)

    return _run(work, places, workers=workers, title=title)
