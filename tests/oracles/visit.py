"""One visit of a Metropolis-Hastings chain that has not forgotten where it started.

At stationarity every burn-in gives the same mean. From a fixed start it does not: with R uniform
i.i.d. proposals, T the matrix of one step and e the start,

    E[W] = 1 / (R - P) sum_{r = P}^{R - 1} e T^(r + 1)          the state after step r counts
"""

from __future__ import annotations

import math

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
