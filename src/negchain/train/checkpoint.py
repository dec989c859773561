"""Checkpoints that are complete or absent: atomic to write, checked to read.

A file `step-000001234.pt` is a `torch.save` archive, followed by a footer with its SHA-256. The
footer tells a damaged file from a good one; the archive's own format does not do so for every bit.
`best.pt` has the same form, and does not count among the latest that are kept.

A file is written under a hidden name in the same folder, forced to the disk (fsync) and renamed.
Older ones are deleted only after that. So a process killed at any moment, or a power cut, leaves
the previous checkpoints readable.
"""

import hashlib
import mmap
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from negchain.files import FileRefused, open_plain, real_folder, replacing
from negchain.printable import reason

CHECKPOINT_SCHEMA = 3
"""Number of the layout of a checkpoint's state; raise it when the trainer changes the layout."""

BEST = "best.pt"
_NAME = re.compile(r"step-(\d{9,})\.pt")
_FOOTER = b"\nsha256:"
_FOOTER_SIZE = len(_FOOTER) + 64
_LEAVES = (torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back, and a sentence for each newer file that had to be skipped."""

    state: dict[str, Any]
    step: int
    num_bytes: int  # of the file
    warnings: list[str]


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
    for stale in real_folder(folder).glob(".*.pt*.tmp"):  # of a process killed while saving
        stale.unlink()
    path = folder / f"step-{step:09d}.pt"
    _write(path, state, step)
    # A file of a later step is a damaged one, which the resumed run had to skip. It does not count
    # among the latest: else a good one would be deleted and the damaged one kept.
    past = [p for s, p in _checkpoints(folder) if s <= step]
    for _, old in _checkpoints(folder):
        if old not in past[-keep:]:
            old.unlink()
    return path


def save_best(folder: Path, state: dict[str, Any], step: int) -> None:
    """Write `state` as the best checkpoint so far, in the place of the one before."""
    _write(real_folder(folder) / BEST, state, step)


def load_named(folder: Path, name: str) -> Loaded:
    """Read one checkpoint: "best", or a step such as "1234".

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> save_best(folder, {"weights": torch.ones(3)}, step=7)
    >>> load_named(folder, "best").step
    7
    """
    files = {str(step): path for step, path in _checkpoints(folder)}
    if (folder / BEST).exists():
        files["best"] = folder / BEST
    path = files.get(name.removeprefix("step-").removesuffix(".pt").lstrip("0") or "0")
    if path is None:
        raise FileRefused(
            f"{folder} has no checkpoint {name!r}; it has {', '.join(files) or 'none'}, which "
            "--checkpoint may name"
        )
    try:
        return _checked(path, _read(path), [])
    except (OSError, ValueError, _Damaged) as error:
        raise FileRefused(
            f"{path} cannot be read: {error}; name another one, --checkpoint latest"
        ) from error


def load_latest(folder: Path) -> Loaded | None:
    """Read the newest undamaged checkpoint of `folder`; None if it holds none at all.

    Damaged files are skipped, and named in `Loaded.warnings`. If every file is damaged, or the
    newest good one was written with another schema, `FileRefused` says so: to start afresh is for
    the user to decide.
    """
    found = _checkpoints(folder)
    warnings: list[str] = []
    for step, path in reversed(found):
        try:
            content = _read(path)
            if content["step"] != step:
                raise _Damaged(f"it says it is of step {content['step']}")
        except (OSError, FileRefused, _Damaged) as error:
            warnings.append(f"{path} is skipped because it is damaged: {error}")
            continue
        return _checked(path, content, [f"{w}; step {step} is used instead" for w in warnings])
    if found:
        every = f"all {len(found)} checkpoints in {folder} are damaged (the newest: "
        if len(found) == 1:
            every = f"the only checkpoint in {folder} is damaged ("
        raise FileRefused(f"{every}{warnings[0]}); start a new run in another folder")
    return None


def largest(folder: Path) -> int | None:
    """Bytes of the largest checkpoint; None if there is none."""
    return max((path.stat().st_size for _, path in _checkpoints(folder)), default=None)


class _Damaged(Exception):
    """The file is not what was written, or not ours."""


class _HashingWriter:
    """The part of a file that `torch.save` needs; hashes what passes through."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.flush, self._file = file.flush, file

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write(path: Path, state: dict[str, Any], step: int) -> None:
    _check_plain(state, "state")
    with replacing(path) as file:
        writer = _HashingWriter(file)
        try:
            torch.save({"schema": CHECKPOINT_SCHEMA, "step": step, "state": state}, writer)  # type: ignore[arg-type]
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # a full disk is "unexpected pos" to torch
                raise error.__context__ from None
            raise
        file.write(_FOOTER + writer.digest.hexdigest().encode())


def _read(path: Path) -> dict[str, Any]:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size - _FOOTER_SIZE
        if size <= 0:
            raise _Damaged("it is too short")
        file.seek(size)
        footer = file.read(_FOOTER_SIZE)
        # A map ends where the archive ends and needs no second copy of it in memory.
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as archive:
            if footer != _FOOTER + hashlib.sha256(archive).hexdigest().encode():
                raise _Damaged("its checksum does not match")
            content = load_tensors(archive)  # the checksum does not say who wrote it
    shape = {"schema": int, "step": int, "state": dict}
    if not isinstance(content, dict) or any(
        type(content.get(name)) is not kind for name, kind in shape.items()
    ):
        raise _Damaged("it holds something else than a checkpoint")
    return content


def load_tensors(archive: mmap.mmap, *, old: bool = False) -> Any:
    """What `torch.save` wrote: tensors, numbers and text. Nothing in it is run.

    `old`: files of torch before 1.6, which are no zip archives, are read too.
    """
    try:
        if not old or zipfile.is_zipfile(archive):  # type: ignore[arg-type]
            _refuse_compressed(archive)
        archive.seek(0)
        return torch.load(archive, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except pickle.UnpicklingError as error:  # torch's words advise to run it
        raise _Damaged("it holds more than tensors, numbers and text") from error
    except Exception as error:  # torch and zipfile have many
        raise _Damaged(reason(error)) from error


def _refuse_compressed(archive: mmap.mmap) -> None:
    """`torch.save` does not compress; a compressed archive could expand to any size."""
    with zipfile.ZipFile(archive) as members:  # type: ignore[call-overload]
        found = members.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED for m in found):
        raise _Damaged("its archive is compressed, which ours never is")
    if sum(m.file_size for m in found) > len(archive):
        raise _Damaged("its archive claims more bytes than it has")


def _checked(path: Path, content: dict[str, Any], warnings: list[str]) -> Loaded:
    schema = content["schema"]
    if schema != CHECKPOINT_SCHEMA:
        raise FileRefused(
            f"{path} has checkpoint schema {schema} and this version reads "
            f"{CHECKPOINT_SCHEMA}; continue it with the version that wrote it"
        )
    return Loaded(content["state"], content["step"], path.stat().st_size, warnings)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every checkpoint, oldest first."""
    if not folder.exists():
        return []
    real_folder(folder)
    matches = ((_NAME.fullmatch(p.name), p) for p in folder.iterdir())
    return sorted((int(m.group(1)), p) for m, p in matches if m)


def _check_plain(value: Any, where: str) -> None:
    """Refuse what could be written but not read back, naming the place."""
    if type(value) in _LEAVES:
        return
    if type(value) not in (dict, OrderedDict, list, tuple):
        raise ValueError(
            f"{where} is of type {type(value).__name__}; a checkpoint holds tensors, numbers, "
            "strings, None, dictionaries, lists and tuples, so convert it to one of them"
        )
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if type(key) not in (str, int):
            raise ValueError(f"{where} has a key of type {type(key).__name__}; use str or int")
        _check_plain(item, f"{where}[{key!r}]")
