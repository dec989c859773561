"""Bias and variance of every estimator's negative gradient, with equal and with differing views.

Shows    how far the long-run mean gradient of each method stays from the exact one.
Data     64 unit vectors in 16 clusters, d = 16; two views of each, equal or at cosine 0.87.
Prints   one table per case, after few and after many steps: what falls with the number of visits
         is noise of the chains, what stays is bias.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/estimator_bias.py

About three minutes on one idle core.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain import estimator_report

NUM_ITEMS, NUM_CLUSTERS, DIM = 64, 16, 16
VIEW_NOISE = 0.1  # per coordinate: two views of an item are at cosine 0.87


def clusters(view_noise: float, seed: int) -> Tensor:  # -> [2,M,D]
    """Two views of unit vectors around random centres, item i in cluster i % 16."""
    generator = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(NUM_CLUSTERS, DIM, generator=generator), dim=-1)
    spread = 0.5 / math.sqrt(DIM) * torch.randn(NUM_ITEMS, DIM, generator=generator)
    items = normalize(centres[torch.arange(NUM_ITEMS) % NUM_CLUSTERS] + spread, dim=-1)
    noise = view_noise * torch.randn(2, NUM_ITEMS, DIM, generator=generator)
    return normalize(items + noise, dim=-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 3000], help="batches")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--beta", type=float, default=14.28)
    parser.add_argument("--methods", nargs="+", default=["dcl", "sogclr", "isir", "emc2"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, view_noise in (("equal views", 0.0), ("views that differ", VIEW_NOISE)):
        z = clusters(view_noise, options.seed)
        cosine = float(torch.linalg.vecdot(z[0], z[1]).mean())
        print(f"{name}: mean cosine {cosine:.2f} between the two views of an item")
        for steps in options.steps:
            report = estimator_report(
                z,
                batch_size=options.batch_size,
                beta=options.beta,
                steps=steps,
                methods=options.methods,
                seed=options.seed,
            )
            print(report, flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
