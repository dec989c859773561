"""What losses without chains do with one batch: rows against the batch's own columns.

InfoNCE and DCL are `exact(rows, table, beta, "all" | "negatives")` of these rows. SogCLR divides
the batch's exponentials by a moving average of their mean instead:

    g_r = 1/K sum_z exp(beta s(a, z)),   u_i <- (1 - gamma) u_i + gamma g_r  (u_i = g_r at first)
    W_z = exp(beta s(a, z)) / (K u_i);   the two rows of an item remember the mean of their u
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from oracles.exact import Known, Row, allowed, normalised, weighted


def batch_rows(
    views: str,
    first: Sequence[int],  # addresses of z_a
    second: Sequence[int],  # addresses of z_b
    ids: Sequence[int],  # positions of the anchors
    key_ids: Sequence[int],  # positions of z_b among the keys; the same without a corpus
    known: Known | None = None,  # per sample of the batch
    symmetric: bool = True,
) -> list[list[Row]]:
    """Per side the rows of a batch, each a share of the mean over that side."""
    size = len(first)
    both = [(first, second), (second, first)][: 2 if symmetric else 1]

    def row(i: int, anchor: int, positive: int, own: Sequence[int], columns, count: int) -> Row:
        others = [j for j in range(size) if allowed(own[i], own[j], known, i)]
        return Row(1 / count, anchor, positive, [c[j] for c in columns for j in others], 1.0)

    if views == "shared":
        count = size * len(both)
        side = [
            row(i, a[i], b[i], ids, (first, second), count) for a, b in both for i in range(size)
        ]
        return [side]
    names = [key_ids, ids]
    return [
        [row(i, a[i], b[i], own, (b,), size) for i in range(size)]
        for (a, b), own in zip(both, names, strict=False)
    ]


class SogCLR:
    """The moving averages of a data set, and the gradient of one batch after another."""

    def __init__(self, gamma: float, beta: float, denominator: str) -> None:
        self.gamma, self.beta, self.denominator = gamma, beta, denominator
        self.u: dict[tuple[int, int], float] = {}  # (side, item)

    def step(
        self,
        sides: list[list[Row]],
        ids: Sequence[int],
        table: np.ndarray,
        num_negatives: Sequence[int],  # of each sample: what u is scaled to for 1 - p+
    ) -> np.ndarray:
        """The gradient of a batch [T,D]; remembers its averages."""
        unit, _ = normalised(table)
        total = np.zeros_like(unit)
        for number, rows in enumerate(sides):
            weights, pulls, seen = [], [], {}
            for place, row in enumerate(rows):
                sample = place % len(ids)
                key = (number, ids[sample])
                similarity = unit[row.negatives] @ unit[row.anchor]
                e, old = np.exp(self.beta * similarity), self.u.get(key)
                if len(e) == 0:
                    weights.append(e)
                    pulls.append(0.0)
                    continue
                g = float(e.mean())
                u = g if old is None else (1 - self.gamma) * old + self.gamma * g
                positive = math.exp(self.beta * float(unit[row.anchor] @ unit[row.positive]))
                z = num_negatives[sample] * u
                weights.append(e / (len(e) * u))
                pulls.append(z / (z + positive) if self.denominator == "all" else 1.0)
                seen.setdefault((key, sample), []).append(u)
            for (key, _), values in reversed(seen.items()):  # the first of equal ids wins
                self.u[key] = sum(values) / len(values)
            total += weighted(rows, table, self.beta, weights, pulls) / len(sides)
        return total
