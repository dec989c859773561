"""Bias and variance of every estimator's negative gradient on frozen clustered embeddings.

Shows    how far the long-run mean gradient of each method stays from the exact one.
Data     300 unit vectors in 20 clusters, d = 64, noise 0.08 per coordinate; two equal views, so
         nothing is stale and nothing but the estimator differs.
Prints   one table per (batch size, beta), then writes the same numbers as JSON.

    PYTHONPATH=src python benchmarks/estimator_bias.py --out estimator_bias.json

About ten minutes on one core. `bias` is |mean g - g| / |g|; `(noise)` is the value an unbiased
estimator of the same variance would show after as many steps, so a bias near it is no evidence of
one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path

import torch
from torch import Tensor

from negchain import estimator_report
from negchain.diagnostics import METHODS

NUM_CLUSTERS, DIM = 20, 64


def clusters(num_samples: int, noise: float, seed: int) -> Tensor:  # -> [M,D]
    """Unit vectors around 20 random centres, item i in cluster i % 20."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize
    centres = unit(torch.randn(NUM_CLUSTERS, DIM, generator=generator), dim=-1)
    spread = noise * torch.randn(num_samples, DIM, generator=generator)
    return unit(centres[torch.arange(num_samples) % NUM_CLUSTERS] + spread, dim=-1)


def commit() -> str:
    """The commit this runs on, marked where the working tree differs from it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    found = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8000, help="batches averaged over")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--betas", type=float, nargs="+", default=[5.0, 14.28])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    z = clusters(300, 0.08, options.seed)
    begin, tables, revision = (
        time.time(),
        [],
        commit(),
    )  # modules are loaded: a later edit is not run
    for batch_size in options.batch_sizes:
        for beta in options.betas:
            report = estimator_report(
                z,
                batch_size=batch_size,
                beta=beta,
                steps=options.steps,
                methods=options.methods,
                seed=options.seed,
            )
            print(report, flush=True)
            print(flush=True)
            tables.append({"batch_size": batch_size, "beta": beta, "rows": report.as_dicts()})
    result = {
        "steps": options.steps,
        "seed": options.seed,
        "commit": revision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.time() - begin, 1),
        "tables": tables,
    }
    print({key: value for key, value in result.items() if key != "tables"})
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
