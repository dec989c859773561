"""A training step of `negchain train` on texts: as a CUDA graph, and operation by operation.

    PYTHONPATH=src python benchmarks/retrieval_step.py BEIR_FOLDER MODEL_FOLDER [--batches 4 16 64]

Shows    the trainer's own step, two draws per query, 1 % of a table's documents refreshed a step.
         Eager steps pad a pass to its longest text, the graph to the corpus's longest.
Prints   ms per step, median of 5 rounds of some steps, one process, nothing beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch

from negchain import tasks
from negchain.bench.runs import stepper, vanishing
from negchain.train.resolve import resolve


def measure(given: argparse.Namespace, method: str, batch: int, graph: bool) -> float:
    """Milliseconds of a step."""
    named = {"data": given.data, "encoder": given.model, "method": method, "batch_size": batch}
    task = tasks.load(resolve(None, {**named, "graph": graph}))
    with vanishing(task) as run:
        if graph and not (task.capturable and run.step.try_capture()):
            warnings.warn(f"{method}, b = {batch}: no graph", stacklevel=1)
        run.step.fill()
        advance, laps = stepper(run), []
        for _ in range(6):
            if task.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(given.steps):
                advance()
            float(run.step.loss)  # waits for the device
            laps.append(1e3 * (time.perf_counter() - begin) / given.steps)
    return statistics.median(laps[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--methods", nargs="+", default=["infonce", "topk", "informed"])
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    print("| method | b | graph, ms | eager, ms | eager / graph |\n|---|---|---|---|---|")
    for batch in given.batches:
        for method in given.methods:
            graph, eager = (measure(given, method, batch, graph) for graph in (True, False))
            row = f"| {method} | {batch} | {graph:.2f} | {eager:.2f} | {eager / graph:.1f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
