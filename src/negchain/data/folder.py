"""A scanned folder or table as image sets: decoded into memory, or checked and left on disk."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from negchain.data.decode import IMAGE_SUFFIXES, Size
from negchain.data.files import check_files, decode_files
from negchain.data.image_set import DataBundle, ImageSet
from negchain.data.scan import ImageFile, Scan, classes_of, require_known_classes, too_few
from negchain.data.storage import Storage
from negchain.printable import printable


def load_folder(
    scan: Scan,
    sizes: Sequence[Size],
    storage: Storage,
    *,
    strict: bool,
    workers: int,
    progress: bool,
) -> DataBundle:
    """The scanned files as sets, kept as `storage` says; `sizes` are those of pretrain + test.

    >>> load_folder(  # doctest: +ELLIPSIS
    ...     Scan("/nowhere", ()), [], Storage(8, 0, True), strict=False, workers=1, progress=False
    ... )
    Traceback (most recent call last):
    ValueError: /nowhere holds 0 readable images; ...
    """
    files = scan.pretrain + scan.test
    name = printable(Path(scan.root).resolve().name)
    places, images, whole = [file.place for file in files], None, None
    title = f"{'decoding' if storage.resident else 'checking'} {name}" if progress else None
    if not storage.resident:
        failed = check_files(places, workers=workers, title=title)
    else:
        pictures = (sizes, storage.short) if storage.short else None
        images, whole, failed = decode_files(
            places, storage.side, whole=pictures, workers=workers, title=title
        )
    skipped = scan.unreadable + tuple((files[i].name, why) for i, why in failed.items())
    kept = [file for i, file in enumerate(files) if i not in failed]
    count = len(scan.pretrain) - sum(i < len(scan.pretrain) for i in failed)
    _require_images(scan.root, count, skipped, strict)
    everything = ImageSet(
        names=tuple(file.name for file in kept),
        labels=None,
        images=images,
        places=None if storage.resident else tuple(file.place for file in kept),
        side=storage.side,
        whole=whole,
        short=0 if storage.resident else storage.short,
    )
    return _divide(name, scan, everything, count, kept, skipped, storage)


def _divide(
    name: str,
    scan: Scan,
    everything: ImageSet,
    count: int,
    kept: Sequence[ImageFile],
    skipped: tuple[tuple[str, str], ...],
    storage: Storage,
) -> DataBundle:
    """The first `count` items to pretrain on, the others to test on, as far as damage left them."""
    classes, notes, unprobed = classes_of(kept[:count]), scan.notes, scan.unprobed
    tested = list(range(count, len(kept)))
    if scan.held_out:
        tested = [i for i in tested if kept[i].class_name in classes]
    else:
        require_known_classes(classes, classes_of(kept[count:]))
    if len(classes) == 1:  # the others were lost to damage
        unprobed = f"only {classes[0]} has readable images to train on"
        classes = ()
    elif scan.test and (too_little := too_few(kept[:count])):
        unprobed, tested = too_little, []
    if scan.test and (not classes or not tested):
        notes += (f"nothing is probed: {unprobed}",)
    pretrain = everything.select(torch.arange(count))
    test = None
    if len(classes) >= 2:
        number = {name: k for k, name in enumerate(classes)}
        labels = torch.tensor([number.get(f.class_name or "", -1) for f in kept])
        pretrain = replace(pretrain, labels=labels[:count])
        if tested:
            chosen = torch.tensor(tested)
            test = replace(everything.select(chosen), labels=labels[chosen])
    shape = (everything.channels, *everything.size, *([storage.short] if storage.short else ()))
    items = [(file.name, file.place.size) for file in kept]
    return DataBundle(
        name=name,
        pretrain=pretrain,
        train=labelled_part(pretrain),
        test=test,
        classes=classes,
        skipped=skipped,
        fingerprint=fingerprint(items[:count], items[count:], shape),
        notes=notes,
        unprobed=unprobed,
        held_out=len(test) if test is not None and scan.held_out else 0,
    )


def _require_images(
    root: str, count: int, skipped: Sequence[tuple[str, str]], strict: bool
) -> None:
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
        raise ValueError(f"{printable(root)} holds 0 readable images{unread}; {remedy}")


def labelled_part(pretrain: ImageSet) -> ImageSet | None:
    """The items with a label, as a set to fit probes on; None if there are none.

    >>> pixels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    >>> labelled_part(ImageSet(("a", "b", "c"), torch.tensor([1, -1, 0]), pixels)).names
    ('a', 'c')
    """
    if pretrain.labels is None or bool((pretrain.labels < 0).all()):
        return None
    return pretrain.select((pretrain.labels >= 0).nonzero().flatten())


def fingerprint(
    pretrain: Iterable[tuple[str, int]], test: Iterable[tuple[str, int]], shape: Sequence[int]
) -> str:
    """16 hexadecimal digits over (name, bytes) of every item and the decoded shape (C, S, S, ...).

    >>> fingerprint([("a.png", 10)], [], (3, 8, 8)) == fingerprint([("a.png", 11)], [], (3, 8, 8))
    False
    """
    digest = hashlib.sha256(repr(tuple(shape)).encode())
    for part in (pretrain, test):
        digest.update(b"\0part\0")
        for name, num_bytes in part:
            digest.update(f"{name}\0{num_bytes}\0".encode())
    return digest.hexdigest()[:16]
