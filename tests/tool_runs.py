"""Runs of the command line small enough for tests, and ways to look at what they left."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from forked import fork
from negchain.cli import run
from negchain.train import checkpoint
from negchain.train.step import TrainStep

# A step takes milliseconds, and there is nothing to probe.
TINY = "--encoder small-cnn --recipe digits --image-size 8 --batch-size 8 --probe-samples 8 "
TINY += "--quiet --device cpu --log-every 1 --eval-every 0 --workers 0 --warmup-epochs 0"
DIGITS = "--data digits --batch-size 32 --probe-samples 32 --quiet --device cpu --eval-every 0"


def negchain(*arguments: object) -> int:
    """The exit status of a command line; strings are split at spaces, paths are not."""
    words: list[str] = []
    for argument in arguments:
        words += argument.split() if isinstance(argument, str) else [str(argument)]
    return run(words)


def picture_folder(path: Path, count: int = 24, side: int = 8) -> Path:
    """A plain folder of random pictures without labels."""
    path.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(path / f"{number:03d}.png")
    return path


def class_folder(path: Path) -> Path:
    """Random pictures of two classes, with a test split: what can be probed in no time."""
    pixels = np.random.default_rng(0).integers(0, 256, (36, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        split = "train" if number < 24 else "test"
        place = path / split / f"class{number % 2}" / f"{number:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image // (1 + number % 2)).save(place)
    return path


def interrupt_at(patch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal while training step number `step`, as Ctrl-C would."""
    call = TrainStep.__call__

    def interrupted(self: TrainStep, now: int, *inputs: Any) -> None:
        if now == step:
            os.kill(os.getpid(), number)
        call(self, now, *inputs)

    patch.setattr(TrainStep, "__call__", interrupted)


def state_of(folder: Path) -> dict[str, Any]:
    loaded = checkpoint.load_latest(folder / "checkpoints")
    assert loaded is not None and loaded.warnings == []
    return {k: v for k, v in loaded.state.items() if k != "seconds"}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("seconds", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Equal bit for bit, tensors included."""
    assert type(a) is type(b), where
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        assert same and a.numpy().tobytes() == b.numpy().tobytes(), where  # NaN marks "not yet"
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for position, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{where}[{position}]")
    else:
        assert a == b, where


def assert_same_run(a: Path, b: Path) -> None:
    assert_same(state_of(a), state_of(b))
    assert_same(metrics_of(a), metrics_of(b), "metrics")


def snapshot(path: Path) -> dict[str, bytes]:
    """Contents of every file below a folder, but for the lock."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def _child(words: list[str], log: str) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "a", buffering=1)
    sys.exit(run(words))


def process(words: str, log: Path) -> Any:
    """A command line in a process of its own."""
    return fork(_child, words.split(), str(log))
