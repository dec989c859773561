"""A captured training step with the loss in fused kernels, in eager torch, and compiled.

    PYTHONPATH=src python benchmarks/compiled_loss.py [--batches 32 256] [--encoder ResNet-18] ...

Question  How much slower is a step if the loss is the readable torch code under `torch.compile`
          instead of the kernels of `negchain.fast.fused`?
Cases     fused: the default. eager: the readable loss, operation by operation. compiled: the same
          code through Inductor. The whole step is one CUDA graph of `TrainStep.capture`.
Method    One process per cell, in which the case and "fused" take turns, round by round. A cell
          that fails, hangs or loses its CUDA context says so, and the others go on.
Prints    ms per step and its ratio to "fused", medians; graphs and graph breaks of the compiled
          loss; how far the first gradients are apart. $OUT/compiled_loss.json has every cell.
          On a CPU it is a smoke test: there is no graph, and "fused" is the readable loss.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from encoder_paths import DEVICE, HERE, gradient, say
from torch._dynamo.utils import counters

from negchain.bench import runs
from negchain.bench.timing import Timed, interleaved
from negchain.pool import Side
from negchain.reproduce.pages import markdown


def change(loss_fn: Any, case: str) -> None:
    """Give a run's loss the path of a case."""
    if case != "fused":
        loss_fn.backend = "torch"
    if case == "compiled":
        name = "visit" if hasattr(loss_fn, "visit") else "_loss"  # what computes
        compiled = torch.compile(getattr(loss_fn, name), dynamic=False)

        def call(*given: Any) -> Any:
            # The backward pass draws again from the step, which the loss increases before that.
            step, loss_fn.step = loss_fn.step, loss_fn.step.clone()
            found = compiled(*given)
            loss_fn.step = step
            return found

        setattr(loss_fn, name, call)


def let_compile() -> None:
    """Take out of the way what only breaks the loss's graph."""
    for name, module in list(sys.modules.items()):
        if name.startswith("negchain.losses") and hasattr(module, "is_traced"):
            module.is_traced = lambda z: False  # asks whether torch.func is at work
        if name.startswith("negchain") and hasattr(module, "has_triton"):
            module.has_triton = lambda: True  # asks the import system
    vars(Side)["to_positives"].lock = nullcontext()  # Python 3.11 locks a cached property
    # On a CPU a vectorised check finds indices out of range that are not (torch 2.15, the walk).
    torch._inductor.config.cpp.simdlen = 1


def measure(method: str, batch: int, case: str, encoder: str) -> dict[str, Any]:
    """Times of a case and of "fused", in turns."""
    data = runs.pictures(HERE, shared=True)
    if case == "compiled":
        let_compile()
    chosen = runs.config(HERE, batch, {"method": method}, runs.encoders(HERE)[encoder])
    timed, gradients, compiled = dict[str, Timed](), [], []
    with ExitStack() as stack:
        for name in ("fused", case):
            counters.clear()
            run = stack.enter_context(runs.prepared(chosen, data))
            change(run.step.loss_fn, name)
            if HERE.on_gpu:
                run.step.capture()
            advance = runs.stepper(run)
            advance()
            gradients.append(gradient(run))
            broken = sum(counters["graph_break"].values())
            compiled.append((counters["stats"]["unique_graphs"], broken))
            timed[name] = Timed(advance, DEVICE)
        times = interleaved(timed, HERE.rounds, window_ms=25.0)
    ratios = [mine / fused for mine, fused in zip(times[case], times["fused"], strict=True)]
    found = {"ms": times[case], "fused": times["fused"], "ratio": ratios}
    return {name: statistics.median(values) for name, values in found.items()} | {
        "compiled": [mine - fused for fused, mine in zip(*compiled, strict=True)],  # no encoder's
        "apart": float((gradients[1] - gradients[0]).norm() / gradients[0].norm()),
    }


def cell(words: list[str], timeout: float) -> dict[str, Any]:
    """`measure` in a process of its own, or what went wrong there."""
    command = [sys.executable, __file__, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    print(done.stderr[-3000:], flush=True)
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return {"error": f"exit status {done.returncode}: {''.join(last)[:200]}"}


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["loss", "b", "case", "ms", "fused, ms", "ratio", "graphs, breaks", "gradient apart"]
    lines = []
    for row in rows:
        cells = [row.get("error", "")[:80], *[""] * 4]
        if "ms" in row:
            cells = [f"{row[name]:.3f}" for name in ("ms", "fused", "ratio")]
            cells += [", ".join(map(str, row["compiled"])), f"{row['apart']:.1e}"]
        lines.append([row["method"], row["batch"], row["case"], *cells])
    return markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=runs.batch_sizes(HERE))
    parser.add_argument("--methods", nargs="+", default=["infonce", "emc2"])
    parser.add_argument("--encoder", default=next(iter(runs.encoders(HERE))))
    parser.add_argument("--budget", type=float, default=540.0, help="of all cells (seconds)")
    parser.add_argument("--timeout", type=float, default=150.0, help="of a cell (seconds)")
    parser.add_argument("--one", nargs=3, help="a cell; for this script itself")
    given = parser.parse_args()
    if given.one:
        method, batch, case = given.one
        print(json.dumps(measure(method, int(batch), case, given.encoder)), flush=True)
        return
    rows, out = list[dict[str, Any]](), Path(os.environ.get("OUT", ".")) / "compiled_loss.json"
    end, cases = time.perf_counter() + given.budget, ("eager", "compiled")
    for words in [(m, b, c) for b in given.batches for m in given.methods for c in cases]:
        asked = ["--encoder", given.encoder, "--one", *map(str, words)]
        row = cell(asked, max(1.0, min(given.timeout, end - time.perf_counter())))
        rows.append({**dict(zip(("method", "batch", "case"), words, strict=True)), **row})
        say(str(rows[-1]))
        out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
