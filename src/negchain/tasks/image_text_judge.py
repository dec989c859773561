"""What pictures with captions are judged by: recall both ways, the exact loss, and examples.

The answer to a picture is right if it is one of its captions. The answer to a caption is right if
it is a picture that has this caption. Captions are distinct texts, so two pictures may share one.

Shapes: `I` test pictures, `T` distinct test captions, `Q` queries, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.chunked import Chunked
from negchain.exact import global_loss
from negchain.losses import ContrastiveLoss
from negchain.tasks.image_text_towers import ImageText, tokens_of
from negchain.tasks.task import SPLITS, Arrays, Judge, Numbers, evenly, variance

if TYPE_CHECKING:
    from negchain.tasks.image_text import CaptionedImages, ImageTextTask

ENCODE_BATCH = 256
QUERIES_AT_A_TIME = 1024
RECALL_AT = (1, 5, 10)
GALLERY, SHOWN = 12, 5  # examples, and answers of each
MOST_SHOWN = 1000  # pictures to retrieve examples from where nothing is tested


class ImageTextJudge(Judge):
    """Evaluates towers on a task's data."""

    task: ImageTextTask
    best_by = "mean_recall"  # of validation pictures, never of test pictures

    def __init__(self, task: ImageTextTask) -> None:
        super().__init__(task)
        self.pictures = task.pictures.judge()
        self._tokens: dict[CaptionedImages, dict[str, Tensor]] = {}

    def quick(self, encoder: ImageText) -> Numbers:
        """The exact loss and beta; recall at 1, 5 and 10 both ways of validation pictures."""
        return self._numbers(encoder, ["validation"])[0]

    def thorough(self, encoder: ImageText) -> tuple[Numbers, Arrays]:
        """The same, and of test pictures with `test_` before the name; who was answered rightly."""
        return self._numbers(encoder, list(SPLITS))

    def _numbers(self, encoder: ImageText, splits: Sequence[str]) -> tuple[Numbers, Arrays]:
        numbers, answers = self.losses(encoder), Arrays()
        for split, part in self.task.held.items():
            if split not in splits:
                continue
            prefix = SPLITS[split]
            (z_i, z_t), pairs = self.embed(encoder, part), distinct(part)[1]
            ways = ("i2t", z_i, z_t, pairs), ("t2i", z_t, z_i, pairs.flip(1))
            recalls, shares = [], []
            for way, queries, candidates, own in ways:
                right = nearest(queries, candidates, own).right
                shares.append(torch.zeros(len(right), dtype=torch.double))
                for k in RECALL_AT:
                    if k == 1 or k < len(candidates):
                        answer = right[:, :k].any(1).cpu()
                        recalls.append(answer.double().mean().item())
                        numbers[f"{prefix}{way}_r{k}"] = recalls[-1]
                        answers[f"right_{prefix}{way}_r{k}"] = answer.numpy()
                        shares[-1] += answer
            numbers[f"{prefix}mean_recall"] = sum(recalls) / len(recalls)
            # For each picture its own recalls and those of its captions, weighted so that the mean
            # over pictures is `mean_recall`.
            pairs = torch.unique(pairs, dim=0)
            each = shares[1] / pairs[:, 1].bincount() * len(shares[0]) / len(shares[1])
            shares[0].index_add_(0, pairs[:, 0], each[pairs[:, 1]])
            answers[f"right_{prefix}mean_recall"] = (shares[0] / len(recalls)).numpy()
        # names the data: only runs on equal data are compared picture by picture
        answers["test_labels"] = np.frombuffer(self.task.fingerprint.encode(), np.uint8)
        return numbers, answers

    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """The numbers of the towers before their first step."""
        kept = (*(f"_r{k}" for k in RECALL_AT), "mean_recall", "global_loss")
        return {f"untrained_{n}": v for n, v in line.items() if n.endswith(kept)}

    def losses(self, encoder: ImageText) -> Numbers:
        """`global_loss` on fixed training pairs at the first beta, `embedding_variance`, `beta`."""
        task, chosen = self.task, self.sample()
        z_image = self._images(encoder, task.train.images.fetch(chosen)).double()
        chosen = chosen.to(task.device)
        z_text = self._texts(encoder, task.caption(task.begin[chosen])).double()
        known = None if task.known is None else task.known[chosen]
        loss = global_loss(
            z_image, z_text, task.config.beta, views="paired", index=chosen, known=known
        )
        return {
            "global_loss": float(loss),
            "embedding_variance": variance(z_image),
            "beta": float(encoder.beta().detach()),
        }

    def embed(self, encoder: ImageText, part: CaptionedImages) -> tuple[Tensor, Tensor]:
        """Pictures [I,D] and distinct captions [T,D], of unit length."""
        if part not in self._tokens:
            tokens, _ = tokens_of(self.task.config, distinct(part)[0])
            self._tokens[part] = {n: t.to(self.task.device) for n, t in tokens.items()}
        both = self._images(encoder, part.images), self._texts(encoder, self._tokens[part])
        return normalize(both[0], dim=-1), normalize(both[1], dim=-1)

    def previews(self) -> Arrays:
        """A few training pictures and their augmentations."""
        return self.pictures.previews()

    def artifacts(self, encoder: ImageText, loss_fn: ContrastiveLoss) -> Arrays:
        """Examples of what is retrieved both ways, and what chains hold."""
        train, held = self.task.train, self.task.held
        some = range(len(train.captions))[:MOST_SHOWN]
        part = held.get("test") or held.get("validation") or train.take(some)
        texts, pairs = distinct(part)
        z_i, z_t = self.embed(encoder, part)
        pictures, captions = evenly(len(part.images), GALLERY), evenly(len(texts), GALLERY)
        answers = nearest(z_i, z_t, pairs, pictures), nearest(z_t, z_i, pairs.flip(1), captions)
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
            arrays[f"{name}_right"] = answer.right[:, :SHOWN].cpu().numpy()
            arrays[f"{name}_similarity"] = answer.similarity[:, :SHOWN].cpu().numpy()
        return arrays | self._chains(loss_fn)

    def _chains(self, loss_fn: ContrastiveLoss) -> Arrays:
        """Training pictures and captions with the negatives their chains hold now."""
        train = self.task.train
        anchors = evenly(len(train.images), GALLERY)
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
        return self.pictures.embed(encoder, encoder.image, images, ENCODE_BATCH)

    def _texts(self, encoder: ImageText, tokens: dict[str, Tensor]) -> Tensor:
        with self.judged(encoder):
            return Chunked(encoder.text, ENCODE_BATCH)(tokens).float()  # type: ignore[no-any-return]


