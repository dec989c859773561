"""Images: two augmented views of each through one encoder.

Shapes: `M` images, `B` batch, `R` rows of a pass, `k` stored augmentations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from negchain import methods, rng
from negchain.augment import Augmentation, Images, Uniforms, augmentation, finite_views, joined
from negchain.data import DataBundle, load_batches, load_data
from negchain.data.listing import Listing
from negchain.encoders import SMALL_IMAGE, Encoder, build_encoder
from negchain.losses.request import Want
from negchain.printable import counted
from negchain.tasks.image_judge import ImageJudge, OnlineProbe
from negchain.tasks.task import Batch, Task
from negchain.train.config import ConfigError, TrainConfig

FEWEST = 48  # px; below, torchvision's stem leaves a single position in the last block


class ImageTask(Task):
    """Images of a data set; uint8, on the device where they fit, augmented there.

    Example:
        >>> from negchain.train.resolve import resolve
        >>> task = ImageTask(config := resolve(None, {"subset": 64}), load_images(config))
        >>> task.place(torch.device("cpu"))
        >>> step = torch.tensor(0)
        >>> a, b, _ = task.batch(torch.tensor([3, 5]), step)
        >>> task.inputs([Want(a), Want(b)], step, 0).shape
        torch.Size([4, 1, 8, 8])
    """

    table: Images | None = None
    """All M images, where they are on the device, or their M k stored views."""

    def __init__(self, config: TrainConfig, data: DataBundle) -> None:
        super().__init__(config)
        self.data = data
        self.num_samples = len(data.pretrain)
        self.fingerprint = data.fingerprint
        self.versions = config.augmentations or 1
        self.resident = self.capturable = data.pretrain.resident
        self.notes, self.skipped = data.notes, data.skipped
        self.unjudged = None if data.labelled else data.unprobed
        self.augment = run_augmentation(config, data)
        self.plain_keys = methods.named(config.method).plain_keys and not config.augmentations
        if self.plain_keys:
            self.layout, self.one_pass = {"views": "paired", "symmetric": False}, False
        self._probe: OnlineProbe | None = None

    @classmethod
    def load(
        cls, config: TrainConfig, progress: bool, encoder_config: Mapping[str, Any] | None
    ) -> ImageTask:
        """The images the settings name, at the size a given encoder takes."""
        if encoder_config is not None:
            config = replace(config, image_size=encoder_config["image_size"])
        data = load_images(config, progress)
        channels = data.pretrain.channels
        if encoder_config is not None and encoder_config["channels"] != channels:
            wanted = counted(encoder_config["channels"], "channel", "channels")
            raise ConfigError(
                f"the encoder takes images of {wanted} and {config.data} has {channels}; give such "
                "images (negchain embed converts files named one by one or in a .txt, but no "
                "folders)"
            )
        return cls(config, data)

    def info(self) -> dict[str, Any]:
        """Counts, classes, and what was left out."""
        data = self.data
        return {
            "train": 0 if data.train is None else len(data.train),
            "test": 0 if data.test is None else len(data.test),
            "held_out": data.held_out,
            "unprobed": self.unjudged,
            "classes": list(data.classes),
            "augment": self.augment.name if isinstance(self.augment, OwnAugmentation) else None,
        }

    def place(self, device: torch.device) -> None:
        """Move the images to the device, or store their augmentations there."""
        super().place(device)
        table, k = self.data.pretrain.table, self.config.augmentations
        self.table = None if table is None else table.to(device)
        if k is not None:
            if self.table is None:
                raise ConfigError(
                    "--augmentations stores every view, which needs the images in memory: raise "
                    "--resident-gb or use --subset"
                )
            self.table = finite_views(self.table, self.augment, k, self.config.seed).flatten(0, 1)

    def build(self) -> tuple[Encoder, list[str]]:
        """The encoder the settings name."""
        if self.device.type == "cpu" and self.config.encoder == "small-cnn":
            # Its tensors are too small to share: a second thread mostly waits, most of all when
            # other processes want the core.
            torch.set_num_threads(1)
        encoder = build_run_encoder(self.config, self.data).to(self.device)
        labels = self.data.pretrain.labels
        if labels is not None and len(set(labels[labels >= 0].tolist())) > 1:
            self._probe = OnlineProbe(labels.to(self.device), encoder.embedding_dim)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
        notes = small_stem(self.config, self.data)[1]
        if "." in self.config.encoder and self.config.pretrained is None:
            notes.append(
                f"{self.config.encoder} names weights, which only --pretrained timm loads: the "
                "encoder starts from fresh ones"
            )
        return encoder, notes

    def start_from(self, encoder: Encoder, pretrained: str) -> str:
        """Weights of timm, another run, or a file."""
        from negchain.train.pretrained import start_from

        return start_from(encoder, pretrained)

    def batch(self, index: Tensor, step: Tensor) -> Batch:
        """The images themselves, or two of the k stored views of each."""
        k = self.config.augmentations
        if k is None:
            return Batch(index, index, {})
        rows = torch.arange(len(index), device=self.device)
        u = rng.uniform(self.config.seed, step, rng.FOR_STORED, rows, 2, torch.float64)
        first = rng.integers_below(torch.full_like(rows, k), u[:, 0])
        other = rng.integers_below(torch.full_like(rows, k - 1), u[:, 1])
        views = first, (first + 1 + other) % k
        return Batch(index * k + views[0], index * k + views[1], {"augmentation": views})

    def inputs(
        self, wants: Sequence[Want], step: Tensor, row: int | Tensor, loaded: Images | None = None
    ) -> Tensor:
        """Pixels [R, C, size, size]: augmented by this step's draws, or stored, or plain."""
        ids = torch.cat([want.ids for want in wants])
        is_key = self.plain_keys and wants[0].tower == "keys"
        if is_key or self.config.augmentations is not None:
            return self.augment.plain(self._pictures(ids, loaded))
        seed, use, number = self.config.seed, rng.FOR_AUGMENT, self.augment.num_uniforms
        drawn: Tensor | Uniforms = (
            Uniforms(seed, step, use, row)
            if isinstance(row, int)
            else rng.uniform(seed, step, use, row, number, torch.float32)
        )
        if self.table is not None:
            dtype = self.autocast or torch.float32
            return self.augment.from_table(self.table, ids, drawn, dtype)
        return self.augment(self._pictures(ids, loaded), drawn)

    def _pictures(self, ids: Tensor, loaded: Images | None) -> Images:  # [R] -> R of them
        """Images by their ids; those of the batch, which come first, from what was loaded."""
        if loaded is None:
            return self.images(ids)
        own, views = loaded.to(self.device, non_blocking=True), 2 if self.one_pass else 1
        others = ids[views * len(own) :]
        found = joined([own, self.images(others)]) if len(others) else own
        if views == 1:
            return found
        places = torch.arange(len(found), device=self.device)
        return found[torch.cat([places[: len(own)], places])]

    def images(self, ids: Tensor) -> Images:  # [R] -> R of them, uint8 on the device
        """Images by position; with stored augmentations views by their ids."""
        if self.table is not None:
            return self.table[ids]
        pictures = self.data.pretrain.pictures(ids.cpu())
        return pictures.to(self.device, non_blocking=True)

    def watch(self, embeddings: Tensor, index: Tensor) -> None:
        """Let the online probe answer and learn."""
        if self._probe is not None:
            self._probe.learn(embeddings, index)

    @property
    def watched(self) -> dict[str, Tensor]:
        """The online probe's accuracy on training images, where these have labels."""
        return {} if self._probe is None else {"online_probe": self._probe.accuracy}

    def state_tensors(self) -> list[Tensor]:
        """The online probe's."""
        return [] if self._probe is None else [self._probe.weight, self._probe.mean]

    def augment_by(self, function: Callable[[Tensor], Tensor]) -> None:
        """Views by a function of the user's; nothing in it can be captured in a graph."""
        if self.config.augmentations is not None:
            raise ConfigError("augment= draws anew every step; leave out --augmentations")
        size, normalize = self.augment.size, self.augment.normalize
        self.augment = OwnAugmentation(size=size, normalize=normalize, function=function)
        self.capturable = False

    def load_ahead(self, positions: Tensor) -> Iterator[Images]:
        """Images decoded ahead by workers."""
        pinned = self.device.type == "cuda"
        return load_batches(self.data.pretrain, positions, self.config.workers, pinned)

    def judge(self) -> ImageJudge:
        """Probes, neighbours and the exact loss."""
        return ImageJudge(self)


