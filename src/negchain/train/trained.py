"""A trained encoder at work: `negchain.load(run)` encodes files, folders, lists and images.

Shapes: N images, C channels, S the encoder's side, F features.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image  # type: ignore[import-untyped]

from negchain.augment.pipeline import check_images
from negchain.chunked import Chunked
from negchain.data import ImageSet
from negchain.data.decode import Decoded, num_cores
from negchain.data.from_files import decode_files
from negchain.data.named import BUILT_IN
from negchain.encoders import Encoder
from negchain.evaluation import embed_all
from negchain.files import replacing
from negchain.printable import printable, show
from negchain.tasks.checks import absolute_sources
from negchain.tasks.image_text_towers import ImageText, tokens_of
from negchain.tasks.images import ImageTask, recipe_for
from negchain.tasks.task import autocast_dtype, judged
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.pretrained import KEPT, load_trained, used_by
from negchain.train.resolve import choose_device
from negchain.train.run_folder import load_run_config

ENCODE_BATCH = 256
FORMATS = (".npz", ".csv", ".parquet")

Paths = str | Path | Sequence[str | Path]
Pictures = Tensor | Image.Image | Sequence[Image.Image]


@dataclass(frozen=True)
class Found:
    """Images that were asked for: squares of the encoder's side, under the names of their files."""

    parts: list[ImageSet]
    classes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    """What else was not read."""
    trained: int = 0
    """How many come before those that test what is trained on these data; 0 if none do."""

    def picture(self, position: int) -> Tensor:
        """The image at a position, uint8 [C,S,S]."""
        for part in self.parts:
            if position < len(part):
                return part.fetch(torch.tensor([position]))[0]
            position -= len(part)
        raise IndexError(position)


@dataclass(frozen=True)
class Embeddings:
    """Features [N,F] float32 with file and class name ("": none) of each; `save` writes them."""

    names: list[str]
    class_names: list[str]
    features: Tensor

    def save(self, out: str | Path) -> None:
        """Write .npz (names, classes, embeddings), .csv or .parquet (a row per image)."""
        out = Path(out)
        check_embedding_file(out)
        rows = self.features.cpu().numpy()
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            if out.suffix == ".npz":
                names, classes = np.array(self.names), np.array(self.class_names)
                np.savez_compressed(file, names=names, classes=classes, embeddings=rows)
            elif out.suffix == ".csv":
                text = io.TextIOWrapper(file, encoding="utf-8", newline="")
                writer = csv.writer(text)
                writer.writerow(["file", "class", *(f"f{i}" for i in range(rows.shape[1]))])
                for name, kind, row in zip(self.names, self.class_names, rows, strict=True):
                    writer.writerow([name, kind, *(f"{value:.7g}" for value in row)])
                text.flush()
                text.detach()  # `replacing` closes the file
            else:
                import pyarrow as arrow
                import pyarrow.parquet as parquet

                flat, width = arrow.array(rows.reshape(-1)), rows.shape[1]
                vectors = arrow.FixedSizeListArray.from_arrays(flat, width)
                table = {"file": self.names, "class": self.class_names, "embedding": vectors}
                parquet.write_table(arrow.table(table), file)


def check_embedding_file(out: Path) -> None:
    """Refuse a file name whose ending says nothing we can write, before anything is encoded."""
    if out.suffix not in FORMATS:
        raise ConfigError(f"embeddings go to {', '.join(FORMATS)}, got {out.name!r}; rename it")
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(
            "writing .parquet needs pyarrow: pip install 'negchain[parquet]', or use .npz"
        )


