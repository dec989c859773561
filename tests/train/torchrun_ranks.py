"""`negchain train` in several processes, as torchrun starts them, forked to save their imports."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  (imported once, not by every rank)
import torch
import torch.distributed as dist

from forked import fork
from negchain.cli import run
from negchain.tasks.image_judge import ImageJudge
from negchain.train import trainer
from negchain.train.step import TrainStep

TINY = (
    "train --data digits --subset 64 --encoder small-cnn --batch-size 12 --steps 10 --log-every 1 "
    "--eval-every 0 --warmup-epochs 0 --probe-samples 32 --device cpu --logger none --quiet"
)
Hook = Callable[[int], Any] | None


def _rank(rank: int, world: int, port: int, words: list[str], log: str, before: Hook) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(f"{log}.{rank}", "w", buffering=1)
    if before is not None:
        before(rank)
    os._exit(run(words))


def _store(port: Connection, ours: Connection) -> None:
    """What torchrun serves its ranks, until the last of them is gone."""
    ours.close()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    with contextlib.suppress(EOFError):
        port.recv()
    os._exit(0)


def start(world: int, words: str, log: Path, before: Hook = None) -> list[BaseProcess]:
    """Ranks of one run; `before` is called in each, with its number.

    The store has a process of its own. Its thread looks names up, and a rank forked in that very
    moment inherits the C library's lock on names: it then waits for ever in getaddrinfo (1 run of
    3 ranks in some 700).
    """
    ours, theirs = multiprocessing.Pipe()
    fork(_store, theirs, ours)
    theirs.close()
    given = (world, ours.recv(), words.split(), str(log), before)
    ranks = [fork(_rank, rank, *given) for rank in range(world)]  # they hold `ours` open
    ours.close()
    return ranks


def unjudged() -> None:
    """Leave out what takes most of the time of a tiny run, and is rank 0's alone."""
    for name in ("before", "thorough"):
        setattr(ImageJudge, name, lambda self, encoder: ({"knn1": 0.5}, {}))
    ImageJudge.quick = lambda self, encoder: {"knn1": 0.5}  # type: ignore[method-assign]
    ImageJudge.artifacts = lambda self, encoder, loss_fn: {}  # type: ignore[method-assign]
    trainer.write_report = lambda folders, file: None  # type: ignore[assignment]


def at_step(step: int, do: Callable[[trainer.Run], Any]) -> None:
    """Do something to the run just before it trains step number `step`."""
    prepare, call = trainer.Run.train, TrainStep.__call__
    runs: list[trainer.Run] = []

    def train(self: trainer.Run, *given: Any) -> Any:
        runs.append(self)
        return prepare(self, *given)

    def watched(self: TrainStep, now: int, *inputs: Any) -> None:
        if now == step:
            do(runs[0])
        call(self, now, *inputs)

    trainer.Run.train = train  # type: ignore[method-assign]
    TrainStep.__call__ = watched  # type: ignore[method-assign]


def ended(world: int, words: str, log: Path, before: Hook = None) -> list[int | None]:
    """Exit states of the ranks of one run."""
    ranks = start(world, words, log, before)
    latest = time.monotonic() + 240
    for rank in ranks:
        rank.join(max(0.0, latest - time.monotonic()))
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks]


def said(log: Path) -> str:
    """What all ranks said, rank after rank."""
    files = sorted(log.parent.glob(f"{log.name}.*"))
    return "".join(file.read_text() for file in files)


def metrics(out: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics that hold a loss, by step; rank 0 alone has written them, once each."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "loss" in line]
    assert len({line["step"] for line in found}) == len(found), "a step is there twice"
    return {line["step"]: line for line in found}
