"""`negchain train` in several processes, as torchrun starts them, forked to save their imports."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from negchain.cli import run

TINY = (
    "train --data digits --subset 64 --encoder small-cnn --batch-size 12 --steps 10 --log-every 1 "
    "--eval-every 0 --warmup-epochs 0 --probe-samples 32 --device cpu --logger none --quiet"
)
STORES: list[dist.TCPStore] = []
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
    code=run(words); import resource; print("cpu", resource.getrusage(resource.RUSAGE_SELF).ru_utime); os._exit(code)


def start(
    world: int, words: str, log: Path, before: Hook = None
) -> list[multiprocessing.process.BaseProcess]:
    """Ranks of one run; `before` is called in each, with its number."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)  # lives as long as torchrun would
    context = multiprocessing.get_context("fork")
    arguments = [(r, world, store.port, words.split(), str(log), before) for r in range(world)]
    ranks = [context.Process(target=_rank, args=given) for given in arguments]
    for rank in ranks:
        rank.start()
    return ranks


def ended(world: int, words: str, log: Path, before: Hook = None) -> list[int | None]:
    """Exit states of the ranks of one run."""
    ranks = start(world, words, log, before)
    for rank in ranks:
        rank.join(240)
        if rank.is_alive():
            rank.kill()
    return [rank.exitcode for rank in ranks]


def said(log: Path) -> str:
    """What all ranks said, rank after rank."""
    files = sorted(log.parent.glob(f"{log.name}.*"))
    return "".join(file.read_text() for file in files)


def metrics(out: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics that hold a loss, by step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}
