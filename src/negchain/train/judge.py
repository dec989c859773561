"""What a run is judged by: probes, neighbours, the exact loss, and the pictures of its report.

Shapes: `M` images, `F` features, `P` points of the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negchain import draws
from negchain.augment import Augmentation, Images
from negchain.data import DataBundle, ImageSet
from negchain.encoders import Encoder
from negchain.evaluation import (
    embed_all,
    knn_accuracy,
    linear_probe,
    linear_probe_paper,
    nearest_neighbours,
)
from negchain.exact import global_loss
from negchain.losses import ContrastiveLoss
from negchain.train.config import TrainConfig

ENCODE_BATCH = 512
GALLERY = 12  # test images with neighbours, and anchors with negatives
NEIGHBOURS = 6
MAP_POINTS = 1500


@dataclass
class Judge:
    """Evaluates an encoder on a data set; leaves it in training mode.

    Args:
        config: the run's settings.
        data: images and labels.
        augment: the run's augmentation.
        device: where to encode.
        autocast: dtype of the encoder's arithmetic, None for its own.
    """

    config: TrainConfig
    data: DataBundle
    augment: Augmentation
    device: torch.device
    autocast: torch.dtype | None

    def quick(self, encoder: Encoder) -> dict[str, float]:
        """`knn1` (where there are labels) and the exact `global_loss` of the fixed probe set."""
        result = {"global_loss": self.exact_loss(encoder)}
        if self.data.labelled:
            features = self._features(encoder)
            result["knn1"] = knn_accuracy(*features)
            result["probe"] = linear_probe(*features).accuracy
        return result

    def thorough(self, encoder: Encoder) -> dict[str, float]:
        """Everything: both probes and both metrics of the nearest neighbour."""
        result = {"global_loss": self.exact_loss(encoder)}
        if self.data.labelled:
            features = self._features(encoder)
            probe = linear_probe(*features)
            result |= {
                "knn1": knn_accuracy(*features),
                "knn1_euclidean": knn_accuracy(*features, metric="euclidean"),
                "probe": probe.accuracy,
                "probe_l2": probe.l2,
                "probe_paper": linear_probe_paper(*features),
            }
        return result

    def exact_loss(self, encoder: Encoder) -> float:
        """Eq. (1), exact, over two fixed views of a fixed sample of the training images.

        Always eq. (1), whatever the method's own denominator: so that methods can be compared.
        """
        count = min(self.config.probe_samples, len(self.data.pretrain))
        generator = torch.Generator().manual_seed(self.config.seed)
        chosen = torch.randperm(len(self.data.pretrain), generator=generator)[:count].sort().values
        views = []
        for view in range(2):
            sample = _Augmented(self, chosen, view)
            views.append(self._embed(encoder, encoder, sample, plain=sample.pixels))
        return float(global_loss(views[0].double(), views[1].double(), self.config.beta))

    def embed(self, encoder: Encoder, images: ImageSet) -> Tensor:
        """Features of a whole set, [M, F] float32."""
        return self._embed(encoder, encoder.features, images, plain=self.augment.plain)

    def artifacts(
        self, encoder: Encoder, loss_fn: ContrastiveLoss | None
    ) -> dict[str, NDArray[np.generic]]:
        """Arrays for the report's galleries and its map; see `negchain.report`."""
        shown = self.data.test if self.data.test is not None else self.data.pretrain
        base = self.data.train if self.data.train is not None else self.data.pretrain
        found: dict[str, Tensor] = {}
        base_x, shown_x = self.embed(encoder, base), self.embed(encoder, shown)
        found |= self._neighbours(base, base_x, shown, shown_x)
        found |= self._map(shown, shown_x)
        if loss_fn is not None:
            found |= self._chains(encoder, loss_fn)
        return {name: value.cpu().numpy() for name, value in found.items()}

    def _neighbours(
        self, base: ImageSet, base_x: Tensor, shown: ImageSet, shown_x: Tensor
    ) -> dict[str, Tensor]:
        queries = torch.linspace(0, len(shown) - 1, min(GALLERY, len(shown))).long()
        same = base is shown  # then the nearest is the image itself
        count = min(NEIGHBOURS + same, len(base))
        nearest = nearest_neighbours(base_x, shown_x[queries.to(shown_x.device)], k=count).cpu()
        nearest = nearest[:, int(same) :]
        unit = torch.nn.functional.normalize
        similar = torch.einsum(
            "qd,qkd->qk",
            unit(shown_x[queries.to(shown_x.device)], dim=-1),
            unit(base_x[nearest.to(base_x.device)], dim=-1),
        )
        found = {
            "neighbour_queries": shown.fetch(queries),
            "neighbour_images": torch.stack([base.fetch(row) for row in nearest]),
            "neighbour_similarities": similar,
        }
        if shown.labels is not None and base.labels is not None:
            found["neighbour_query_labels"] = shown.labels[queries]
            found["neighbour_labels"] = base.labels[nearest]
        return found

    def _map(self, shown: ImageSet, shown_x: Tensor) -> dict[str, Tensor]:
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE

        step = max(1, -(-len(shown) // MAP_POINTS))
        chosen = torch.arange(0, len(shown), step)
        x = torch.nn.functional.normalize(shown_x[chosen.to(shown_x.device)], dim=-1).cpu().numpy()
        if np.ptp(x, axis=0).max() < 1e-6:  # a collapsed encoder: every image at one point
            x = np.zeros((len(x), 2))
        elif len(x) > 40:
            x = PCA(n_components=min(50, *x.shape), random_state=0).fit_transform(x)
            x = TSNE(
                perplexity=min(30, (len(x) - 1) / 3), init="pca", random_state=0
            ).fit_transform(x)
        else:
            x = PCA(n_components=2, random_state=0).fit_transform(x)
        labels = torch.full((len(chosen),), -1) if shown.labels is None else shown.labels[chosen]
        return {
            "map_xy": torch.from_numpy(x).float(),
            "map_labels": labels,
            "map_thumbs": shown.fetch(chosen),
        }

    def _chains(self, encoder: Encoder, loss_fn: ContrastiveLoss) -> dict[str, Tensor]:
        """Training images and the negatives their chains hold now, where the loss has chains."""
        images, stored = self.data.pretrain, loss_fn.ids_per_item
        anchors = torch.linspace(0, len(images) - 1, min(GALLERY * 2, len(images))).long()
        first = torch.zeros_like(anchors)
        found = loss_fn.held(anchors, (first, first) if stored > 1 else None)
        if not found:
            return {}
        held = found[0].cpu() // stored
        both = self._embed(
            encoder, encoder, images.fetch(torch.cat([anchors, held])), plain=self.augment.plain
        )
        unit = torch.nn.functional.normalize(both, dim=-1)
        return {
            "chain_anchors": images.fetch(anchors),
            "chain_negatives": images.fetch(held),
            "chain_similarities": (unit[: len(anchors)] * unit[len(anchors) :]).sum(1),
        }

    def _features(self, encoder: Encoder) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        train, test = self.data.train, self.data.test
        assert train is not None and test is not None
        assert train.labels is not None and test.labels is not None
        x = self.embed(encoder, train), self.embed(encoder, test)
        return x[0], train.labels.to(x[0].device), x[1], test.labels.to(x[1].device)

    def _embed(
        self,
        encoder: Encoder,
        encode: Callable[[Tensor], Tensor],
        images: ImageSet | Tensor | _Augmented,
        plain: Callable[[Tensor], Tensor],
    ) -> Tensor:
        encoder.eval()
        try:
            return embed_all(
                encode,
                images,
                plain=plain,
                batch_size=ENCODE_BATCH,
                device=self.device,
                autocast=self.autocast,
            )
        finally:
            encoder.train()


class _Augmented:
    """A fixed view of chosen images, batch after batch in order."""

    def __init__(self, judge: Judge, chosen: Tensor, view: int) -> None:
        self.judge, self.chosen, self.view = judge, chosen, view
        self._rows = chosen[:0]

    def __len__(self) -> int:
        return len(self.chosen)

    def fetch(self, positions: Tensor) -> Any:  # Images
        self._rows = positions
        return self.judge.data.pretrain.pictures(self.chosen[positions])

    def pixels(self, images: Images) -> Tensor:
        """Augment the images fetched last."""
        judge = self.judge
        step = torch.tensor(self.view, device=images.device)
        rows = self._rows.to(images.device)
        u = draws.uniform(
            judge.config.seed,
            step,
            draws.STREAM_PROBE,
            rows,
            judge.augment.num_uniforms,
            torch.float32,
        )
        return judge.augment(images, u)
