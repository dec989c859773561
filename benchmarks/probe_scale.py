"""Is InfoNCE's low accuracy by the authors' probe the features' worth, or only their scale?

Asks     On STL-10 without normalisation, b = 32, InfoNCE (SimCLR with the positive in its
         denominator) is five to seven points behind every other method by the authors' probe, and
         level by a tuned one (records/reproduce/stl10.jsonl). The authors' probe is 500 steps of
         SGD with one learning rate on features as they are, so that it sees their scale.
Runs     Pictures of CIFAR-10 (the first 100 of each class, seen at 16 px), the small CNN without
         normalisation and with BatchNorm, b = 32, beta 14.28, Adam, 30 epochs. Probes are fitted
         on these pictures and tested on 2,000 others.
Prints   the mean length of features less their mean; the tuned probe; the authors' probe with
         features as they are, and times 4 and 16 for all methods alike; and brought to one length.

    unpack.py cifar10.npz DATA
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/probe_scale.py --data DATA --out FILE.jsonl

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from pictures import TEST_PER_CLASS, copied

from negchain.evaluation import linear_probe, linear_probe_paper
from negchain.reproduce.common import Options, append, provenance, read_rows
from negchain.reproduce.pages import distinct, markdown, spread, where
from negchain.reproduce.runs import prepared

METHODS = ("infonce", "dcl", "sogclr", "emc2")
NORMS = ("none", "batch")
SCALES = (1, 4, 16)
LENGTH = 10.0  # to which features are brought
PER_CLASS = 100
BATCH = 2 * PER_CLASS  # five batches a pass, as of 5,000 pictures of STL-10 in batches of 1,024
BASE = {
    "recipe": "cifar", "image_size": 16, "encoder": "small-cnn", "batch_size": 32, "epochs": 30,
    "beta": 14.28, "device": "cpu",
}  # fmt: skip


def measured(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train, then probe the features at several scales."""
    settings = {**job["settings"], "data": folder}
    with prepared({**job, "settings": settings}) as (run, _):
        while run.done < run.total_steps:
            run.advance(run.order.batch(run.done))
        numbers = run.judge.losses(run.encoder)
        train_x, train_y, test_x, test_y = run.judge._features(run.encoder)
    length = (train_x - train_x.mean(0)).norm(dim=1).mean().item()

    def authors(scale: float) -> float:
        scaled = train_x * scale, train_y, test_x * scale, test_y
        return linear_probe_paper(*scaled, batch_size=BATCH)

    found = {f"authors x{scale}": authors(scale) for scale in SCALES}
    tuned = linear_probe(train_x, train_y, test_x, test_y).accuracy
    equal = authors(LENGTH / length)
    return {**numbers, "length": length, "tuned": tuned, **found, "authors equal": equal}


def table(rows: list[dict[str, Any]]) -> str:
    keys = ["length", "tuned", *(f"authors x{scale}" for scale in SCALES), "authors equal"]
    lines = []
    for norm in NORMS:
        for method in distinct(rows, "method"):
            own = [row for row in where(rows, method=method) if row["job"]["norm"] == norm]
            if own:
                means = [spread(row[key] for row in own) for key in (*keys, "global_loss")]
                lines.append([norm, method, len(own), *means])
    return markdown(["norm", "method", "seeds", *keys, "exact loss"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("cifar10"))
    parser.add_argument(
        "--out", type=Path, default=Path("records/2026-11-19_probe-scale_cpu.jsonl")
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--norms", nargs="+", default=NORMS)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=BASE["epochs"])
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        {
            "seed": seed, "norm": norm, "method": method,
            "settings": {**BASE, "norm": norm, "lr": given.lr, "epochs": given.epochs},
        }
        for seed in range(given.seeds)
        for norm in given.norms
        for method in METHODS
    ]  # fmt: skip
    if not given.redraw:
        per_class = {"train": PER_CLASS, "test": TEST_PER_CLASS}
        folder = str(copied(given.data, Path("/tmp/negchain-pictures/cifar10-1000"), per_class))
        append(given.out, {"record": "probe-scale", **provenance(Options(device="cpu"))})
        done = [row["job"] for row in read_rows(given.out)]
        for job in (job for job in jobs if job not in done):
            append(given.out, {"job": job, **measured(job, folder)})
            print(job["norm"], job["method"], job["seed"], flush=True)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
