"""One copy of every item as a proposal, or both? Bias of EMC² where the views of an item differ.

Shows    `InBatch()` offers each row one of the two views of every other item, `InBatch(copies=2)`
         both. Both: twice the proposals, so a chain forgets more of what another view left it
         with; but an item is met twice, which pulls towards the batch's own softmax.
Data     as in estimator_bias.py: 64 items in 16 clusters, two stored views of each.
Prints   relative bias of the mean negative gradient per beta and cosine between the views.

    OMP_NUM_THREADS=1 PYTHONPATH=src:benchmarks python benchmarks/both_copies.py
"""

from __future__ import annotations

import argparse
import math

import torch
from estimator_bias import clusters

from negchain import EMC2Loss, InBatch, estimator_report
from negchain.methods import METHODS, Method, register

NOISES = {"equal": 0.0, "cosine 0.87": 0.1, "cosine 0.5": 0.25, "independent": math.inf}


def both(kernel: str) -> str:
    """Register EMC² with both copies offered; its name."""

    def build(s) -> EMC2Loss:
        return EMC2Loss(
            s.num_samples, s.beta, kernel, proposals=InBatch(2), seed=s.seed, normalize=s.normalize
        )

    name = f"{kernel}-both"
    return register(Method(name, name, ("#888", "#aaa"), build)).name


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--betas", type=float, nargs="+", default=[2.0, 5.0, 14.28])
    parser.add_argument("--views", nargs="+", choices=NOISES, default=list(NOISES))
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = ["emc2", both("mh"), "isir", both("isir")]
    assert set(methods) <= set(METHODS)
    for name in options.views:
        z = clusters(min(NOISES[name], 1e3), 0)
        cosine = float(torch.linalg.vecdot(z[0], z[1]).mean())
        for beta in options.betas:
            report = estimator_report(
                z, batch_size=8, beta=beta, steps=options.steps, methods=methods
            )
            told = "  ".join(
                f"{row.method} {row.relative_bias:.3f} (noise {row.noise:.3f})"
                for row in report.rows
            )
            print(f"{name} ({cosine:+.2f}), beta {beta}: {told}", flush=True)


if __name__ == "__main__":
    main()
