"""`negchain bench`: how fast everything is on this machine, as ratios, with a dated record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

HELP = """Measure the speed of this machine: tables of ratios, and a dated record of them.

    negchain bench                          # everything; minutes
    negchain bench --only scan,step         # some tables

Tables: `scan` (mh_scan against a loop over columns), `losses` (each against InfoNCE), `step` (the
trainer's step of each method against InfoNCE's), `trainer` (images per second against a DataLoader
with torchvision's transforms), `large` (the streaming loss at large batches), `tables` (chain
tables of many samples).

Fast paths are compared with their readable twins in the same run; a mismatch ends in exit status 1.
"""

OptionalPath = Optional[Path]  # noqa: UP045 - typer reads it


def command(
    only: Annotated[
        str,
        typer.Option(
            metavar="TABLE,...",
            help="Tables to measure; by default all.",
        ),
    ] = "",
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What to measure.")] = "auto",
    out: Annotated[
        OptionalPath,
        typer.Option(help="Folder of the record; records/ if there is one, else here."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds: does everything run?")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Of the random inputs; -1 takes a fresh one and records it.")
    ] = -1,
) -> int:
    """See `HELP`."""
    from negchain.cli.measure import measure  # brings torch, which --help does not need

    return measure(only, device, out, quick, seed)
