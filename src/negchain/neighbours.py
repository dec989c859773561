"""Nearest neighbours among frozen features: which they are, how they vote, and near-duplicates.

Shapes: M training rows, Q query rows, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.printable import counted

Metric = Literal["cosine", "euclidean"]

KNN_TEMPERATURE = 0.07
"""Of the weighted votes: Wu et al., "Unsupervised feature learning via non-parametric instance
discrimination" (2018), and nearly every self-supervised paper since."""


def nearest_neighbours(
    train_x: Tensor, query_x: Tensor, *, k: int, metric: Metric = "cosine", chunk: int = 1024
) -> Tensor:
    """Positions of the k nearest training rows of each query, nearest first: -> [Q,k] int64.

    All pairs, `chunk` queries at once, in float64: |q|^2 - 2 q.t + |t|^2 cancels badly in float32.

    Example:
        >>> train = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> nearest_neighbours(train, torch.tensor([[3.0, 1.0]]), k=2).tolist()
        [[1, 0]]
    """
    check_features(train_x, query_x)
    return _nearest(train_x, query_x, k, metric, chunk)[1]


def _nearest(
    train_x: Tensor, query_x: Tensor, k: int, metric: Metric, chunk: int
) -> tuple[Tensor, Tensor]:
    """Cosines (or q.t - |t|^2 / 2) of the k nearest rows, [Q,k] float64, and their positions."""
    cosine, train, found = metric == "cosine", train_x.double(), []
    if cosine:
        train = F.normalize(train)
    squares = train.square().sum(1)
    for rows in torch.split(query_x, chunk):
        closeness = (F.normalize(rows.double()) if cosine else rows.double()) @ train.T
        if not cosine:
            closeness -= squares / 2  # |q|^2 is the same for all training rows
        found.append(closeness.topk(k))
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def knn_votes(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, *, ks: Sequence[int], chunk: int = 1024
) -> dict[int, Tensor]:
    """For each k the votes of the k nearest rows, weighted by exp(cosine / 0.07): [Q,C].

    This is the k-NN other papers report. C runs over the sorted classes of `train_y`; a row's votes
    sum to one. All k share one search.

    Example:
        >>> x, y = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.1]]), torch.tensor([7, 9, 9])
        >>> knn_votes(x, y, torch.tensor([[0.1, 2.0]]), ks=(1, 3))[3].argmax(1).tolist()
        [0]
    """
    check_features(train_x, test_x)
    cosines, nearest = _nearest(train_x, test_x, max(ks), "cosine", chunk)
    classes, labels = torch.unique(train_y.to(train_x.device), return_inverse=True)
    votes = {}
    for k in ks:
        weights = (cosines[:, :k] / KNN_TEMPERATURE).softmax(1)
        votes[k] = weights.new_zeros(len(weights), len(classes))
        votes[k].scatter_add_(1, labels[nearest[:, :k]], weights)
    return votes


def in_top(scores: Tensor, classes: Tensor, truth: Tensor, k: int) -> Tensor:
    """Whether each row's class is among the k with the highest score: [Q] bool.

    Example:
        >>> scores = torch.tensor([[0.1, 0.7, 0.2]])
        >>> in_top(scores, torch.tensor([4, 5, 6]), torch.tensor([6]), 2).tolist()
        [True]
    """
    best = classes.to(scores.device)[scores.topk(min(k, scores.shape[1])).indices]
    return (best == truth.to(scores.device)[:, None]).any(1)


def knn_accuracy(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, *, metric: Metric = "cosine"
) -> float:
    """Share of test rows whose nearest training row is of their class.

    Example:
        >>> x, y = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([7, 9])
        >>> knn_accuracy(x, y, torch.tensor([[0.1, 2.0], [0.2, 3.0]]), torch.tensor([7, 9]))
        0.5
    """
    nearest = nearest_neighbours(train_x, test_x, k=1, metric=metric)[:, 0]
    return accuracy(train_y.to(nearest.device)[nearest], test_y)


def similar_pairs(
    x: Tensor, above: float, *, limit: int = 100_000, chunk: int = 1024
) -> tuple[Tensor, Tensor, int]:
    """Pairs of rows whose cosine is at least `above`, most similar first.

    Returns positions [P,2] (the smaller first), cosines [P], and how many pairs there are in all;
    of more than `limit` the most similar are kept.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1]])
        >>> pairs, cosine, count = similar_pairs(x, 0.9)
        >>> pairs.tolist(), count
        ([[0, 2]], 1)
    """
    check_features(x)
    if not -1 <= above <= 1:
        raise ValueError(f"a cosine lies between -1 and 1, got {above}; use e.g. 0.95")
    unit = F.normalize(x.double())
    least = above - torch.finfo(torch.float32).eps  # copies reach 1 up to rounding only
    count = 0
    pairs, scores = x.new_empty(0, 2, dtype=torch.long), x.new_empty(0, dtype=torch.double)
    for first in range(0, len(x), chunk):
        cosine = unit[first : first + chunk] @ unit[first:].T
        left, right = (cosine >= least).triu(1).nonzero(as_tuple=True)
        count += len(left)
        pairs = torch.cat([pairs, torch.stack([left, right], 1) + first])
        scores = torch.cat([scores, cosine[left, right]])
        order = scores.argsort(descending=True, stable=True)[:limit]
        pairs, scores = pairs[order], scores[order]
    return pairs, scores, count


def accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Share of rows where the two agree."""
    return (predicted.cpu() == truth.cpu()).double().mean().item()


def check_features(*features: Tensor) -> None:
    """Refuse features that are not finite."""
    for x in features:
        if not x.isfinite().all():
            bad = int((~x.isfinite()).sum())
            raise ValueError(
                f"features must be finite, got {counted(bad, 'value that is', 'values that are')} "
                "not; the encoder has diverged: lower the learning rate"
            )
