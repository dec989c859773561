"""Image sets: M images with stable positions, in memory or decoded as they are asked for.

A position 0..M-1 is an item's place in the sorted order of the set's names (source after source),
the integer that chains, caches and the data order refer to. Two forms, one interface:

Resident    all pixels in memory; the trainer moves what crops are cut from to its device.
On disk     places only (files, or ranges of shards); decoded when asked for, or ahead by
            `load_batches` in DataLoader workers.

An item is read in two forms. `fetch` gives its *square*, side x side pixels, which is evaluated and
shown. `pictures` gives what random crops are cut from: the whole picture in its own proportions, or
the square where the set has nothing else (digits, CIFAR-10, STL-10).

Letters in shapes: M items, T batches, B rows of a batch, C channels, S the side.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from negchain.augment.pictures import Images, Pictures
from negchain.data.decode import decoded, num_cores, why_unreadable
from negchain.data.listing import Place
from negchain.printable import printable


@dataclass(frozen=True, eq=False)
class ImageSet:
    """M images, each with a name and a position; resident (`images`) or on disk (`places`).

    >>> digits = ImageSet(("d/0", "d/1"), torch.tensor([3, -1]),
    ...                   torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    >>> len(digits), digits.channels, digits.size, digits.resident
    (2, 1, (8, 8), True)
    >>> digits.fetch(torch.tensor([1, 1, 0])).shape
    torch.Size([3, 1, 8, 8])
    """

    names: tuple[str, ...]
    """Relative POSIX paths such as `train/cat/0001.jpg`, or `digits/17`."""
    labels: Tensor | None
    """int64 [M], -1 where an item has no label; None when no item has one."""
    images: Tensor | None
    """The squares, uint8 [M,C,S,S] on the CPU; None when the set is on disk."""
    places: tuple[Place, ...] | None = None
    """Where the bytes are, when the set is on disk."""
    side: int = 0
    """S, when the set is on disk."""
    whole: Images | None = None
    """The whole pictures, when the set is resident and they are more than the squares."""
    short: int = 0
    """Shorter side up to which pictures on disk are decoded whole; 0: only squares are."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def resident(self) -> bool:
        """Whether all pixels are in memory."""
        return self.images is not None

    @property
    def channels(self) -> int:
        """1 for grey, 3 for RGB (sets on disk always)."""
        return 3 if self.images is None else self.images.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """(S, S): height and width of the squares."""
        if self.images is None:
            return self.side, self.side
        return self.images.shape[2], self.images.shape[3]

    @property
    def table(self) -> Images | None:
        """All that crops are cut from; None when the set is on disk."""
        return self.images if self.whole is None else self.whole

    def fetch(self, positions: Tensor, threads: int | None = None) -> Tensor:  # [B] -> [B,C,S,S]
        """The squares at `positions`, in that order: by indexing, or decoded now on all cores."""
        if self.images is not None:
            return self.images[positions]
        found = self._decode_all(positions, threads, whole=False)
        return torch.stack(found) if found else torch.empty(0, 3, *self.size, dtype=torch.uint8)

    def pictures(self, positions: Tensor, threads: int | None = None) -> Images:  # [B] -> B of them
        """What crops of the items at `positions` are cut from; decoded now, where on disk."""
        if self.table is not None:
            return self.table[positions]
        if not self.short:
            return self.fetch(positions, threads)
        return Pictures.pack(self._decode_all(positions, threads, whole=True))

    def select(self, positions: Tensor) -> "ImageSet":  # int64 [N], ascending
        """The items at `positions` as a set of its own; shares memory when they are consecutive."""
        rows: list[int] = positions.tolist()
        consecutive = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
        chosen = slice(rows[0], rows[0] + len(rows)) if consecutive else positions
        whole = None if self.whole is None else self.whole[chosen]
        return replace(
            self,
            names=tuple(self.names[i] for i in rows),
            labels=None if self.labels is None else self.labels[positions],
            images=None if self.images is None else self.images[chosen],
            places=None if self.places is None else tuple(self.places[i] for i in rows),
            whole=whole.trimmed() if isinstance(whole, Pictures) else whole,
        )

    def labelled_part(self) -> "ImageSet | None":
        """The items with a label, to fit probes on; None if there are none.

        >>> pixels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
        >>> ImageSet(("a", "b", "c"), torch.tensor([1, -1, 0]), pixels).labelled_part().names
        ('a', 'c')
        """
        if self.labels is None or bool((self.labels < 0).all()):
            return None
        return self.select((self.labels >= 0).nonzero().flatten())

    def _decode_all(self, positions: Tensor, threads: int | None, whole: bool) -> list[Tensor]:
        with warnings.catch_warnings(), ThreadPoolExecutor(threads or num_cores()) as pool:
            warnings.simplefilter("ignore")  # PIL warns of odd metadata; what matters raises
            return list(pool.map(lambda p: self._decode(p, whole), positions.tolist()))

    def _decode(self, position: int, whole: bool) -> Tensor:
        assert self.places is not None
        place = self.places[position]
        try:
            with decoded(place, max(self.side, self.short)) as found:
                pixels = found.whole(self.short) if whole else found.square(self.side)
            return torch.from_numpy(np.ascontiguousarray(pixels))
        except Exception as error:  # PIL's readers raise nearly every type on damaged files
            raise ValueError(
                f"{self.names[position]} in {printable(place.path)} was readable when the run "
                f"began and is not now ({why_unreadable(place, error)}); restore the file and add "
                "--resume, or start a new run without it"
            ) from error


@dataclass(frozen=True, eq=False)
class DataBundle:
    """What a run trains and is judged on.

    >>> pair = ImageSet(("0", "1"), None, torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    >>> bundle = DataBundle("pair", pair, None, None, (), (), "0" * 16)
    >>> bundle.labelled
    False
    """

    name: str
    """`digits`, `cifar10`, `stl10`, or the folder's name; `+` between several."""
    pretrain: ImageSet
    """Every item to pretrain on; its labels are never used for that."""
    train: ImageSet | None
    """The labelled items of `pretrain` to fit probes on; None if there are none."""
    test: ImageSet | None
    """Labelled items held out for probes; None if there are none, or nothing to fit probes on."""
    classes: tuple[str, ...]
    """Class names; a label is a place in this tuple."""
    skipped: tuple[tuple[str, str], ...]
    """(file, reason) of the unreadable files, which have no position."""
    fingerprint: str
    """16 hexadecimal digits of a hash over names, file sizes, decoded size and what is held out."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what was decided or left out."""
    unprobed: str = "the data has no labels"
    """Why nothing is probed, where `labelled` is false."""
    native: int = 0
    """Shorter side in pixels of a typical picture as it is stored, of the largest source."""
    held_out: int = 0
    """How many items of `test` were held out of the training pictures: there was no test split."""

    @property
    def labelled(self) -> bool:
        """Whether probes can be fitted and tested."""
        return self.train is not None and self.test is not None


def fingerprint(
    pretrain: Iterable[tuple[str, int]], test: Iterable[tuple[str, int]], shape: Sequence[int]
) -> str:
    """16 hexadecimal digits over (name, bytes) of every item and the decoded shape (C, S, ...)."""
    digest = hashlib.sha256(repr(tuple(shape)).encode())
    for part in (pretrain, test):
        digest.update(b"\0part\0")
        for name, num_bytes in part:
            digest.update(f"{name}\0{num_bytes}\0".encode())
    return digest.hexdigest()[:16]


def _batch(image_set: ImageSet, positions: Tensor) -> Images | str:
    """What `pictures` gives, or the message of the error that ends the run."""
    try:
        return image_set.pictures(positions, threads=1)
    except ValueError as error:  # a DataLoader would wrap it in a page of traceback
        return str(error)


def load_batches(
    image_set: ImageSet, positions: Tensor, num_workers: int | None = None, pin: bool = False
) -> Iterator[Images]:  # positions int64 [T,B] -> T times B images
    """What crops are cut from, in the batches that `positions` names, in that order.

    There is no state: to go on at step t, pass `positions[t:]`. A resident set is indexed.
    Otherwise each of `num_workers` processes (None: one per core; 0: none, decode here) decodes
    whole batches ahead of the consumer; `pin` puts them in pinned memory where there is a GPU.
    Torch's global random state is left alone.

    >>> two = ImageSet(("0", "1"), None, torch.tensor([7, 9], dtype=torch.uint8).view(2, 1, 1, 1))
    >>> [b.flatten().tolist() for b in load_batches(two, torch.tensor([[1, 0], [1, 1]]))]
    [[9, 7], [9, 9]]
    """
    if image_set.resident:
        for row in positions:
            yield image_set.pictures(row)
        return
    workers = num_cores() if num_workers is None else num_workers
    loader: DataLoader[Images | str] = DataLoader(
        positions,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_batch, image_set),
        num_workers=min(workers, len(positions)),
        pin_memory=pin and torch.cuda.is_available(),
        generator=torch.Generator(),  # else it would draw its worker seed from the global one
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork beside threads; these workers only decode files.
        warnings.simplefilter("ignore", DeprecationWarning)
        batches = iter(loader)
    for batch in batches:
        if isinstance(batch, str):
            raise ValueError(batch)
        yield batch
