"""A table of images, by names alone: `path,label` in a CSV file, perhaps with `split`.

Paths are relative to the table, an empty label is none. A split is train, unlabeled, or test (val,
valid, validation); an empty one is train. Commas, semicolons or tabs stand between the columns, as
spreadsheets write them.
"""

import csv
import os
import stat
from dataclasses import replace
from pathlib import Path

from negchain.data.places import whole_file
from negchain.data.scan import SPLITS, ImageFile, Scan, divide
from negchain.files import FileRefused, text_lines
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
    for written, label, split in _rows(table):
        name, where = printable(os.path.normpath(written)), os.path.join(folder, written)
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
        file = ImageFile(name, whole_file(where, status), printable(label) or None)
        splits[split].append(file)
    for files in splits.values():
        files.sort(key=lambda file: file.name)
    scan = divide(table, splits, holdout, [])
    return replace(scan, unreadable=tuple(sorted(unreadable)))


def _rows(table: str) -> list[tuple[str, str, str]]:
    """(path, label, split) of every row."""
    shown = printable(table)
    try:
        lines = text_lines(Path(table).resolve())
        first = next(lines, "")
        between = max(",;\t", key=first.count)
        named = next(csv.reader([first], delimiter=between), [])
        columns = [name.strip().lower() for name in named]
        if "path" not in columns or "label" not in columns:
            raise ValueError(
                f"{shown} must begin with a line that names the columns path and label, got "
                f"{printable(', '.join(columns)[:80]) or 'nothing'}; name them so"
            )
        reader = csv.DictReader(lines, columns, restval="", delimiter=between)
        cells = [[row.get(c) or "" for c in ("path", "label", "split")] for row in reader]
    except (OSError, UnicodeDecodeError, FileRefused, csv.Error) as error:
        raise ValueError(
            f"{shown} must be a CSV file in UTF-8, but {error}; save it as such"
        ) from error
    rows = []
    for path, label, split in cells:
        rows.append((path.strip(), label.strip(), split.strip().lower() or "train"))
        if rows[-1][2] not in SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(SPLITS)}, got {printable(split[:40])!r} for "
                f"{printable(path)} in {shown}; correct it, or remove the column"
            )
    return rows
