"""The global loss and its exact gradient: float64, loops over rows, nothing from the package.

Every layout (shared views, paired towers, a corpus of keys) is first written out as *rows*: who is
compared with whom, and how often each negative counts. One function then adds them up:

    s(a, z) = <u_a, u_z>,   u = e / |e|                          e: the raw embeddings, [T,D]
    Z_r     = sum_z count_z exp(beta s(a, z))                    over the negatives of row r
    L_r     = -beta s(a, y) + log Z_r                            denominator "negatives"
    L_r     = -beta s(a, y) + log(Z_r + exp(beta s(a, y)))       denominator "all"
    L       = sum_r share_r L_r

    dL_r    = c_r beta ( sum_z p_z ds(a, z) - ds(a, y) ),   p_z = count_z exp(beta s(a, z)) / Z_r
    c_r     = 1, or with "all" Z_r / (Z_r + exp(beta s(a, y)))
    ds(a, z)/de_a = (u_z - s u_a) / |e_a|,  and the same with a and z exchanged

    dL_r/dbeta = c_r ( sum_z p_z s(a, z) - s(a, y) )

An embedding is known by its *address*, its row in the table of all embeddings. The view v of item i
has the address i V + v; with two towers the keys come after the anchors.

Several views: an anchor is seen in each of its views equally often, and its negatives are all
views of all other items. `copies` is how many negatives of eq. (1) an item stands for (2 for two
views through one encoder): it changes the size of Z, never p.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

Known = Sequence[Collection[int]]  # per row of the data set: further positives, never negatives


class Row(NamedTuple):
    """One anchor in one view beside one view of its positive. A negative may be listed twice."""

    share: float  # of the row in the mean over rows
    anchor: int
    positive: int
    negatives: list[int]
    count: float  # how often each negative counts in the partition


class Exact(NamedTuple):
    """The loss and its gradient, in parts."""

    value: float
    positive: np.ndarray  # [T,D] from the similarities to the positives
    negative: np.ndarray  # [T,D] from the similarities to the negatives
    beta: float  # dL/dbeta

    @property
    def gradient(self) -> np.ndarray:
        return self.positive + self.negative


# ---------------------------------------------------------------- who is compared with whom


def view_pairs(num_views: int) -> list[tuple[int, int]]:
    """The two views an item is seen in: any two different ones, or its only one twice."""
    if num_views == 1:
        return [(0, 0)]
    return [(a, b) for a in range(num_views) for b in range(num_views) if a != b]


def shared_rows(
    num_items: int,
    *,
    num_views: int = 1,
    copies: float = 2.0,
    symmetric: bool = True,
    known: Known | None = None,
    ids: Sequence[int] | None = None,
) -> list[Row]:
    """Two views of every item through one encoder; negatives are all views of other items.

    `ids` names items that are the same (equal ids are no negatives); default: all different.
    """
    ids = range(num_items) if ids is None else ids
    pairs = view_pairs(num_views)
    pairs = pairs + [(b, a) for a, b in pairs] if symmetric else pairs
    rows = []
    for i in range(num_items):
        others = [j for j in range(num_items) if allowed(ids[i], ids[j], known, i)]
        negatives = [j * num_views + v for j in others for v in range(num_views)]
        for a, b in pairs:
            share = 1 / (num_items * len(pairs))
            anchor, positive = i * num_views + a, i * num_views + b
            rows.append(Row(share, anchor, positive, negatives, copies / num_views))
    return rows


def corpus_rows(
    pairs: Sequence[tuple[int, int]],
    num_anchors: int,
    num_keys: int,
    *,
    views: tuple[int, int] = (1, 1),
    known: Known | None = None,
    reverse: bool = False,
) -> list[Row]:
    """Labelled pairs (anchor, key) against a corpus of keys; `known` is per anchor.

    Keys of nobody are negatives like all others. `reverse`: the keys are compared with all
    anchors instead, with `known` per key.
    """
    num_views = {"anchors": views[0], "keys": views[1]}
    offset = {"anchors": 0, "keys": num_anchors * views[0]}
    size = {"anchors": num_anchors, "keys": num_keys}
    mine, theirs = ("keys", "anchors") if reverse else ("anchors", "keys")
    rows = []
    for pair in pairs:
        i, own = pair[::-1] if reverse else pair
        negatives = [
            offset[theirs] + j * num_views[theirs] + v
            for j in range(size[theirs])
            if allowed(own, j, known, i)
            for v in range(num_views[theirs])
        ]
        for a in range(num_views[mine]):
            for b in range(num_views[theirs]):
                share = 1 / (len(pairs) * num_views[mine] * num_views[theirs])
                anchor = offset[mine] + i * num_views[mine] + a
                positive = offset[theirs] + own * num_views[theirs] + b
                rows.append(Row(share, anchor, positive, negatives, 1 / num_views[theirs]))
    return rows


def paired_rows(
    num_items: int,
    *,
    views: tuple[int, int] = (1, 1),
    symmetric: bool = True,
    known: Known | None = None,
) -> list[Row]:
    """Anchor i belongs to key i; with `symmetric` the mean of both directions."""
    pairs = [(i, i) for i in range(num_items)]
    sides = [
        corpus_rows(pairs, num_items, num_items, views=views, known=known, reverse=reverse)
        for reverse in ((False, True) if symmetric else (False,))
    ]
    return [row._replace(share=row.share / len(sides)) for side in sides for row in side]


def allowed(own: int, other: int, known: Known | None, row: int) -> bool:
    """Whether `other` is a negative of a row whose positive is `own`. Not mutual."""
    return other != own and (known is None or other not in known[row])


# ---------------------------------------------------------------- the loss and its gradient


def exact(
    rows: Sequence[Row],
    table: np.ndarray,
    beta: float,
    denominator: str = "negatives",
    *,
    tilt: np.ndarray | None = None,
) -> Exact:
    """The sum over rows of the module's header. A row without negatives contributes nothing.

    `tilt` [T] is added to the logits of the negatives: the gradient of a *wrong* p, to know what
    a mistake would look like.
    """
    table = np.asarray(table, dtype=np.float64)
    unit, norm = normalised(table)
    positive, negative = np.zeros_like(table), np.zeros_like(table)
    value = beta_gradient = 0.0
    for row in rows:
        if not row.negatives:
            continue
        own = float(unit[row.anchor] @ unit[row.positive])
        similarity = unit[row.negatives] @ unit[row.anchor]
        logits = beta * similarity + (0.0 if tilt is None else tilt[row.negatives])
        log_partition = math.log(row.count) + log_sum_exp(logits)
        p = np.exp(logits - log_sum_exp(logits))
        pull, loss = 1.0, log_partition - beta * own
        if denominator == "all":
            pull, loss = 1 / (1 + math.exp(-loss)), math.log1p(math.exp(loss))
        value += row.share * loss
        beta_gradient += row.share * pull * (float(p @ similarity) - own)
        weight = row.share * pull * beta
        add_similarity(positive, unit, norm, row.anchor, [row.positive], np.array([-weight]))
        add_similarity(negative, unit, norm, row.anchor, row.negatives, weight * p)
    return Exact(value, positive, negative, beta_gradient)


def target(row: Row, table: np.ndarray, beta: float) -> np.ndarray:
    """p over the row's negatives: where its chain belongs."""
    unit, _ = normalised(np.asarray(table, dtype=np.float64))
    logits = beta * unit[row.negatives] @ unit[row.anchor]
    return np.exp(logits - log_sum_exp(logits))


