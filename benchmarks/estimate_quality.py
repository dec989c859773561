"""Do features follow the estimate, up to the exact one? CIFAR-10 through the trainer.

Every step has b anchors, as always. What differs is how well the softmax over all other items is
known: DCL's from the batch, a chain's, one from R uniform draws more, and the exact one, for which
all items are encoded in every step (in fresh views, with their gradients). No estimator with b
anchors a step can be better than the last: its mean is right and only the anchors are a sample.
`whole table` encodes nothing beyond the batch: it takes the exact softmax over the embeddings that
all items had when a batch last held them, with the gradient of the batch's items as anchors and as
keys of all stale anchors. With an encoder that stands still this is the exact gradient.

Data     as benchmarks/pictures.py: 1,000 training pictures at 16 px, fresh augmentations; probes
         are fitted on them and tested on 2,000 others.
Encoder  the trainer's small CNN with GroupNorm: BatchNorm would see 1,016 pictures in one case and
         16 in another. Adam 1e-3, beta 14.28, 30 epochs.
Prints   exact loss on 1,000 of the pictures, linear probe, probe from a tenth of the labels and
         20-NN: mean and deviation over seeds; then differences to DCL, pairs of a seed.

    unpack.py cifar10.npz DATA        # /work/shared/data; or any folder of train/CLASS, test/CLASS
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/estimate_quality.py --data DATA

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from hypotheses import table
from pictures import BASE, TEST_PER_CLASS, copied

from negchain import ImportanceLoss, WeightedLoss
from negchain.losses import Uniform
from negchain.losses.batch import check_batch
from negchain.losses.request import Part
from negchain.methods import LossSettings, Method, register
from negchain.reproduce.common import Options, append, provenance, read_rows
from negchain.reproduce.pages import markdown
from negchain.reproduce.runs import train


class ExactLoss(ImportanceLoss):
    """The softmax over the whole set: every item is encoded once in every step."""

    def _parts(self, index: Any, augmentation: Any, step: Any) -> list[Part]:
        ids = torch.arange(self.num_samples or 0, device=index.device)
        return [Part("draw", side, ids) for side in range(self.num_sides)]


class WholeTableLoss(WeightedLoss):
    """The global loss of a batch's items, all others as they were when last seen."""

    table: torch.Tensor  # [M,2,D] two views of every item
    log_sums: torch.Tensor  # [M,2] log of their sums over negatives; inf: not seen yet

    def __init__(self, num_samples: int, beta: float, *, dim: int, **more: Any) -> None:
        super().__init__(num_samples, beta, **more)
        self.add_state("table", torch.zeros(num_samples, 2, dim))
        self.add_state("log_sums", torch.full((num_samples, 2), math.inf))

    def _loss(self, call: Any, requests: Any) -> torch.Tensor:
        batch, beta = check_batch(self, call), float(self.beta)
        rows, size = batch.both.flatten(0, 1), len(batch.index)
        here = self.log_sums[:, 0].isfinite().index_fill(0, batch.index, False)
        stale = beta * rows @ self.table[here].flatten(0, 1).to(rows).T  # [2B,2M']
        fresh = beta * rows @ rows.T
        ids = batch.index.repeat(2)
        own = ids[:, None] == ids
        logits = torch.cat([fresh.masked_fill(own, -math.inf), stale], 1).detach()
        log_sum = logits.logsumexp(1)
        weights = (logits - log_sum[:, None]).exp()
        as_key = (stale.detach() - self.log_sums[here].flatten()).exp().clamp(max=1.0)
        positive = beta * (batch.both[0] * batch.both[1]).sum(1).repeat(2)
        moved = (weights * torch.cat([fresh.masked_fill(own, 0.0), stale], 1)).sum(1) - positive
        moved = moved + (as_key * stale).sum(1)
        if self.training:
            self.table[batch.index] = batch.both.detach().transpose(0, 1).to(self.table)
            self.log_sums[batch.index] = log_sum.view(2, size).T.to(self.log_sums)
        value = (log_sum - positive).detach()
        return self._finish([(moved - moved.detach() + value).mean()], {})


