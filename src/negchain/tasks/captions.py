"""Pictures with captions, by names alone: a table of `image,caption`, and where its files lie.

    FOLDER/train.csv, val.csv, test.csv     with train/000001.jpg, or images beside the tables
    FOLDER/captions.csv     or the only further table with these columns; captions.txt as well
    FOLDER/any.csv          the table itself after --data

A row is a picture and one caption of it; further rows of a picture are further captions. Further
columns are ignored but `split`. A picture is looked for beside its table, then in the folder named
as the table, then in `images/` or `Images/`. Pictures have the order of their names.

This module imports no torch: the command line asks it whether a folder is its own.
"""

import os
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from negchain.data.listing import lowest
from negchain.files import read_table, table_columns
from negchain.printable import counted, printable

COLUMNS = ("image", "caption")
_HELD = {"test": "test", **dict.fromkeys(("val", "valid", "validation", "dev"), "validation")}
_SPLITS = {"train": "train", "restval": "train", **_HELD}
_Found = dict[str, tuple[str, str, dict[str, None]]]  # by name: split, path, distinct captions


@dataclass(frozen=True)
class Captioned:
    """A picture and its captions."""

    name: str  # relative to the folder, POSIX
    path: str
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """What the tables of a folder name: nothing else is opened yet."""

    root: str
    train: tuple[Captioned, ...]
    validation: tuple[Captioned, ...] = ()
    test: tuple[Captioned, ...] = ()
    notes: tuple[str, ...] = ()


def find_tables(data: str) -> dict[str, Path]:
    """Tables with the columns `image` and `caption`, by name: of a folder, or the file itself.

    >>> find_tables("/nowhere")
    {}
    """
    path = Path(data)
    files = [path] if path.suffix.lower() in (".csv", ".txt") and os.path.isfile(path) else []
    if os.path.isdir(path):  # pathlib's raises where a name is too long
        files = [*sorted(path.glob("*.csv")), *path.glob("captions.txt")]
    return {f.stem.lower(): f for f in files if set(COLUMNS) <= set(table_columns(f))}


def read_pairs(data: str, holdout: float = 0.2) -> Pairs:
    """The pictures and captions of a folder or a table.

    Without a validation split a share `holdout` of the training pictures becomes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a.png", "b.png"):
    ...         _ = Path(folder, name).write_bytes(b"")
    ...     rows = "image,caption,split", "b.png,dog,train", "a.png,cat,test", "b.png,it,train"
    ...     _ = Path(folder, "captions.csv").write_text("\\n".join(rows))
    ...     pairs = read_pairs(folder, holdout=0)
    >>> [(p.name, p.captions) for p in pairs.train], pairs.test[0].name
    ([('b.png', ('dog', 'it'))], 'a.png')
    """
    tables = find_tables(data)
    main = _main_table(data, tables)
    root = str(Path(data) if Path(data).is_dir() else Path(data).parent)
    found: _Found = {}
    if main:
        _read(main, root, found)
    for name, split in _HELD.items():
        if name in tables and all(own != split for own, _, _ in found.values()):
            _read(tables[name], root, found, into=split)
    splits: dict[str, list[Captioned]] = {"train": [], "validation": [], "test": []}
    for name, (split, path, texts) in sorted(found.items()):
        splits[split].append(Captioned(name, path, tuple(texts)))
    train, validation, test = map(tuple, splits.values())
    pairs = Pairs(root, train, validation, test)
    return pairs if pairs.validation else _hold_out(pairs, holdout)


