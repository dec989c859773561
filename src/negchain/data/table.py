"""A table of images, by names alone: `path,label` in a CSV file, perhaps with `split`.

Paths are relative to the table, an empty label is none. A split is train, unlabeled, or test (val,
valid, validation); an empty one is train.
"""

import os
import stat
from dataclasses import replace
from pathlib import Path

from negchain.data.places import whole_file
from negchain.data.scan import SPLITS, ImageFile, Scan, divide
from negchain.files import read_table
from negchain.printable import printable


def scan_csv(path: str | Path, holdout: float = 0.2) -> Scan:
    r"""The image files that a table with the columns `path` and `label` names.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "pets.csv")
    ...     _ = table.write_text("path,label\nb.png,dog\na.png,cat\n")
    ...     scan = scan_csv(table)
    >>> scan.unreadable
    (('a.png', 'no such file'), ('b.png', 'no such file'))
    """
    table = os.fspath(path)
    folder = os.path.dirname(table)
    names, unreadable = set[str](), list[tuple[str, str]]()
    splits: dict[str, list[ImageFile]] = {split: [] for split in SPLITS}
    for _, row in read_table(Path(path), ("path", "label")):
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
            status = os.stat(where)
        except (OSError, ValueError):
            unreadable.append((name, "no such file"))
            continue
        if not stat.S_ISREG(status.st_mode):
            unreadable.append((name, "not a regular file"))
            continue
        file = ImageFile(name, whole_file(where, status), printable(row["label"].strip()) or None)
        splits[split].append(file)
    for files in splits.values():
        files.sort(key=lambda file: file.name)
    scan = divide(table, splits, holdout, [])
    return replace(scan, unreadable=tuple(sorted(unreadable)))
