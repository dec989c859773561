"""What a source of images holds, by names alone: files, classes and splits. Nothing is opened.

Shards (.tar) and Arrow files hold pictures uncompressed, so a picture is a range of bytes. It costs
one read, in any order and from any process.

Folders and tables (`folder`), shards (`shards`) and saved data sets (`arrow`) list their files by
split; `divide` makes of them what is pretrained on and what probes are tested on. Where there are
classes and no test split, a share of every class is held out.
"""

import hashlib
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from negchain.printable import counted, printable

TEST_SPLITS = ("test", "val", "valid", "validation")
SPLITS = ("train", "unlabeled", *TEST_SPLITS)

LEAST_TRAIN = 3
"""Training pictures that a class must have for a probe to set some aside to tune itself."""


class Place(NamedTuple):
    """Where the bytes of a picture are: `size` bytes of a file from `begin` on."""

    path: str
    begin: int = 0
    size: int = -1
    """-1: all of the file."""
    changed: int = -1
    """When the file was last written, in nanoseconds as `os.stat` has them; -1: not compared."""


def whole_file(path: str, missing: str = "no such file") -> Place:
    """All of a regular file, in its present state; an OSError says why there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a null in its name
        raise OSError(missing) from None
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise OSError("not a regular file")
    return Place(path, 0, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture, not opened yet: its name in the set, where its bytes are, its class."""

    name: str
    place: Place
    class_name: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a source: those to pretrain on and those to test probes on."""

    root: str
    pretrain: tuple[ImageFile, ...]
    test: tuple[ImageFile, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    """(name, reason) of what cannot be an item, though its name says so."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what was decided or left out."""
    held_out: bool = False
    """Whether `test` was held out here; else it is the data's own."""
    unprobed: str = "the data has no labels"
    """Why nothing is probed, where `test` is empty."""


def visible(folder: str) -> list[os.DirEntry[str]]:
    """What lies in a folder, without what is hidden: a leading dot, and where a Mac packs such."""
    return [entry for entry in os.scandir(folder) if not entry.name.startswith((".", "__MACOSX"))]


def classes_of(files: Iterable[ImageFile]) -> tuple[str, ...]:
    """The class names that occur, sorted."""
    return tuple(sorted({file.class_name for file in files if file.class_name is not None}))


def without_classes(files: Iterable[ImageFile]) -> list[ImageFile]:
    """The same files without labels."""
    return [replace(file, class_name=None) for file in files]


def tested_on(splits: Mapping[str, Sequence[ImageFile]]) -> str | None:
    """The split that probes are tested on: the first with a class, where two can be learned."""
    if len(classes_of(splits.get("train", ()))) < 2:
        return None
    return next((split for split in TEST_SPLITS if classes_of(splits.get(split, ()))), None)


def divide(
    root: str,
    splits: Mapping[str, Sequence[ImageFile]],
    holdout: float,
    notes: Sequence[str] = (),
    unreadable: Iterable[tuple[str, str]] = (),
) -> Listing:
    """Files by the name of their split as what is pretrained on and what probes are tested on."""
    notes, unprobed = list(notes), Listing.unprobed
    pretrain = [*splits.get("train", ()), *without_classes(splits.get("unlabeled", ()))]
    present = [split for split in TEST_SPLITS if splits.get(split)]
    classes, tested = classes_of(pretrain), tested_on(splits)
    if len(classes) < 2:
        if classes or present:
            there = "is" if len(classes) == 1 else "are"
            unprobed = f"probes need 2 classes to train on, and there {there} {len(classes)}"
            notes.append(f"nothing is probed: {unprobed}")
        pretrain = without_classes(pretrain)
    test = [file for file in splits.get(tested or "", ()) if file.class_name is not None]
    if tested and (loose := len(splits[tested]) - len(test)):
        notes.append(f"{counted(loose, 'image', 'images')} of {tested} without a class: not read")
    require_known_classes(classes, classes_of(test))
    for split in present:
        if split != tested:
            why = "" if classes_of(splits[split]) else " (no classes)"
            notes.append(f"the split {split}{why} is not read")
    listing = Listing(
        root, tuple(pretrain), tuple(test), tuple(sorted(unreadable)), tuple(notes), False, unprobed
    )
    return listing if test else hold_out(listing, holdout)


def lowest(names: Iterable[str], count: int) -> set[str]:
    """The `count` names that hash lowest, to hold out.

    The choice does not depend on a run's seed, and a name that is added moves few others.

    >>> sorted(lowest("abcdef", 2)), sorted(lowest("abcdefg", 2))
    (['d', 'f'], ['d', 'f'])
    """
    return set(sorted(names, key=lambda n: hashlib.sha256(os.fsencode(n)).digest())[:count])


def hold_out(listing: Listing, share: float) -> Listing:
    """Take `share` of every class out of `pretrain` as `test`, where a probe can then be fitted.

    Of a class's pictures those whose names hash lowest are held out, one at least of two. They are
    left out of pretraining too, so that probes are tested on pictures the encoder has never seen.
    """
    members: dict[str, list[str]] = defaultdict(list)
    for file in listing.pretrain:
        if file.class_name is not None:
            members[file.class_name].append(file.name)
    if len(members) < 2:
        return listing
    chosen = set[str]()
    for names in members.values():
        chosen |= lowest(names, max(round(share * len(names)), len(names) > 1))
    test = [file for file in listing.pretrain if file.name in chosen]
    rest = tuple(file for file in listing.pretrain if file.name not in chosen)
    reason = too_few(rest) if share else "--holdout 0 leaves nothing to test on"
    if reason:
        note = f"{len(members)} classes, and nothing is probed: {reason}"
        return replace(listing, notes=(*listing.notes, note), unprobed=reason)
    held = tuple(sorted(test, key=lambda file: file.name))
    return replace(listing, pretrain=rest, test=held, held_out=True)


def require_known_classes(train: Sequence[str], test: Sequence[str]) -> None:
    """Raise ValueError where a class can be tested and not learned."""
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise ValueError(
            f"every class of test/ needs readable images in train/, and {', '.join(unknown[:5])} "
            f"has none; add them to train/, or remove test/{unknown[0]}"
        )


def too_few(train: Iterable[ImageFile]) -> str:
    """Why a probe cannot be fitted on `train`; empty if it can."""
    counts = Counter(file.class_name for file in train if file.class_name is not None)
    most = max(counts.values(), default=0)
    if len(counts) >= 2 and most >= LEAST_TRAIN:
        return ""
    return (
        f"a probe needs 2 classes and {LEAST_TRAIN} training images in one of them, and there "
        f"{'is' if len(counts) == 1 else 'are'} {len(counts)} with at most {most}"
    )


def ignored(
    other: Counter[str], thing: str = "file", without: str = "an image suffix"
) -> list[str]:
    """A note about what was passed over, by its ending; none if there was nothing."""
    if not other:
        return []
    kinds = (f"{printable(suffix) or 'no suffix'} {n}" for suffix, n in other.most_common(5))
    number = counted(other.total(), thing, f"{thing}s")
    return [f"{number} without {without} ignored ({', '.join(kinds)})"]
