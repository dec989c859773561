"""On a GPU: the trainer's step as a CUDA graph and eagerly, for every method: losses and speed.

    PYTHONPATH=src python benchmarks/gpu_check.py DATA [--steps 200] [--batch-size 32 256]

DATA is any folder `negchain train` takes. For each method and batch size the same steps run as a
CUDA graph and eagerly; the table shows the largest difference of their losses over ten steps
(bf16: rounding differs between kernels, then training amplifies it) and the speed of both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from negchain.optim import set_lr
from negchain.train import trainer
from negchain.train.config import resolve
from negchain.train.run_folder import RunFolder

SETTINGS: dict[str, dict] = {
    "infonce": {"method": "infonce"},
    "dcl": {"method": "dcl"},
    "sogclr": {"method": "sogclr"},
    "negcache": {"method": "negcache"},
    "emc2 encode": {"method": "emc2"},
    "emc2 cached": {"method": "emc2", "carried": "cached"},
    "emc2 score": {"method": "emc2", "carried": "score"},
    "emc2 cache": {"method": "emc2", "proposal": "cache"},
    "isir": {"method": "isir"},
}


def prepared(config, data, graph: bool):
    folder = RunFolder.create(Path(tempfile.mkdtemp()) / "run", config="{}\n")
    run = trainer.prepare(config, data, lambda: folder)
    if graph:
        run.step.capture()
    return run


def run_steps(run, steps: int) -> tuple[list[float], float]:
    losses = []
    for step in range(steps):
        set_lr(run.step.optimizer, 1e-4)
        run.step(step, run.order.batch(step))
        if step < 10:
            losses.append(float(run.step.loss))
        if step == 20:
            torch.cuda.synchronize()
            begin = time.perf_counter()
    torch.cuda.synchronize()
    return losses, (steps - 21) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    data = None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-18 without norm")
    names = f"{'b':>4} {'method':<14} {'|graph-eager|':>14} {'images/s':>10} {'ms/step':>8}"
    print(f"{names} {'eager':>8}")
    for batch in given.batch_size:
        base = None
        for name in given.only:
            settings = {**SETTINGS[name], "data": given.data, "batch_size": batch}
            config = resolve(f"stl10-b{batch}", {**settings, "steps": given.steps})
            data = data or trainer.load_images(config, False)
            graph = prepared(config, data, graph=True)
            losses, speed = run_steps(graph, given.steps)
            info = graph.step.loss_fn.info
            worst, eager_speed = float("nan"), float("nan")
            if not given.no_eager:
                eager = trainer.prepare(config, data, lambda: graph.folder)  # noqa: B023
                eager_losses, eager_speed = run_steps(eager, min(given.steps, 60))
                worst = max(abs(a - b) for a, b in zip(losses, eager_losses, strict=True))
            base = base or 1 / speed
            rows.append(
                {
                    "batch": batch,
                    "method": name,
                    "difference": worst,
                    "ms": 1e3 / speed,
                    "images_per_second": speed * batch,
                    "ratio_to_first": 1 / speed / base,
                    "info": info,
                }
            )
            print(
                f"{batch:>4} {name:<14} {worst:>14.2e} {speed * batch:>10,.0f} {1e3 / speed:>8.2f} "
                f"{1e3 / eager_speed:>8.2f}   x{1 / speed / base:.2f}  loss {losses[0]:.3f}",
                flush=True,
            )
            graph.folder.close()
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
