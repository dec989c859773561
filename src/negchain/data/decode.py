"""Image files to uint8 RGB: one definition of "readable" for sets in memory and on disk.

A file of a known format is turned upright (EXIF) and converted to RGB: alpha composited on white,
16-bit grey scaled to 8 by the bits it uses (8, 12 or 16), 32-bit grey by its own range. Colour
profiles are ignored, 16-bit colour keeps its upper byte, and of an animation the first frame is
read. Two things come out of it:

the picture   whole, its shorter side at most `short` pixels: what random crops are cut from;
the square    its centre at side x side pixels, the evaluation view: as resizing the shorter side
              to `side` and cropping the centre, without computing what the crop throws away.

All threads of a process together decode at most `IN_FLIGHT` bytes at a time (or one picture),
however large the pictures are.
"""

import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError, features

from negchain.data.listing import Place

_AVIF = "avif" in features.modules and features.check("avif")  # Pillow 11.3 and newer
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm".split()
    + ([".avif"] if _AVIF else [])
)
"""File name endings (lower case) of what is read as an image; other files are not looked at."""

IN_FLIGHT = 1 << 30
"""Bytes of decoded pixels that all threads of a process hold at a time."""

LARGEST = 1 << 30
"""Bytes of a picture inside a file, at most: it is read whole."""

