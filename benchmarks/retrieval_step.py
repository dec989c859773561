"""A training step of `negchain train` on texts: as a CUDA graph, and operation by operation.

    PYTHONPATH=src python benchmarks/retrieval_step.py BEIR_FOLDER MODEL_FOLDER [--batches 4 16 64]

Shows    the trainer's own step, two draws per query, 1 % of a table's documents refreshed a step.
         Eager steps pad a pass to its longest text, the graph to the corpus's longest.
Prints   ms per step, median of 5 rounds, one process, nothing beside it.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

from negchain import tasks
from negchain.bench.runs import stepper, vanishing
from negchain.bench.timing import Timed, interleaved
from negchain.train.resolve import resolve


def measure(given: argparse.Namespace, method: str, batch: int, graph: bool) -> float:
    """Milliseconds of a step."""
    named = {"data": given.data, "encoder": given.model, "method": method, "batch_size": batch}
    task = tasks.load(resolve(None, {**named, "graph": graph}))
    with vanishing(task) as run:
        if graph and not (task.capturable and run.step.try_capture()):
            warnings.warn(f"{method}, b = {batch}: no graph", stacklevel=1)
        run.step.fill()
        timed = {"step": Timed(stepper(run), task.device)}
        return statistics.median(interleaved(timed, rounds=5, window_ms=given.window)["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--methods", nargs="+", default=["infonce", "topk", "informed"])
    parser.add_argument("--window", type=float, default=300.0, help="ms of a round")
    given = parser.parse_args()
    print("| method | b | graph, ms | eager, ms | eager / graph |\n|---|---|---|---|---|")
    for batch in given.batches:
        for method in given.methods:
            graph, eager = (measure(given, method, batch, graph) for graph in (True, False))
            row = f"| {method} | {batch} | {graph:.2f} | {eager:.2f} | {eager / graph:.1f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