def weighted(
    rows: Sequence[Row],
    table: np.ndarray,
    beta: float,
    weights: Sequence[np.ndarray],
    pulls: Sequence[float],
) -> np.ndarray:
    """The gradient for given weights of the negatives and factors c_r: any method's, [T,D]."""
    unit, norm = normalised(np.asarray(table, dtype=np.float64))
    total = np.zeros_like(unit)
    for row, w, pull in zip(rows, weights, pulls, strict=True):
        scale = row.share * pull * beta
        add_similarity(total, unit, norm, row.anchor, [row.positive], np.array([-scale]))
        add_similarity(total, unit, norm, row.anchor, row.negatives, scale * w)
    return total


def add_similarity(
    total: np.ndarray,
    unit: np.ndarray,
    norm: np.ndarray,
    anchor: int,
    others: Sequence[int],
    weights: np.ndarray,
) -> None:
    """total += sum_z weight_z ds(anchor, z)/de."""
    others = list(others)
    s = unit[others] @ unit[anchor]
    pull = (unit[others] - s[:, None] * unit[anchor]) / norm[anchor]
    total[anchor] += weights @ pull
    back = (unit[anchor] - s[:, None] * unit[others]) / norm[others][:, None]
    np.add.at(total, others, weights[:, None] * back)


def normalised(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    norm = np.sqrt((table * table).sum(1))
    return table / norm[:, None], norm


def log_sum_exp(logits: np.ndarray) -> float:
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - top).sum()))