@dataclass(frozen=True)
class Trained:
    """The encoder of a run, ready to encode; made by `negchain.load`."""

    encoder: Encoder | ImageText
    config: TrainConfig
    device: torch.device
    notes: tuple[str, ...] = ()
    """Why it is not of the newest checkpoint, where that is damaged."""

    @property
    def side(self) -> int:
        """S: images are read at this size, their central square."""
        return self.encoder.encoder_config["image_size"]

    def encode(self, images: Paths | Pictures) -> Tensor:
        """Features [N,F] float32 on the CPU, not normalised; one row per image, in order.

        Args:
            images: a file, a folder, the name of a data set, a list of files; or PIL images; or a
                uint8 tensor [N,C,H,W] or [C,H,W]. Central squares are seen.
        """
        if isinstance(images, str | Path):
            return self.embed(images).features
        if isinstance(images, Tensor):
            return self._features(images if images.ndim == 4 else images[None])
        pictures = [images] if isinstance(images, Image.Image) else list(images)
        if not pictures:
            raise ValueError("encode needs at least one image, got an empty list")
        given = [picture for picture in pictures if isinstance(picture, Image.Image)]
        if not given:
            return self.embed(pictures).features  # type: ignore[arg-type]
        if len(given) < len(pictures):
            raise ValueError("encode takes paths or PIL images, got some of each; make two calls")
        return self._features(self._squares(given))

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Embeddings [N,D] float32 of texts, beside which those of `encode` lie (image-text)."""
        if not isinstance(self.encoder, ImageText):
            raise ConfigError(
                f"only a run of --task image-text has a text encoder, and this is of --task "
                f"{self.config.task}"
            )
        if not len(texts):
            return torch.empty(0, self.encoder.embedding_dim)
        tokens, _ = tokens_of(self.config, texts)
        on_device = {name: table.to(self.device) for name, table in tokens.items()}
        with self._judged():
            found: Tensor = Chunked(self.encoder.text, ENCODE_BATCH)(on_device)
        return found.float().cpu()

    def embed(self, what: Paths) -> Embeddings:
        """Features of files, with their names and classes."""
        return self.embed_found(self.read(what))

    def embed_found(self, found: Found) -> Embeddings:
        """Features of images that `read` found."""
        names, classes = list[str](), list[str]()
        for part in found.parts:
            labels = [-1] * len(part) if part.labels is None else part.labels.tolist()
            names += part.names
            classes += ["" if label < 0 else found.classes[label] for label in labels]
        features = torch.cat([self._features(part) for part in found.parts])
        return Embeddings(names, classes, features)

    def read(self, what: Paths) -> Found:
        """The images of a file, a folder, a data set, a .txt with a path per line, or a list."""
        if isinstance(what, str | Path):
            path, suffix = Path(what), Path(what).suffix.lower()
            if str(what) not in BUILT_IN and path.is_file() and suffix == ".txt":
                lines = path.read_text("utf-8-sig", "surrogateescape").split("\n")
                return self._files([str(path.parent / line) for line in lines if line.strip()])
            if str(what) in BUILT_IN or not path.is_file() or suffix in (".csv", ".tar"):
                return self._data(str(what))
            return self._files([str(path)])
        paths = list(what)
        if other := [each for each in paths if not isinstance(each, str | Path)]:
            raise ConfigError(
                f"a list names files, got {show(other[0])}; `encode` takes PIL images and uint8 "
                "tensors too (torch.from_numpy of an array)"
            )
        return self._files([str(path) for path in paths])

    def _data(self, data: str) -> Found:
        changed = replace(self.config, data=absolute_sources(data), subset=None)
        bundle = ImageTask.load(changed, False, self.encoder.encoder_config).data
        parts = [bundle.pretrain, *([bundle.test] if bundle.test is not None else [])]
        notes = tuple(note for note in bundle.notes if note.endswith("not read"))
        split = changed.data == self.config.data or not bundle.held_out
        trained = len(bundle.pretrain) if split else 0
        return Found(parts, bundle.classes, bundle.skipped, notes, trained)

    def _files(self, paths: list[str]) -> Found:
        folders = [path for path in paths if Path(path).is_dir()]
        if folders:
            raise ConfigError(f"a list names files and {folders[0]} is a folder; give it alone")
        squares, _, failed = decode_files(paths, self.side, workers=num_cores())
        skipped = tuple((paths[i], why) for i, why in failed.items())
        if not len(squares):
            first = f" ({skipped[0][0]}: {skipped[0][1]})" if skipped else ""
            raise ConfigError(f"no image could be read{first}; name image files or a folder")
        names = tuple(printable(path) for i, path in enumerate(paths) if i not in failed)
        return Found([ImageSet(names, None, self._channels(squares))], skipped=skipped)

    def _squares(self, pictures: Iterable[Image.Image]) -> Tensor:  # [N,C,S,S]
        """Central squares of at least one picture, as of those in files."""
        squares = np.stack([Decoded.of(p, p.size).square(self.side) for p in pictures])
        return self._channels(torch.from_numpy(squares))

    def _channels(self, squares: Tensor) -> Tensor:  # [N,3,S,S]
        """RGB as the encoder wants it: as it is, or in grey."""
        if self.encoder.encoder_config["channels"] == 3:
            return squares
        rows = squares.permute(0, 2, 3, 1).contiguous().numpy()
        grey = [np.array(Image.fromarray(row).convert("L")) for row in rows]
        return torch.from_numpy(np.stack(grey))[:, None]

    def _features(self, images: Tensor | ImageSet) -> Tensor:
        channels = self.encoder.encoder_config["channels"]
        if isinstance(images, Tensor) and images.shape[1:2] != (channels,):
            raise ValueError(
                f"this encoder takes images [N,{channels},H,W], got {list(images.shape)}; "
                "convert them, or give PIL images or files"
            )
        if isinstance(images, Tensor):
            check_images(images)
            if images.shape[2] != images.shape[3] and len(images):
                if not images.numel():
                    raise ValueError(f"images must have pixels, got {list(images.shape)}")
                parts = torch.split(images, ENCODE_BATCH)  # squares of all may be far larger
                squares = (self._squares(map(to_pil_image, part.cpu())) for part in parts)
                return torch.cat([self._features(part) for part in squares])
        augment = recipe_for(self.config.recipe, self.side, channels)
        with self._judged():
            return embed_all(
                self.encoder.features, images, plain=augment.plain, batch_size=ENCODE_BATCH,
                device=self.device,
            ).cpu()  # fmt: skip

    def _judged(self) -> AbstractContextManager[None]:
        return judged(self.encoder, self.device, autocast_dtype(self.config, self.device))


def load_run_encoder(
    run: str | Path, device: str = "auto", root: str = "data", which: str = KEPT
) -> Trained:
    """What `negchain.load` does; `root` holds downloaded data sets, `which` is a checkpoint."""
    config = replace(load_run_config(Path(run)), device=device, root=root)  # type: ignore[arg-type]
    (encoder, loaded), where = load_trained(Path(run), which), choose_device(device)
    if "image_size" not in encoder.encoder_config:
        raise ConfigError(
            f"this encodes images, and {run} is of --task {config.task}; "
            + used_by(Path(run), encoder)
        )
    return Trained(encoder.to(where), config, where, tuple(loaded.warnings))
