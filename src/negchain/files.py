"""Reading and writing files in folders that other people may have prepared.

Run folders are passed on, so nothing in one may lead outside it. Only plain files are opened, never
links, pipes or devices. A new file is written under a random new name and then renamed, which
replaces a link instead of following it. Sizes are checked before anything is read.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import secrets
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from negchain.printable import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

JSON_LIMIT = 64 << 20  # bytes; a config names the files that were left out
LINE_LIMIT = 4 << 20  # characters of a line of a table
ARRAYS_LIMIT = 512 << 20  # bytes of all arrays of an .npz together

_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "a+b": os.O_RDWR | os.O_APPEND | os.O_CREAT,
}
_NOT_PLAIN = "must be a plain file, and it is a device, a pipe or a folder; remove it"
_LINKED = (
    "is written to, and it is the same file as another (a hard link); copy the folder to break the "
    "tie"
)


class FileRefused(ValueError):
    """A file is not what it should be; the message is one sentence for the user."""


class DiskFull(OSError):
    """There is no room for a file; the message names it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn "no space left on device" into a sentence that names the file and what to do."""
    try:
        yield
    except Exception as error:  # safetensors has one of its own
        why = error.strerror if isinstance(error, OSError) else "No space left on device"
        number = getattr(error, "errno", errno.ENOSPC if str(why) in str(error) else None)
        if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        rule, remedy = "the disk is full", "free some space"
        if number == errno.EFBIG:
            rule, remedy = "a file may not be so large here", "raise the limit (ulimit -f)"
        raise DiskFull(
            f"{rule}: {path} could not be written ({why}); {remedy} "
            "and try again (a training run goes on with --resume)"
        ) from error


@contextmanager
def replacing(path: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """Write a file that appears under its name whole and on the disk, or not at all.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a.txt") as file:
    ...     _ = file.write(b"all of it")
    >>> [p.name for p in folder.iterdir()]
    ['a.txt']
    """
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming(path):
        try:
            descriptor = os.open(hidden, flags, 0o644)
        except OSError as error:
            error.filename = os.fspath(path)  # nobody knows the other name
            raise
        try:
            with os.fdopen(descriptor, "wb", buffering) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


def open_plain(path: Path, mode: Literal["rb", "ab", "a+b"] = "rb") -> BinaryIO:
    """Open a plain file, made if it is to be written; a link or a pipe is refused.

    >>> open_plain(Path("/dev/null"))
    Traceback (most recent call last):
    negchain.files.FileRefused: /dev/null must be a plain file, and it is a device, a pipe or a \
