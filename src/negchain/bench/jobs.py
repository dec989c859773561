"""Several training runs at a time on one device: images per second of all of them together."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from negchain.bench.runs import SIDE
from negchain.bench.table import Row, Settings, Table
from negchain.train.concurrent import Row as Found
from negchain.train.concurrent import measure

PICTURES = 1024
HOW = {"turns": "taking turns", "mps": "sharing through MPS"}
ALONE = "one run alone"


def table(settings: Settings) -> Table:
    """`negchain train` 1, 2 and 4 times at once (on a CPU 1 and 2), EMC², b = 32."""
    said: list[str] = []
    seconds = (3.0 if settings.on_gpu else 1.0) if settings.quick else 5.0

    def say(text: str) -> None:
        settings.say(text)
        said.append(text)

    with tempfile.TemporaryDirectory(prefix="negchain-bench-") as folder:
        arguments = ["--method", "emc2", "--batch-size", "32"]
        if settings.on_gpu:
            _write_pictures(Path(folder), settings.seed)
            arguments += ["--preset", "stl10-b32", "--data", folder, "--device", "cuda"]
        else:
            arguments += ["--data", "digits", "--device", "cpu"]
        settings.say(ALONE)
        counts = ((4,) if settings.quick else (2, 4)) if settings.on_gpu else (2,)
        found = measure(arguments, counts, seconds=seconds, say=say)
    alone = [sum(found[0].rates)]
    rows = [
        Row.of(
            _name(row, settings.on_gpu),
            [sum(row.rates)],
            "images/s",
            against=ALONE,
            base=alone,
            headline=row is found[-1],
        )
        for row in found
    ]
    return Table(
        subject="jobs",
        title="Runs at the same time, images per second of all together",
        compares="images/s against one run alone",
        rows=tuple(rows),
        notes=(
            f"`negchain train` EMC², b = 32, in processes of its own; one window of {seconds:g} s "
            "in which all train, so there is no spread.",
            *(said if settings.on_gpu and all(row.sharing != "mps" for row in found) else ()),
        ),
    )


def _name(row: Found, on_gpu: bool) -> str:
    if row.jobs == 1:
        return ALONE
    return f"{row.jobs} at a time, {HOW[row.sharing] if on_gpu else 'on one CPU'}"


def _write_pictures(folder: Path, seed: int) -> None:
    shape = (PICTURES, SIDE, SIDE, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:05d}.png", compress_level=0)
