"""Where the bytes of a picture are: a whole file, or a range of one.

Shards (.tar) and Arrow files hold pictures uncompressed, so a picture is a range of bytes. It costs
one read, in any order and from any process. A range is valid only while its file is unchanged:
`opened` refuses a file that was written since.
"""

import io
import os
import stat
from typing import BinaryIO, NamedTuple

LARGEST = 1 << 30
"""Bytes of a picture inside a file, at most: it is read whole."""


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
    """The bytes at a place as a file of their own; a range is read at once."""
    place = Place(place) if isinstance(place, str) else place
    # Without O_NONBLOCK opening a pipe would wait for ever.
    file = open(place.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        size = status.st_size if place.size < 0 else place.size
        if place.changed not in (-1, status.st_mtime_ns) or place.begin + size > status.st_size:
            raise OSError("the file has changed since it was listed")
        if size == status.st_size:
            return file
        if size > LARGEST:
            raise OSError(f"{size >> 20:,} MB of a file, and at most {LARGEST >> 20:,} are read")
        with file:
            return io.BytesIO(os.pread(file.fileno(), size, place.begin))
    except BaseException:
        file.close()
        raise
