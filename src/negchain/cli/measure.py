"""The tables of `negchain bench`: measured, shown and written to a record."""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

from negchain import bench
from negchain.bench import record as records
from negchain.train.config import ConfigError
from negchain.train.presets import choose


def measure(only: str, device: str, out: Path | None, quick: bool, seed: int) -> int:
    """What `negchain bench` does; see `negchain.cli.bench` for the options."""
    choose("--device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU and none is visible; use --device cpu or auto")
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    names = [choose("--only", name.strip(), bench.SUBJECTS) for name in only.split(",") if only]
    subjects = list(dict.fromkeys(names)) or list(bench.SUBJECTS)
    if not -1 <= seed < 2**31:
        raise ConfigError(f"--seed must be from 0 to 2147483647, or -1, got {seed}")
    words = ["negchain bench", *(["--only", ",".join(subjects)] if only else [])]
    words += [] if device == "auto" else ["--device", device]
    folder = out or Path("records" if Path("records").is_dir() else ".")
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbelow(2**31) if seed < 0 else seed
    record = records.Record.new(where, " ".join(words + ["--quick"] * quick), seed, quick)
    path = records.new_path(folder, record.date, where)
    _measure(record, path, subjects, where)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(record.page()))
    else:
        print(record.page())
    print(f"record: {path}")
    for text in record.mismatches:
        print(f"mismatch: {text}", file=sys.stderr)
    for subject, reason in record.failed.items():
        print(f"failed: {subject}: {reason}", file=sys.stderr)
    return 1 if record.mismatches or record.failed else 0


def _measure(record: records.Record, path: Path, subjects: list[str], device: torch.device) -> None:
    """Fill the record, writing it after every table: an interrupted run keeps what it has."""
    begin = time.perf_counter()
    for number, subject in enumerate(subjects):

        def say(text: str, number: int = number, subject: str = subject) -> None:
            seconds = time.perf_counter() - begin
            print(f"[{number}/{len(subjects)}, {seconds:.0f} s] {subject}: {text}", file=sys.stderr)

        say("begins")
        settings = bench.Settings(device=device, quick=record.quick, seed=record.seed, say=say)
        try:
            record.tables[subject] = bench.measure(subject, settings)
        except Exception as error:  # the other tables are still worth having
            record.failed[subject] = f"{type(error).__name__}: {error}"
            if os.environ.get("NEGCHAIN_DEBUG"):
                traceback.print_exception(error)
        record.write(path)
