"""Folders and tables of images: their files by split, with the classes that layout or table give.

Layouts of a folder, the first that fits:

train/ ...    with `unlabeled/`, and `test/` (or `val/`, `valid/`, `validation/`: the first that has
              class folders). Two or more folders in `train/` are classes: `train/cat/any/1.jpg`.
              `Train/` and `Testing/` are splits too where there are no other folders.
cat/ dog/     all images lie in two or more folders: they are the classes.
pets/ ...     a folder in which everything lies is passed through.
a heap        images at any depth without labels.

A table is a CSV file with the columns `path` and `label`, perhaps with `split`. Paths are relative
to the table. An empty label is none, an empty split is train.

An item is a regular file with an image suffix. One that is a broken link or no regular file is
named in `unreadable`, files with other suffixes are counted in `notes`, and hidden files and
folders (a leading dot, `__MACOSX`) are passed over. A folder that links reach twice is read once:
links in a circle end, and no picture becomes its own negative. A link to a folder that contains the
data (to `/`, say) is not followed; a link to elsewhere is followed and named in `notes`.

Order: names are POSIX paths relative to the root, sorted by code point: the same on every machine.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from negchain.data.decode import is_image
from negchain.data.listing import (
    SPLITS,
    TEST_SPLITS,
    ImageFile,
    Listing,
    classes_of,
    divide,
    ignored,
    tested_on,
    visible,
    whole_file,
    without_classes,
)
from negchain.files import read_table
from negchain.printable import counted, printable

_CALLED = {"training": "train", "testing": "test", "unlabelled": "unlabeled"}


@dataclass
class Walk:
    """What lies below a folder, as the head of this file says."""

    root: str
    files: list[ImageFile] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def enter(self, folder: str, prefix: str) -> "Walk":
        """Adds everything under `folder`, named from `prefix` on; one stack, no recursion."""
        seen: set[tuple[int, int]] = set()
        stack = [(folder, prefix)]
        while stack:
            here, name = stack.pop()
            try:
                status = os.stat(here)
                entries = sorted(visible(here), key=lambda entry: entry.name, reverse=True)
            except OSError as error:
                self.unreadable.append((name, f"folder cannot be listed: {error.strerror}"))
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            for entry in entries:
                shown = name + printable(entry.name)
                linked = entry.is_symlink()  # perhaps to itself, which only os.path takes
                if not (os.path.isdir(entry.path) if linked else entry.is_dir()):
                    self._add_file(entry, shown)
                elif not linked or self._follows(entry.path, shown):
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

    def _add_file(self, entry: os.DirEntry[str], name: str) -> None:
        if not is_image(entry.name):
            self.other[os.path.splitext(entry.name)[1].lower()] += 1
            return
        try:
            self.files.append(ImageFile(name, whole_file(entry.path, "broken link")))
        except OSError as error:
            self.unreadable.append((name, str(error)))

    def labelled(self, depth: int) -> list[ImageFile]:
        """The files in order, with the folder at `depth` of their name as class."""
        placed = []
        for file in sorted(self.files, key=lambda file: file.name):
            *folders, _ = file.name.split("/")
            class_name = folders[depth] if len(folders) > depth else None
            placed.append(replace(file, class_name=class_name))
        return placed


def list_folder(root: str | Path, holdout: float = 0.2) -> Listing:
    """The image files under `root`, in order, with the classes that the layout gives them."""
    top, inside = os.fspath(root), ""
    while (only := _only_folder(os.path.join(top, inside))) is not None:
        inside += f"{only}/"
    listing = _list_here(os.path.join(top, inside), holdout)
    if not inside:
        return listing

    def placed(files: Iterable[ImageFile]) -> tuple[ImageFile, ...]:
        return tuple(replace(file, name=printable(inside) + file.name) for file in files)

    notes = listing.notes
    if not classes_of(listing.pretrain):
        notes += (f"all images lie in {printable(inside)}, and one folder labels nothing",)
    return replace(
        listing,
        root=top,
        pretrain=placed(listing.pretrain),
        test=placed(listing.test),
        notes=notes,
        unreadable=tuple((printable(inside) + name, why) for name, why in listing.unreadable),
    )


def _only_folder(top: str) -> str | None:
    """The one folder in which everything lies; None if there is another folder or an image."""
    entries = visible(top)
    folders = [entry for entry in entries if os.path.isdir(entry.path)]
    if len(folders) != 1 or any(is_image(entry.name) for entry in entries):
        return None
    only = folders[0]
    return None if _called(only.name) in SPLITS or only.is_symlink() else only.name


def _called(folder: str) -> str:
    """A folder's name in small letters; other spellings of a split become ours."""
    return _CALLED.get(folder.lower(), folder.lower())


