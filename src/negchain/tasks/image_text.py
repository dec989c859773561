"""Pictures with captions: an image tower and a text tower, each the other's negatives.

A sample is a picture. Its key is one of its captions, drawn anew each time, as an augmentation is.
So captions of one picture are never negatives of each other, whatever the method. Pictures that
share a caption, word for word, are known positives of each other.

Shapes: `M` pictures, `C` captions, `B` batch, `R` rows of a pass, `L` tokens, `K` known positives.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from negchain import rng
from negchain.augment import Images
from negchain.data import DataBundle, ImageSet
from negchain.data.listing import ImageFile, Listing, whole_file
from negchain.losses.request import Want
from negchain.printable import counted
from negchain.tasks.captions import read_pairs
from negchain.tasks.checks import LARGEST_BETA
from negchain.tasks.image_text_judge import ImageTextJudge
from negchain.tasks.image_text_towers import ImageText, build, image_size_of, start_from, tokens_of
from negchain.tasks.images import ImageTask, load_images, small_stem
from negchain.tasks.task import Batch, Task
from negchain.tasks.text import explained, try_out
from negchain.train.config import TrainConfig

MOST_KNOWN = 64
"""Known positives a picture has at most: a caption that thousands share says little."""


@dataclass(frozen=True)
class CaptionedImages:
    """Pictures, and the captions of each."""

    images: ImageSet
    captions: tuple[tuple[str, ...], ...]

    def take(self, chosen: Sequence[int]) -> "CaptionedImages":
        """Some of them, in ascending order."""
        images = self.images.select(torch.tensor(chosen, dtype=torch.int64))
        return CaptionedImages(images, tuple(self.captions[number] for number in chosen))

    def flat(self) -> tuple[list[str], Tensor]:
        """All captions, picture after picture, and where each picture's begin [M + 1]."""
        counts = torch.tensor([0, *(len(own) for own in self.captions)])
        return [text for own in self.captions for text in own], counts.cumsum(0)