@dataclass(frozen=True, kw_only=True)
class OwnAugmentation(Augmentation):
    """`function` in the place of a recipe: uint8 [N,C,H,W] to pixels [N,C,size,size].

    It draws from torch's global generator, which is seeded by the step before each call. So a
    resumed run draws what an uninterrupted one would have.

    Example:
        >>> own = OwnAugmentation(size=4, function=lambda x: x[:, :, ::2, ::2])
        >>> own(torch.full((2, 1, 8, 8), 51, dtype=torch.uint8), torch.rand(2, 1))[0, 0, 0, 0]
        tensor(0.2000)
    """

    function: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        """What the function is called, for the record."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    @property
    def num_uniforms(self) -> int:
        """One, which seeds the function's generator."""
        return 1

    def __call__(self, images: Images, uniforms: Tensor | Uniforms) -> Tensor:
        """Pixels of a batch, seeded by the first uniform of its first image."""
        drawn = uniforms.made(1, 1) if isinstance(uniforms, Uniforms) else uniforms
        with torch.random.fork_rng(), torch.autocast(images.device.type, enabled=False):
            torch.manual_seed(int(drawn[0, 0].item() * 2**24))
            found = self.function(self._squares(images))
        channels = images.shape[1] if isinstance(images, Tensor) else images.channels
        wanted = [len(images), channels, self.size, self.size]
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if got != wanted:
            raise ConfigError(f"augment must return pixels of shape {wanted}, got {got}")
        if found.dtype != torch.uint8 and (not found.is_floating_point() or (found > 32).any()):
            raise ConfigError(
                f"augment must return uint8, or floats in [0, 1], got {found.dtype} up to "
                f"{found.max().item():g}; divide by 255"
            )
        pixels = found.float() / 255 if found.dtype == torch.uint8 else found.float()
        return self._normalized(pixels)

    def _squares(self, images: Images) -> Tensor:
        """Pictures of their own sizes as central squares of twice the side that is wanted."""
        if isinstance(images, Tensor):
            return images
        squares = Augmentation(size=2 * self.size).plain(images)
        return (255 * squares).round().to(torch.uint8)


