"""What a folder of images holds, by names alone: files, classes and splits.

Layouts, the first that fits:

train/ ...    with `unlabeled/`, and `test/` (or `val/`, `valid/`, `validation/`: the first that has
              class folders). Two or more folders in `train/` are classes: `train/cat/any/1.jpg`.
              `Train/` and `Testing/` are splits too where there are no other folders.
cat/ dog/     all images lie in two or more folders: they are the classes.
pets/ ...     a folder in which everything lies is passed through.
a heap        images at any depth without labels.

Where there are classes and no test split, a share of every class is held out: see `hold_out`.

What counts as an item: a regular file with an image suffix that can be read. Such a file that
cannot be read is named in `unreadable`; files with other suffixes are counted in `notes`; hidden
files and folders (a leading dot) are passed over. A folder reached twice through links is read
once, so that links that run in circles end, and no picture becomes its own negative. A link to a
folder around the data (to `/`, say) is not followed, and one to elsewhere is named in `notes`.

Order: names are POSIX paths relative to the root, sorted by code point: the same on every machine.
"""

import hashlib
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from negchain.data.decode import IMAGE_SUFFIXES
from negchain.data.places import Where, whole_file
from negchain.printable import printable

TEST_FOLDERS = ("test", "val", "valid", "validation")
SPLITS = ("train", "unlabeled", *TEST_FOLDERS)
_CALLED = {"training": "train", "testing": "test", "unlabelled": "unlabeled"}

LEAST_TRAIN = 3
"""Training pictures that a class must have for a probe to set some aside to tune itself."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture, not opened yet: its name in the set, where its bytes are, its class."""

    name: str
    place: Where
    class_name: str | None = None