def uniform(num: int) -> Any:
    """A builder of the loss with so many uniform draws, instead of the batch's columns."""

    def build(s: LossSettings) -> Any:
        kind = ExactLoss if num == 0 else ImportanceLoss
        proposals = Uniform(num or s.num_samples, alone=True)
        return kind(s.num_samples, s.beta, proposals=proposals, seed=s.seed, **s.layout)

    return build


DRAWS = (16, 64, 256)
METHODS = {
    **{f"draws-{number}": uniform(number) for number in DRAWS},
    "whole-table": lambda s: WholeTableLoss(
        s.num_samples, s.beta, dim=s.dim, seed=s.seed, **s.layout
    ),
    "exact": uniform(0),
}
BOTH = {"proposal": "both"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("dcl", "dcl", {}),
    ("infonce", "infonce", {}),
    ("emc2, both", "emc2", BOTH),
    ("isir, both", "isir", BOTH),
    *((f"draws-{number}", f"draws-{number}", {}) for number in DRAWS),
    ("whole-table", "whole-table", {}),
    ("exact", "exact", {}),
]


def differences(rows: list[dict[str, Any]]) -> str:
    """Every case minus DCL of the same batch size, over pairs of a seed."""
    last = {(r["job"]["case"], r["job"]["b"], r["job"]["seed"]): r["curve"][-1] for r in rows}
    lines = []
    for case, b in dict.fromkeys((case, b) for case, b, _ in last):
        seeds = [s for c, n, s in last if (c, n) == (case, b) and ("dcl", b, s) in last]
        if case == "dcl" or len(seeds) < 2:
            continue
        cells = [case, str(b), str(len(seeds))]
        for key in ("global_loss", "probe", "knn20"):
            gaps = [last[case, b, s][key] - last["dcl", b, s][key] for s in seeds]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5
            cells.append(f"{statistics.fmean(gaps):+.3f} ± {error:.3f}")
        lines.append(cells)
    return markdown(["minus DCL", "b", "pairs", "exact loss", "probe", "20-NN"], lines)


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("cifar10"))
    record = Path("records/2026-11-18_estimate-quality_cpu.jsonl")
    parser.add_argument("--out", type=Path, default=record)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, build in METHODS.items():
        register(Method(name, name, ("#888", "#888"), build))
    chosen = [case for case in CASES if case[0] in (given.cases or [case[0]])]
    jobs = [
        {
            "case": case,
            "method": method,
            "seed": seed,
            "b": b,
            "settings": {**BASE, **more, "norm": "group", "beta": 14.28, "batch_size": b},
        }
        for b in given.batches
        for seed in given.seeds
        for case, method, more in chosen
    ]
    if not given.redraw:
        per_class = {"train": 100, "test": TEST_PER_CLASS}
        folder = copied(given.data, Path("/tmp/negchain-pictures/cifar10-1000"), per_class)
        append(given.out, {"record": "estimate quality", **provenance(Options(device="cpu"))})
        done = [row["job"] for row in read_rows(given.out)]
        for job in (job for job in jobs if job not in done):
            begin = time.time()
            settings = {"data": str(folder), **job["settings"]}
            found = train({**job, "settings": settings, "points": [0.25, 0.5, 1.0]}, begin + 1e6)
            append(given.out, {"job": job, **found, "wall": round(time.time() - begin, 1)})
            last = found["curve"][-1]
            print(job["case"], job["b"], job["seed"], last["global_loss"], last["probe"],
                  round(time.time() - begin), flush=True)  # fmt: skip
    rows = read_rows(given.out)
    named = [{**row, "job": {**row["job"], "case": f"b = {row['job']['b']}: {row['job']['case']}"}}
             for row in rows]  # fmt: skip
    print(table(named) + "\n\n" + differences(rows))


if __name__ == "__main__":
    main()
