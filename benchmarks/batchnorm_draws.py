"""Negatives in a BatchNorm pass of their own: they are told from anchors by their pass.

Data     1,000 training pictures of CIFAR-10 at 16 px, as in pictures.py.
Cases    *own pass*: what a loss wants encoded (draws, and carried states of chains) is encoded
         apart from the batch; *together*: in one pass with it, as the trainer does (draws since
         2026-11-20); and GroupNorm, where an embedding does not depend on its pass. Informed
         importance, i-SIR with informed proposals, and EMC² offered both views.
Prints   exact loss, spread of the embeddings, linear probe, and the lowest loss that a step had
         when it was measured: mean over seeds. Far below 0 it needs draws opposite to the anchors.

    unpack.py cifar10.npz DATA        # /work/shared/data; or any folder of train/CLASS, test/CLASS
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/batchnorm_draws.py --data DATA --out FILE

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pictures import BASE, TEST_PER_CLASS, copied

from negchain.reproduce.common import Options, Row, append, provenance, read_rows
from negchain.reproduce.pages import markdown, where
from negchain.reproduce.runs import train
from negchain.train.step import TrainStep

RECORD = Path("records/2026-11-20_batchnorm-draws_cpu.jsonl")
SETTINGS: Row = {**BASE, "epochs": 15}
INFORMED: Row = {"proposal": "informed"}
METHODS: dict[str, Row] = {"informed": {}, "isir": INFORMED, "emc2": {"proposal": "both"}}
WAYS = {"own pass": "batch", "together": "batch", "GroupNorm": "group"}
POINTS = [n / 15 for n in range(1, 16)]


def run(job: Row) -> Row:
    """Train as a job says."""
    whole = TrainStep._encode

    def parted(
        step: TrainStep, towers: Any, shares: Any, row: int, loaded: Any = None
    ) -> list[torch.Tensor]:
        """The two views of the batch, then the rest, with the draws that one pass has."""
        found = whole(step, towers, shares[:2], row, loaded)
        if len(shares) > 2:
            after = row + sum(share.size for share in shares[:2])
            found += whole(step, towers, shares[2:], after, loaded)
        return found

    if job["way"] == "own pass":
        TrainStep._encode = parted  # type: ignore[method-assign]
    try:
        return {"job": job, **train(job, math.inf)}
    finally:
        TrainStep._encode = whole  # type: ignore[method-assign]


def table(rows: list[Row]) -> str:
    """Ends of every method and way, means over seeds."""
    lines = []
    for method in METHODS:
        for way in WAYS:
            own = [row["curve"] for row in where(rows, method=method, way=way)]
            if own:
                ends = [curve[-1] for curve in own]
                means = [
                    ", ".join(f"{end[key]:.{digits}f}" for end in ends)
                    for key, digits in (("global_loss", 2), ("embedding_variance", 2))
                ]
                least = ", ".join(f"{min(point['loss'] for point in curve):.1f}" for curve in own)
                lines.append([method, way, *means, f"{fmean(e['probe'] for e in ends):.3f}", least])
    heads = ["method", "encoded", "exact loss", "variance", "probe, mean", "lowest loss of a step"]
    return markdown(heads, lines)


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("cifar10"))
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        {"way": way, "method": method, "seed": seed,
         "settings": {**SETTINGS, **more, "norm": norm}}
        for seed in given.seeds
        for method, more in METHODS.items()
        for way, norm in WAYS.items()
        if way != "GroupNorm" or method == "informed"
    ]  # fmt: skip
    done = [row["job"] for row in read_rows(given.out)]
    missing = [] if given.redraw else [job for job in jobs if job not in done]
    if missing:
        append(given.out, {"record": given.out.stem, **provenance(Options(device="cpu"))})
        with tempfile.TemporaryDirectory() as folder:
            data = copied(given.data, Path(folder), {"train": 100, "test": TEST_PER_CLASS})
            for job in missing:
                begin = time.time()
                where_it_is = {**job["settings"], "data": str(data)}
                at = {**job, "points": POINTS, "settings": where_it_is}
                row = {**run(at), "job": job, "wall": round(time.time() - begin, 1)}
                append(given.out, row)
                print(job["way"], job["method"], job["seed"], row["curve"][-1], flush=True)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
