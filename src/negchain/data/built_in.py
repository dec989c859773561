"""Built-in sets: digits (scikit-learn), cifar10 and stl10 (torchvision's files), in memory.

stl10 has 105,000 images to train on; stl10-unlabeled leaves out the 5,000 that probes are fitted
on, as the paper does.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor
from torchvision.datasets import CIFAR10, STL10  # type: ignore[import-untyped,unused-ignore]
from torchvision.transforms.v2 import functional as tvf  # type: ignore[import-untyped,unused-ignore]

from negchain.data.from_files import TIMES
from negchain.data.image_set import DataBundle, ImageSet, fingerprint

# Names, labels [M], pixels uint8 [M,C,H,W], and the names of the classes.
Part = tuple[list[str], Tensor, Tensor, list[str]]


def load_built_in(name: str, side: int, root: Path, download: bool) -> DataBundle:
    """The set of that name at `side` pixels; torchvision's files lie, or are fetched, in `root`."""
    if name == "stl10-unlabeled":
        whole = load_built_in("stl10", side, root, download)
        assert whole.pretrain.labels is not None
        pretrain = whole.pretrain.select((whole.pretrain.labels < 0).nonzero().flatten())
        own = fingerprint([("unlabeled", int(whole.fingerprint, 16))], [], pretrain.size)
        return replace(whole, name=name, pretrain=pretrain, fingerprint=own)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, about how CIFAR-10 was stored in 2009
            parts = [_READERS[name](split, root, download) for split in ("train", "test")]
    except (RuntimeError, OSError) as error:
        remedy = "try again with a network" if download else "add --download to fetch it"
        raise ValueError(
            f"{name} cannot be read from {root} ({error}); {remedy}, "
            "or give --data a folder of images"
        ) from error
    native = parts[0][2].shape[-1]
    short = 0 if native == side else min(native, TIMES[0] * side)
    sets = [
        ImageSet(
            tuple(f"{name}/{n}" for n in names),
            labels,
            _resize(pixels, side),
            whole=_resize(pixels, short) if short else None,
        )
        for names, labels, pixels, _ in parts
    ]
    items = [[(item, parts[0][2][0].numel()) for item in part.names] for part in sets]
    shape = (sets[0].channels, side, side, *([short] if short else ()))
    return DataBundle(
        name=name,
        pretrain=sets[0],
        train=sets[0].labelled_part(),
        test=sets[1],
        classes=tuple(parts[0][3]),
        skipped=(),
        fingerprint=fingerprint(items[0], items[1], shape),
    )


def _resize(pixels: Tensor, side: int) -> Tensor:
    """uint8 [M,C,S,S] -> [M,C,side,side], bilinear with antialiasing, in pieces for memory."""
    if pixels.shape[-1] == side:
        return pixels.contiguous()
    return torch.cat([tvf.resize(part, [side, side]) for part in torch.split(pixels, 4096)])


def _digits(split: str, root: Path, download: bool) -> Part:
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
    rows = (held_out == (split == "test")).nonzero().flatten()
    return [str(row) for row in rows.tolist()], labels[rows], pixels[rows], list("0123456789")


def _cifar10(split: str, root: Path, download: bool) -> Part:
    data = CIFAR10(root, train=split == "train", download=download)
    names = [f"{split}/{i}" for i in range(len(data))]
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2)
    return names, torch.tensor(data.targets), pixels, data.classes


def _stl10(split: str, root: Path, download: bool) -> Part:
    parts = "train+unlabeled" if split == "train" else split
    data = STL10(root, split=parts, download=download)
    labels = torch.from_numpy(data.labels.astype(np.int64))
    count = int((labels >= 0).sum())
    names = [f"{split}/{i}" for i in range(count)]
    names += [f"unlabeled/{i}" for i in range(len(labels) - count)]
    return names, labels, torch.from_numpy(data.data), data.classes


_READERS = {"digits": _digits, "cifar10": _cifar10, "stl10": _stl10}
