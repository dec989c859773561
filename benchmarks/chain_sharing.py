"""Two views share one chain: how much weight does each way of sharing put where it belongs?

Shows    the bias of EMC2Loss(walk="sequential") against walk="parallel" and kernel="isir".
Data     300 unit vectors in 20 clusters, d = 64, noise 0.08, b = 8, beta = 5; views equal. The
         softmax over all negatives puts 0.60 of its mass on the anchor's own cluster, a batch of 8
         about 0.06 of its columns, so a chain that forgets what it carried shows at once.
Prints   for each way and seed: mean weight on the own cluster, share of carried states in the own
         cluster, and the length of the mean weighted negative along the exact one.

    PYTHONPATH=src python benchmarks/chain_sharing.py --steps 6000
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from estimator_bias import clusters, commit
from torch import Tensor

import negchain.losses.emc2 as emc2_module
from negchain import EMC2Loss
from negchain.losses.walk import Walk, walk_chains
from negchain.pool import Side

WAYS: dict[str, dict[str, str]] = {
    "mh parallel": {"kernel": "mh", "walk": "parallel"},
    "mh sequential": {"kernel": "mh", "walk": "sequential"},
    "isir": {"kernel": "isir"},
}


class Recorder:
    """Stands in for `walk_chains` and keeps what the last walk weighed."""

    def __init__(self) -> None:
        self.walk: Walk | None = None
        self.side: Side | None = None

    def __call__(self, side: Side, *rest: object) -> Walk:
        """Walk, and remember."""
        self.side, self.walk = side, walk_chains(side, *rest)  # type: ignore[arg-type]
        return self.walk

    def weights_by_item(self, carried: Tensor, num_samples: int) -> Tensor:  # [B] -> [B,M]
        """Weight of every item of the data set, mean over an item's two rows."""
        assert self.walk is not None and self.side is not None
        size = len(carried)
        full = torch.zeros(2 * size, num_samples)
        full.scatter_add_(1, self.side.column_ids(), self.walk.weights)
        rows = torch.arange(2 * size)
        full[rows, carried.repeat(2)] += self.walk.carried_weight
        return full.view(2, size, num_samples).mean(0)


def measure(
    z: Tensor, beta: float, batch_size: int, steps: int, warm_up: int, seed: int, settings: dict
) -> dict[str, float]:
    """Long-run mean weights of one way of sharing, against the exact softmax."""
    size = len(z)
    logits = (beta * z @ z.T).fill_diagonal_(-math.inf)
    exact = logits.softmax(1) @ z
    item = torch.arange(size)
    same = (item[:, None] % 20 == item[None, :] % 20).fill_diagonal_(False)
    recorder = Recorder()
    emc2_module.walk_chains = recorder  # type: ignore[assignment]
    loss_fn = EMC2Loss(size, beta, normalize=False, seed=seed, **settings)
    generator = torch.Generator().manual_seed(seed)
    total, visits, held, counted = torch.zeros(size, size), torch.zeros(size), 0.0, 0
    for step in range(steps):
        index = torch.randperm(size, generator=generator)[:batch_size]
        ids = loss_fn.carried(index)
        assert isinstance(ids, Tensor)
        with torch.no_grad():
            loss_fn(z[index], z[index], index, carried=z[ids])
        if step < warm_up:
            continue
        total[index] += recorder.weights_by_item(ids, size)
        visits[index] += 1
        held += float(same[index, loss_fn.carried(index)].float().mean())
        counted += 1
    weights = total / visits[:, None]
    mean = weights @ z
    return {
        "own_cluster_weight": float((weights * same).sum(1).mean()),
        "own_cluster_states": held / counted,
        "length": float((mean * exact).sum() / (exact * exact).sum()),
        "row_sum": float(weights.sum(1).mean()),
    }


def main() -> None:
    """Measure every way with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--warm-up", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--beta", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    z = clusters(300, 0.08, 0)
    logits = (options.beta * z @ z.T).fill_diagonal_(-math.inf)
    item = torch.arange(300)
    same = (item[:, None] % 20 == item[None, :] % 20).fill_diagonal_(False)
    target = float((logits.softmax(1) * same).sum(1).mean())
    print(f"commit {commit()}, torch {torch.__version__}, {options.steps} steps")
    print(f"exact softmax: weight on the own cluster {target:.4f}")
    print(f"{'way':<14} {'seed':>4} {'weight':>8} {'states':>8} {'length':>8} {'row sum':>8}")
    results = []
    for way in options.ways:
        for seed in options.seeds:
            row = measure(
                z,
                options.beta,
                options.batch_size,
                options.steps,
                options.warm_up,
                seed,
                WAYS[way],
            )
            results.append({"way": way, "seed": seed, **row})
            numbers = " ".join(f"{value:>8.4f}" for value in row.values())
            print(f"{way:<14} {seed:>4} {numbers}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"target": target, "results": results}, indent=1))


if __name__ == "__main__":
    main()
