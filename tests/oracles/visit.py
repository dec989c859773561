"""One visit of a Metropolis-Hastings chain that has not forgotten where it started.

At stationarity every burn-in gives the same mean. From a fixed start it does not: with R uniform
i.i.d. proposals, T the matrix of one step and e the start,

    E[W] = 1 / (R - P) sum_{r = P}^{R - 1} e T^(r + 1)          the state after step r counts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oracles.exact import Row, normalised


def one_step(logits: np.ndarray) -> np.ndarray:
    """T[z, z'] = 1/m min(1, p(z') / p(z)) for z' != z; what is left stays."""
    size = len(logits)
    kernel = np.zeros((size, size))
    for z in range(size):
        for proposal in range(size):
            accept = math.exp(min(0.0, logits[proposal] - logits[z]))
            kernel[z, proposal] += accept / size
            kernel[z, z] += (1 - accept) / size
    return kernel


def expected_weights(
    row: Row, table: np.ndarray, beta: float, start: int, steps: int, burn_in: int
) -> np.ndarray:
    """Mean share of the counted steps at each of the row's negatives; `start` is one of them."""
    unit, _ = normalised(np.asarray(table, dtype=np.float64))
    kernel = one_step(beta * unit[row.negatives] @ unit[row.anchor])
    state = np.array([float(z == start) for z in row.negatives])
    total = np.zeros_like(state)
    for step in range(steps):
        state = state @ kernel
        if step >= burn_in:
            total += state
    return total / (steps - burn_in)


# ---------------------------------------------------------------- one chain, several views


class SharedChain(NamedTuple):
    """Where the one chain of an item settles that is seen in several views, and its weights."""

    items: np.ndarray  # [n] the item's negatives
    law: np.ndarray  # [n] how often the chain holds each of them between visits
    weights: list[np.ndarray]  # per row: mean weight of each of the row's negatives
    carried: list[np.ndarray]  # per row: the part of it that is the carried state's own


def shared_chain(
    rows: Sequence[Row],
    item_of: Callable[[int], int],
    table: np.ndarray,
    beta: float,
    steps: dict[int, float],
    burn_in: float,
) -> SharedChain:
    """The stationary law of a chain over items, by its kernel: no simulation, no noise.

    A visit shows one of the rows (the anchor in one of its views). The held item comes in a view
    drawn uniformly, R proposals are uniform and independent over items and views, and the view of
    the state the visit ends in is forgotten:

        K = mean over rows a and numbers of proposals R of   V T_a^R F,      law = law K
        V: item -> its views, uniformly;  T_a: one step for the anchor a;  F: view -> its item

    `steps`: R with its probability. `burn_in`: the share of R that is not counted.
    """
    unit, _ = normalised(np.asarray(table, dtype=np.float64))
    members = np.array([item_of(z) for z in rows[0].negatives])
    items = np.unique(members)
    forget = (members[:, None] == items[None, :]).astype(float)
    view = (forget / forget.sum(0)).T
    logits = [beta * unit[row.negatives] @ unit[row.anchor] for row in rows]
    kernels = [one_step(row_logits) for row_logits in logits]
    whole = sum(
        share * view @ np.linalg.matrix_power(kernel, num) @ forget
        for kernel in kernels
        for num, share in steps.items()
    ) / len(rows)
    equations = np.vstack([whole.T - np.eye(len(items)), np.ones(len(items))])
    law = np.linalg.lstsq(equations, np.append(np.zeros(len(items)), 1.0), rcond=None)[0]
    weights, carried = [], []
    for kernel, row_logits in zip(kernels, logits, strict=True):
        refused = 1 - np.exp(np.minimum(0.0, row_logits[None, :] - row_logits[:, None])).mean(1)
        seen, still = np.zeros(len(members)), np.zeros(len(members))
        for num, share in steps.items():
            first = int(num * burn_in + 1e-3)
            state, stays = law @ view, law @ view
            for step in range(num):
                state, stays = state @ kernel, stays * refused
                if step >= first:
                    seen += share * state / (num - first)
                    still += share * stays / (num - first)
            if num == 0:
                seen, still = seen + share * state, still + share * stays
        weights.append(seen)
        carried.append(still)
    return SharedChain(items, law, weights, carried)
