"""Which change makes a better estimate a better encoder? Digits, b = 8, through the trainer.

Data     512 digits (scikit-learn), augmented afresh, the trainer's small CNN; tested on
         the 359 held out.
Cases    the methods; chains with both views of an item as proposals, or informed ones; the
         positive in the denominator ("all"); beta 5 and 30 beside 14.28; learning rate 3e-3 beside
         1e-3; InfoNCE for the first half of the steps, EMC² after; three quarters of i-SIR's
         weights and a quarter of DCL's; informed importance whose partition is the table's, times a
         running ratio, instead of its own draws' sum (no bias of self-normalisation:
         benchmarks/differing_views.py); 60 epochs, in which a chain is visited sixty times,
         beside 4.
Prints   exact loss, linear probe, probe from a tenth of the labels and 20-NN: mean and deviation.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/hypotheses.py --out FILE.jsonl

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from negchain import DCLLoss, EMC2Loss, InfoNCELoss
from negchain.losses import ImportanceLoss, InBatch, Informed
from negchain.losses.weighted import Learn
from negchain.methods import LossSettings, Method, register
from negchain.objective import Estimate, global_log_partition
from negchain.pool import Side
from negchain.reproduce.common import Options, append, provenance, read_rows
from negchain.reproduce.pages import distinct, markdown, spread, where
from negchain.reproduce.runs import train

STEPS = 256


class TablePartition(ImportanceLoss):
    """W_ij = e^{l_ij} / (n q_j Z_i), Z_i = the stale table's partition times a running ratio."""

    ratio: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_state("ratio", torch.ones(()))

    def _estimate(self, number: int, side: Side, logits: Tensor) -> tuple[Estimate, Learn]:
        fresh = global_log_partition(side, logits)
        assert fresh is not None
        table = self.tables[number]
        stale = table._log_sum(table._kept(side, float(self.beta))(), side)
        own_sum = logits.logsumexp(1)  # stands for `fresh`
        log_z = stale + self.ratio.log()
        weights = torch.exp(logits - own_sum[:, None] + (fresh - log_z).clamp(max=1.4)[:, None])
        found = torch.exp(fresh - stale).mean()

        def learn(batch: object) -> None:
            self.ratio.lerp_(found.clamp(max=4 * float(self.ratio)), 0.05)

        return Estimate(weights.to(logits.dtype), log_z), learn


class Later(EMC2Loss):
    """InfoNCE for the first half of the steps; chains walk all the time."""

    def forward(self, z_a: Tensor, z_b: Tensor, *args: Any, **more: Any) -> Tensor:
        value = super().forward(z_a, z_b, *args, **more)
        early = int(self.step) <= STEPS // 2
        return InfoNCELoss(None, self.beta)(z_a, z_b, args[0]) if early else value


class Mixed(EMC2Loss):
    """A share of i-SIR's loss and the rest of DCL's, which is the same as to mix their weights."""

    share = 0.75

    def forward(self, z_a: Tensor, z_b: Tensor, *args: Any, **more: Any) -> Tensor:
        value = super().forward(z_a, z_b, *args, **more)
        in_batch = DCLLoss(None, self.beta)(z_a, z_b, args[0])
        return self.share * value + (1 - self.share) * in_batch


def _table(s: LossSettings) -> Any:
    return TablePartition(s.num_samples, s.beta, Informed(share=0.9), **s.chosen)


def _later(s: LossSettings) -> Any:
    return Later(s.num_samples, s.beta, **s.chosen)


def mixed(s: LossSettings) -> Any:
    return Mixed(s.num_samples, s.beta, kernel="isir", proposals=InBatch(copies=2), **s.chosen)


BASE = {"data": "digits", "batch_size": 8, "subset": 512, "epochs": STEPS // 64, "device": "cpu"}
LONG = {"epochs": 60}
IN_BATCH, CHAINS = ("infonce", "dcl", "sogclr"), ("emc2", "isir")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((m, m, {}) for m in (*IN_BATCH, *CHAINS, "informed", "table-partition")),
    *((f"{m}, {p}", m, {"proposal": p}) for p in ("both", "informed") for m in CHAINS),
    *((f"{m}, all", m, {"denominator": "all"}) for m in (*CHAINS, "sogclr", "informed")),
    ("InfoNCE, then emc2", "later", {}),
    ("isir and dcl, both", "mixed", {"proposal": "both"}),
    *((f"{m}, lr 3e-3", m, {"lr": 3e-3}) for m in ("infonce", "dcl", "emc2", "isir")),
    *((f"{m}, β {b}", m, {"beta": b}) for b in (5.0, 30.0) for m in ("infonce", "dcl", "emc2")),
    *((f"{m}, 60 epochs", m, LONG) for m in (*IN_BATCH, *CHAINS, "informed")),
    ("isir and dcl, both, 60 epochs", "mixed", {**LONG, "proposal": "both"}),
    *(
        (f"{m}, {p}, 60 epochs", m, {**LONG, "proposal": p})
        for p in ("both", "informed")
        for m in CHAINS
    ),
]


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and deviation over seeds."""
    lines = []
    for case in distinct(rows, "case"):
        last = [row["curve"][-1] for row in where(rows, case=case)]
        keys = ("global_loss", "probe", "probe_10pct", "knn20")
        lines.append([case, len(last), *(spread((p[k] for p in last), 3) for k in keys)])
    return markdown(["case", "seeds", "exact loss", "probe", "probe, 10 %", "20-NN"], lines)


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("records/2026-11-16_hypotheses_cpu.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    own = (("table-partition", _table), ("later", _later), ("mixed", mixed))
    for name, build in own:
        register(Method(name, name, ("#888", "#888"), build))
    jobs = [
        {"case": case, "method": method, "seed": seed, "settings": {**BASE, **more}}
        for seed in range(given.seeds)
        for case, method, more in CASES
        if given.only in case
    ]
    done = [row["job"] for row in read_rows(given.out)]
    if not given.redraw:
        append(given.out, {"record": "hypotheses", **provenance(Options(device="cpu"))})
        for job in (job for job in jobs if job not in done):
            begin = time.time()
            settings = {"proposal": "batch", **job["settings"]}  # a case says it where it is more
            found = train({**job, "settings": settings, "points": [1.0]}, begin + 1e6)
            append(given.out, {"job": job, **found, "wall": round(time.time() - begin, 1)})
            print(job["case"], job["seed"], found["curve"][-1]["global_loss"], flush=True)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
