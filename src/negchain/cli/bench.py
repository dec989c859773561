"""`negchain bench`: how fast everything is on this machine, as ratios, with a dated record."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from negchain.progress import result, say
from negchain.train.config import ConfigError
from negchain.train.presets import choose


def command(
    only: Annotated[str, typer.Option(metavar="TABLE,...", help="Tables; by default all.")] = "",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What to measure.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the record; records/ if there is one, else here."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds, to see that everything runs.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of the random inputs; -1 draws one and records it.")
    ] = -1,
) -> int:
    """Measure the speed of this machine: tables of ratios, and a dated record of them.

    For example:

        negchain bench                          # everything; minutes
        negchain bench --only scan,step         # some tables

    Tables: `scan` (mh_scan against a loop over columns), `losses` (each against InfoNCE), `step`
    (the trainer's step of each method against InfoNCE's), `trainer` (images per second against a
    DataLoader with torchvision's transforms), `large` (the loss for large batches), `tables` (chain
    tables of many samples).

    Fast paths are compared with their readable twins in the same run; a mismatch ends in exit
    status 1.
    """
    from rich.markdown import Markdown

    from negchain.bench import SUBJECTS, Settings, measure  # torch, which --help does not need
    from negchain.bench.record import Record, new_path
    from negchain.train.resolve import choose_device

    choose("--device", device, ("auto", "cpu", "cuda"))
    where = choose_device(device)
    names = [choose("--only", name.strip(), SUBJECTS) for name in only.split(",") if only]
    subjects = list(dict.fromkeys(names)) or list(SUBJECTS)
    if not -1 <= seed < 2**31:
        raise ConfigError(f"--seed must be from 0 to 2147483647, or -1, got {seed}")
    words = ["negchain bench", *(["--only", ",".join(subjects)] if only else [])]
    words += [] if device == "auto" else ["--device", device]
    folder = out or Path("records" if Path("records").is_dir() else ".")
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbelow(2**31) if seed < 0 else seed
    record = Record.new(where, " ".join(words + ["--quick"] * quick), seed, quick)
    path = new_path(folder, record.date, where)
    begin = time.perf_counter()
    for number, subject in enumerate(subjects):

        def tell(text: str, number: int = number, subject: str = subject) -> None:
            seconds = time.perf_counter() - begin
            say(f"[{number}/{len(subjects)}, {seconds:.0f} s] {subject}: {text}")

        tell("begins")
        try:
            how = Settings(device=where, quick=quick, seed=seed, say=tell)
            record.tables[subject] = measure(subject, how)
        except Exception as error:  # the other tables are still worth having
            record.failed[subject] = f"{type(error).__name__}: {error}"
            if os.environ.get("NEGCHAIN_DEBUG"):
                traceback.print_exception(error)
        record.write(path)  # an interrupted run keeps what it has
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(record.page()))
    else:
        print(record.page())
    result(f"record: {path}")
    for text in record.mismatches:
        say(f"mismatch: {text}")
    for subject, reason in record.failed.items():
        say(f"failed: {subject}: {reason}")
    return 1 if record.mismatches or record.failed else 0
