"""Watch an estimator approach the exact softmax, or fail to: 200 points, no training.

Shows    the heart of negchain, `logits -> weights`, on its own. There are 200 frozen points in 20
         clusters. Each point has a chain, and every visit offers it 14 random negatives. EMC2 and
         i-SIR carry one state from visit to visit, DCL carries nothing.
Prints   the total variation distance between the mean weights so far and the exact softmax over
         all 199 negatives, after 10, 100, 1,000 and 10,000 visits (0 = equal, 1 = disjoint). It
         falls towards zero for the chains and stays where it is for DCL.

    python examples/tiny_exact.py
    python examples/tiny_exact.py --visits 1000
"""

from __future__ import annotations

import argparse
import math

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from negchain import mh_scan
from negchain.weights import isir_weights, softmax_weights

NUM_POINTS, NUM_PROPOSALS, BETA = 200, 14, 5.0
CHECKPOINTS = (10, 100, 1_000, 10_000)


def points(generator: torch.Generator) -> Tensor:  # -> [M,D]
    """Unit vectors in 20 clusters."""
    unit = torch.nn.functional.normalize
    centres = unit(torch.randn(20, 64, generator=generator), dim=-1)
    spread = 0.08 * torch.randn(NUM_POINTS, 64, generator=generator)
    return unit(centres[torch.arange(NUM_POINTS) % 20] + spread, dim=-1)


def offer(generator: torch.Generator) -> Tensor:  # -> [M,R]
    """R uniform draws from the negatives of each point: any point but itself."""
    own = torch.arange(NUM_POINTS)[:, None]
    drawn = torch.randint(0, NUM_POINTS - 1, (NUM_POINTS, NUM_PROPOSALS), generator=generator)
    return drawn + (drawn >= own)


class Estimator:
    """One of the three methods, with its chains and the mean of its weights so far."""

    def __init__(self, method: str, states: Tensor) -> None:
        self.method = method
        self.states = states.clone()  # [M] one integer per point; DCL leaves it alone
        self.total = torch.zeros(NUM_POINTS, NUM_POINTS)

    def visit(self, logits: Tensor, ids: Tensor, generator: torch.Generator) -> None:
        """One visit of every point: `logits` [M,M] of all pairs, `ids` [M,R] proposals."""
        offered, carried = logits.gather(1, ids), self.states[:, None]
        start = logits.gather(1, carried)[:, 0]
        if self.method == "DCL":
            weights, _ = softmax_weights(offered)
            self.total.scatter_add_(1, ids, weights)
            return
        if self.method == "EMC2 (MH)":
            log_u = torch.rand(ids.shape, generator=generator).log()
            scan = mh_scan(offered, start, log_u, burn_in=NUM_PROPOSALS // 2)
        else:
            noise = torch.rand(NUM_POINTS, NUM_PROPOSALS + 1, generator=generator)
            scan = isir_weights(offered, start, -(-noise.log()).log())
        self.total.scatter_add_(1, ids, scan.weights)
        self.total.scatter_add_(1, carried, scan.start_weight[:, None])
        moved = ids.gather(1, scan.last.clamp(min=0)[:, None])[:, 0]
        self.states = torch.where(scan.last >= 0, moved, self.states)

    def distance(self, target: Tensor, visits: int) -> float:
        """Total variation distance to the exact softmax, mean over the points."""
        return float((self.total / visits - target).abs().sum(1).mean() / 2)


def main() -> None:
    """Run the three side by side and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visits", type=int, default=CHECKPOINTS[-1])
    visits = parser.parse_args().visits
    checkpoints = [*(n for n in CHECKPOINTS if n < visits), visits]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    z = points(generator)
    logits = (BETA * z @ z.T).fill_diagonal_(-math.inf)
    target = logits.softmax(1)
    states = offer(generator)[:, 0]  # Algorithm 1 starts each chain at a uniform draw
    estimators = [Estimator(name, states) for name in ("EMC2 (MH)", "i-SIR", "DCL")]
    found: dict[str, list[float]] = {e.method: [] for e in estimators}
    for visit in range(1, visits + 1):
        ids = offer(generator)
        for estimator in estimators:
            estimator.visit(logits, ids, generator)
            if visit in checkpoints:
                found[estimator.method].append(estimator.distance(target, visit))
    table = Table(title="distance of the mean weights from the exact softmax")
    for column in ("method", *(f"{n:,} visits" for n in checkpoints)):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, distances in found.items():
        table.add_row(method, *(f"{d:.3f}" for d in distances))
    Console().print(table)


if __name__ == "__main__":
    main()