@dataclass(frozen=True)
class Scan:
    """What a folder or a table names: nothing is opened yet."""

    root: str
    pretrain: tuple[ImageFile, ...]
    test: tuple[ImageFile, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    held_out: bool = False
    """Whether `test` was held out here; else it is the data's own."""
    unprobed: str = "the data has no labels"
    """Why nothing is probed, where `test` is empty."""


@dataclass
class _Walk:
    root: str
    files: list[ImageFile] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

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
                shown = name + printable(entry.name)
                try:
                    status = entry.stat()
                except OSError:  # a link to nothing or to itself
                    self._add_file(entry, shown, None)
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    self._add_file(entry, shown, status)
                elif not entry.is_symlink() or self._follows(entry.path, shown):
                    stack.append((entry.path, f"{shown}/"))
        return self

    def _follows(self, path: str, name: str) -> bool:
        target, root = os.path.realpath(path), os.path.realpath(self.root)
        around = os.path.commonpath([target, root])
        if around == target and target != root:
            self.notes.append(f"{name} leads to {printable(target)}, around the data: not followed")
            return False
        if around != root:
            self.notes.append(f"{name} leads out of the data, to {printable(target)}: read as well")
        return True

    def _add_file(self, entry: os.DirEntry[str], name: str, status: os.stat_result | None) -> None:
        suffix = os.path.splitext(entry.name)[1].lower()
        if suffix not in IMAGE_SUFFIXES:
            self.other[printable(suffix) or "no suffix"] += 1
        elif status is None:
            self.unreadable.append((name, "broken link"))
        elif not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            self.unreadable.append((name, "not a regular file"))
        else:
            self.files.append(ImageFile(name, whole_file(entry.path, status)))

    def labelled(self, depth: int) -> list[ImageFile]:
        """The files in order, with the folder at `depth` of their name as class."""
        placed = []
        for file in sorted(self.files, key=_name):
            *folders, _ = file.name.split("/")
            class_name = folders[depth] if len(folders) > depth else None
            placed.append(replace(file, class_name=class_name))
        return placed


def _name(file: ImageFile) -> str:
    return file.name


def classes_of(files: Iterable[ImageFile]) -> tuple[str, ...]:
    """The class names that occur, sorted."""
    return tuple(sorted({file.class_name for file in files if file.class_name is not None}))


def scan_folder(root: str | Path, holdout: float = 0.2) -> Scan:
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
    top, inside = os.fspath(root), ""
    while (only := _only_folder(os.path.join(top, inside))) is not None:
        inside += f"{only}/"
    scan = _scan_here(os.path.join(top, inside), holdout)
    if not inside:
        return scan

    def placed(files: Iterable[ImageFile]) -> tuple[ImageFile, ...]:
        return tuple(replace(file, name=printable(inside) + file.name) for file in files)

    notes = scan.notes
    if not classes_of(scan.pretrain):
        notes += (f"all images lie in {printable(inside)}, and one folder labels nothing",)
    return replace(
        scan, root=top, pretrain=placed(scan.pretrain), test=placed(scan.test), notes=notes,
        unreadable=tuple((printable(inside) + name, why) for name, why in scan.unreadable),
    )  # fmt: skip


def _only_folder(top: str) -> str | None:
    """The one folder in which everything lies; None where there is another, or an image."""
    try:
        entries = [entry for entry in os.scandir(top) if not entry.name.startswith(".")]
    except OSError:
        return None
    folders = [entry.name for entry in entries if entry.is_dir()]
    if len(folders) != 1 or _called(folders[0]) in SPLITS or any(map(_is_image, entries)):
        return None
    return None if os.path.islink(os.path.join(top, folders[0])) else folders[0]


def _is_image(entry: os.DirEntry[str]) -> bool:
    return os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES


def _called(folder: str) -> str:
    """A folder's name as we write it, where it is that of a split."""
    return _CALLED.get(folder.lower(), folder.lower())


def _split_folders(top: str) -> dict[str, str]:
    """Split: its folder. Of other folders beside, only names written as ours are splits."""
    folders = [e.name for e in os.scandir(top) if e.is_dir() and not e.name.startswith(".")]
    named = {_called(folder): folder for folder in sorted(folders)}
    if len(named) < len(folders) or not set(named) <= set(SPLITS):
        named = {folder: folder for folder in folders}
    return {split: named[split] for split in SPLITS if split in named}


def _scan_here(top: str, holdout: float) -> Scan:
    splits = _split_folders(top)
    if "train" in splits or "unlabeled" in splits:
        return _scan_splits(top, splits, holdout)
    walk = _Walk(top).enter(top, "")
    files = walk.labelled(0)
    folders = classes_of(files)
    loose = sum(file.class_name is None for file in files)
    notes, unprobed = [*walk.notes, *ignored(walk.other)], Scan.unprobed
    tests = [name for name in folders if _called(name) in TEST_FOLDERS]
    if loose or len(folders) < 2 or tests:
        files = [replace(file, class_name=None) for file in files]
        if tests:
            unprobed = f"there is {tests[0]}/, and no train/ beside it"
            notes.append(f"nothing is probed: {unprobed}")
        elif loose and len(folders) > 1:
            unprobed = f"{loose:,} images lie beside {folders[0]}/ and {folders[1]}/, which are "
            unprobed += "classes only if every image lies in one of them"
            notes.append(f"nothing is probed: {unprobed}")
    scan = Scan(
        top, tuple(files), (), tuple(sorted(walk.unreadable)), tuple(notes), unprobed=unprobed
    )
    return hold_out(scan, holdout)


def _scan_splits(top: str, folders: dict[str, str], holdout: float) -> Scan:
    walks: dict[str, _Walk] = {}
    files: dict[str, list[ImageFile]] = {}
    for split, folder in folders.items():  # test folders come last
        if tested_on(files) is None:
            walks[split] = _Walk(top).enter(os.path.join(top, folder), f"{folder}/")
            files[split] = walks[split].labelled(1)
    tested = tested_on(files)
    read = {s: walk for s, walk in walks.items() if s == tested or s not in TEST_FOLDERS}
    other = sum((walk.other for walk in read.values()), Counter[str]())
    notes = [note for walk in read.values() for note in walk.notes]
    notes += [*_beside(top, list(folders.values())), *ignored(other)]
    notes += [f"the split {split} is not read" for split in folders if split not in walks]
    scan = divide(top, files, holdout, notes)
    unreadable = sorted(pair for walk in read.values() for pair in walk.unreadable)
    return replace(scan, unreadable=tuple(unreadable))


def ignored(
    other: Counter[str], things: str = "files", without: str = "an image suffix"
) -> list[str]:
    """A note about what was passed over, by its ending; none if there was nothing."""
    if not other:
        return []
    kinds = ", ".join(f"{suffix} {n}" for suffix, n in other.most_common(5))
    return [f"{other.total()} {things} without {without} ignored ({kinds})"]


def _beside(top: str, splits: Sequence[str]) -> list[str]:
    """A note if images may lie beside the folders of the splits."""
    beside = sorted(
        printable(entry.name)
        for entry in os.scandir(top)
        if not entry.name.startswith(".")
        and entry.name not in splits
        and (entry.is_dir() or _is_image(entry))
    )
    if not beside:
        return []
    shown = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
    return [f"beside {'/, '.join(splits)}/ there is {shown}: not read"]


def require_known_classes(train: Sequence[str], test: Sequence[str]) -> None:
    """Raise ValueError where a class can be tested and not learned."""
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise ValueError(
            f"every class of test/ needs readable images in train/, and {', '.join(unknown[:5])} "
            f"has none; add them to train/, or remove test/{unknown[0]}"
        )


def hold_out(scan: Scan, share: float) -> Scan:
    """Take `share` of every class out of `pretrain` as `test`, where a probe can then be fitted.

    Of a class's pictures those whose names hash lowest are held out, one at least of two: the
    choice does not depend on the run's seed, and a picture that is added moves few others. They are
    left out of pretraining too, so that probes are tested on pictures the encoder has never seen.

    >>> from negchain.data.places import Place
    >>> files = [ImageFile(f"{c}/{n}", Place("x"), c) for c in ("cat", "dog") for n in range(10)]
    >>> held = hold_out(Scan("pets", tuple(files)), 0.2)
    >>> len(held.pretrain), [file.class_name for file in held.test]
    (16, ['cat', 'cat', 'dog', 'dog'])
    """
    members: dict[str, list[ImageFile]] = defaultdict(list)
    for file in scan.pretrain:
        if file.class_name is not None:
            members[file.class_name].append(file)
    if len(members) < 2:
        return scan
    test: list[ImageFile] = []
    for files in members.values():
        ranked = sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f.name)).digest())
        test += ranked[: max(round(share * len(ranked)), len(ranked) > 1)]
    chosen = {file.name for file in test}
    rest = tuple(file for file in scan.pretrain if file.name not in chosen)
    reason = "" if share else "--holdout 0 leaves nothing to test on"
    reason = reason or too_few(rest)
    if reason:
        note = f"{len(members)} classes, and nothing is probed: {reason}"
        return replace(scan, notes=(*scan.notes, note), unprobed=reason)
    note = (
        f"no test split: {len(test):,} images, {share:.0%} of each of {len(members)} classes, are "
        "held out to test probes and are not pretrained on; --holdout sets the share"
    )
    held = tuple(sorted(test, key=_name))
    return replace(scan, pretrain=rest, test=held, notes=(*scan.notes, note), held_out=True)


