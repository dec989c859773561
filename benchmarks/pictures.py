"""Do features follow the better estimate where there is room? CIFAR-10, b = 8, through the trainer.

Data     1,000 training pictures of CIFAR-10 (the first 100 of each class; --per-class), seen at 16
         px (--size), which is what two shared cores can train in an hour; augmented afresh. Probes
         are fitted on the same pictures and tested on 2,000 others (200 a class).
Encoder  the trainer's small CNN with BatchNorm, Adam 1e-3, beta 14.28 unless a case says another.
Cases    the methods; `untrained`: the same network, its BatchNorm's averages and nothing else
         moved; `beta`: a lower and a higher one; `stored`: four augmentations of each picture;
         `both`: chains are offered both views of every item, as DCL's softmax has them;
         `all`: the positive is in the denominator, as it is in InfoNCE's; `isir and dcl`: three
         quarters of i-SIR's weights and a quarter of DCL's.
Prints   exact loss on 1,000 of the pictures (at the case's own beta), linear probe, probe from a
         tenth of the labels and 20-NN: mean and deviation over seeds.

    unpack.py cifar10.npz DATA        # /work/shared/data; or any folder of train/CLASS, test/CLASS
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/pictures.py --data DATA --out FILE.jsonl

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from hypotheses import mixed, table

from negchain.methods import METHODS, Method, register
from negchain.reproduce.common import Options, append, provenance, read_rows
from negchain.reproduce.runs import train

TEST_PER_CLASS = 200
BASE = {
    "recipe": "cifar", "image_size": 16, "encoder": "small-cnn", "lr": 1e-3, "batch_size": 8,
    "epochs": 30, "device": "cpu", "probe_samples": 1000,
}  # fmt: skip
CHAINS = [name for name, method in METHODS.items() if "proposal" in method.options]
FIRST = ("infonce", "dcl", "sogclr")
INFORMED = {"proposal": "informed"}
BOTH = {"proposal": "both"}  # both views of every item, as many columns as DCL has
STORED = {"augmentations": 4}  # a chain for each of them
ALL = {"denominator": "all"}  # the positive kept in, as InfoNCE has it
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("untrained", FIRST[0], {"epochs": 1, "lr": 1e-12}),
    *((name, name, {}) for name in FIRST),
    (CHAINS[0], CHAINS[0], {}),
    (f"{CHAINS[1]}, informed", CHAINS[1], INFORMED),
    (CHAINS[1], CHAINS[1], {}),
    (f"{CHAINS[0]}, informed", CHAINS[0], INFORMED),
    *((f"{name}, stored", name, STORED) for name in (*FIRST, CHAINS[0])),
    *((f"{name}, both", name, BOTH) for name in CHAINS),
    (f"{FIRST[2]}, all", FIRST[2], ALL),
    *((f"{name}, both, all", name, {**BOTH, **ALL}) for name in CHAINS),
    ("isir and dcl, both", "mixed", BOTH),
]


def copied(data: Path, out: Path, per_class: dict[str, int]) -> Path:
    """The first pictures of each class, copied: a folder's own order is by class."""
    for split, number in per_class.items():
        for folder in sorted((data / split).iterdir()):
            (out / split / folder.name).mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.iterdir())[:number]:
                shutil.copy(file, out / split / folder.name)
    return out


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("cifar10"))
    parser.add_argument("--out", type=Path, default=Path("records/2026-11-16_pictures_cpu.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--betas", type=float, nargs="+", default=[14.28])
    parser.add_argument("--batches", type=int, nargs="+", default=[8])
    parser.add_argument("--per-class", type=int, default=100, help="training pictures of a class")
    parser.add_argument("--size", type=int, default=16, help="of a picture, in pixels")
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    register(Method("mixed", "mixed", ("#888", "#888"), mixed))
    count = 10 * given.per_class

    def named(case: str, beta: float, b: int) -> str:
        """A case by what is not as usual in it."""
        words = [case]
        if beta != 14.28:
            words.append(f"β {beta:g}")
        if b != 8:
            words.append(f"b {b}")
        if count != 1000:
            words.append(f"{count:,} pictures")
        if given.size != 16:
            words.append(f"{given.size} px")
        return ", ".join(words)

    jobs = [
        {
            "case": named(case, beta, b),
            "method": method,
            "seed": seed,
            "settings": {**BASE, **more, "beta": beta, "batch_size": b, "image_size": given.size},
        }
        for seed in given.seeds
        for case, method, more in CASES
        for beta in given.betas
        for b in given.batches
        if case in (given.cases or [case])
    ]
    if not given.redraw:
        per_class = {"train": given.per_class, "test": TEST_PER_CLASS}
        place = Path(f"/tmp/negchain-pictures/cifar10-{count}")
        folder = str(copied(given.data, place, per_class))
        append(given.out, {"record": "pictures", **provenance(Options(device="cpu"))})
        done = [row["job"] for row in read_rows(given.out)]
        for job in (job for job in jobs if job not in done):
            begin, cpu = time.time(), time.process_time()
            plain = {"data": folder}
            if "augmentations" not in job["settings"]:
                plain["proposal"] = "batch"  # a case says it where chains get more
            run = {**job, "settings": {**plain, **job["settings"]}, "points": [1.0]}
            found = train(run, begin + 1e6)
            wall, cpu = round(time.time() - begin, 1), round(time.process_time() - cpu, 1)
            append(given.out, {"job": job, **found, "wall": wall, "cpu": cpu})
            last = found["curve"][-1]
            print(job["case"], job["seed"], last["global_loss"], last["probe"], wall, flush=True)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
