"""Runs of the command line small enough to break many times, and what they left."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from negchain.cli import main as negchain
from negchain.train import checkpoint
from negchain.train.step import TrainStep

STEPS = 12
TINY = (
    "train --encoder small-cnn --recipe digits --image-size 8 --batch-size 8 --probe-samples 8 "
    "--quiet --device cpu --log-every 1 --eval-every 2 --warmup-epochs 0 --checkpoint-every 3"
)
RESIDENT, ON_DISK = "--workers 0", "--workers 2 --resident-gb 0"


def pictures(path: Path, seed: int = 0) -> Path:
    path.mkdir(parents=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 9, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(path / f"{number:03d}.png")
    return path


def _child(words: list[str], log: str, before: Callable[[], Any] | None) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    if before is not None:
        before()
    negchain(words)


def start(
    words: str, *paths: object, log: Path, before: Callable[[], Any] | None = None
) -> multiprocessing.process.BaseProcess:
    """A command line in a process of its own; `before` runs in it first."""
    context = multiprocessing.get_context("fork")
    arguments = [*words.split(), *map(str, paths)]
    child = context.Process(target=_child, args=(arguments, str(log), before))
    child.start()
    return child


def ended(
    words: str, *paths: object, log: Path, before: Callable[[], Any] | None = None
) -> tuple[int, str]:
    """Exit status of a command line, and the line in which it says what went wrong."""
    child = start(words, *paths, log=log, before=before)
    child.join(300)
    assert child.exitcode is not None, "it hangs"
    return child.exitcode, said(log)


def said(log: Path) -> str:
    text = log.read_text()
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if re.match("(refused|failed|stopped)", line)]
    return lines[0] if lines else ""


def state_of(folder: Path) -> Any:
    loaded = checkpoint.load_latest(folder / "checkpoints")
    assert loaded is not None
    return loaded.step, {k: v for k, v in loaded.state.items() if k != "seconds"}


def metrics_of(folder: Path) -> list[Any]:
    clock = ("seconds", "images_per_second", "samples_per_second")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
            torch.nan_to_num(a), torch.nan_to_num(b)
        )  # fmt: skip
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def require_equal(a: Path, b: Path) -> None:
    assert same(state_of(a), state_of(b)), "the runs' states differ"
    assert same(metrics_of(a), metrics_of(b)), "the runs' metrics differ"


def whole(top: Path, how: str) -> tuple[Path, Path]:
    """Pictures, and a run on them that was left alone."""
    data = pictures(top / "pictures")
    status, text = ended(f"{TINY} --steps {STEPS} {how} --data", data, "--out", top / "whole",
                         log=top / "log")  # fmt: skip
    assert status == 0, text
    return data, top / "whole"


def finished(top: Path, log: Path) -> None:
    status, text = ended("train --quiet --resume --out", top, log=log)
    assert status == 0, text


def at_step(step: int, do: Callable[[], Any]) -> Callable[[], Any]:
    """Do something in the child just before it trains step number `step`."""

    def before() -> None:
        call = TrainStep.__call__

        def watched(self: TrainStep, now: int, *inputs: Any) -> None:
            if now == step:
                do()
            call(self, now, *inputs)

        TrainStep.__call__ = watched  # type: ignore[method-assign]

    return before