def _split_folders(top: str) -> dict[str, str]:
    """The folder of each split; beside folders that are none, only our own spellings count."""
    folders = [entry.name for entry in visible(top) if os.path.isdir(entry.path)]
    named = {_called(folder): folder for folder in sorted(folders)}
    if len(named) < len(folders) or not set(named) <= set(SPLITS):
        named = {folder: folder for folder in folders}
    return {split: named[split] for split in SPLITS if split in named}


def _list_here(top: str, holdout: float) -> Listing:
    splits = _split_folders(top)
    if "train" in splits or "unlabeled" in splits:
        return _list_splits(top, splits, holdout)
    walk = Walk(top).enter(top, "")
    files = walk.labelled(0)
    folders = classes_of(files)
    loose = sum(file.class_name is None for file in files)
    tests = [name for name in folders if _called(name) in TEST_SPLITS]
    unprobed = ""
    if tests:
        unprobed = f"there is {tests[0]}/, and no train/ beside it"
    elif loose and len(folders) > 1:
        unprobed = f"{counted(loose, 'image lies', 'images lie')} beside "
        unprobed += f"{folders[0]}/ and {folders[1]}/, which are "
        unprobed += "classes only if every image lies in one of them"
    if unprobed or loose or len(folders) < 2:
        files = without_classes(files)
    notes = [*walk.notes, *ignored(walk.other)]
    notes += [f"nothing is probed: {unprobed}"] if unprobed else []
    listing = divide(top, {"train": files}, holdout, notes, walk.unreadable)
    return replace(listing, unprobed=unprobed) if unprobed else listing


def _list_splits(top: str, folders: dict[str, str], holdout: float) -> Listing:
    walks: dict[str, Walk] = {}
    files: dict[str, list[ImageFile]] = {}
    for split, folder in folders.items():  # test folders come last
        if tested_on(files) is None:
            walks[split] = Walk(top).enter(os.path.join(top, folder), f"{folder}/")
            files[split] = walks[split].labelled(1)
    tested = tested_on(files)
    read = [walk for split, walk in walks.items() if split == tested or split not in TEST_SPLITS]
    other = sum((walk.other for walk in read), Counter[str]())
    notes = [note for walk in read for note in walk.notes]
    notes += [*_beside(top, list(folders.values())), *ignored(other)]
    notes += [f"the split {split} is not read" for split in folders if split not in walks]
    return divide(top, files, holdout, notes, [pair for walk in read for pair in walk.unreadable])


def _beside(top: str, splits: Sequence[str]) -> list[str]:
    """A note if images may lie beside the folders of the splits."""
    beside = sorted(
        printable(entry.name)
        for entry in visible(top)
        if entry.name not in splits and (os.path.isdir(entry.path) or is_image(entry.name))
    )
    if not beside:
        return []
    shown = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
    return [f"beside {'/, '.join(splits)}/ there is {shown}: not read"]


def list_table(path: str | Path, holdout: float = 0.2) -> Listing:
    """The image files that a table with the columns `path` and `label` names."""
    table = os.fspath(path)
    folder = os.path.dirname(table)
    names, unreadable = set[str](), list[tuple[str, str]]()
    splits: dict[str, list[ImageFile]] = {split: [] for split in SPLITS}
    captioned = " (or image and caption, for pictures with captions)"
    for _, row in read_table(Path(path), ("path", "label"), captioned):
        written, split = row["path"].strip(), row.get("split", "").strip().lower() or "train"
        name, where = printable(os.path.normpath(written)), os.path.join(folder, written)
        if split not in SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(SPLITS)}, got {printable(split[:40])!r} for "
                f"{name} in {printable(table)}; correct it, or remove the column"
            )
        if name in names:
            raise ValueError(
                f"{printable(table)} must name every image once, and {name} is there twice; "
                "remove one of the rows"
            )
        names.add(name)
        try:
            file = ImageFile(name, whole_file(where), printable(row["label"].strip()) or None)
            splits[split].append(file)
        except OSError as error:
            unreadable.append((name, str(error)))
    for files in splits.values():
        files.sort(key=lambda file: file.name)
    return divide(table, splits, holdout, unreadable=unreadable)
