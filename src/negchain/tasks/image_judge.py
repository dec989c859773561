"""What a run is judged by: probes, neighbours, the exact loss, and the pictures of its report.

Shapes: `M` images, `Q` test images, `F` features, `P` points of the map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, normalize

from negchain import rng
from negchain.augment import Uniforms, finite_views
from negchain.data import ImageSet
from negchain.encoders import Encoder
from negchain.evaluation import (
    ProbeResult,
    embed_all,
    few_label_probe,
    linear_probe,
    linear_probe_paper,
)
from negchain.exact import global_loss
from negchain.losses import ContrastiveLoss
from negchain.neighbours import in_top, knn_accuracy, knn_votes, nearest_neighbours
from negchain.tasks.task import Arrays, Judge, Numbers, evenly, variance

if TYPE_CHECKING:
    from negchain.tasks.images import ImageTask

ENCODE_BATCH = 512
GALLERY = 12  # test images with neighbours, and anchors with negatives
NEIGHBOURS = 6
MAP_POINTS = 1500
MAP_STEPS = 1000  # of t-SNE
VIEWED, VIEWS = 6, 6  # training images shown augmented, and how many times
KNN = (20, 200)  # the usual k, where there are as many training images
FEW_LABELS = {"probe_1pct": 0.01, "probe_10pct": 0.1}
TOP5_FROM = 10  # classes; of fewer, five guesses are half of them
VALIDATED_FROM = 50
"""Validation pictures from which they choose an encoder: one of fewer is above two points."""
PIXEL_SIDE = 16
"""Raw pixels are averaged to at most this side. That makes as many numbers as a small encoder has
features, so that the probe takes as long. (Neighbours of tiny images are a common baseline.)"""

PROBE_RATE = 0.5  # of the online probe's steps; embeddings have unit length, times SHARPNESS
SHARPNESS = 10.0
PROBE_MEMORY = 0.95  # of its running accuracy

Features = tuple[Tensor, Tensor, Tensor, Tensor]  # train_x, train_y, test_x, test_y


class ImageJudge(Judge):
    """Evaluates an encoder on a data set."""

    task: ImageTask
    best_by = "probe_validation"  # on training pictures that the fit leaves out, never on test ones

    def __init__(self, task: ImageTask) -> None:
        super().__init__(task)
        self.config, self.data, self.augment = task.config, task.data, task.augment

    def quick(self, encoder: Encoder) -> Numbers:
        """The exact `global_loss`, `embedding_variance`; with labels `knn1` and `probe`.

        With labels for enough pictures, `probe_validation` too.
        """
        result = self.losses(encoder)
        if self.data.labelled:
            result |= _accuracies(self._features(encoder))
        return result

    def before(self, encoder: Encoder) -> tuple[Numbers, Arrays]:
        """What a result must beat: `quick` of this encoder, raw pixels, and chance; no answers.

        `chance` is the test accuracy of the best constant answer: the commonest class among the
        test images, whether or not it is the commonest to train on.
        """
        result = self.losses(encoder)
        if not self.data.labelled:
            return result, {}

        def both(images: Tensor) -> Tensor:  # in one pass: a set on disk is decoded once
            side = min(PIXEL_SIDE, *images.shape[-2:])
            pixels = adaptive_avg_pool2d(images.float(), side).flatten(1)
            return torch.cat([encoder.features(images).float(), pixels], 1)

        train_x, train_y, test_x, test_y = self._features(encoder, both)
        width = encoder.feature_dim
        result |= _accuracies((train_x[:, :width], train_y, test_x[:, :width], test_y))
        pixels = _accuracies((train_x[:, width:], train_y, test_x[:, width:], test_y))
        result |= {f"pixels_{name}": pixels[name] for name in ("knn1", "probe")}
        chance = (test_y == test_y.mode().values).double().mean().item()
        return {**result, "chance": chance}, {}

    def thorough(self, encoder: Encoder) -> tuple[Numbers, Arrays]:
        """Every number, and what was answered for each test image (for intervals and confusions).

        The arrays: `test_labels`, `probe_predicted` [Q] int64, `right_knn1`, `right_knn20`,
        `right_probe` [Q] bool.
        """
        numbers, answers = self.losses(encoder), dict[str, Tensor]()
        if self.data.labelled:
            found, answers = _all_accuracies(self._features(encoder))
            numbers |= found
        return numbers, {name: value.cpu().numpy() for name, value in answers.items()}

    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """The numbers of raw pixels, of chance, and of the encoder before its first step."""
        kept = {k: line[k] for k in ("pixels_knn1", "pixels_probe", "chance") if k in line}
        named = ("knn1", "probe", "probe_validation", "global_loss")
        return kept | {f"untrained_{k}": line[k] for k in named if k in line}

    def losses(self, encoder: Encoder) -> Numbers:
        """`global_loss` and `embedding_variance` on a fixed sample of the training images.

        The loss is eq. (1) of two augmented views, whatever the method's denominator and keys, so
        that methods can be compared. Where a method's keys are not augmented, `own_loss` is the
        loss of one view against them: what the method trains. It can fall while the other does not.
        """
        chosen, device = self.sample(), self.task.device

        def embedded(view: int, *, plain: bool = False) -> Tensor:
            found, step = [], torch.tensor(view, device=device)
            for first in range(0, len(chosen), ENCODE_BATCH):
                some = chosen[first : first + ENCODE_BATCH]
                images = self.data.pretrain.pictures(some).to(device)
                drawn = Uniforms(self.config.seed, step, rng.FOR_PROBE, first)
                pixels = self.augment.plain(images) if plain else self.augment(images, drawn)
                found.append(encoder(pixels).float().double())
            return torch.cat(found)

        with self.judged(encoder):
            z_a, z_b = embedded(0), embedded(1)
            keys = embedded(1, plain=True) if self.task.plain_keys else None
        found = {"global_loss": float(global_loss(z_a, z_b, self.config.beta))}
        if keys is not None:
            own = global_loss(z_a, keys, self.config.beta, views="paired", symmetric=False)
            found["own_loss"] = float(own)
        return found | {"embedding_variance": variance(z_a)}

    def artifacts(self, encoder: Encoder, loss_fn: ContrastiveLoss) -> Arrays:
        """Arrays for the report's galleries and its map; see `negchain.report`."""
        shown = self.data.test if self.data.test is not None else self.data.pretrain
        base = self.data.train if self.data.train is not None else self.data.pretrain
        base_x, shown_x = (self.embed(encoder, encoder.features, part) for part in (base, shown))
        found = self._neighbours(base, base_x, shown, shown_x)
        placed, method = self._map(shown, shown_x)
        found |= placed | self._chains(encoder, loss_fn)
        arrays = {name: value.cpu().numpy() for name, value in found.items()}
        return {**arrays, **self.previews(), "map_method": np.array(method)}

    def previews(self) -> Arrays:
        """A few training images and their augmentations, before any normalisation."""
        images = self.data.pretrain
        chosen = evenly(len(images), VIEWED)
        augmented = finite_views(images.pictures(chosen), self.augment, VIEWS, self.config.seed)
        return {
            "views_original": images.fetch(chosen).numpy(), "views_augmented": augmented.numpy()
        }  # fmt: skip

    def _neighbours(
        self, base: ImageSet, base_x: Tensor, shown: ImageSet, shown_x: Tensor
    ) -> dict[str, Tensor]:
        queries = evenly(len(shown), GALLERY)
        queries_x = shown_x[queries.to(shown_x.device)]
        same = base is shown  # then a query is among its nearest, and copies may come before it
        count = min(NEIGHBOURS + same, len(base))
        nearest = nearest_neighbours(base_x, queries_x, k=count).cpu()
        if same:
            itself_last = (nearest == queries[:, None]).int().argsort(dim=1, stable=True)
            nearest = nearest.gather(1, itself_last)[:, :-1]
        # not cosine_similarity: it makes nought of features that `nearest_neighbours` tells apart
        units = normalize(queries_x, dim=-1), normalize(base_x[nearest.to(base_x.device)], dim=-1)
        found = {
            "neighbour_queries": shown.fetch(queries),
            "neighbour_images": torch.stack([base.fetch(row) for row in nearest]),
            "neighbour_similarities": torch.einsum("qd,qkd->qk", *units),
        }
        if shown.labels is not None and base.labels is not None:
            found["neighbour_query_labels"] = shown.labels[queries]
            found["neighbour_labels"] = base.labels[nearest]
        return found

    def _map(self, shown: ImageSet, shown_x: Tensor) -> tuple[dict[str, Tensor], str]:
        """Images in two dimensions, and by which method."""
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE

        step = max(1, -(-len(shown) // MAP_POINTS))
        chosen = torch.arange(0, len(shown), step)
        x = normalize(shown_x[chosen.to(shown_x.device)], dim=-1).cpu().numpy()
        method = "PCA"
        if np.ptp(x, axis=0).max() < 1e-6:  # a collapsed encoder: every image at one point
            x = np.zeros((len(x), 2))
        elif len(x) > 40:
            method = "t-SNE"
            x = PCA(n_components=min(50, *x.shape), random_state=0).fit_transform(x)
            near = min(30, (len(x) - 1) / 3)
            drawn = TSNE(perplexity=near, init="pca", random_state=0, max_iter=MAP_STEPS)
            x = drawn.fit_transform(x)
        else:
            x = PCA(n_components=2, random_state=0).fit_transform(x)
        labels = torch.full((len(chosen),), -1) if shown.labels is None else shown.labels[chosen]
        return {
            "map_xy": torch.from_numpy(x).float(),
            "map_labels": labels,
            "map_thumbs": shown.fetch(chosen),
        }, method

    def _chains(self, encoder: Encoder, loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
        """Training images and the negatives their chains hold now, where the loss has chains."""
        images, stored = self.data.pretrain, loss_fn.ids_per_item
        anchors = evenly(len(images), 2 * GALLERY)
        first = torch.zeros_like(anchors)
        found = loss_fn.held(anchors, (first, first) if stored > 1 else None)
        if not found:
            return {}
        held = found[0].cpu() // stored
        pairs = images.fetch(torch.cat([anchors, held]))
        anchors_x, held_x = normalize(self.embed(encoder, encoder, pairs), dim=-1).chunk(2)
        return {
            "chain_anchors": images.fetch(anchors),
            "chain_negatives": images.fetch(held),
            "chain_similarities": (anchors_x * held_x).sum(1),
        }

    def _features(
        self, encoder: Encoder, encode: Callable[[Tensor], Tensor] | None = None
    ) -> Features:
        train, test = self.data.train, self.data.test
        assert train is not None and test is not None
        assert train.labels is not None and test.labels is not None
        x, y = (self.embed(encoder, encode or encoder.features, part) for part in (train, test))
        return x, train.labels.to(x.device), y, test.labels.to(y.device)

    def embed(
        self,
        encoder: nn.Module,
        encode: Callable[[Tensor], Tensor],
        images: ImageSet | Tensor,
        batch_size: int = ENCODE_BATCH,
    ) -> Tensor:
        """What `encode`, of this encoder, makes of all images: [M, F] float32."""
        plain, device = self.augment.plain, self.task.device
        with self.judged(encoder):
            return embed_all(encode, images, plain=plain, batch_size=batch_size, device=device)


def _accuracies(features: Features) -> dict[str, float]:
    probe = linear_probe(*features)
    return {"knn1": knn_accuracy(*features), "probe": probe.accuracy, **_validated(probe)}


def _validated(probe: ProbeResult) -> dict[str, float]:
    """What encoders are chosen by, where there are pictures enough."""
    return {"probe_validation": probe.validation} if probe.held_out >= VALIDATED_FROM else {}


def _all_accuracies(features: Features) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Every accuracy of the features, and the answers behind them."""
    train_x, train_y, test_x, test_y = features
    classes = torch.unique(train_y)
    votes = knn_votes(train_x, train_y, test_x, ks=[1, *(k for k in KNN if k <= len(train_x))])
    probe = linear_probe(*features)
    right = {f"knn{k}": in_top(votes[k], classes, test_y, 1) for k in votes}
    numbers = {name: answers.double().mean().item() for name, answers in right.items()}
    if len(classes) >= TOP5_FROM:
        top5 = {f"knn{k}_top5": in_top(votes[k], classes, test_y, 5) for k in votes if k > 1}
        numbers |= {name: answers.double().mean().item() for name, answers in top5.items()}
        numbers["probe_top5"] = probe.top5
    numbers |= {
        "knn1_euclidean": knn_accuracy(*features, metric="euclidean"),
        "probe": probe.accuracy,
        "probe_l2": probe.l2,
        "probe_paper": linear_probe_paper(*features),
        "feature_spread": (train_x - train_x.mean(0)).norm(dim=1).mean().item(),
        **_validated(probe),
    }
    numbers |= {name: few_label_probe(*features, share=s) for name, s in FEW_LABELS.items()}
    predicted = probe.predicted.to(test_y.device)
    right["probe"] = predicted == test_y
    answers = {f"right_{name}": answers for name, answers in right.items()}
    return numbers, answers | {"test_labels": test_y, "probe_predicted": predicted}


class OnlineProbe:
    """A linear classifier on detached embeddings, trained beside the encoder: a number for the log.

    It classifies each batch before it learns from it; `accuracy` is a running mean.

    Everything stays on the device and has a fixed shape, so a step with it can be a CUDA graph.

    Args:
        labels: [M] of all training images; below 0 where there is none.
        dim: D.

    Example:
        >>> probe = OnlineProbe(torch.tensor([0, 1]).repeat(50), dim=2)
        >>> for step in range(50):
        ...     index = torch.arange(8) + step
        ...     probe.learn(torch.eye(2)[index % 2], index)
        >>> float(probe.accuracy) > 0.9
        True
    """

    def __init__(self, labels: Tensor, dim: int) -> None:
        self.labels = labels
        # [C, D + 1]: the last column is the bias
        self.weight = torch.zeros(int(labels.max()) + 1, dim + 1, device=labels.device)
        self.mean = torch.zeros(2, device=labels.device)  # right answers, answers

    def learn(self, embeddings: Tensor, index: Tensor) -> None:
        """Answer for the images at `index` [B] by their embeddings [B,D], then take a step."""
        with torch.no_grad():
            z = SHARPNESS * normalize(embeddings.float(), dim=-1)
            z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
            labels = self.labels[index]
            labelled = (labels >= 0).float()
            logits = z @ self.weight.T
            right = (logits.argmax(1) == labels).float() * labelled
            now = torch.stack([right.sum(), labelled.sum()])
            self.mean.copy_(torch.where(now[1] > 0, PROBE_MEMORY * self.mean + now, self.mean))
            classes = torch.arange(len(self.weight), device=labels.device)
            error = logits.softmax(1) - (labels[:, None] == classes).float()
            error *= (labelled / labelled.sum().clamp_min(1))[:, None]
            self.weight -= PROBE_RATE * (error.T @ z)

    @property
    def accuracy(self) -> Tensor:
        """The share of right answers, recent batches counting most."""
        return self.mean[0] / self.mean[1].clamp_min(1)