folder; remove it
    """
    flags = _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP or path.is_symlink():
            raise FileRefused(f"{path} must be a plain file, and it is a link; remove it") from None
        if error.errno not in (errno.ENXIO, errno.EISDIR):  # a pipe nobody reads; a folder
            raise
        raise FileRefused(f"{path} {_NOT_PLAIN}") from None
    found = os.fstat(descriptor)
    plain = stat.S_ISREG(found.st_mode)
    if plain and (mode == "rb" or found.st_nlink <= 1):
        return os.fdopen(descriptor, mode)
    os.close(descriptor)
    raise FileRefused(f"{path} {_LINKED if plain else _NOT_PLAIN}")


def is_plain(path: Path) -> bool:
    """Whether a plain file of that name exists; a link is none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def real_folder(path: Path) -> Path:
    """Return `path`, which is made if it does not exist; a link in its place is refused."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileRefused(
            f"{path} must be a folder of its own, and it is a link or a file; remove it"
        )
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def read_text(path: Path) -> str:
    """The text of a plain file of at most `JSON_LIMIT` bytes, which is UTF-8."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(JSON_LIMIT + 1) if size <= JSON_LIMIT else b""
    if size > JSON_LIMIT or len(content) > JSON_LIMIT:
        raise FileRefused(
            f"{path} has {size >> 20:,} MB and at most {JSON_LIMIT >> 20:,} MB are read; restore "
            "the file that belongs there"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileRefused(f"{path} must hold text (UTF-8), but {error}; restore the file") from None


def read_table(
    path: Path, needed: Sequence[str], otherwise: str = ""
) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV file in UTF-8, each with its line, by the columns its first line names.

    Column names become small letters, cells are text. Cells are separated by commas, semicolons or
    tabs, as spreadsheets write them. A file without the columns `needed` is refused; `otherwise`
    names others that would do elsewhere.
    """
    shown = printable(path.name)
    try:
        lines = _text_lines(path.resolve())
        names, between = _header(next(lines, ""))
        # strict: else an open quote swallows all below
        reader = csv.reader(lines, delimiter=between, strict=True)
        rows = [(1 + reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, FileRefused, csv.Error) as error:
        raise ValueError(
            f"{shown} must be a CSV file in UTF-8, but {error}; save it as such"
        ) from error
    if not set(needed) <= set(names):
        raise ValueError(
            f"{shown} must begin with a line that names the columns {' and '.join(needed)}"
            f"{otherwise}, got {printable(', '.join(names)[:80]) or 'nothing'}; name them so"
        )
    for line, row in rows:
        if any(row[len(names) :]):
            raise ValueError(
                f"a row must have as many cells as the first line, and line {line} of {shown} has "
                f"{len(row)}, not {len(names)}; put quotes around a text with a comma"
            )
    return [(line, dict(zip(names, row + [""] * len(names), strict=False))) for line, row in rows]


def table_columns(path: Path) -> list[str]:
    """The columns a table's first line names; none where it is no table."""
    try:
        with open_plain(path.resolve()) as file:
            return _header(file.readline(1 << 16).decode("utf-8-sig"))[0]
    except (OSError, ValueError, csv.Error):
        return []


def _header(line: str) -> tuple[list[str], str]:
    """The names in a table's first line, and what stands between them."""
    between = max(",;\t", key=line.count)
    names = next(csv.reader([line], delimiter=between), [])
    return [name.strip().lower() for name in names], between


def _text_lines(path: Path) -> Iterator[str]:
    """The lines of a plain file in UTF-8, as the csv module wants them, each of bounded length."""
    with open_plain(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        while line := text.readline(LINE_LIMIT):
            if len(line) == LINE_LIMIT:
                raise FileRefused(f"a line of it has more than {LINE_LIMIT:,} characters")
            yield line


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object a file holds; NaN and infinities, which JSON does not know, become None."""
    try:
        value = json.loads(read_text(path), parse_constant=lambda name: None)
    except FileRefused:
        raise
    except (ValueError, RecursionError) as error:
        raise FileRefused(
            f"{path} must hold JSON, got {error}; restore the file or leave it out"
        ) from None
    if not isinstance(value, dict):
        raise FileRefused(
            f"{path} must hold a JSON object, got {type(value).__name__}; restore the file or "
            "leave it out"
        )
    return value


def parse_object(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a line holds; None if it holds something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz: plain numbers or text, of at most `ARRAYS_LIMIT` bytes together."""
    import numpy as np  # a tenth of a second, which `negchain --help` can do without

    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if sum(member.file_size for member in members) > ARRAYS_LIMIT:
                raise FileRefused(f"its arrays have more than {ARRAYS_LIMIT >> 20:,} MB")
            found = {}
            for member in members:
                with archive.open(member) as content:
                    array = found[member.filename[:-4]] = np.lib.format.read_array(content)
                if array.size > member.file_size:  # elements of no bytes can be any number
                    raise FileRefused(f"it claims an array of shape {array.shape}")
            return found
    except (ValueError, OSError, EOFError, NotImplementedError, RuntimeError, MemoryError,
            zipfile.BadZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined] # fmt: skip
        raise FileRefused(
            f"{path} must be an .npz of plain arrays, but {error}; delete it or restore it"
        ) from None
