"""Listed files as image sets: measured, then decoded into memory or checked and left on disk.

Random crops are cut from whole pictures, stored at the first of these sizes that fits the budget:

3 sides    The shorter side is three times the encoder's side. Crops down to a ninth of the area are
           not enlarged, and hold the detail of crops of the original (Lanczos; the tests compare
           with torchvision).
2 sides    Crops down to a quarter of the area are not enlarged: four draws of five.
on disk    Nothing is stored. Pictures are decoded for every crop, at three sides.

Smaller pictures are kept as they are. Squares of the encoder's own side need nothing beside them.

Files are read by threads: PIL releases the interpreter lock while it decodes and resamples, and
processes would have to send the pixels back.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from negchain.augment.pictures import Pictures
from negchain.data.decode import (
    IMAGE_SUFFIXES,
    Size,
    decoded,
    read_size,
    stored_size,
    why_unreadable,
)
from negchain.data.image_set import DataBundle, ImageSet, fingerprint
from negchain.data.listing import (
    ImageFile,
    Listing,
    Place,
    classes_of,
    require_known_classes,
    too_few,
)
from negchain.printable import counted, printable
from negchain.progress import Progress

TIMES = (3, 2)
"""Shorter sides of stored pictures, in sides of the square the encoder sees: what is tried."""

_FILES_PER_PART = 16


# ---------------------------------------------------------------------------- how they are kept


@dataclass(frozen=True)
class Storage:
    """How the pictures of all folders of a run are kept.

    >>> choose_storage([(4000, 3000)] * 100, side=96, budget=1 << 30).note
    'crops are cut from whole pictures, kept with shorter sides up to 288 px (0.03 GB of \
--resident-gb 1): those of 11 % of the area and more are not enlarged'
    """

    side: int
    """Side of the squares the encoder sees."""
    short: int
    """Shorter side up to which whole pictures are kept; 0: the squares are the pictures."""
    resident: bool
    """Whether everything is decoded into memory."""
    note: str = ""
    """What the user is told."""


def choose_storage(sizes: Sequence[Size], side: int, budget: int) -> Storage:
    """Decide from the sizes of all files, (0, 0) for unreadable ones, and a budget in bytes."""
    sizes = [size for size in sizes if size != (0, 0)]
    if set(sizes) <= {(side, side)}:
        return Storage(side, 0, len(sizes) * 3 * side * side <= budget)
    for times in TIMES:
        short = times * side
        num_bytes = sum(3 * math.prod(stored_size(size, short)) for size in sizes)
        if num_bytes <= budget:
            return Storage(side, short, True, _note(sizes, times, short, num_bytes, budget))
    note = (
        f"{len(sizes):,} pictures need {num_bytes / 2**30:.2f} GB at {times * side} px and "
        f"--resident-gb allows {budget / 2**30:g}: they are decoded anew for every crop"
    )
    return Storage(side, TIMES[0] * side, False, note)


def _note(sizes: Sequence[Size], times: int, short: int, num_bytes: int, budget: int) -> str:
    enough = sum(min(size) >= short for size in sizes)
    some = f"in the {counted(enough, 'that is', 'that are')} large enough "
    whose = "" if enough == len(sizes) else some
    share = f"{whose}those of {100 / times**2:.0f} % of the area and more are not enlarged"
    return (
        f"crops are cut from whole pictures, kept with shorter sides up to {short} px "
        f"({num_bytes / 2**30:.2f} GB of --resident-gb {budget / 2**30:g}): "
        + (share if enough else "none is that large, so small crops are enlarged")
    )


# ------------------------------------------------------------------------------ many files at once


def _run(
    work: Callable[[int], None],
    places: Sequence[Place | str],
    *,
    workers: int,
    title: str | None,
) -> dict[int, str]:
    """`work(0..)` on threads under a progress bar; {number: reason} of the files that failed."""

    def some(numbers: range) -> dict[int, str]:
        failed = {}
        for i in numbers:
            try:
                work(i)
            except Exception as error:  # PIL's readers raise nearly every type on damaged files
                failed[i] = why_unreadable(places[i], error)
        return failed

    every = range(len(places))
    parts = [every[start : start + _FILES_PER_PART] for start in every[::_FILES_PER_PART]]
    Image.init()  # registers readers: not safe to happen in several threads at once
    pool = ThreadPoolExecutor(workers)
    failed: dict[int, str] = {}
    try:
        with warnings.catch_warnings(), Progress(title is not None) as progress:
            warnings.simplefilter("ignore")  # PIL warns of odd metadata; what matters raises
            progress.begin(len(places), "files", title or "")
            for numbers, reasons in zip(parts, pool.map(some, parts), strict=True):
                failed |= reasons
                progress.at(numbers.stop)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for the rest of the folder
    return failed


def read_sizes(
    places: Sequence[Place | str], *, workers: int, title: str | None = None
) -> list[Size]:
    """Width and height of every file, from its header; (0, 0) where that cannot be read."""
    sizes = [(0, 0)] * len(places)

    def work(i: int) -> None:
        sizes[i] = read_size(places[i])

    _run(work, places, workers=workers, title=title)
    return sizes


def decode_files(
    places: Sequence[Place | str],
    side: int,
    *,
    sizes: Sequence[Size] = (),
    short: int = 0,
    workers: int,
    title: str | None = None,
) -> tuple[Tensor, Pictures | None, dict[int, str]]:
    """All readable files as squares, uint8 [M,3,side,side], and {number: reason} of the others.

    Between the two, where `short` is not 0: the same files as whole pictures, whose shorter sides
    are kept up to `short` pixels; `sizes` are then those of all files (`read_sizes`). Row k is the
    k-th readable file; with `title` a progress bar is shown on stderr.

    >>> images, pictures, failed = decode_files(["/nowhere/a.png"], 8, workers=1)
    >>> images.shape, failed
    (torch.Size([0, 3, 8, 8]), {0: 'no such file (a broken link?)'})
    """
    squares = torch.empty(len(places), 3, side, side, dtype=torch.uint8)
    num_bytes = [3 * math.prod(stored_size(size, short)) for size in sizes] if short else []
    begins = [0, *accumulate(num_bytes)]
    flat = torch.empty(begins[-1], dtype=torch.uint8)
    sizes_hw = torch.zeros(len(places), 2, dtype=torch.int32)
    rows, slots = squares.numpy(), flat.numpy()

    def work(i: int) -> None:
        with decoded(places[i], max(side, short)) as found:
            rows[i] = found.square(side)
            if short:
                picture = found.whole(short)
                if picture.size != num_bytes[i]:
                    raise OSError("its size is not what its header says")
                slots[begins[i] : begins[i + 1]] = picture.reshape(-1)
                sizes_hw[i] = torch.tensor(picture.shape[1:])

    failed = _run(work, places, workers=workers, title=title)
    keep = torch.tensor([i for i in range(len(places)) if i not in failed], dtype=torch.int64)
    # The bytes of unreadable files stay where they are: nobody's offset leads there.
    pictures = Pictures(flat, torch.tensor(begins)[keep], sizes_hw[keep]) if short else None
    return _close_gaps(squares, keep), pictures, failed


def _close_gaps(images: Tensor, keep: Tensor, chunk: int = 1024) -> Tensor:
    """The rows `keep`, ascending, moved to the front in place: a copy might not fit in memory."""
    if len(keep) < len(images):
        for start in range(0, len(keep), chunk):
            part = keep[start : start + chunk]
            images[start : start + len(part)] = images[part]  # reads at or behind what it writes
    return images[: len(keep)]


# ----------------------------------------------------------------------------- from files to sets


def load_files(
    listing: Listing,
    sizes: Sequence[Size],
    storage: Storage,
    *,
    strict: bool,
    workers: int,
    progress: bool,
) -> DataBundle:
    """The listed files as sets, kept as `storage` says; `sizes` are those of pretrain + test."""
    files = listing.pretrain + listing.test
    name = printable(Path(listing.root).resolve().name)
    places = [file.place for file in files]
    title = f"{'decoding' if storage.resident else 'checking'} {name}" if progress else None
    # What stays on disk is decoded too, to one pixel (a JPEG at 1/8 of its size): a truncated JPEG
    # passes PIL's `verify`, and both ways a set holds the same items.
    side, short = (storage.side, storage.short) if storage.resident else (1, 0)
    images, whole, failed = decode_files(
        places, side, sizes=sizes, short=short, workers=workers, title=title
    )
    skipped = listing.unreadable + tuple((files[i].name, why) for i, why in failed.items())
    kept = [file for i, file in enumerate(files) if i not in failed]
    count = len(listing.pretrain) - sum(i < len(listing.pretrain) for i in failed)
    _require_images(listing, count, skipped, strict)
    classes, tested, unprobed = _probed(listing, kept[:count], kept[count:])
    number = {name: k for k, name in enumerate(classes)}
    labels = [number.get(file.class_name or "", -1) for file in kept]
    everything = ImageSet(
        names=tuple(file.name for file in kept),
        labels=torch.tensor(labels) if classes else None,
        images=images if storage.resident else None,
        places=None if storage.resident else tuple(file.place for file in kept),
        side=storage.side,
        whole=whole,
        short=0 if storage.resident else storage.short,
    )
    pretrain = everything.select(torch.arange(count))
    shape = (everything.channels, *everything.size, *([storage.short] if storage.short else ()))
    items = [(file.name, file.place.size) for file in kept]
    lost = bool(listing.test) and not tested  # all that there was to probe, to damage
    return DataBundle(
        name=name,
        pretrain=pretrain,
        train=pretrain.labelled_part(),
        test=everything.select(torch.tensor(tested)) if tested else None,
        classes=classes,
        skipped=skipped,
        fingerprint=fingerprint(items[:count], items[count:], shape),
        notes=listing.notes + ((f"nothing is probed: {unprobed}",) if lost else ()),
        unprobed=unprobed,
        held_out=len(tested) if listing.held_out else 0,
    )


def _probed(
    listing: Listing, train: Sequence[ImageFile], test: Sequence[ImageFile]
) -> tuple[tuple[str, ...], list[int], str]:
    """Of readable files: the classes, positions to test probes on, and why there are none."""
    classes = classes_of(train)
    if not listing.held_out:
        require_known_classes(classes, classes_of(test))
    if len(classes) == 1:  # the others were lost to damage
        return (), [], f"only {classes[0]} has readable images to train on"
    if listing.test and (too_little := too_few(train)):
        return classes, [], too_little
    tested = [i for i, file in enumerate(test, len(train)) if file.class_name in classes]
    return classes, tested, listing.unprobed


def _require_images(
    listing: Listing, count: int, skipped: Sequence[tuple[str, str]], strict: bool
) -> None:
    root = listing.root
    first = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
    if strict and skipped:
        raise ValueError(
            f"strict reading allows no unreadable file, and {printable(root)} holds {len(skipped)} "
            f"({first}); repair or remove them, or leave out --strict"
        )
    if count == 0:
        unread = f" and {len(skipped)} unreadable ({first})" if skipped else ""
        remedy = f"give a folder with files ending in {', '.join(sorted(IMAGE_SUFFIXES))}"
        if root.lower().endswith(".csv"):
            remedy = "name images by paths that are relative to the table"
        said = "; ".join((f"0 readable images{unread}", *listing.notes, remedy))
        raise ValueError(f"{printable(root)} holds {said}")
