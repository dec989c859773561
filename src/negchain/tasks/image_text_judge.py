"""What pictures with captions are judged by: recall both ways, the exact loss, and examples.

A picture's answer is right if it is one of its own captions, a caption's if it is a picture that
has it; captions are distinct texts, so two pictures may share one.

Shapes: `I` test pictures, `T` distinct test captions, `M` candidates, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.evaluation import embed_all
from negchain.exact import global_loss
from negchain.losses import ContrastiveLoss
from negchain.tasks.image_judge import previews, spread
from negchain.tasks.image_text_towers import ImageText, tokens_of
from negchain.tasks.task import Arrays, Judge, Numbers, judged

if TYPE_CHECKING:
    from negchain.tasks.image_text import CaptionedImages, ImageTextTask

ENCODE_BATCH = 256
QUERIES_AT_A_TIME = 1024
RECALL_AT = (1, 5, 10)
GALLERY, SHOWN = 12, 5  # examples, and answers of each
MOST_SHOWN = 1000  # pictures to retrieve examples from where nothing is tested
SPLITS = {"validation": "", "test": "test_"}  # before the name of a number


class ImageTextJudge(Judge):
    """Evaluates towers on a task's data; leaves them in training mode."""

    def __init__(self, task: ImageTextTask) -> None:
        self.task = task
        self._tokens: dict[int, dict[str, Tensor]] = {}

    def quick(self, encoder: ImageText) -> Numbers:
        """The exact loss and beta; recall at 1, 5 and 10 both ways of validation pictures."""
        return self._numbers(encoder, ["validation"])[0]

    def before(self, encoder: ImageText) -> Numbers:
        """The same, and of test pictures with `test_` before the name."""
        return self._numbers(encoder, list(SPLITS))[0]

    def thorough(self, encoder: ImageText) -> tuple[Numbers, Arrays]:
        """Every number, and which pictures and captions were answered rightly."""
        return self._numbers(encoder, list(SPLITS))

    def _numbers(self, encoder: ImageText, splits: Sequence[str]) -> tuple[Numbers, Arrays]:
        numbers, answers = self.losses(encoder), Arrays()
        for split, prefix in SPLITS.items():
            if split not in splits or split not in self.task.held:
                continue
            part = self.task.held[split]
            found = Retrieval(*self.embed(encoder, part), *distinct(part))
            recalls, shares = [], []
            for way, right in (("i2t", found.captions_right()), ("t2i", found.pictures_right())):
                shares.append(torch.zeros(len(right.table), dtype=torch.double))
                for k in RECALL_AT:
                    if k == 1 or k < right.candidates:
                        answer = right.table[:, :k].any(1).cpu()
                        recalls.append(answer.double().mean().item())
                        numbers[f"{prefix}{way}_r{k}"] = recalls[-1]
                        answers[f"right_{prefix}{way}_r{k}"] = answer.numpy()
                        shares[-1] += answer
            numbers[f"{prefix}mean_recall"] = sum(recalls) / len(recalls)
            # by picture: its own, and what its captions have in the mean over all captions
            pairs = torch.unique(distinct(part)[1], dim=0)
            each = shares[1] / pairs[:, 1].bincount() * len(shares[0]) / len(shares[1])
            shares[0].index_add_(0, pairs[:, 0], each[pairs[:, 1]])
            answers[f"right_{prefix}mean_recall"] = (shares[0] / len(recalls)).numpy()
        # what names the data, so that runs on the same are compared by the same pictures
        answers["test_labels"] = np.frombuffer(self.task.fingerprint.encode(), np.uint8)
        return numbers, answers

    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """Of the towers before the first step."""
        kept = (*(f"_r{k}" for k in RECALL_AT), "mean_recall", "global_loss")
        return {f"untrained_{n}": v for n, v in line.items() if n.endswith(kept)}

    def score(self, numbers: Mapping[str, float]) -> float:
        """The mean of validation's recalls, never of test's; without any the exact loss decides."""
        return numbers.get("mean_recall", -numbers.get("global_loss", math.inf))

    def losses(self, encoder: ImageText) -> Numbers:
        """`global_loss` on fixed training pairs at the first beta, `embedding_variance`, `beta`."""
        task = self.task
        generator = torch.Generator().manual_seed(task.config.seed)
        count = min(task.config.probe_samples, task.num_samples)
        chosen = torch.randperm(task.num_samples, generator=generator)[:count].sort().values
        z_image = self._images(encoder, task.train.images.fetch(chosen)).double()
        first = task.begin[chosen.to(task.device)]
        z_text = self._texts(encoder, task.caption(first)).double()
        known = None if task.known is None else task.known[chosen.to(task.device)]
        loss = global_loss(
            z_image,
            z_text,
            task.config.beta,
            views="paired",
            index=chosen.to(task.device),
            known=known,
        )
        centre = normalize(z_image, dim=-1).mean(0)
        return {
            "global_loss": float(loss),
            "embedding_variance": float(1 - centre.square().sum()),
            "beta": float(encoder.beta().detach()),
        }

    def embed(self, encoder: ImageText, part: CaptionedImages) -> tuple[Tensor, Tensor]:
        """Pictures [I,D] and distinct captions [T,D], of unit length."""
        if id(part) not in self._tokens:
            texts, _ = distinct(part)
            tokens, _ = tokens_of(self.task.config, texts)
            self._tokens[id(part)] = {n: t.to(self.task.device) for n, t in tokens.items()}
        images = self._images(encoder, part.images)
        return normalize(images, dim=-1), normalize(
            self._texts(encoder, self._tokens[id(part)]), dim=-1
        )

    def previews(self) -> Arrays:
        """A few training pictures and their augmentations."""
        return previews(self.task.train.images, self.task.augment, self.task.config.seed)

    def artifacts(self, encoder: ImageText, loss_fn: ContrastiveLoss | None) -> Arrays:
        """Examples of what is retrieved both ways, and what chains hold."""
        held = self.task.held
        part = held.get("test") or held.get("validation") or _first(self.task.train, MOST_SHOWN)
        texts, pairs = distinct(part)
        found = Retrieval(*self.embed(encoder, part), texts, pairs)
        pictures, captions = spread(len(part.images), GALLERY), spread(len(texts), GALLERY)
        answers = found.captions_right(pictures), found.pictures_right(captions)
        words = np.array(texts)
        arrays = self.previews() | {
            "asked_images": part.images.fetch(pictures).numpy(),
            "asked_images_captions": np.array([part.captions[i][0] for i in pictures.tolist()]),
            "found_captions": words[answers[0].found[:, :SHOWN].cpu().numpy()],
            "asked_captions": words[captions.numpy()],
            "found_images": torch.stack(
                [part.images.fetch(row) for row in answers[1].found[:, :SHOWN].cpu()]
            ).numpy(),
        }
        for name, answer in zip(("found_captions", "found_images"), answers, strict=True):
            arrays[f"{name}_right"] = answer.table[:, :SHOWN].cpu().numpy()
            arrays[f"{name}_similarity"] = answer.similarity[:, :SHOWN].cpu().numpy()
        return arrays | ({} if loss_fn is None else self._chains(loss_fn))

    def _chains(self, loss_fn: ContrastiveLoss) -> Arrays:
        """Training pictures and captions with the negatives their chains hold now."""
        train = self.task.train
        anchors = spread(len(train.images), GALLERY)
        held = [ids.cpu() for ids in loss_fn.held(anchors)]
        if len(held) != 2:  # no chains
            return {}
        first = [own[0] for own in train.captions]
        return {
            "chain_images": train.images.fetch(anchors).numpy(),
            "chain_held_captions": np.array([first[i] for i in held[0].tolist()]),
            "chain_captions": np.array([first[i] for i in anchors.tolist()]),
            "chain_held_images": train.images.fetch(held[1]).numpy(),
        }

    def _images(self, encoder: ImageText, images: Any) -> Tensor:
        task = self.task
        with judged(encoder, task.device, task.autocast):
            return embed_all(
                encoder.image, images, plain=task.augment.plain, batch_size=ENCODE_BATCH,
                device=task.device,
            )  # fmt: skip

    def _texts(self, encoder: ImageText, tokens: dict[str, Tensor]) -> Tensor:
        with judged(encoder, self.task.device, self.task.autocast):
            parts = zip(*(torch.split(t, ENCODE_BATCH) for t in tokens.values()), strict=True)
            rows = [encoder.text(dict(zip(tokens, part, strict=True))) for part in parts]
        return torch.cat([row.float() for row in rows])


