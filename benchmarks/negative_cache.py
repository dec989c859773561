"""Does Negative Cache learn? Its own loss beside the one methods are compared by.

    python benchmarks/negative_cache.py STL10 [--steps 300] [--norms batch,none] [--lr 1e-3]
        [--encoder small-cnn] [--pictures 1000] [--cases dcl,negcache]

STL10 is a folder of pictures, such as the one `unpack.py stl10.npz STL10 --limit 3000` of the
project's data makes. Every case trains an encoder on pictures of 32 px (b = 32, β = 14.28, the
data's recipe, 30 steps of warm-up, then a constant rate) through the trainer's step. Two cases are
forms the trainer once had: augmented keys ("negcache-views"), and a table encoded anew in the order
of the data ("negcache-in-order").
A line has the exact loss of two augmented views ("views"), and that of an augmented view against
plain keys ("plain"), which is what Negative Cache trains; lower is better, and an encoder that maps
everything to one point has log 598 and log 299.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch

from negchain import tasks
from negchain.methods import METHODS, register
from negchain.train import start
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder

CASES = ("dcl", "negcache", "negcache-views", "negcache-in-order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--norms", default="batch,none")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--encoder", default="small-cnn")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--pictures", type=int, default=1000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    told = dataclasses.replace(METHODS["negcache"], name="negcache-views", plain_keys=False)
    register(told)
    register(dataclasses.replace(METHODS["negcache"], name="negcache-in-order"))
    marks = [asked.steps * i // 6 for i in range(7)]
    print("| norm | method | loss |", *(f"{n} |" for n in marks), flush=True)
    print("|---|---|---|" + "---|" * len(marks))
    for norm in asked.norms.split(","):
        for method in asked.cases.split(","):
            rows = trained(asked, method, norm, marks)
            for name in ("views", "plain"):
                values = " | ".join(f"{row[name]:.2f}" for row in rows)
                print(f"| {norm} | {method} | {name} | {values} |", flush=True)


def trained(
    asked: argparse.Namespace, method: str, norm: str, marks: list[int]
) -> list[dict[str, float]]:
    """Both losses at the steps in `marks`."""
    settings = {"data": asked.data, "method": method, "norm": norm, "steps": marks[-1]}
    settings |= {"batch_size": 32, "image_size": 32, "probe_samples": 300, "workers": 1}
    settings |= {"encoder": asked.encoder, "lr": asked.lr, "subset": asked.pictures}
    if asked.encoder != "small-cnn":
        settings["stem"] = "large"
    config = resolve(None, {**settings, "device": "cpu"})
    folder = Path(tempfile.mkdtemp(), "run")
    run = start.prepare(tasks.load(config), lambda: RunFolder.create(folder, config="{}\n"))
    judge = dataclasses.replace(run.judge, config=dataclasses.replace(config, method="negcache"))
    rows = []
    if method == "negcache-in-order":
        for table in run.step.loss_fn.tables:
            table.order.step = 1
    with run.folder:
        run.step.fill()
        for step in range(marks[-1] + 1):
            if step in marks:
                found = judge.losses(run.encoder)
                rows.append({"views": found["global_loss"], "plain": found["own_loss"]})
            if step < marks[-1]:
                run.step.optimizer.param_groups[0]["lr"] = config.lr * min(1, (step + 1) / 30)
                run.step(step, run.order.batch(step))
    return rows


if __name__ == "__main__":
    main()
