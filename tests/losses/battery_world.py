"""Frozen embeddings to run a loss on, and the exact gradient it should have in the long run.

The embeddings are made to betray mistakes: clusters (hard negatives), unequal lengths before
normalisation, towers that differ, keys that are popular and keys that are nobody's positive.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from oracles import Row, corpus_rows, paired_rows, shared_rows, target

Order = Literal["epochs", "fresh", "repeats"]


@dataclass(frozen=True, eq=False)
class World:
    """Items (or pairs of an anchor and a key) with frozen embeddings in one or more views."""

    views: Literal["shared", "paired"]
    table: Tensor  # [T,D] raw embeddings, float64: anchors, then keys of a second tower
    pairs: Tensor  # [P,2] anchor and key of every labelled pair
    num_anchors: int
    num_keys: int | None  # None: as many as anchors, one to one
    num_views: int  # of an anchor and of a key
    known: Tensor | None  # [anchors,L] further positives of each anchor, padded with -1

    def address(self, tower: str, ids: Tensor, view: Tensor) -> Tensor:
        """Where the embeddings of these items in these views are in the table."""
        second = self.views == "paired" and tower == "keys"
        return ids * self.num_views + view + (self.num_anchors * self.num_views if second else 0)

    def rows(self, symmetric: bool = True, copies: float = 1.0) -> list[Row]:
        """What the oracle adds up; `copies` as in `oracles.shared_rows`."""
        known = None if self.known is None else [set(row) for row in self.known.tolist()]
        if self.views == "shared":
            return shared_rows(
                self.num_anchors,
                num_views=self.num_views,
                copies=copies,
                symmetric=symmetric,
                known=known,
            )
        both = (self.num_views, self.num_views)
        if self.num_keys is None:
            return paired_rows(self.num_anchors, views=both, symmetric=symmetric, known=known)
        pairs = [(int(i), int(k)) for i, k in self.pairs]
        return corpus_rows(pairs, self.num_anchors, self.num_keys, views=both, known=known)

    @functools.cached_property
    def norm(self) -> np.ndarray:
        """[T,1] lengths of the raw embeddings."""
        return self.table.norm(dim=1, keepdim=True).numpy()

    @functools.lru_cache(maxsize=4)  # noqa: B019 worlds are few, and live as long as the tests
    def targets(
        self, beta: float, symmetric: bool, per_view: bool
    ) -> list[tuple[int, int, np.ndarray, np.ndarray, Row]]:
        """Per row (side, chain, ids of its negatives, p, the row).

        `per_view`: a chain for each view of each item, whose ids name items and views.
        """
        per_item = self.num_views if per_view else 1
        offset, found = self.num_anchors * self.num_views, []
        for row in self.rows(symmetric):
            second = self.views == "paired" and row.anchor >= offset
            chain = (row.anchor - offset * second) // (self.num_views // per_item)
            first = offset if self.views == "paired" and not second else 0
            ids = (np.array(row.negatives) - first) // (self.num_views // per_item)
            p = target(row, self.table.numpy(), beta)
            found.append((int(second), chain, ids, p, row))
        return found


@functools.cache
def make_world(
    views: Literal["shared", "paired"] = "shared",
    size: int = 48,
    num_keys: int | None = None,
    num_views: int = 1,
    spread: float = 0.25,
    num_known: int = 0,
    popularity: float = 0.0,
    dim: int = 5,
    seed: int = 0,
) -> World:
    """A world of `size` anchors.

    Args:
        views: one tower or two.
        size: number of anchors.
        num_keys: size of a corpus; None: a key for each anchor.
        num_views: views of each anchor and key.
        spread: how far the views of an item, or the two of a pair, lie apart.
        num_known: further positives per anchor, drawn at random: not mutual.
        popularity: how unequally the keys of a corpus are somebody's positive; keys of the last
            quarter are nobody's. 0: anchors share them evenly.
        dim: D.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    keys = size if num_keys is None else num_keys
    if num_keys is None:
        pairs = np.stack([np.arange(size)] * 2, 1)
    else:
        wanted = np.arange(1, 1 + 3 * keys // 4) ** -popularity
        chosen = rng.choice(len(wanted), size=size, p=wanted / wanted.sum())
        pairs = np.stack([np.arange(size), chosen], 1)
    centres = rng.normal(size=(6, dim))
    label = np.sort(rng.choice(6, size=max(size, keys), p=np.array([7, 5, 3, 2, 2, 1]) / 20))

    def embed(items: np.ndarray) -> np.ndarray:  # [n,D] -> [n * views, D]
        z = np.repeat(items, num_views, 0)
        noise = rng.normal(size=z.shape) * (spread if num_views > 1 else 0.0)
        return (z + noise) * np.exp(0.5 * rng.normal(size=(len(z), 1)))

    base = centres[label] + 0.6 * rng.normal(size=(max(size, keys), dim))
    table = embed(base[:size])
    if views == "paired":
        table = embed(base[pairs[:, 1]] + 0.3 * rng.normal(size=(size, dim)))
        table = np.concatenate([table, embed(base[:keys])])
    known = None
    if num_known:
        known = torch.from_numpy(rng.integers(0, keys, size=(size, num_known)))
        known[::3, -1] = -1
    return World(
        views,
        torch.from_numpy(table),
        torch.from_numpy(pairs),
        size,
        num_keys,
        num_views,
        known,
    )


def batches(
    num_pairs: int, batch_size: int, order: Order, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Numbers of the pairs of each batch.

    "epochs": shuffled, split, the odd last batch kept. "fresh": a new set every step. "repeats":
    drawn with replacement. In all of them every pair weighs the same in the mean over steps.
    """
    done = 0
    while done < steps:
        if order == "repeats":
            yield torch.randint(num_pairs, (batch_size,), generator=generator)
            done += 1
            continue
        parts = torch.randperm(num_pairs, generator=generator).split(batch_size)
        parts = parts[: 1 if order == "fresh" else steps - done]
        yield from parts
        done += len(parts)
