"""negchain's losses in open_clip's training loop (open_clip_torch 3).

    data = open_clip_train.data.get_data(args, ...)
    positions = CsvPositions(data["train"].dataloader.dataset)        # or ShardPositions(urls)
    loss_fn = EMC2Loss(len(positions), views="paired", denominator="all")
    loss = IndexedClipLoss(loss_fn).to(args.device)                   # state, unlike ClipLoss
    data["train"] = loss.watch(data["train"], positions, model)
    train_one_epoch(model, data, loss, ...)                           # open_clip's own

Their loop hands on images and texts, and no positions, and calls
`loss(**model_out, output_dict=True)`. So the loader tells the loss the positions of each batch it
hands out. The loss takes beta from `logit_scale`, and what it wants encoded from the data set.

Shapes: `B` batch, `D` embedding, `R` positions to encode.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BufferedReader
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset, default_collate

from negchain.chunked import Chunked
from negchain.losses import ContrastiveLoss
from negchain.printable import counted

Fetch = Callable[[Tensor], Tensor]
Kept = dict[tuple[object, ...], Tensor]


class IndexedClipLoss(nn.Module):
    """Takes the place of `open_clip.ClipLoss`: the same call, the same names in its answer.

    `state_dict` holds the loss's state; put it into your checkpoints beside open_clip's.

    Args:
        loss_fn: with `views="paired"`: images are the anchors, texts the keys. The model's
            `logit_scale`, which open_clip clamps at 100, takes the place of its beta.

    Example:
        >>> from negchain import SogCLRLoss
        >>> loss = IndexedClipLoss(SogCLRLoss(8, views="paired", denominator="all"))
        >>> loss.remember(torch.tensor([3, 5]))  # the loader that `watch` returns does this
        >>> images, texts = torch.randn(2, 2, 4, requires_grad=True)
        >>> loss(images, texts, torch.tensor(10.0), output_dict=True)["contrastive_loss"].backward()
    """

    def __init__(self, loss_fn: ContrastiveLoss) -> None:
        super().__init__()
        if loss_fn.views != "paired" or isinstance(loss_fn.beta, Tensor):
            raise ValueError(
                "the loss must have views='paired' (images and texts) and a number as beta (the "
                f"model's logit_scale takes its place), got views={loss_fn.views!r}, "
                f"beta={loss_fn.beta}"
            )
        self.loss_fn = loss_fn
        self._encode: Any = None
        self._recent: list[Tensor] = []  # positions of the batches of this step
        self._calls = 0  # with them
        self._kept: Kept = {}  # what was fetched and encoded for them

    def watch(
        self, info: Any, positions: CsvPositions | ShardPositions, model: nn.Module | None = None
    ) -> Any:
        """open_clip's DataInfo whose loader tells this loss the positions of each batch.

        Args:
            info: `data["train"]`.
            positions: what gives samples their positions.
            model: whose towers encode what the loss asks for (CSV only: shards are read in order).
        """
        if self.loss_fn.num_samples not in (None, len(positions)):
            raise ValueError(
                f"a position is a picture, and the loss was built for {self.loss_fn.num_samples} "
                f"where there are {len(positions)}; build it with num_samples=len(positions)"
            )
        if model is not None:
            if not isinstance(positions, CsvPositions):
                raise ValueError(
                    "shards are read in order: leave model out, and use a loss that asks for "
                    "nothing to be encoded, SogCLRLoss or EMC2Loss(carried='cached')"
                )
            towers: Any = getattr(model, "module", model)
            # as --precision bf16 has its pictures: in the type of the layers that see them
            sees = next(m for m in towers.visual.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
            images: Fetch = lambda ids: positions.images(ids).to(sees.weight)  # noqa: E731
            texts: Fetch = lambda ids: positions.texts(ids).to(ids.device)  # noqa: E731
            self._encode = (
                partial(_encoded, images, _Tower(towers, "encode_image")),
                partial(_encoded, texts, _Tower(towers, "encode_text")),
            )
        return replace(info, dataloader=_Watched(positions.loader(info.dataloader), self, info))

    def remember(self, index: Tensor) -> None:
        """Take the positions [B] of the batch that is handed out now."""
        if self._calls:
            self.forget()
        self._recent.append(index)

    def forget(self) -> None:
        """Begin a new step. With `accum_freq` an epoch may end within one."""
        self._recent.clear()
        self._kept.clear()
        self._calls = 0

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch, or with `accum_freq` of all batches of a step, [].

        Their loop then calls once per batch with the features of all of them, of which one batch
        has a gradient. These calls are one step: only the last changes the state and trains what
        the loss asked for. That is fetched once, and encoded in chunks of a batch's size.

        Args:
            image_features, text_features: [B, D].
            logit_scale: [] beta.
            logit_bias: None; it belongs to SigLIP's loss.
            output_dict: return `{"contrastive_loss": loss}`.
        """
        if logit_bias is not None:
            raise ValueError("logit_bias belongs to SigLIP's loss; train a model without it")
        known = sum(len(part) for part in self._recent)
        if known != len(image_features):
            raise ValueError(
                f"the loss has {counted(len(image_features), 'pair', 'pairs')} and positions of "
                f"{known}: the loader must be the one loss.watch(data['train'], positions) made, "
                "used by this loss alone"
            )
        index = torch.cat(self._recent).to(image_features.device, torch.int64)
        encode, self._calls = self._encode, self._calls + 1
        last = self._calls == len(self._recent)
        if len(self.loss_fn.tables) and encode and self._calls == 1 and not int(self.loss_fn.step):
            self.loss_fn.fill(encode)
        if encode and len(self._recent) > 1:
            size = max(map(len, self._recent))
            encode = tuple(partial(each, kept=self._kept, size=size) for each in encode)
            encode = encode if last else tuple(map(torch.no_grad(), encode))
        self.loss_fn.beta = logit_scale
        self.loss_fn.train(self.training and last)
        value: Tensor = self.loss_fn(image_features, text_features, index, encode=encode)
        self.loss_fn.beta = logit_scale.detach()  # not its graph
        if last:
            self._kept.clear()
        return {"contrastive_loss": value} if output_dict else value


