"""How long a captured training step takes with each strategy of `negchain.fast.encoder`.

    PYTHONPATH=src python benchmarks/encoder_paths.py [--budget 400] [--strategies plain ...]
        [--encoders ResNet-18 ViT-Tiny ...] [--batches 32 256]

One row per encoder, batch size and loss, one column per strategy: ms per step, the median of rounds
in which the strategies take turns. A strategy that fails says so in its cell. Compiled strategies
are first compiled by several processes at once, so that the compiler's cache has them. Writes
encoder_paths.json into $OUT (default: here) after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from negchain.bench import Settings, runs
from negchain.bench.timing import Timed, interleaved, release
from negchain.data import DataBundle
from negchain.fast import encoder as fast_encoder
from negchain.reproduce.pages import markdown
from negchain.train import trainer
from negchain.train.config import TrainConfig

STRATEGIES = get_args(fast_encoder.Strategy)
LOSSES = (runs.BASE, runs.DEFAULT)
SIXTEEN_BITS = {"precision": "bf16"}  # also where this is tried on a CPU
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = Settings(device=DEVICE)
ENCODERS = runs.encoders(HERE)
BEGIN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


def config(encoder: str, batch: int, loss: str) -> TrainConfig:
    return runs.config(HERE, batch, runs.variants()[loss], {**ENCODERS[encoder], **SIXTEEN_BITS})


def captured(run: trainer.Run, name: fast_encoder.Strategy) -> None:
    """Record the run's step with a strategy (on a CPU: set it up and make a step)."""
    fast = fast_encoder.accelerate(run.encoder, run.step.autocast, name)
    if DEVICE.type == "cuda":
        with mock.patch.object(fast_encoder, "accelerate", lambda *tower: fast):
            run.step.capture()
    else:
        run.step.embed = {"anchors": fast, "keys": fast}


def gradient(run: trainer.Run) -> Tensor:
    """Adam's first moment after the first step: a tenth of its gradient."""
    state = run.step.optimizer.state
    return torch.cat([state[p]["exp_avg"].flatten().float() for p in run.encoder.parameters()])


def measured(
    encoder: str, batch: int, loss: str, names: list[str], data: DataBundle, rounds: int
) -> dict[str, Any]:
    """One row: milliseconds by strategy, or what went wrong, and how far gradients are apart."""
    torch._dynamo.reset()
    row: dict[str, Any] = {"encoder": encoder, "batch": batch, "loss": loss, "ms": {}, "error": {}}
    row |= {"prepared_s": {}, "apart": {}}
    reference: Tensor | None = None
    with ExitStack() as stack:
        timed: dict[str, Timed] = {}
        for name in names:
            begin = time.perf_counter()
            try:
                run = stack.enter_context(runs.prepared(config(encoder, batch, loss), data))
                captured(run, name)
                advance = runs.stepper(run)
                advance()
                found = gradient(run)
                reference = found if reference is None else reference
                row["apart"][name] = float((found - reference).norm() / reference.norm())
                timed[name] = Timed(advance, DEVICE)
            except Exception as error:
                traceback.print_exc()
                row["error"][name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            row["prepared_s"][name] = round(time.perf_counter() - begin, 1)
        if timed:
            times = interleaved(timed, rounds, window_ms=25.0)
            row["ms"] = {name: statistics.median(found) for name, found in times.items()}
    del timed, reference
    release()
    return row


def compile_ahead(cells: list[tuple[str, int, str]], names: list[str], processes: int) -> None:
    """Fill the compiler's cache: every process compiles its share."""
    jobs = [(*cell, name) for name in names if name == "compiled" for cell in cells]
    shares = [jobs[number::processes] for number in range(processes)]
    say(f"compiling {len(jobs)} graphs in {processes} processes")
    begun = [
        subprocess.Popen([sys.executable, __file__, "--compile-only", json.dumps(share)])
        for share in shares
        if share
    ]
    for process in begun:
        process.wait()
    say("compiled")


def compile_only(jobs: list[tuple[str, int, str, str]]) -> None:
    torch._inductor.config.compile_threads = 2
    data = runs.pictures(HERE, shared=True)
    for encoder, batch, loss, name in jobs:
        try:
            with runs.prepared(config(encoder, batch, loss), data) as run:
                captured(run, name)
                runs.stepper(run)()
        except Exception as error:  # told when it is measured
            print(f"{encoder} {batch} {loss} {name}: {error}", flush=True)
        torch._dynamo.reset()
        release()


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    lines = []
    for row in rows:
        errors = {name: text[:60] for name, text in row["error"].items()}
        cells = errors | {name: f"{ms:.3f}" for name, ms in row["ms"].items()}
        lines.append(
            [row["encoder"], row["batch"], row["loss"], *(cells.get(n, "-") for n in names)]
        )
    return markdown(["encoder", "b", "loss", *names], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--encoders", nargs="+", default=list(ENCODERS), choices=ENCODERS)
    parser.add_argument("--batches", nargs="+", type=int, default=runs.batch_sizes(HERE))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--budget", type=float, default=400.0, help="begin no row after (seconds)")
    parser.add_argument("--processes", type=int, default=8, help="that compile at once; 0: none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile-only", default="", help="JSON; used by this script itself")
    given = parser.parse_args()
    if given.compile_only:
        compile_only(json.loads(given.compile_only))
        return
    out = Path(os.environ.get("OUT", ".")) / "encoder_paths.json"
    cells = [(e, b, m) for b in given.batches for e in given.encoders for m in given.losses]
    cells.sort(key=lambda cell: cell[1] > 32 and cell[2] != runs.BASE)  # what may be left out
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    say(f"{gpu}, torch {torch.__version__}")
    if given.processes:
        compile_ahead(cells, given.strategies, given.processes)
    data = runs.pictures(HERE, shared=True)
    rows: list[dict[str, Any]] = []
    for encoder, batch, loss in cells:
        if time.perf_counter() - BEGIN > given.budget:
            say(f"no time left for {encoder}, b = {batch}, {loss}")
            continue
        rows.append(measured(encoder, batch, loss, given.strategies, data, given.rounds))
        last = rows[-1]
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in last["ms"].items())
        say(f"{encoder}, b = {batch}, {loss}: {times}")
        say(f"  prepared in s: {last['prepared_s']}")
        say(f"  gradient apart from the first's: {last['apart']}")
        out.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "rows": rows}, indent=1))
    print(table(rows, given.strategies), flush=True)


if __name__ == "__main__":
    main()
