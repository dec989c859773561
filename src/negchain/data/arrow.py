"""Pictures of a Hugging Face data set: a folder that `save_to_disk` wrote.

Arrow keeps a column's bytes one behind the other and uncompressed, so a picture of a saved data set
is a range of its file (see `negchain.data.listing`): the table of ranges is all that stays in
memory, and workers read files. Items are named `split/row`. The classes are those of the ClassLabel
column, or of `label`.

Only pyarrow is needed. Nothing a file says is executed, and no path in it is followed.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from negchain.data.listing import SPLITS, ImageFile, Listing, Place, divide
from negchain.files import FileRefused, read_object
from negchain.printable import printable, reason

_KNOWN = {"unsupervised": "unlabeled", **{name: name for name in SPLITS}}


def is_saved(folder: str) -> bool:
    """Whether `Dataset.save_to_disk` or that of a DatasetDict wrote the folder."""
    names = ("state.json", "dataset_dict.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def list_saved(folder: str, holdout: float = 0.2) -> Listing:
    """The pictures of a saved Dataset, or of the splits of a DatasetDict."""
    root = Path(folder)
    if not (root / "dataset_dict.json").is_file():
        return divide(folder, {"train": _saved_files(root, "train")}, holdout)
    found = read_object(root / "dataset_dict.json").get("splits")
    names = found if isinstance(found, list) else []
    splits = {_KNOWN[name]: name for name in names if isinstance(name, str) and name in _KNOWN}
    if "train" not in splits and "unlabeled" not in splits:
        raise ValueError(
            f"a DatasetDict needs a split named train, and {printable(folder)} has "
            f"{printable(', '.join(map(str, names))) or 'none'}; give one of its splits alone"
        )
    files = {split: _saved_files(root / name, name) for split, name in splits.items()}
    return divide(folder, files, holdout)


def _columns(schema: Any) -> tuple[str, str | None, list[str] | None]:
    """The column of pictures, that of labels, and the names of the classes."""
    try:
        known = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {name: dict(feature) for name, feature in known.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        kinds = {}
    types = {name: kinds.get(name, {}).get("_type") for name in schema.names}
    pictures = [name for name, kind in types.items() if kind == "Image"]
    if len(pictures) != 1:
        raise ValueError(
            f"a data set needs one column of type Image and {len(pictures)} of its columns "
            f"({printable(', '.join(types))}) are; choose one with select_columns or cast_column"
        )
    labels = [name for name, kind in types.items() if kind == "ClassLabel"]
    label = "label" if "label" in types else next(iter(labels), None)
    names = kinds.get(label, {}).get("names")
    names = names if isinstance(names, list) else []
    return pictures[0], label, [printable(str(name)) for name in names] or None


def _class(label: Any, names: list[str] | None) -> str | None:
    if label is None or (isinstance(label, int) and label < 0):  # -1 is "no label" there too
        return None
    if names is not None and isinstance(label, int):
        return names[label]  # an IndexError is the file's fault
    return printable(str(label))


def _saved_files(folder: Path, name: str) -> list[ImageFile]:
    """The pictures of a saved Dataset; whatever is wrong with its files is refused."""
    listed, found = read_object(folder / "state.json").get("_data_files"), list[ImageFile]()
    arrow = _pyarrow()
    try:
        for entry in listed if isinstance(listed, list) else ():
            file = entry.get("filename") if isinstance(entry, dict) else None
            if not isinstance(file, str) or Path(file).name != file or "\0" in file:
                raise ValueError("its state.json names a file elsewhere")
            for place, label in _saved_rows(str(folder / file)):
                found.append(ImageFile(f"{name}/{len(found):09d}", place, label))
    except (arrow.ArrowException, OSError, IndexError, ValueError) as error:
        raise FileRefused(
            f"{printable(str(folder))} must be a data set of pictures as Hugging Face's "
            f"save_to_disk writes it, but {printable(reason(error))}; save it again with "
            "Dataset.save_to_disk"
        ) from error
    return found


def _saved_rows(path: str) -> Iterator[tuple[Place, str | None]]:
    arrow = _pyarrow()
    changed = os.stat(path).st_mtime_ns
    with arrow.memory_map(path) as mapped:
        whole = mapped.read_buffer()
    with arrow.ipc.open_stream(whole) as reader:
        picture, label, names = _columns(reader.schema)
        for batch in reader:
            ranges, labels = _ranges(batch.column(picture), whole), [None] * len(batch)
            if label is not None:
                batch.column(label).validate(full=True)
                labels = batch.column(label).to_pylist()
            for (begin, size), known in zip(ranges, labels, strict=True):
                yield Place(path, begin, size, changed), _class(known, names)


def _ranges(column: Any, whole: Any) -> Iterator[tuple[int, int]]:
    """(begin, bytes) in the file of every row; (0, 0) for a row that holds none."""
    arrow = _pyarrow()
    column.validate(full=True)  # offsets of a hostile file may lead anywhere
    stored = column.field("bytes") if arrow.types.is_struct(column.type) else column
    if stored.type not in (arrow.binary(), arrow.large_binary()):
        raise ValueError(f"pictures must be stored as bytes, and they are {stored.type}")
    kind = np.int32 if stored.type == arrow.binary() else np.int64
    _, offsets, data = stored.buffers()
    ends = np.frombuffer(offsets, kind)[stored.offset :][: len(stored) + 1].tolist()
    start = data.address - whole.address if data is not None and data.size else 0
    if start < 0 or start + ends[-1] > whole.size:
        raise ValueError("its pictures are compressed a second time")
    present = stored.is_valid().to_pylist()
    for there, begin, end in zip(present, ends[:-1], ends[1:], strict=True):
        yield (start + begin, end - begin) if there else (0, 0)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ValueError(
            "reading a Hugging Face data set needs pyarrow: pip install 'negchain[parquet]'"
        ) from error
    return pyarrow
