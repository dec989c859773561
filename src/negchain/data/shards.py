"""Pictures inside shards (.tar, as webdataset writes them), found by reading the headers alone.

    pets-0000.tar:   0001.jpg  0001.cls  0001.json  |  0002.jpg  0002.cls  ...

Members of a shard whose names agree up to the first dot are one sample, in any order. A sample has
one picture; its `.cls` holds its class (a number or a name); other members are counted in a note.
An item's name is `shard/member`: equal keys in two shards are two items, in one shard they are
refused. The name of a shard says its split: `test-0000.tar`, `val/0000.tar`.

A shard that was cut or damaged is refused: it would silently be a smaller data set.
"""

import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from negchain.data.decode import is_image
from negchain.data.folder import Walk
from negchain.data.listing import SPLITS, ImageFile, Listing, Place, divide, ignored, visible
from negchain.files import FileRefused, open_plain
from negchain.printable import counted, printable

MOST_SHARDS = 1_000_000  # of a pattern
LONGEST_CLASS = 256  # bytes of a .cls

_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_BLOCK = 512


def shards_of(source: str) -> list[str]:
    """The shards that a folder, a pattern `a-{000..120}.tar` or a file names; [] if it has none.

    >>> shards_of("/nowhere/pets-{08..10}.tar")
    Traceback (most recent call last):
    ValueError: /nowhere/pets-{08..10}.tar names 3 shards and 3 of them are not there, the first \
is pets-08.tar; correct the range
    """
    if os.path.isdir(source):
        return _in_folder(source)
    if not source.endswith(".tar"):
        return []
    if (found := _RANGE.search(source)) is None or os.path.exists(source):
        return [source] if os.path.isfile(source) else []
    first, last = found.groups()
    if int(last) - int(first) >= MOST_SHARDS:
        raise ValueError(f"{printable(source)} names more than {MOST_SHARDS:,} shards; narrow it")
    numbers = range(int(first), int(last) + 1)
    paths = [source.replace(found[0], f"{n:0{len(first)}d}") for n in numbers]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing or not paths:
        example = f", the first is {printable(Path(missing[0]).name)}" if missing else ""
        raise ValueError(
            f"{printable(source)} names {counted(len(paths), 'shard', 'shards')} and "
            f"{counted(len(missing), 'of them is', 'of them are')} not there{example}; correct the "
            "range"
        )
    return paths


def _in_folder(folder: str) -> list[str]:
    folders = [folder, *filter(os.path.isdir, (os.path.join(folder, name) for name in SPLITS))]
    listed = [entry.path for each in folders for entry in visible(each)]
    shards = sorted(path for path in listed if path.endswith(".tar"))
    pictures = Walk(folder).enter(folder, "").files if shards else []
    if pictures:
        raise ValueError(
            f"a folder holds pictures or .tar shards, and {printable(folder)} holds "
            f"{len(pictures)} and {len(shards)}; move one kind elsewhere and give both as A,B"
        )
    return shards


def list_shards(source: str, holdout: float = 0.2) -> Listing:
    """The pictures in the shards that `source` names, with their classes and splits."""
    paths = shards_of(source)
    root = source if os.path.isdir(source) else os.path.dirname(paths[0])
    splits: dict[str, list[ImageFile]] = defaultdict(list)
    other: Counter[str] = Counter()
    for path in paths:
        name = os.path.relpath(path, root or ".")
        shard = _Shard(path, printable(name)).read()
        splits[_split_of(name)] += shard.files()
        other += shard.other
    count = sum(map(len, splits.values()))
    bare = sum(f.class_name is None for s in splits if s != "unlabeled" for f in splits[s])
    notes = ignored(other, "member", "an image or .cls suffix")
    if bare:
        notes.append(f"without a .cls member, and not probed: {bare:,} of {count:,} pictures")
    return divide(source, splits, holdout, notes)


def _split_of(name: str) -> str:
    """`test/0000.tar` and `test-0000.tar` are of the split `test`; others are trained on."""
    first = re.split(r"[^a-z]", name.lower())[0]
    return first if first in SPLITS else "train"


@dataclass
class _Shard:
    path: str
    name: str
    pictures: dict[str, tuple[str, Place]] = field(default_factory=dict)  # by key
    classes: dict[str, str] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)

    def read(self) -> "_Shard":
        with open_plain(Path(self.path).resolve()) as file:
            status = os.fstat(file.fileno())
            for member in self._members(file.fileno(), status.st_size):
                place = Place(self.path, member.offset_data, member.size, status.st_mtime_ns)
                self._add(member.name, place, file.fileno())
        return self

    def _members(self, descriptor: int, size: int) -> Iterator[tarfile.TarInfo]:
        """Regular members in order; refuses a shard that does not end as it should."""
        try:
            with tarfile.open(self.path, "r:") as tar:
                at = -1
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined] # else it keeps them all
                    if member.offset <= at or member.offset_data + member.size > size:
                        raise tarfile.ReadError(f"its member at byte {member.offset} is cut")
                    at = member.offset
                    if member.isreg() and not member.issparse():
                        yield member
                    elif not member.isdir():
                        self.other["links and other special members"] += 1
                # A damaged header ends the iteration as the end of the archive does.
                end = os.pread(descriptor, _BLOCK, tar.offset)  # type: ignore[attr-defined]
                if end != bytes(_BLOCK):
                    raise tarfile.ReadError(f"its header at byte {tar.offset} is damaged or cut")  # type: ignore[attr-defined]
        except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError) as error:
            raise FileRefused(
                f"{printable(self.path)} must be a whole .tar that is not compressed, but "
                f"{printable(str(error))}; write or copy it again"
            ) from error

    def _add(self, member: str, place: Place, descriptor: int) -> None:
        folder, _, base = member.rpartition("/")
        stem, _, kind = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if base.startswith((".", "__")):  # hidden, and webdataset's own
            return
        if is_image(base):
            if key in self.pictures:
                raise FileRefused(
                    f"a sample must have one picture, and {printable(key)} of "
                    f"{printable(self.path)} has two ({printable(self.pictures[key][0])}, "
                    f"{printable(member)}); give every picture a key of its own, the part of its "
                    "name before the first dot"
                )
            self.pictures[key] = member, place
        elif kind.lower() == "cls":
            text = os.pread(descriptor, min(place.size, LONGEST_CLASS + 1), place.begin)
            self.classes[key] = self._class(member, text, key)
        else:
            self.other[os.path.splitext(base)[1].lower()] += 1

    def _class(self, member: str, text: bytes, key: str) -> str:
        try:
            found = text.decode("utf-8").strip()
        except UnicodeDecodeError:
            found = ""
        if not found or len(text) > LONGEST_CLASS or key in self.classes:
            raise FileRefused(
                f"a .cls holds the one class of its sample, a number or a name of at most "
                f"{LONGEST_CLASS} bytes, and {printable(member)} of {printable(self.path)} holds "
                f"{'another one' if found and key in self.classes else repr(text[:20])}; write the "
                "shard again, or leave the member out"
            )
        return printable(found)

    def files(self) -> list[ImageFile]:
        found = [
            ImageFile(f"{self.name}/{printable(member)}", place, self.classes.get(key))
            for key, (member, place) in self.pictures.items()
        ]
        return sorted(found, key=lambda file: file.name)