class Answers(NamedTuple):
    """The nearest candidates of some queries, nearest first, and which are right."""

    found: Tensor  # [Q,k] places of the candidates
    similarity: Tensor  # [Q,k]
    right: Tensor  # [Q,k] bool


def nearest(
    queries: Tensor, candidates: Tensor, pairs: Tensor, chosen: Tensor | None = None
) -> Answers:
    """The nearest candidates of every query, or of the `chosen` ones.

    Args:
        queries: [N,D] of unit length.
        candidates: [M,D] of unit length.
        pairs: (query, candidate) of everything that belongs together, [P,2].
        chosen: [Q] places of queries.

    Example:
        >>> images, captions = torch.eye(3), torch.eye(3)[[1, 0]]
        >>> nearest(images, captions, torch.tensor([[0, 1], [1, 0], [2, 0]])).right[:, 0].tolist()
        [True, True, True]
    """
    rows = torch.arange(len(queries)) if chosen is None else chosen
    together = (pairs[:, 0] * len(candidates) + pairs[:, 1]).to(queries.device)
    k, parts = min(max(RECALL_AT), len(candidates)), []
    for some in torch.split(rows.to(queries.device), QUERIES_AT_A_TIME):
        near = (queries[some] @ candidates.T).topk(k)
        right = torch.isin(some[:, None] * len(candidates) + near.indices, together)
        parts.append((near.indices, near.values, right))
    return Answers(*(torch.cat(column) for column in zip(*parts, strict=True)))


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
