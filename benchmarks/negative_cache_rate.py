"""What makes Negative Cache learn with BatchNorm: rate, refresh, or the passes of the encoder?

    PYTHONPATH=src python benchmarks/negative_cache_rate.py STL10 CASE [--epochs 8]    # on a GPU

STL10: the folder that `unpack.py stl10.npz STL10` of the project's data makes. The preset stl10-b32
with BatchNorm, Adam 3e-4, `refresh=0.01`, seed 0, except for what the case changes; a line of JSON
six times on the way.

    rate-1e-4, rate-2e-4    another learning rate
    refresh-.05             five times the refreshed keys a step
    eval-keys               keys (positives, winners, table) by running statistics
    one-pass                anchors in the keys' pass; winners by a pass before it
    refreshed-inside        refreshed keys in the pass of positives and winners
    apart                   positives and winners in passes of their own
    none                    no normalisation (the authors' code's), Adam 1e-4 (the paper's)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn

from negchain.chunked import statistics_kept
from negchain.losses.request import Request
from negchain.optim import set_lr
from negchain.reproduce import runs
from negchain.train import start

SETTINGS: dict[str, dict[str, Any]] = {
    "rate-1e-4": {"lr": 1e-4},
    "rate-2e-4": {"lr": 2e-4},
    "refresh-.05": {"refresh": 0.05},
    "none": {"norm": "none", "lr": 1e-4},
    "eval-keys": {}, "one-pass": {}, "refreshed-inside": {}, "apart": {},
}  # fmt: skip


def by_running_statistics(step: Any) -> None:
    """Keys are encoded by running statistics."""
    encode, norms = step._encode, [m for m in step.encoder.modules() if "BatchNorm" in str(type(m))]

    def changed(towers: Any, shares: Any, row: int, loaded: Any = None) -> list[Tensor]:
        mine: list[nn.Module] = norms if shares[0].want.tower == "keys" else []
        for norm in mine:
            norm.eval()
        found: list[Tensor] = encode(towers, shares, row, loaded)
        for norm in mine:
            norm.train()
        return found

    step._encode = changed


def by_passes(step: Any, case: str) -> None:
    """The step with other passes through the encoder."""

    def forward(loaded: Any) -> Tensor:
        task, loss_fn, index = step.task, step.loss_fn, step.index
        whole, first = task.batch(index, step.step), loss_fn.request(index)
        asked = step._shares(first)
        own, keys = (step._of_batch(getattr(whole, t), t) for t in ("anchors", "keys"))
        second: Request
        if case == "one-pass":
            pixels = task.inputs([own.want], step.step, 0)
            with torch.no_grad(), statistics_kept(step.encoder):
                second = loss_fn.request(index, step.plain["anchors"](pixels))
            shares = [keys, *step._shares(second)]
            plain = task.inputs([share.want for share in shares], step.step, own.size)
            z = step.embed["anchors"](torch.cat([pixels, plain.to(pixels.dtype)]))
            z_a, z_b, drawn = torch.split(z, [own.size, *(share.size for share in shares)])
            answers = [step._renewed(share, 3 * own.size) for share in asked]
        else:
            (z_a,) = step._encode(step.embed, [own], 0)
            second = loss_fn.request(index, z_a)
            winners = step._shares(second)
            if case == "apart":
                (z_b,) = step._encode(step.embed, [keys], own.size)
                (drawn,) = step._encode(step.embed, winners, 2 * own.size)
                answers = [step._renewed(share, 3 * own.size) for share in asked]
            else:
                every = step._encode(step.embed, [keys, *winners, *asked], own.size)
                z_b, drawn, answers = every[0], every[1], [z.detach() for z in every[2:]]
        second.answer([drawn])
        loss: Tensor = loss_fn(z_a, z_b, index, first.answer(answers), second)
        return loss

    step._forward = forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("case", choices=SETTINGS)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    settings = {"preset": "stl10-b32", "norm": "batch", "lr": 3e-4, "data": given.data}
    settings |= {"epochs": given.epochs, **SETTINGS[given.case]}
    prepare = start.prepare

    def prepared(*args: Any, **more: Any) -> Any:
        run = prepare(*args, **more)
        if given.case == "eval-keys":
            by_running_statistics(run.step)
        elif given.case in ("one-pass", "refreshed-inside", "apart"):
            by_passes(run.step, given.case)
        return run

    start.prepare = prepared
    with runs.prepared({"seed": 0, "method": "negcache", "settings": settings}) as (run, graph):
        for step in range(run.total_steps):
            set_lr(run.step.optimizer, run._lr(step))
            run.step(step, run.order.batch(step))
            if (step + 1) % (run.total_steps // 6) == 0:
                row = {"case": given.case, "graph": graph, "step": step + 1}
                row |= {"loss": float(run.step.loss), **run.judge.quick(run.encoder)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