def load_images(
    config: TrainConfig, progress: bool = False, listed: Listing | None = None
) -> DataBundle:
    """The data a config names, or files that are listed already, cut to its subset."""
    data = load_data(
        config.data if listed is None else listed,
        image_size=config.image_size,
        root=config.root,
        download=config.download,
        strict=config.strict,
        resident_bytes=int(config.resident_gb * 2**30),
        holdout=config.holdout,
        num_workers=config.workers,
        progress=progress,
    )
    if config.subset is not None and config.subset < len(data.pretrain):
        first, notes = data.pretrain.select(torch.arange(config.subset)), data.notes
        kept, known = (
            0 if part.labels is None else len(set(part.labels.tolist()) - {-1})
            for part in (first, data.pretrain)
        )
        if kept < known:  # as in the first images of a sorted folder
            notes = (
                *notes,
                f"--subset {config.subset} takes the first images in the data's order, which hold "
                f"{kept} of {known} classes",
            )
        fingerprint = f"{data.fingerprint}-first{config.subset}"
        data = replace(data, pretrain=first, fingerprint=fingerprint, notes=notes)
    return data


def run_augmentation(config: TrainConfig, data: DataBundle) -> Augmentation:
    """The run's augmentation at the size its encoder sees."""
    size = config.image_size or data.pretrain.size[0]
    return recipe_for(config.recipe, size, data.pretrain.channels)


def recipe_for(recipe: str, size: int, channels: int) -> Augmentation:
    """A recipe at the size and for the channels an encoder sees."""
    augment = augmentation(recipe, size=size)  # whose constants are for three channels
    return replace(augment, normalize=None) if channels == 1 else augment


def build_run_encoder(config: TrainConfig, data: DataBundle) -> Encoder:
    """The encoder a config names, with fresh weights."""
    return build_encoder(
        config.encoder,
        image_size=config.image_size or data.pretrain.size[0],
        channels=data.pretrain.channels,
        norm=config.norm,
        projection=config.projector,
        embedding_dim=config.embedding_dim,
        seed=config.seed,
        small_stem=small_stem(config, data)[0],
    )


def small_stem(config: TrainConfig, data: DataBundle) -> tuple[bool, list[str]]:
    """Whether a ResNet keeps every pixel at first, and what to tell the user where we chose.

    torchvision's stem halves a picture twice before the first block, which throws too much away of
    a picture of 32 px, and is what makes the network fast. Keeping every pixel costs 4 to 16 times
    as much, so photographs that were only shrunk to 64 px do not get it unless asked for.
    """
    size = config.image_size or data.pretrain.size[0]
    if config.encoder not in ("resnet18", "resnet50") or config.stem != "auto":
        return config.stem == "small", []
    if size > SMALL_IMAGE:
        return False, []
    own = data.native
    if size < FEWEST or own <= SMALL_IMAGE:
        why = f"they have {own} px" if own <= SMALL_IMAGE else f"{size} px are few"
        return True, [
            f"{config.encoder} keeps every pixel of the pictures at first ({why}); "
            "--stem large takes a quarter (32 px) to a sixteenth (64 px) of the time and sees less"
        ]
    return False, [
        f"{config.encoder} halves the pictures twice at first (they have {own} px and are shrunk "
        f"to {size}); --stem small sees more and takes 8 to 16 times as long"
    ]
