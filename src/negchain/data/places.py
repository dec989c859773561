"""Where the bytes of a picture are: a whole file, or a range of one.

Shards (.tar) and Arrow files hold pictures uncompressed, so a picture is a range of bytes. It costs
one read, in any order and from any process. A range is valid only while its file is unchanged:
`opened` refuses a file that was written since.
"""

import io
import os
import stat
from typing import BinaryIO, NamedTuple


class Place(NamedTuple):
    """`size` bytes of a file from `begin` on; `changed` is when the file was last written.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"...picture..."), file.flush()
    ...     with opened(Place(file.name, 3, 7)) as part:
    ...         part.read()
    b'picture'
    """

    path: str
    begin: int = 0
    size: int = -1
    """-1: all of the file."""
    changed: int = -1
    """Nanoseconds, as `os.stat` has them; -1: not compared."""


def whole_file(path: str, status: os.stat_result) -> Place:
    """All of a file, in its present state."""
    return Place(path, 0, status.st_size, status.st_mtime_ns)


def opened(place: Place | str) -> BinaryIO:
    """The bytes at a place as a file of their own."""
    place = Place(place) if isinstance(place, str) else place
    # Without O_NONBLOCK opening a pipe would wait for ever.
    descriptor = os.open(place.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        size = status.st_size if place.size < 0 else place.size
        if place.changed not in (-1, status.st_mtime_ns) or place.begin + size > status.st_size:
            raise OSError("the file has changed since it was listed")
        return io.BufferedReader(_Range(descriptor, place.begin, size), 1 << 16)
    except BaseException:
        os.close(descriptor)
        raise


class _Range(io.RawIOBase):
    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor, self._begin, self._size, self._at = descriptor, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("a seek before the first byte")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._at))
        found = os.pread(self._descriptor, wanted, self._begin + self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
