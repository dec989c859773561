"""A folder of images as a data set: what is in it, which of it is labelled, what is unreadable.

Two layouts. A folder holding `train/` or `unlabeled/` (and perhaps `test/`) is split: pretraining
takes `train` + `unlabeled`, and where `train/` has two or more class sub-folders they label it and
`test/` (`train/cat/any/depth/1.jpg` is a cat). Any other folder is a plain heap of images at any
depth, without labels.

What counts as an item: a regular file with an image suffix that `read_image` can read. Such a file
that cannot be read is named in `skipped`; files with other suffixes are counted in `notes`; hidden
files and folders (a leading dot) are passed over. A folder reached twice through links is read
once, so that links that run in circles end, and no picture becomes its own negative.

Order: names are POSIX paths relative to the root, sorted by code point: the same on every machine.
"""

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from negchain.data.decode import IMAGE_SUFFIXES, check_files, decode_files
from negchain.data.image_set import DataBundle, ImageSet


@dataclass(frozen=True)
class ImageFile:
    """A file with an image suffix: its name in the set, where it is, its bytes, its class."""

    name: str
    path: str
    num_bytes: int
    class_name: str | None = None


@dataclass(frozen=True)
class FolderScan:
    """What a folder holds, by names alone: nothing is opened yet."""

    root: str
    pretrain: tuple[ImageFile, ...]
    test: tuple[ImageFile, ...]
    unreadable: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass
class _Walk:
    files: list[ImageFile] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)

    def enter(self, folder: str, prefix: str) -> "_Walk":
        """Adds everything under `folder`, named from `prefix` on; one stack, no recursion."""
        seen: set[tuple[int, int]] = set()
        stack = [(folder, prefix)]
        while stack:
            here, name = stack.pop()
            try:
                status = os.stat(here)
                entries = sorted(os.scandir(here), key=lambda entry: entry.name, reverse=True)
            except OSError as error:
                self.unreadable.append((name, f"folder cannot be listed: {error.strerror}"))
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                shown = name + _printable(entry.name)
                try:
                    status = entry.stat()
                except OSError:  # a link to nothing or to itself
                    self._add_file(entry, shown, None)
                    continue
                if stat.S_ISDIR(status.st_mode):
                    stack.append((entry.path, f"{shown}/"))
                else:
                    self._add_file(entry, shown, status)
        return self

    def _add_file(self, entry: os.DirEntry[str], name: str, status: os.stat_result | None) -> None:
        suffix = os.path.splitext(entry.name)[1].lower()
        if suffix not in IMAGE_SUFFIXES:
            self.other[suffix or "no suffix"] += 1
        elif status is None:
            self.unreadable.append((name, "broken link"))
        elif not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            self.unreadable.append((name, "not a regular file"))
        else:
            self.files.append(ImageFile(name, entry.path, status.st_size))


