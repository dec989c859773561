"""Image sets: M images with stable positions, in memory or decoded as they are asked for.

A position 0..M-1 is an item's place in the sorted order of the set's names (source after source),
the integer that chains, caches and the data order refer to. Two forms, one interface:

Resident    all pixels as one uint8 tensor [M,C,H,W]; the trainer moves it to its device.
Streamed    paths only; `fetch` decodes now, `stream_batches` decodes ahead in DataLoader workers.

Letters in shapes: M items, T batches, B rows of a batch, C channels, H x W pixels.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from negchain.data.decode import num_cores, try_read


@dataclass(frozen=True, eq=False)
class ImageSet:
    """M images, each with a name and a position; resident (`images`) or streamed (`paths`).

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
    """uint8 [M,C,H,W] on the CPU; None when the set is streamed."""
    paths: tuple[str, ...] | None = None
    """Where the files are, when the set is streamed."""
    side: int = 0
    """Height and width that streamed files are decoded to."""

    def __post_init__(self) -> None:
        """Checks that the parts are of one length."""
        items = self.images if self.images is not None else self.paths
        assert items is not None and len(items) == len(self.names)
        assert self.labels is None or self.labels.shape == (len(self.names),)

    def __len__(self) -> int:
        """M."""
        return len(self.names)

    @property
    def resident(self) -> bool:
        """Whether all pixels are in memory."""
        return self.images is not None

    @property
    def channels(self) -> int:
        """1 for grey, 3 for RGB (streamed sets always)."""
        return 3 if self.images is None else self.images.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) in pixels."""
        if self.images is None:
            return self.side, self.side
        return self.images.shape[2], self.images.shape[3]

    def fetch(self, positions: Tensor) -> Tensor:  # int64 [B] -> uint8 [B,C,H,W]
        """The images at `positions`, in that order: by indexing, or decoded now on all cores."""
        if self.images is not None:
            return self.images[positions]
        wanted: list[int] = positions.tolist()
        with warnings.catch_warnings(), ThreadPoolExecutor(num_cores()) as pool:
            warnings.simplefilter("ignore")  # PIL warns of odd metadata; what matters raises
            decoded = list(pool.map(self._decode, wanted))
        return _stack(decoded, self.side)

    def select(self, positions: Tensor) -> "ImageSet":  # int64 [N], ascending
        """The items at `positions` as a set of its own; shares memory when they are consecutive."""
        rows: list[int] = positions.tolist()
        images = self.images
        if images is not None:
            consecutive = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
            images = images[rows[0] : rows[0] + len(rows)] if consecutive else images[positions]
        return ImageSet(
            names=tuple(self.names[i] for i in rows),
            labels=None if self.labels is None else self.labels[positions],
            images=images,
            paths=None if self.paths is None else tuple(self.paths[i] for i in rows),
            side=self.side,
        )

    def _decode(self, position: int) -> Tensor:
        assert self.paths is not None
        pixels = try_read(self.paths[position], self.side)
        if isinstance(pixels, str):
            raise ValueError(
                f"{self.paths[position]} was readable when the run began and is not now "
                f"({pixels}); restore the file, or start a new run without it"
            )
        return torch.from_numpy(np.ascontiguousarray(pixels))


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
    """16 hexadecimal digits of a hash over names, file sizes and decoded size."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what was decided or left out."""

    @property
    def labelled(self) -> bool:
        """Whether probes can be fitted and tested."""
        return self.train is not None and self.test is not None


def _stack(decoded: list[Tensor], side: int) -> Tensor:
    return torch.stack(decoded) if decoded else torch.empty(0, 3, side, side, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class _Batches(Dataset[Tensor | str]):
    """Item t is batch t, whole: uint8 [B,C,H,W], or the sentence of the error that stops it."""

    image_set: ImageSet
    positions: Tensor  # [T,B]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, t: int) -> Tensor | str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decoded = [self.image_set._decode(int(p)) for p in self.positions[t]]
        except ValueError as error:  # a DataLoader would wrap it in a page of traceback
            return str(error)
        return _stack(decoded, self.image_set.side)


def stream_batches(
    image_set: ImageSet, positions: Tensor, num_workers: int | None = None, pin: bool = False
) -> Iterator[Tensor]:  # positions int64 [T,B] -> T times uint8 [B,C,H,W]
    """The batches whose rows `positions` names, in exactly that order, decoded ahead.

    There is no state: to go on at step t, pass `positions[t:]`. A resident set is indexed.
    Otherwise each of `num_workers` processes (None: one per core; 0: none, decode here) decodes
    whole batches ahead of the consumer; `pin` puts them in pinned memory where there is a GPU.
    Torch's global random state is left alone.

    >>> two = ImageSet(("0", "1"), None, torch.tensor([7, 9], dtype=torch.uint8).view(2, 1, 1, 1))
    >>> [b.flatten().tolist() for b in stream_batches(two, torch.tensor([[1, 0], [1, 1]]))]
    [[9, 7], [9, 9]]
    """
    if image_set.resident:
        for row in positions:
            yield image_set.fetch(row)
        return
    workers = num_cores() if num_workers is None else num_workers
    loader: DataLoader[Tensor | str] = DataLoader(
        _Batches(image_set, positions),
        batch_size=None,
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