class _Tower(nn.Module):
    """One encoder of a CLIP model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, inputs: Tensor) -> Tensor:
        return getattr(self.model, self.name)(inputs)  # type: ignore[no-any-return]


def _encoded(
    fetch: Fetch, tower: _Tower, ids: Tensor, kept: Kept | None = None, size: int = 0
) -> Tensor:  # [R] -> [R,D]
    """What a loss asks for; with `kept` in several calls, `size` samples at a time."""
    if kept is None:
        return tower(fetch(ids))  # type: ignore[no-any-return]
    name = (tower.name, *ids.tolist())
    if name not in kept:
        kept[name] = fetch(ids)
    if torch.is_grad_enabled():
        return Chunked(tower, size)(kept[name])  # type: ignore[no-any-return]
    if ("z", *name) not in kept:
        kept["z", *name] = Chunked(tower, size)(kept[name])
    return kept["z", *name]


class _Watched:
    """A loader of (images, texts, positions) that keeps the positions for the loss."""

    def __init__(self, loader: Any, loss: IndexedClipLoss, info: Any) -> None:
        self.loader, self.loss = loader, loss
        self.num_batches = info.dataloader.num_batches
        self.num_samples = info.dataloader.num_samples

    def __len__(self) -> int:
        return int(self.num_batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.loss.forget()
        for images, texts, index in self.loader:
            self.loss.remember(torch.as_tensor(index))
            yield images, texts


class CsvPositions:
    """Positions of open_clip's `CsvDataset`: one per picture, whose captions are all its positives.

    Example:
        >>> class Captions:
        ...     images, captions = ["a.jpg", "b.jpg", "a.jpg"], ["a cat", "a dog", "the cat"]
        >>> len(CsvPositions(Captions())), CsvPositions(Captions()).of_row
        (2, [0, 1, 0])
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        numbers: dict[str, int] = {}
        self.of_row = [numbers.setdefault(str(i), len(numbers)) for i in dataset.images]
        self.rows: list[list[int]] = [[] for _ in numbers]
        for row, position in enumerate(self.of_row):
            self.rows[position].append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, ids: Tensor) -> Tensor:
        """Pictures of positions [R], transformed as in training."""
        return torch.stack([self.dataset[self.rows[i][0]][0] for i in ids.tolist()])

    def texts(self, ids: Tensor) -> Tensor:
        """Tokens of a caption of each position [R], a random one of several."""
        rows = [self.rows[i] for i in ids.tolist()]
        chosen = [own[int(torch.randint(len(own), ()))] for own in rows]
        texts: Tensor = self.dataset.tokenize([str(self.dataset.captions[row]) for row in chosen])
        return texts

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader over (image, text, position)."""
        return DataLoader(
            StackDataset(loader.dataset, self.of_row),  # type: ignore[arg-type]
            collate_fn=_flat,
            batch_sampler=loader.batch_sampler,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
        )


def _flat(rows: list[tuple[tuple[Tensor, Tensor], int]]) -> Any:
    return default_collate([(*pair, position) for pair, position in rows])


class ShardPositions:
    """Positions of the samples of webdataset shards, by the names in their tar files.

    Shards are read in order, so nothing can be fetched by position: use a loss that asks for
    nothing (`SogCLRLoss`, `EMC2Loss(carried="cached")`).

    Args:
        urls: the shards, as given to open_clip (`{000..012}` is expanded); their headers are read,
            or where they are no local files (`pipe:aws s3 cp ...`) each is read once, whole.
    """

    def __init__(self, urls: str | Sequence[str]) -> None:
        from webdataset.gopen import gopen
        from webdataset.shardlists import expand_urls
        from webdataset.tariterators import base_plus_ext

        self.found: dict[tuple[str, str], int] = {}  # (url, key): position
        for url in expand_urls(urls):
            with gopen(url) as file:
                seeks = isinstance(file, BufferedReader)
                shard = tarfile.open(fileobj=file, mode="r:*" if seeks else "r|*")
                names = shard.getnames()
            for key, _ in map(base_plus_ext, names):
                if key is not None:
                    self.found.setdefault((url, key), len(self.found))

    def __len__(self) -> int:
        return len(self.found)

    def add(self, sample: dict[str, Any]) -> dict[str, Any]:
        """A sample with its position."""
        return {**sample, "position": self.found[sample["__url__"], sample["__key__"]]}

    def loader(self, loader: Any) -> Any:
        """The same loader, changed to (image, text, position)."""
        import webdataset

        (inner,) = loader.pipeline
        stages = inner.dataset.pipeline
        for number, stage in enumerate(stages):
            if getattr(stage, "args", None) == ("image", "text"):
                stages[number] = webdataset.to_tuple("image", "text", "position")
                stages.insert(number, webdataset.map(self.add))
                return loader
        raise ValueError(
            "the pipeline has no stage to_tuple('image', 'text'): make it with "
            "open_clip_train.data.get_wds_dataset"
        )