def _printable(name: str) -> str:
    """File names are bytes; those that are not UTF-8 are shown with escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def scan_folder(root: str | Path) -> FolderScan:
    r"""The image files under `root`, in order, with the classes that the layout gives them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("train/cat/b.png", "train/cat/a.png", "train/dog/c.PNG", "train/x.txt"):
    ...         file = Path(folder, name)
    ...         file.parent.mkdir(parents=True, exist_ok=True)
    ...         _ = file.write_text("")
    ...     scan = scan_folder(folder)
    >>> [file.name for file in scan.pretrain], scan.pretrain[2].class_name
    (['train/cat/a.png', 'train/cat/b.png', 'train/dog/c.PNG'], 'dog')
    """
    top = os.fspath(root)
    walk, notes = _Walk(), list[str]()
    splits = [s for s in ("train", "unlabeled", "test") if os.path.isdir(os.path.join(top, s))]
    if "train" in splits or "unlabeled" in splits:
        for split in splits:
            walk.enter(os.path.join(top, split), f"{split}/")
        notes += _not_read(top, splits)
        pretrain, test = _assign_classes(walk.files, notes)
    else:
        walk.enter(top, "")
        pretrain, test = sorted(walk.files, key=_name), []
    if walk.other:
        kinds = ", ".join(f"{suffix} {n}" for suffix, n in walk.other.most_common(5))
        notes.append(f"{walk.other.total()} files without an image suffix ignored ({kinds})")
    return FolderScan(
        top, tuple(pretrain), tuple(test), tuple(sorted(walk.unreadable)), tuple(notes)
    )


def _name(file: ImageFile) -> str:
    return file.name


def _not_read(top: str, splits: Sequence[str]) -> list[str]:
    """A note if images may lie beside the splits (a `val/`, say)."""
    beside = sorted(
        _printable(entry.name)
        for entry in os.scandir(top)
        if not entry.name.startswith(".")
        and entry.name not in splits
        and (entry.is_dir() or os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES)
    )
    if not beside:
        return []
    shown = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
    return [f"beside train/, test/ and unlabeled/ there is {shown}: not read"]


def _assign_classes(
    files: Iterable[ImageFile], notes: list[str]
) -> tuple[list[ImageFile], list[ImageFile]]:
    """(pretraining files, test files), with classes where there is something to tell apart."""
    pretrain, test = list[ImageFile](), list[ImageFile]()
    for file in sorted(files, key=_name):
        split, *folders, _ = file.name.split("/")
        class_name = folders[0] if folders and split != "unlabeled" else None
        placed = ImageFile(file.name, file.path, file.num_bytes, class_name)
        (test if split == "test" else pretrain).append(placed)
    classes = _classes(pretrain)
    if len(classes) < 2:
        if classes or test:
            count = f"{len(classes)} class folder{'s' * (not classes)} with images"
            notes.append(f"train/ has {count}, and probes need 2: nothing is probed")
        return [ImageFile(f.name, f.path, f.num_bytes) for f in pretrain], []
    labelled = [file for file in test if file.class_name is not None]
    if len(labelled) < len(test):
        notes.append(f"{len(test) - len(labelled)} images of test/ in no class folder: not read")
    _require_known_classes(classes, _classes(labelled))
    return pretrain, labelled


def _classes(files: Iterable[ImageFile]) -> tuple[str, ...]:
    return tuple(sorted({file.class_name for file in files if file.class_name is not None}))


def _require_known_classes(train: Sequence[str], test: Sequence[str]) -> None:
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise ValueError(
            f"every class of test/ needs readable images in train/, and {', '.join(unknown[:5])} "
            f"has none; add them to train/, or remove test/{unknown[0]}"
        )


def load_folder(
    scan: FolderScan, *, side: int, resident: bool, strict: bool, workers: int, progress: bool
) -> DataBundle:
    """The scanned folder decoded into memory (`resident`), or checked file by file for streaming.

    >>> scan = FolderScan("/nowhere", (), (), (), ())
    >>> load_folder(  # doctest: +ELLIPSIS
    ...     scan, side=8, resident=True, strict=False, workers=1, progress=False
    ... )
    Traceback (most recent call last):
    ValueError: pretraining needs at least 2 readable images, and /nowhere holds 0; ...
    """
    files = scan.pretrain + scan.test
    name = Path(scan.root).resolve().name
    paths, images = [file.path for file in files], None
    title = f"{'decoding' if resident else 'checking'} {name}" if progress else None
    if resident:
        images, failed = decode_files(paths, side, workers=workers, title=title)
    else:
        failed = check_files(paths, workers=workers, title=title)
    skipped = scan.unreadable + tuple((files[i].name, why) for i, why in failed.items())
    kept = [file for i, file in enumerate(files) if i not in failed]
    count = len(scan.pretrain) - sum(i < len(scan.pretrain) for i in failed)
    _require_images(scan.root, count, skipped, strict)
    classes = _classes(kept[:count])
    _require_known_classes(classes, _classes(kept[count:]))
    notes = scan.notes
    if len(classes) == 1:  # the others were lost to damage
        notes += (f"only {classes[0]} has readable images in train/: nothing is probed",)
    everything = ImageSet(
        names=tuple(file.name for file in kept),
        labels=_labels(kept, classes),
        images=images,
        paths=None if resident else tuple(file.path for file in kept),
        side=side,
    )
    return _divide(name, everything, count, classes, kept, skipped, notes)


def _divide(
    name: str,
    everything: ImageSet,
    count: int,
    classes: tuple[str, ...],
    kept: Sequence[ImageFile],
    skipped: tuple[tuple[str, str], ...],
    notes: tuple[str, ...],
) -> DataBundle:
    """The first `count` items of a folder to pretrain on, the others to test on."""
    pretrain = everything.select(torch.arange(count))
    labelled = everything.labels is not None
    held_out = torch.arange(count, len(kept) if labelled else count)
    items = [(file.name, file.num_bytes) for file in kept]
    shape = (everything.channels, *everything.size)
    return DataBundle(
        name=name,
        pretrain=pretrain,
        train=labelled_part(pretrain),
        test=everything.select(held_out) if len(held_out) else None,
        classes=classes if labelled else (),
        skipped=skipped,
        fingerprint=fingerprint(items[:count], items[count:], shape),
        notes=notes,
    )


def _require_images(
    root: str, count: int, skipped: Sequence[tuple[str, str]], strict: bool
) -> None:
    first = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
    if strict and skipped:
        raise ValueError(
            f"strict reading allows no unreadable file, and {root} holds {len(skipped)} ({first}); "
            "repair or remove them, or leave out --strict"
        )
    if count < 2:
        unread = f" and {len(skipped)} unreadable ({first})" if skipped else ""
        raise ValueError(
            f"pretraining needs at least 2 readable images, and {root} holds {count}{unread}; "
            f"give a folder with files ending in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )


def _labels(files: Sequence[ImageFile], classes: Sequence[str]) -> Tensor | None:
    if len(classes) < 2:
        return None
    number = {name: k for k, name in enumerate(classes)}
    return torch.tensor([-1 if f.class_name is None else number[f.class_name] for f in files])


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
    """16 hexadecimal digits over (name, bytes) of every item and the decoded shape (C, H, W).

    >>> fingerprint([("a.png", 10)], [], (3, 8, 8)) == fingerprint([("a.png", 11)], [], (3, 8, 8))
    False
    """
    digest = hashlib.sha256(repr(tuple(shape)).encode())
    for part in (pretrain, test):
        digest.update(b"\0part\0")
        for name, num_bytes in part:
            digest.update(f"{name}\0{num_bytes}\0".encode())
    return digest.hexdigest()[:16]