def tested_on(splits: Mapping[str, Sequence[ImageFile]]) -> str | None:
    """The split that probes are tested on: the first with a class, where two can be learned."""
    if len(classes_of(splits.get("train", ()))) < 2:
        return None
    return next((split for split in TEST_FOLDERS if classes_of(splits.get(split, ()))), None)


def divide(
    source: str,
    splits: Mapping[str, Sequence[ImageFile]],
    holdout: float,
    notes: Sequence[str],
) -> Scan:
    """Files by the name of their split as what is pretrained on and what probes are tested on."""
    pretrain = list(splits.get("train", ()))
    pretrain += [replace(file, class_name=None) for file in splits.get("unlabeled", ())]
    present = [split for split in TEST_FOLDERS if splits.get(split)]
    classes, tested, unprobed = classes_of(pretrain), tested_on(splits), Scan.unprobed
    if len(classes) < 2:
        if classes or present:
            unprobed = f"probes need 2 classes to train on, and there are {len(classes)}"
            notes = [*notes, f"nothing is probed: {unprobed}"]
        pretrain = [replace(file, class_name=None) for file in pretrain]
    test = [file for file in splits.get(tested or "", ()) if file.class_name is not None]
    if tested and (loose := len(splits[tested]) - len(test)):
        notes = [*notes, f"{loose:,} images of {tested} without a class: not read"]
    require_known_classes(classes, classes_of(test))
    for split in present:
        if split != tested:
            why = "" if classes_of(splits[split]) else " (no classes)"
            notes = [*notes, f"the split {split}{why} is not read"]
    scan = Scan(source, tuple(pretrain), tuple(test), (), tuple(notes), unprobed=unprobed)
    return scan if test else hold_out(scan, holdout)


def too_few(train: Iterable[ImageFile]) -> str:
    """Why a probe cannot be fitted on `train`; empty if it can."""
    counts = Counter(file.class_name for file in train if file.class_name is not None)
    if len(counts) >= 2 and max(counts.values()) >= LEAST_TRAIN:
        return ""
    most = max(counts.values(), default=0)
    return (
        f"a probe needs 2 classes and {LEAST_TRAIN} training images in one of them, and there are "
        f"{len(counts)} with at most {most}"
    )
