"""Built-in sets: digits (scikit-learn), cifar10 and stl10 (torchvision's files), in memory.

stl10 has 105,000 images to train on; stl10-unlabeled leaves out the 5,000 that probes are fitted
on, as the paper does.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor
from torchvision.datasets import (  # type: ignore[import-untyped,unused-ignore]
    CIFAR10,
    STL10,
    VisionDataset,
)
from torchvision.transforms.v2 import functional as tvf  # type: ignore[import-untyped,unused-ignore]

from negchain.data.from_files import TIMES
from negchain.data.image_set import DataBundle, ImageSet, fingerprint

Part = tuple[Sequence[str], Tensor, Tensor]  # names, labels [M], pixels uint8 [M,C,H,W]


def load_built_in(name: str, side: int, root: Path, download: bool) -> DataBundle:
    """The set of that name at `side` pixels; torchvision's files lie, or are fetched, in `root`."""
    return _LOADERS[name](side, root, download)


def _built_in(
    name: str,
    pretrain: Part,
    test: Part,
    classes: Sequence[str],
    side: int,
) -> DataBundle:
    native = pretrain[2].shape[-1]
    short = 0 if native == side else min(native, TIMES[0] * side)

    def image_set(names: Sequence[str], labels: Tensor, pixels: Tensor) -> ImageSet:
        full_names = tuple(f"{name}/{n}" for n in names)
        whole = _resize(pixels, short) if short else None
        return ImageSet(full_names, labels, _resize(pixels, side), whole=whole)

    sets = [image_set(*pretrain), image_set(*test)]
    num_bytes = pretrain[2][0].numel()
    items = [[(item, num_bytes) for item in part.names] for part in sets]
    shape = (sets[0].channels, side, side, *([short] if short else ()))
    return DataBundle(
        name=name,
        pretrain=sets[0],
        train=sets[0].labelled_part(),
        test=sets[1],
        classes=tuple(classes),
        skipped=(),
        fingerprint=fingerprint(items[0], items[1], shape),
    )


def _resize(pixels: Tensor, side: int, chunk: int = 4096) -> Tensor:
    """uint8 [M,C,S,S] -> [M,C,side,side], bilinear with antialiasing, in pieces for memory."""
    if pixels.shape[-1] == side:
        return pixels.contiguous()
    size = [side, side]
    return torch.cat(
        [tvf.resize(part, size, antialias=True) for part in torch.split(pixels, chunk)]
    )


def _digits(side: int, root: Path, download: bool) -> DataBundle:
    """scikit-learn's 1,797 digits, 8 x 8 with 17 grey levels; a fifth of each class held out.

    Not enlarged unless `image_size` asks for it: at 16 px a small CNN took three times as long and
    reached no more (1-NN 0.953-0.975 against 0.975-0.992, one setting, three seeds).
    """
    digits = load_digits()
    labels = torch.from_numpy(digits.target.astype(np.int64))
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    shuffled = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))  # frozen numbers
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = shuffled[labels[shuffled] == label]
        held_out[members[: round(len(members) / 5)]] = True

    def part(mask: Tensor) -> Part:
        rows = mask.nonzero().flatten()
        return [str(row) for row in rows.tolist()], labels[rows], pixels[rows]

    names = [str(label) for label in range(10)]
    return _built_in("digits", part(~held_out), part(held_out), names, side)


def _torchvision(
    name: str, load: Callable[[], list[VisionDataset]], root: Path, download: bool
) -> list[VisionDataset]:
    """`load()`, with torchvision's failure turned into what the user can do about it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, about how CIFAR-10 was stored in 2009
            return load()
    except (RuntimeError, OSError) as error:
        remedy = "try again with a network" if download else "add --download to fetch it"
        raise ValueError(
            f"{name} cannot be read from {root} ({error}); {remedy}, "
            "or give --data a folder of images"
        ) from error


def _cifar10(side: int, root: Path, download: bool) -> DataBundle:
    def load() -> list[VisionDataset]:
        return [CIFAR10(root, train=train, download=download) for train in (True, False)]

    def part(split: str, dataset: VisionDataset) -> Part:
        names = [f"{split}/{i}" for i in range(len(dataset.data))]
        pixels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2)
        return names, torch.tensor(dataset.targets), pixels

    train, test = _torchvision("cifar10", load, root, download)
    return _built_in("cifar10", part("train", train), part("test", test), train.classes, side)


def _stl10(side: int, root: Path, download: bool) -> DataBundle:
    def load() -> list[VisionDataset]:
        splits = ("train+unlabeled", "test")
        return [STL10(root, split=split, download=download) for split in splits]

    def part(split: str, dataset: VisionDataset) -> Part:
        labels = torch.from_numpy(dataset.labels.astype(np.int64))
        count = int((labels >= 0).sum())
        names = [f"{split}/{i}" for i in range(count)]
        names += [f"unlabeled/{i}" for i in range(len(labels) - count)]
        return names, labels, torch.from_numpy(dataset.data)

    train, test = _torchvision("stl10", load, root, download)
    return _built_in("stl10", part("train", train), part("test", test), train.classes, side)


def _stl10_unlabeled(side: int, root: Path, download: bool) -> DataBundle:
    whole = _stl10(side, root, download)
    assert whole.pretrain.labels is not None
    pretrain = whole.pretrain.select((whole.pretrain.labels < 0).nonzero().flatten())
    own = fingerprint([("unlabeled", int(whole.fingerprint, 16))], [], pretrain.size)
    return replace(whole, name="stl10-unlabeled", pretrain=pretrain, fingerprint=own)


_LOADERS: dict[str, Callable[[int, Path, bool], DataBundle]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "stl10": _stl10,
    "stl10-unlabeled": _stl10_unlabeled,
}
