"""Does the global loss want a larger beta than the in-batch one? Tuned per method, on images.

Data     `digits`: 512 digits to pretrain and to fit probes on, the 926 others of the training split
         for validation, the 359 held out for the test. `cifar10`: 1,000 pictures of CIFAR-10 at
         16 px (benchmarks/pictures.py), of 4,000 others every second one for validation.
Encoder  the trainer's small CNN with BatchNorm, Adam 1e-3; equal epochs for all.
Tuning   beta of 5 to 50, for each method the one with the best mean probe on the validation
         pictures over seeds; told is the probe on the test pictures.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/beta_per_method.py digits --batch 8

`cifar10` needs `--data` (see benchmarks/pictures.py). The same command goes on with what is
missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import pictures
import torch

from negchain.evaluation import few_label_probe, linear_probe
from negchain.methods import title_of
from negchain.optim import set_lr
from negchain.reproduce.common import Options, Row, append, provenance, read_rows
from negchain.reproduce.pages import distinct, markdown, spread, where
from negchain.reproduce.runs import prepared

BETAS = (5.0, 10.0, 14.28, 25.0, 50.0)
CHAINS = pictures.CHAINS[:2]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, name, {}) for name in (*pictures.FIRST, CHAINS[0])),
    *((f"{name}, informed", name, pictures.INFORMED) for name in CHAINS),
]
SETS: dict[str, Row] = {
    "digits": {"data": "digits", "subset": 512, "device": "cpu"},
    "cifar10": pictures.BASE,
}
PER_CLASS = {"train": 100, "test": 400}


def judged(run: Any) -> Row:
    """Probes on validation and on test pictures, none of them pretrained on; the exact loss."""
    x, y, held_x, held_y = run.judge._features(run.encoder)
    count = run.config.subset
    if count:
        fit, valid, test = (x[:count], y[:count]), (x[count:], y[count:]), (held_x, held_y)
    else:
        fit, valid, test = (x, y), (held_x[::2], held_y[::2]), (held_x[1::2], held_y[1::2])
    found = run.judge.losses(run.encoder)
    for name, pair in (("valid", valid), ("test", test)):
        found[name] = linear_probe(*fit, *pair).accuracy
        found[f"{name}_10pct"] = few_label_probe(*fit, *pair, share=0.1)
    return found


def trained(job: Row) -> Row:
    """One run through the trainer."""
    with prepared(job) as (run, _):
        for step in range(run.total_steps):
            set_lr(run.step.optimizer, run._lr(step))
            run.step(step, run.order.batch(step))
        return judged(run)


def chosen(rows: list[Row]) -> float:
    """The beta with the best mean probe on the validation pictures; the smaller of equals."""
    means = {
        beta: statistics.mean(row["valid"] for row in where(rows, beta=beta))
        for beta in sorted(distinct(rows, "beta"))
    }
    return max(means, key=means.__getitem__)


def table(rows: list[Row]) -> str:
    """For every method its probes on validation pictures by beta, and what is left on test ones."""
    lines = []
    for data, batch, case in distinct(rows, "set", "batch", "case"):
        own = where(rows, set=data, batch=batch, case=case)
        best = chosen(own)
        by_beta = [spread((r["valid"] for r in where(own, beta=b)), 3) or "–" for b in BETAS]
        ends = [
            spread((r[key] for r in where(own, beta=beta)), 3)
            for beta in (best, 14.28)
            for key in ("test", "test_10pct")
        ]
        seeds = len(where(own, beta=best))
        method = own[0]["job"]["method"]
        name = case.replace(method, title_of(method))
        lines.append([data, batch, name, seeds, *by_beta, f"{best:g}", *ends])
    heads = ["data", "b", "method", "seeds", *(f"valid, β {b:g}" for b in BETAS), "chosen β"]
    heads += ["test", "test, 10 %", "test at 14.28", "test, 10 %, at 14.28"]
    return markdown(heads, lines)


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="what to run")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--betas", type=float, nargs="+", default=BETAS)
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--data", type=Path, default=Path("cifar10"))
    out = Path("records/2026-11-16_beta-per-method_cpu.jsonl")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        {"set": name, "batch": batch, "case": case, "beta": beta, "method": method, "seed": seed}
        | {"settings": {**SETS[name], **more} | {"beta": beta, "batch_size": batch}}
        for name in given.sets
        for batch in given.batch
        for seed in range(given.seeds)
        for case, method, more in CASES
        for beta in given.betas
        if case in (given.cases or [case])
    ]
    for job in jobs:
        job["settings"]["epochs"] = given.epochs
    if not given.redraw:
        append(given.out, {"record": "beta-per-method", **provenance(Options(device="cpu"))})
        folder = Path("/tmp/negchain-pictures/cifar10-held-out")
        if "cifar10" in given.sets:
            pictures.copied(given.data, folder, PER_CLASS)
        done = [row["job"] for row in read_rows(given.out)]
        for job in (job for job in jobs if job not in done):
            begin = time.process_time()
            plain = {"proposal": "batch", "data": str(folder)}  # one view, as in the record
            settings = {**plain, **job["settings"]}
            found = trained({**job, "settings": settings})
            cpu = round(time.process_time() - begin, 1)
            append(given.out, {"job": job, **found, "cpu": cpu})
            print(job["set"], job["batch"], job["seed"], job["case"], job["beta"], found, cpu)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
