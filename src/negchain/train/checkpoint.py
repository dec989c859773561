"""Checkpoints that are complete or absent: atomic to write, checked to read.

A file `step-000001234.pt` is a `torch.save` archive followed by a footer with the SHA-256 of the
archive. Writing goes to a hidden file in the same folder, to the disk (fsync), then under its name
(rename, fsync of the folder); older ones are deleted only after that. So a process killed at any
moment, or a machine without power, leaves the previous checkpoints readable, and the footer tells
a half-written or damaged file from a good one, which the archive's own format does not do for
every bit.
"""

import hashlib
import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

CHECKPOINT_SCHEMA = 1
"""Number of the layout of a checkpoint's state; raise it when the trainer changes the layout."""

_NAME = re.compile(r"step-(\d{9,})\.pt")
_FOOTER = b"\nsha256:"
_FOOTER_SIZE = len(_FOOTER) + 64
_LEAVES = (torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None))


class CheckpointError(ValueError):
    """There are checkpoints, but none that this version can continue from."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back, and a sentence for each newer file that had to be skipped."""

    state: dict[str, Any]
    step: int
    warnings: list[str]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears under its name whole and on the disk, or not at all.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as file:
    ...     _ = file.write(b"all of it")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        with open(hidden, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def save(folder: Path, state: dict[str, Any], step: int, keep: int) -> Path:
    """Write `state` as the checkpoint of `step`, then delete all but the latest `keep`.

    `state` holds tensors, numbers, strings, None, and dictionaries, lists and tuples of these:
    what `torch.load(weights_only=True)` reads back.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> save(folder, {"weights": torch.ones(3)}, step=7, keep=2).name
    'step-000000007.pt'
    >>> load_latest(folder).state
    {'weights': tensor([1., 1., 1.])}
    """
    assert keep >= 1 and step >= 0
    _check_plain(state, "state")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".step-*.tmp"):  # left by a process that was killed while saving
        stale.unlink()
    path = folder / f"step-{step:09d}.pt"
    with replacing(path) as file:
        writer = _HashingWriter(file)
        torch.save({"schema": CHECKPOINT_SCHEMA, "step": step, "state": state}, writer)  # type: ignore[arg-type]
        file.write(_FOOTER + writer.digest.hexdigest().encode())
    # A later step than this one is a damaged file that the resumed run had to step back from; it
    # must not count among the latest, or pruning would delete a good one in its favour.
    past = [p for s, p in _checkpoints(folder) if s <= step]
    for _, old in _checkpoints(folder):
        if old not in past[-keep:]:
            old.unlink()
    return path


def load_latest(folder: Path, *, map_location: str | torch.device = "cpu") -> Loaded | None:
    """Read the newest undamaged checkpoint of `folder`; None if it holds none at all.

    Damaged files are skipped in favour of older ones and named in `Loaded.warnings`. If every file
    is damaged, or the newest good one was written with another schema, `CheckpointError` says so:
    starting afresh in their place is the user's decision.
    """
    found = _checkpoints(folder)
    warnings: list[str] = []
    for step, path in reversed(found):
        try:
            content = _read(path, map_location)
        except (OSError, _Damaged) as error:
            warnings.append(f"{path} is skipped because it is damaged: {error}")
            continue
        schema = content.get("schema")
        if schema != CHECKPOINT_SCHEMA:
            raise CheckpointError(
                f"{path} has checkpoint schema {schema} and this version reads "
                f"{CHECKPOINT_SCHEMA}; continue it with the version that wrote it"
            )
        assert content["step"] == step
        return Loaded(content["state"], step, warnings)
    if found:
        raise CheckpointError(
            f"all {len(found)} checkpoints in {folder} are damaged (the newest: {warnings[0]}); "
            "start a new run in another folder"
        )
    return None


class _Damaged(Exception):
    """The footer is missing or does not match."""


class _HashingWriter:
    """The part of a file that `torch.save` needs; hashes what passes through."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _read(path: Path, map_location: str | torch.device) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - _FOOTER_SIZE
        if size <= 0:
            raise _Damaged("it is too short")
        file.seek(size)
        footer = file.read()
        # A map ends where the archive ends and needs no second copy of it in memory.
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as archive:
            if footer != _FOOTER + hashlib.sha256(archive).hexdigest().encode():
                raise _Damaged("its checksum does not match")
            content = torch.load(archive, map_location=map_location, weights_only=True)  # type: ignore[arg-type]
    assert isinstance(content, dict)
    return content


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir())
    return sorted((int(m.group(1)), p) for m, p in matches if m)


def _check_plain(value: object, where: str) -> None:
    """Refuse what could be written but not read back, naming the place."""
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, dict)
        for key, item in value.items():
            if type(key) not in (str, int):
                raise ValueError(f"{where} has a key of type {type(key).__name__}; use str or int")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        for position, item in enumerate(value):
            _check_plain(item, f"{where}[{position}]")
    elif type(value) not in _LEAVES:
        raise ValueError(
            f"{where} is of type {type(value).__name__}; a checkpoint holds tensors, numbers, "
            "strings, None, dictionaries, lists and tuples, so convert it to one of them"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