class ImageTextTask(Task):
    """Pictures through one tower, captions through the other; made by `load`."""

    layout = {"views": "paired"}
    one_pass = False

    def __init__(
        self,
        config: TrainConfig,
        train: CaptionedImages,
        held: Mapping[str, CaptionedImages],
        bundle: DataBundle,
    ) -> None:
        super().__init__(config)
        self.train, self.held = train, held  # "validation" and "test", where there are any
        self.num_samples = len(train.images)
        self.fingerprint = bundle.fingerprint
        self.resident = self.capturable = train.images.resident
        self.skipped = bundle.skipped
        self.unjudged = None if held else bundle.unprobed
        self.pictures = ImageTask(config, replace(bundle, pretrain=train.images))
        self.pictures.one_pass = False  # a step shows one view of each
        texts, self.begin = train.flat()
        self.tokens, cut = tokens_of(config, texts)
        self.known, beyond = shared_captions(train.captions)
        notes = list(bundle.notes)
        if cut:
            longest = self.tokens["input_ids"].shape[1]
            notes.append(
                f"{cut:,} of {len(texts):,} captions {'fills' if cut == 1 else 'fill'} {longest} "
                "tokens: longer ones are cut"
            )
        if beyond:
            notes.append(
                f"{counted(beyond, 'image shares', 'images share')} a caption with more than "
                f"{MOST_KNOWN} others, of which only so many are kept from being negatives"
            )
        self.notes = notes

    def info(self) -> dict[str, Any]:
        """Counts, and why nothing is tested where that is so."""
        return {
            "captions": len(self.tokens["input_ids"]),
            "validation": len(self.held["validation"].images) if "validation" in self.held else 0,
            "test": sum(len(part.images) for part in self.held.values()),
            "unprobed": self.unjudged,
        }

    def place(self, device: torch.device) -> None:
        """Move pictures and tokens to the device."""
        super().place(device)
        self.pictures.place(device)
        self.begin = self.begin.to(device)
        self.tokens = {name: table.to(device) for name, table in self.tokens.items()}
        self.known = None if self.known is None else self.known.to(device)

    def build(self) -> tuple[ImageText, list[str]]:
        """The towers the settings name."""
        small, notes = small_stem(self.config, self.pictures.data)
        encoder = build(self.config, self.pictures.augment.size, small)
        if (folder := self.config.text_encoder) is not None:
            with explained("--text-encoder", folder):
                held = (tokens_of(self.config, p.flat()[0])[0] for p in self.held.values())
                for tokens in (self.tokens, *held):
                    try_out(encoder.text, tokens)
        encoder = encoder.to(self.device)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        return encoder, notes

    def start_from(self, encoder: ImageText, pretrained: str) -> str:
        """Weights of timm or a file for the image tower; of both towers from a run."""
        return start_from(encoder, pretrained)

    def towers(self, encoder: ImageText) -> tuple[nn.Module, nn.Module]:
        """Pictures are anchors, captions keys; both directions are trained."""
        return encoder.image, encoder.text

    def beta(self, encoder: ImageText) -> Tensor:
        """Learned by its logarithm."""
        return encoder.beta()

    def after_step(self, encoder: ImageText) -> None:
        """Keep beta at most 100."""
        with torch.no_grad():
            encoder.log_beta.clamp_(max=math.log(LARGEST_BETA))

    def batch(self, index: Tensor, step: Tensor) -> Batch:
        """Pictures and their captions go by one position."""
        return Batch(index, index, {} if self.known is None else {"known": self.known[index]})

    def inputs(
        self, wants: Sequence[Want], step: Tensor, row: int | Tensor, loaded: Images | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Augmented pixels [R,3,S,S], or tokens [R,L] of a caption drawn for each picture."""
        if wants[0].tower == "anchors":
            return self.pictures.inputs(wants, step, row, loaded)
        ids = torch.cat([want.ids for want in wants])
        if isinstance(row, int):
            row = torch.arange(row, row + len(ids), device=self.device)
        u = rng.uniform(self.config.seed, step, rng.FOR_STORED, row, 1, torch.float64)
        count = self.begin[ids + 1] - self.begin[ids]
        return self.caption(self.begin[ids] + rng.integers_below(count, u[:, 0]))

    def caption(self, numbers: Tensor) -> dict[str, Tensor]:
        """Tokens of training captions by number, [R,L]."""
        return {name: table[numbers] for name, table in self.tokens.items()}

    def load_ahead(self, positions: Tensor) -> Iterator[Images]:
        """Pictures decoded ahead by workers."""
        return self.pictures.load_ahead(positions)

    def judge(self) -> ImageTextJudge:
        """Recall both ways and the exact loss."""
        return ImageTextJudge(self)


def load(
    config: TrainConfig, progress: bool, encoder_config: Mapping[str, Any] | None
) -> ImageTextTask:
    """The pictures and captions after --data, at the size a given encoder takes."""
    pairs = read_pairs(config.data, config.holdout)
    side = image_size_of(config.encoder) or config.image_size
    if encoder_config is not None:
        side = encoder_config["image_size"]
    config = replace(config, image_size=side)
    splits = {"train": pairs.train[: config.subset]}
    splits |= {"validation": pairs.validation, "test": pairs.test}
    listed = [(p, split) for split, pictures in splits.items() for p in pictures]
    files = tuple(ImageFile(p.name, whole_file(p.path)) for p, _ in listed)
    listing = Listing(pairs.root, files, notes=pairs.notes)
    bundle = load_images(replace(config, subset=None), progress, listing)
    told = {p.name: (split, p.captions) for p, split in listed}
    readable = [(name, *told[name]) for name in bundle.pretrain.names]
    everything = CaptionedImages(bundle.pretrain, tuple(captions for _, _, captions in readable))
    parts = {
        split: everything.take([n for n, (_, own, _) in enumerate(readable) if own == split])
        for split in splits
    }
    train = parts.pop("train")
    held = {split: part for split, part in parts.items() if part.captions}
    if encoder_config is not None and held and not train.captions:
        train = next(iter(held.values()))  # of which the exact loss is, then
    if len(train.captions) < 2:
        raise ValueError(
            "training needs at least 2 readable images with captions, and "
            f"{config.data} holds {len(train.captions)}; add some (test.csv and val.csv are "
            "never trained on, whatever else is missing)"
        )
    digest = hashlib.sha256(bundle.fingerprint.encode())
    for each in readable:
        digest.update(repr(each).encode())
    why = "there are too few images to hold some out"
    why = why if config.holdout else "--holdout 0 leaves nothing to test on"
    bundle = replace(bundle, fingerprint=digest.hexdigest()[:16], unprobed=why)
    return ImageTextTask(config, train, held, bundle)


def shared_captions(captions: Sequence[Sequence[str]]) -> tuple[Tensor | None, int]:
    """Pictures that share a caption with each, [M,K] padded with -1, and how many share too many.

    >>> shared_captions([("a dog", "it runs"), ("A dog",), ("a cat",)])[0].tolist()
    [[1], [0], [-1]]
    """
    having: dict[str, list[int]] = defaultdict(list)
    for picture, own in enumerate(captions):
        for text in {text.casefold() for text in own}:
            having[text].append(picture)
    others: dict[int, set[int]] = defaultdict(set)
    crowded = set[int]()
    for pictures in having.values():
        for picture in pictures if len(pictures) > 1 else ():
            others[picture].update(pictures[: MOST_KNOWN + 1])
            if len(pictures) > MOST_KNOWN + 1:
                crowded.add(picture)
    if not others:
        return None, 0
    rows = [
        torch.tensor(sorted(others[picture] - {picture})[:MOST_KNOWN], dtype=torch.int64)
        for picture in range(len(captions))
    ]
    return pad_sequence(rows, batch_first=True, padding_value=-1), len(crowded)