def _main_table(data: str, tables: dict[str, Path]) -> Path | None:
    """The table to train on; None where all are of held-out splits, by their names."""
    if not tables:
        seen = sorted(Path(data).glob("*.csv")) if Path(data).is_dir() else [Path(data)]
        columns = next((table_columns(file) for file in seen if file.is_file()), None)
        having = "no .csv" if columns is None else f"{seen[0].name} with {', '.join(columns)[:80]}"
        raise ValueError(
            "captions need a .csv whose first line names the columns image and caption, and "
            f"{printable(data)} has {printable(having)}; add it, or name its columns so"
        )
    wanted = [name for name in ("train", "captions") if name in tables]
    others = [name for name in tables if name not in _HELD]
    if not wanted and len(others) > 1:
        raise ValueError(
            f"one table must hold the captions to train on, and {printable(data)} has "
            f"{', '.join(tables[name].name for name in others[:5])}; name one of them captions.csv"
        )
    return tables[(wanted or others)[0]] if wanted or others else None


def _read(table: Path, root: str, pictures: _Found, into: str = "train") -> None:
    """Add the rows of a table to the splits they name, or to `into`."""
    bases = [table.parent, *(table.parent / name for name in (table.stem, "images", "Images"))]
    locate = cache(partial(_locate, bases=bases, root=root))
    missing: dict[str, int] = {}  # the line that names it first
    for line, row in read_table(table, COLUMNS):
        image, caption = row["image"].strip(), " ".join(row["caption"].split())
        if not image or not caption:
            lacking, told = ("caption", image) if image else ("image", caption)
            raise ValueError(
                f"every row must have an image and a caption, and line {line} of "
                f"{printable(table.name)} has no {lacking} "
                f"({printable(told[:80]) or 'it is empty'}); write it, or remove the row"
            )
        found = locate(image)
        if found is None:
            missing.setdefault(image, line)
            continue
        name, path = found
        named = row.get("split", "").strip().lower()
        if named and named not in _SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(_SPLITS)}, got {printable(named)!r} in line "
                f"{line} of {printable(table.name)}; correct it, or remove the column"
            )
        split = _SPLITS.get(named, into)
        home, _, captions = pictures.setdefault(name, (split, path, {}))
        if home != split:
            raise ValueError(
                f"an image must be in one split, and {printable(image)} is in {home} and in "
                f"{split} (line {line} of {printable(table.name)}); remove it from one"
            )
        captions[caption] = None
    if missing:
        image, line = next(iter(missing.items()))
        raise ValueError(
            f"every image of {printable(table.name)} must be there, and "
            f"{counted(len(missing), 'is', 'are')} not: {printable(image)} (line {line}) is "
            f"neither beside the table nor in {table.stem}/ or images/; {_alike(image, bases)}"
            "correct the names, or remove the rows"
        )


def _locate(image: str, bases: list[Path], root: str) -> tuple[str, str] | None:
    for base in bases:
        path = os.path.normpath(base / image)
        if "\0" not in path and os.path.isfile(path):
            return printable(os.path.relpath(path, root).replace(os.sep, "/")), path
    return None


def _alike(image: str, bases: list[Path]) -> str:
    """The question whether another file is meant, whose name differs in case or in its ending."""
    for folder, name in (os.path.split(base / image) for base in bases):
        try:
            there = sorted(os.listdir(folder))
        except (OSError, ValueError):  # no folder; a null in its name
            continue
        for change in (str.casefold, lambda name: os.path.splitext(name)[0].casefold()):
            for near in there:
                if change(near) == change(name):
                    return f"did you mean {printable(near)!r}? If so, "
    return ""


def _hold_out(pairs: Pairs, share: float) -> Pairs:
    """Take the images whose names hash lowest, with all their captions, for validation."""
    size = len(pairs.train)
    count = min(max(round(share * size), 1), size - 2) if share else 0
    if count < 1:
        return pairs
    held = lowest((picture.name for picture in pairs.train), count)
    note = (
        f"no validation split: {counted(count, 'image is', 'images are')} held out, {share:.0%}, "
        "with every caption, to choose the best encoder by; --holdout sets the share"
    )
    return replace(
        pairs,
        train=tuple(p for p in pairs.train if p.name not in held),
        validation=tuple(p for p in pairs.train if p.name in held),
        notes=(*pairs.notes, note),
    )
