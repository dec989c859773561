"""One copy of every item as a proposal, or both? The bias of EMC² to the last digit.

Shows    `InBatch()` offers each row one of the two views of every other item, `InBatch(copies=2)`
         both. Both: twice the proposals, so a chain forgets more of what another view left it
         with; but a Metropolis-Hastings chain meets an item twice, which pulls it towards the
         batch's own softmax. i-SIR weighs its columns as a set, in which the held item counts in
         as many copies as the others: nothing pulls there.
How      no simulation: every batch, every view and every order of proposals is enumerated, the
         kernel of a visit is a matrix, its stationary law an eigenvector. 14 items in 7 clusters,
         two stored views, D = 4, b = 3.
Prints   |mean negative gradient - exact| / |exact| with one copy and with both, for both kernels,
         and of the batch's own softmax (DCL), by beta and by the cosine between an item's views.

    OMP_NUM_THREADS=1 python benchmarks/both_copies.py
"""

from __future__ import annotations

import itertools
import math

import numpy as np

M, D, B, V = 14, 4, 3, 2
BURN_IN = 0.5
NOISES = {"equal": 0.0, "near": 0.2, "far": 0.5, "independent": math.inf}


def unit(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


def views(noise: float) -> np.ndarray:  # -> [M,V,D]
    rng = np.random.default_rng(0)
    items = unit(unit(rng.normal(size=(7, D)))[np.arange(M) % 7] + 0.35 * rng.normal(size=(M, D)))
    apart = rng.normal(size=(M, V, D))
    return unit(apart if noise == math.inf else items[:, None] + noise * apart)


def offers(others: list[int], copies: int) -> list[tuple[int, ...]]:
    """Every sequence of proposals a row may be offered, all equally likely; places are j V + v."""
    found: list[tuple[int, ...]] = []
    for batch in itertools.combinations(range(len(others)), B - 1):
        shown = itertools.product(range(V), repeat=B - 1) if copies == 1 else [None]
        for seen in shown:
            every = [(j, v) for j in batch for v in range(V)]
            places = every if seen is None else list(zip(batch, seen, strict=True))
            found += itertools.permutations([j * V + v for j, v in places])
    return found


def scanned(logits: np.ndarray, order: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Metropolis-Hastings over the places of an order: counted states and ends, [from, to]."""
    accept = np.exp(np.minimum(0, logits[None, :] - logits[:, None]))
    state, first, counted = np.eye(len(logits)), int(len(order) * BURN_IN + 1e-3), 0.0
    for step, place in enumerate(order):
        moved = state @ accept[:, place]
        state = state * (1 - accept[:, place])
        state[:, place] += moved
        if step >= first:
            counted = counted + state / (len(order) - first)
    return np.asarray(counted), state


def resampled(
    logits: np.ndarray, order: tuple[int, ...], copies: int
) -> tuple[np.ndarray, np.ndarray]:
    """An i-SIR step over the places of an order and the held one: weights, which are the ends."""
    weights = np.zeros((len(logits), len(logits)))
    weights[:, list(order)] = np.exp(logits[list(order)])
    for held in range(len(logits)):
        if held // V not in {place // V for place in order}:  # else it is there already
            weights[held, held] += copies * np.exp(logits[held])
    weights /= weights.sum(1, keepdims=True)
    return weights, weights


def bias(z: np.ndarray, beta: float, copies: int, isir: bool = False) -> tuple[float, float]:
    """Of the chains' mean negative gradient, and of the batch's softmax over the same columns."""
    flat = z.reshape(M * V, D)
    chains, exact, batch = (np.zeros_like(flat) for _ in range(3))
    view = np.kron(np.eye(M - 1), np.full((1, V), 1 / V))  # a held item comes in any of its views
    forget = np.kron(np.eye(M - 1), np.ones((V, 1)))
    for i in range(M):
        others = [j for j in range(M) if j != i]
        address = np.array([j * V + v for j in others for v in range(V)])
        orders = offers(others, copies)
        orders = sorted({tuple(sorted(o)) for o in orders}) if isir else orders  # sets
        kernel, counted = np.zeros((M - 1, M - 1)), []
        for v in range(V):
            logits = beta * flat[address] @ z[i, v]
            ends, weights = 0.0, 0.0
            for order in orders:
                more, state = resampled(logits, order, copies) if isir else scanned(logits, order)
                weights, ends = weights + more, ends + state
            kernel += view @ (ends / len(orders)) @ forget / V
            counted.append(weights / len(orders))
        equations = np.vstack([kernel.T - np.eye(M - 1), np.ones(M - 1)])
        law = np.linalg.lstsq(equations, np.append(np.zeros(M - 1), 1.0), rcond=None)[0]
        for v in range(V):
            p = np.exp(beta * flat[address] @ z[i, v])
            softmax = np.zeros(len(address))
            for order in orders:
                softmax[list(order)] += p[list(order)] / p[list(order)].sum() / len(orders)
            for total, w in (
                (chains, law @ view @ counted[v]),
                (exact, p / p.sum()),
                (batch, softmax),
            ):
                total[i * V + v] += w @ flat[address]
                np.add.at(total, address, w[:, None] * z[i, v])
    size = np.linalg.norm(exact)
    return float(np.linalg.norm(chains - exact) / size), float(np.linalg.norm(batch - exact) / size)


def main() -> None:
    """Enumerate and print."""
    print("| views | beta | MH, one copy | MH, both | i-SIR, one copy | i-SIR, both | batch |")
    print("|---|---|---|---|---|---|---|")
    for name, noise in NOISES.items():
        z = views(noise)
        cosine = float((z[:, 0] * z[:, 1]).sum(1).mean())
        for beta in (1.0, 3.0, 8.0, 14.28):
            found = [bias(z, beta, copies, isir) for isir in (False, True) for copies in (1, 2)]
            cells = [f"{chains:.3f}" for chains, _ in found] + [f"{found[-1][1]:.3f}"]
            print(f"| {name}, cosine {cosine:.2f} | {beta:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