# A list keeps PIL from handing a disguised file to its other readers (EPS starts Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM") + (("AVIF",) if _AVIF else ())
_STRIP_PIXELS = 1 << 22  # converted at a time, so that intermediate arrays stay small
_GREY_BITS = (8, 12, 16)
_TURNS = {  # EXIF orientation -> what makes it upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Size = tuple[int, int]  # width, height, as PIL has them
Bytes = npt.NDArray[np.uint8]


def is_image(name: str) -> bool:
    """Whether the ending of a file's name says so."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def num_cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Room:
    """Bytes in use by all threads; a picture above the limit waits until nothing else is in use."""

    def __init__(self) -> None:
        self._used, self._changed = 0, threading.Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= IN_FLIGHT)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()


_room = _Room()


# ------------------------------------------------------------------------------- from modes to RGB


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Boxes of whole rows that cover the image."""
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


def _grey_range(image: Image.Image) -> tuple[float, float]:
    """The values that become black and white: of 16 bits those it uses, else the image's own."""
    low, high = np.inf, -np.inf
    for box in _strips(image):
        values = np.asarray(image.crop(box))
        values = values[np.isfinite(values)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        bits = next(b for b in _GREY_BITS if high < 2**b)
        return 0.0, 2.0**bits - 1
    if not np.isfinite(low):
        return 0.0, 1.0
    return (low, high) if high > low else (low, low + 1)


def _strip_to_rgb(image: Image.Image, limits: tuple[float, float] | None) -> Image.Image:
    if limits is not None:
        values = np.nan_to_num(np.asarray(image).astype(np.float64)).clip(*limits)
        scaled = (values - limits[0]) * (255.0 / (limits[1] - limits[0]))
        grey = np.rint(scaled).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL mode to RGB; raises where PIL knows no conversion (LAB)."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    wide = image.mode.startswith("I;16") or image.mode in ("I", "F")
    limits = _grey_range(image) if wide else None
    whole = Image.new("RGB", image.size)
    for box in _strips(image):
        whole.paste(_strip_to_rgb(image.crop(box), limits), box)
    return whole


# --------------------------------------------------------------------------------------- one file


@contextmanager
def opened(place: Place | str) -> Iterator[BinaryIO]:
    """The bytes at a place as a file of their own; a range is read at once.

    A place is valid only while its file is unchanged: one written since is refused.
    """
    place = Place(place) if isinstance(place, str) else place

    def at_once(path: str, flags: int) -> int:  # opening a pipe would wait for ever
        return os.open(path, flags | os.O_NONBLOCK)

    with open(place.path, "rb", opener=at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        size = status.st_size if place.size < 0 else place.size
        if place.changed not in (-1, status.st_mtime_ns) or place.begin + size > status.st_size:
            raise OSError("the file has changed since it was listed")
        if size == status.st_size:
            yield file
        elif size > LARGEST:
            raise OSError(f"{size >> 20:,} MB of a file, and at most {LARGEST >> 20:,} are read")
        else:
            yield io.BytesIO(os.pread(file.fileno(), size, place.begin))


def stored_size(size: Size, short: int) -> Size:
    """`size` with the shorter side brought down to `short`; smaller pictures stay as they are.

    >>> stored_size((4000, 3000), 300), stored_size((200, 100), 300)
    ((400, 300), (200, 100))
    """
    least = min(size)
    if least <= short:
        return size
    width, height = (max(1, round(side * short / least)) for side in size)
    return width, height


class Decoded(NamedTuple):
    """An image in RGB, as it lies in its file: not upright yet."""

    rgb: Image.Image
    size: Size  # of the file; a JPEG may have been decoded smaller
    turn: Image.Transpose | None

    @classmethod
    def of(cls, image: Image.Image, size: Size) -> "Decoded":
        """An image that is open; `size` is that of its file."""
        try:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        except Exception:  # damaged, and no reason to go without the pixels
            orientation = 1
        return cls(_to_rgb(image), size, _TURNS.get(orientation))

    def square(self, side: int) -> Bytes:  # -> [3,side,side]
        """The central square: bilinear with antialiasing, as `torchvision.transforms.Resize`."""
        rgb = self.rgb
        if rgb.size != (side, side):
            short = min(rgb.size)
            left, top = (rgb.width - short) / 2, (rgb.height - short) / 2
            box = (left, top, left + short, top + short)
            rgb = rgb.resize((side, side), Image.Resampling.BILINEAR, box=box)
        return self._upright(rgb)

    def whole(self, short: int) -> Bytes:  # -> [3,h,w]
        """The whole picture, its shorter side at most `short` pixels."""
        # Lanczos keeps the detail that crops are to show; bilinear would take a tenth of it.
        rgb, size = self.rgb, stored_size(self.size, short)
        if rgb.size != size:
            rgb = rgb.resize(size, Image.Resampling.LANCZOS)
        return self._upright(rgb)

    def _upright(self, rgb: Image.Image) -> Bytes:  # -> [3,h,w]
        turned = rgb if self.turn is None else rgb.transpose(self.turn)
        return np.asarray(turned).transpose(2, 0, 1)


@contextmanager
def decoded(place: Place | str, enough: int) -> Iterator[Decoded]:
    """An image file, for pictures and squares whose shorter sides have at most `enough` pixels.

    A JPEG at least four times too large is decoded by libjpeg at 1/2, 1/4 or 1/8 of its size, never
    below twice `enough`: large photos decode several times faster, and the square of a smooth one
    differs by less than one grey level on average.
    """
    with opened(place) as file, Image.open(file, formats=_FORMATS) as image:
        size = image.size
        image.draft(image.mode, (2 * enough, 2 * enough))  # does nothing unless it is a JPEG
        copies = 1 if image.mode == "RGB" else 2
        with _room.take(4 * image.width * image.height * copies):  # PIL has 4 bytes a pixel
            image.load()
            yield Decoded.of(image, size)


def read_size(place: Place | str) -> Size:
    """Width and height from the file's header; a turned picture's are not exchanged."""
    with opened(place) as file, Image.open(file, formats=_FORMATS) as image:
        return image.size


def why_unreadable(place: Place | str, error: Exception) -> str:
    """One phrase for what a reader raised."""
    if isinstance(error, FileNotFoundError):
        return "no such file (a broken link?)"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, UnidentifiedImageError):
        size = os.path.getsize(place) if isinstance(place, str) else place.size
        return "empty file" if size == 0 else "not an image of a known format"
    return str(error) or type(error).__name__
