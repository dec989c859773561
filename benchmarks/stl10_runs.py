"""Many training runs on one GPU, several at a time, with one table at the end.

    PYTHONPATH=src python benchmarks/stl10_runs.py DATA RUNS.json [--at-once 5] [--seconds 500]

DATA is an image folder (train/, test/, unlabeled/). RUNS.json: {"name": {"method": ..., option:
value, ...}, ...}; keys that begin with "loss." are set on the loss itself ("loss.partition_rate").
Writes runs.jsonl (one line per run: settings, seconds, 1-NN, probes, exact loss) into $OUT.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any


def one(task: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    """Train and judge one run; its numbers, or why there are none."""
    name, settings, data = task
    begin = time.perf_counter()
    try:
        from negchain import tasks
        from negchain.optim import set_lr
        from negchain.train import trainer
        from negchain.train.resolve import resolve
        from negchain.train.run_folder import RunFolder

        given = {k: v for k, v in settings.items() if not k.startswith("loss.")}
        config = resolve(None, {"data": data, "eval_every": 0, "checkpoint_every": 0, **given})
        folder = Path(tempfile.mkdtemp()) / "run"
        run = trainer.prepare(tasks.load(config), lambda: RunFolder.create(folder, config="{}\n"))
        for key, value in settings.items():
            if key.startswith("loss."):
                setattr(run.step.loss_fn, key.removeprefix("loss."), value)
        with run.folder:
            if run.device.type == "cuda":
                run.step.capture()
            run.step.fill()
            begin = time.perf_counter()
            for step in range(run.total_steps):
                set_lr(run.step.optimizer, run._lr(step))
                run.step(step, run.order.batch(step))
            loss = float(run.step.loss)
            seconds = time.perf_counter() - begin
            found = {**run.judge.quick(run.encoder), "loss": loss, "seconds": seconds}
        keep = ("knn1", "knn20", "probe", "global_loss", "seconds", "loss", "embedding_variance")
        numbers = {k: round(float(found[k]), 4) for k in keep if k in found}
    except Exception:
        numbers = {"error": traceback.format_exc()[-600:]}
    return {"name": name, **settings, **numbers, "wall": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=500.0)
    options = parser.parse_args()
    begin, out = time.perf_counter(), Path(os.environ.get("OUT", "."))
    tasks = [(n, s, options.data) for n, s in json.loads(options.runs.read_text()).items()]
    with mp.get_context("spawn").Pool(options.at_once, maxtasksperchild=1) as pool:
        waiting = pool.imap_unordered(one, tasks)
        with open(out / "runs.jsonl", "w") as file:
            for _ in tasks:
                left = options.seconds - (time.perf_counter() - begin)
                try:
                    row = waiting.next(timeout=max(left, 0.1))
                except mp.TimeoutError:
                    print("no time left", flush=True)
                    break
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(json.dumps(row), flush=True)
        pool.terminate()
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