class Answers(NamedTuple):
    """The nearest candidates of some queries, and which are right."""

    found: Tensor  # [Q,k] places of the candidates
    similarity: Tensor  # [Q,k]
    table: Tensor  # [Q,k] bool
    candidates: int


class Retrieval:
    """Pictures and captions against each other.

    Args:
        images: [I,D] of unit length.
        captions: [T,D] of unit length.
        texts: the T captions.
        pairs: (picture, caption) of everything that belongs together, [P,2].

    Example:
        >>> found = Retrieval(torch.eye(3), torch.eye(3)[[1, 0]], ["b", "a"],
        ...                   torch.tensor([[0, 1], [1, 0], [2, 0]]))
        >>> found.captions_right().table[:, 0].tolist(), found.pictures_right().table[:, 0].tolist()
        ([True, True, True], [True, True])
    """

    def __init__(
        self, images: Tensor, captions: Tensor, texts: Sequence[str], pairs: Tensor
    ) -> None:
        self.images, self.captions, self.texts = images, captions, texts
        self.pairs = (pairs[:, 0] * len(texts) + pairs[:, 1]).to(images.device)

    def captions_right(self, pictures: Tensor | None = None) -> Answers:
        """The nearest captions of pictures (all of them unless told)."""
        return self._answers(self.images, self.captions, pictures, len(self.texts), 1)

    def pictures_right(self, captions: Tensor | None = None) -> Answers:
        """The nearest pictures of captions."""
        return self._answers(self.captions, self.images, captions, 1, len(self.texts))

    def _answers(
        self, queries: Tensor, candidates: Tensor, chosen: Tensor | None, by_row: int, by_found: int
    ) -> Answers:
        rows = torch.arange(len(queries)) if chosen is None else chosen
        k = min(max(RECALL_AT), len(candidates))
        parts = []
        for some in torch.split(rows.to(queries.device), QUERIES_AT_A_TIME):
            near = (queries[some] @ candidates.T).topk(k)
            pairs = some[:, None] * by_row + near.indices * by_found
            right = torch.isin(pairs, self.pairs)
            parts.append((near.indices, near.values, right))
        found, similarity, table = (torch.cat(column) for column in zip(*parts, strict=True))
        return Answers(found, similarity, table, len(candidates))


def distinct(part: CaptionedImages) -> tuple[list[str], Tensor]:
    """The distinct captions of pictures, and (picture, caption) of all that belong together."""
    numbers: dict[str, int] = {}
    texts, pairs = list[str](), list[tuple[int, int]]()
    for picture, own in enumerate(part.captions):
        for text in own:
            number = numbers.setdefault(text.casefold(), len(numbers))
            if number == len(texts):
                texts.append(text)
            pairs.append((picture, number))
    return texts, torch.tensor(pairs)


def _first(part: CaptionedImages, count: int) -> CaptionedImages:
    kept = min(count, len(part.images))
    return type(part)(part.images.select(torch.arange(kept)), part.captions[:kept])
