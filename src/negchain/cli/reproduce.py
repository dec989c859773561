"""`negchain reproduce`: the paper's experiments, rerun and recorded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from negchain.printable import counted
from negchain.progress import say
from negchain.reproduce import NAMES

if TYPE_CHECKING:
    from negchain.reproduce.common import Options

SHIPPED, PAGE = Path("records/reproduce"), Path("docs/results.md")  # of negchain's own folder

HELP = """Rerun experiments of the EMC² paper; records, tables and figures.

For example:

    negchain reproduce theory                                # minutes on a CPU
    negchain reproduce stl10 --data stl10-unlabeled --download
    negchain reproduce stl10 burn-in --data ./stl10 --minutes 8
    negchain reproduce stl10 --redraw                        # figures from the record

Finished runs are kept in runs/reproduce; the same command goes on with those that are missing.
Records of docs/results.md are in records/reproduce: `--redraw` reads them if that folder is there.
Runs are added to them, and that page and docs/figures renewed, with `--out records/reproduce` only.

""" + "\n".join(f"* `{name}`: {text}" for name, text in NAMES.items())


def command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Experiments.")],
    data: Annotated[
        str,
        typer.Option(help="A folder with train/, test/, unlabeled/, or stl10-unlabeled, stl10."),
    ] = "",
    download: Annotated[
        bool, typer.Option("--download", help="Download cifar10 or stl10 into data/ first.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: minutes on a CPU.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds 0 .. N-1.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; else the experiment's own.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated; by default all.")] = "",
    settings: Annotated[str, typer.Option(help="Variants, comma-separated; by default all.")] = "",
    minutes: Annotated[float, typer.Option(help="Start no run after this time.")] = 1e6,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: 8 on a GPU, 1 on a CPU.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the records; runs/reproduce, with --quick runs/quick."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder of the figures; that of the records.")
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only tables and figures, from the records.")
    ] = False,
) -> int:
    """See `HELP`."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its profiler warns of its own gaps
    from negchain.reproduce import common, pages
    from negchain.train.presets import ConfigError, choose
    from negchain.train.run_folder import check_writable
    from negchain.train.team import require_one_process

    require_one_process("reproduce", "")
    if jobs < 0:
        raise ConfigError(f"--jobs must be at least 0, got {jobs}; 0 chooses by machine")
    if not minutes >= 0:  # nor is nan
        raise ConfigError(
            f"--minutes must be at least 0, got {minutes:g}; leave it out to start every run"
        )
    given = {"data": data, "download": download, "seeds": seeds, "epochs": epochs}
    given |= {"methods": methods, "settings": settings}
    if redraw and (choosing := [name for name, value in given.items() if value]):
        raise ConfigError(
            f"--redraw takes all runs of a record, and --{choosing[0]} chooses runs to make; leave "
            "one of them out"
        )
    chosen = [choose("NAME", name, NAMES) for name in names]
    # what an experiment reads instead of a record of its own is run for it
    runs = list(dict.fromkeys(n for name in chosen for n in common.runs_of(name)))
    options = common.Options(
        data or None, quick, seeds, epochs, _words(methods), _words(settings), device
    )
    if out is None:
        shipped = redraw and not quick and SHIPPED.exists()
        out = SHIPPED if shipped else Path("runs/quick" if quick else "runs/reproduce")
    page = PAGE if PAGE.exists() and out.resolve() == SHIPPED.resolve() else None
    place = figures or (PAGE.parent / "figures" if page else out)
    check_writable(place, "--figures" if figures else "--out")
    failed = 0
    if not redraw:
        _prepare(runs, options, download)
        failed = _make(runs, options, out, minutes, jobs)
    drawn = [name for name in chosen if redraw or pages.has_runs(name, out)]
    rows = {name: pages.rows_of(name, out, quick) for name in drawn}  # before one is overwritten
    for name, found in rows.items():
        say(f"record: {_files(common.runs_of(name), out)}")
        pages.redraw(name, found, place, page)
    return 1 if failed else 0


def _files(names: Iterable[str], out: Path) -> str:
    return " and ".join(str(out / f"{name}.jsonl") for name in names)


def _prepare(runs: list[str], options: Options, download: bool) -> None:
    """Refuse data that are not read or not there, and fetch what is to be."""
    from negchain.data import load_data
    from negchain.data.named import named_sources
    from negchain.reproduce import load
    from negchain.train.presets import ConfigError, choose
    from negchain.train.resolve import choose_device, resolve

    data = options.data
    if (data or download) and not any(load(name).on_data for name in runs):
        raise ConfigError(
            f"--data and --download belong to experiments on images, got {' '.join(runs)}, which "
            "reads none; leave them out"
        )
    choose_device(choose("--device", options.device, ("auto", "cpu", "cuda")))
    if data:
        named_sources(data)
    if download:
        if not data:  # `resolve` would say that it is 'digits', the default of train
            raise ConfigError(
                "--download belongs to --data cifar10 or stl10 or stl10-unlabeled, and no --data "
                "is given; name one of them or leave out --download"
            )
        resolve(None, {"data": data, "download": True})  # refuses what train refuses
        load_data(data, download=True)


def _make(runs: list[str], options: Options, out: Path, minutes: float, jobs: int) -> int:
    """Make the runs that the records lack; returns how many failed."""
    from negchain.reproduce import common, plan
    from negchain.train.stopping import Interrupted, at_once

    files, again = _files(runs, out), "the same command goes on with what is missing"
    with at_once():
        waiting = plan.missing(runs, options, out)
        processes = jobs or (8 if options.on_gpu() else 1)
        try:
            failed, left = common.perform(
                waiting, options, out, minutes=minutes, processes=processes
            )
        except KeyboardInterrupt:
            raise Interrupted(f"early; finished runs are in {files}, and {again}") from None
    if left:
        total = counted(len(waiting), "run is", "runs are")
        say(f"{left} of {total} missing: --minutes {minutes:g} left no time; {again}")
    if failed:
        say(f"{failed} of {counted(len(waiting), 'run', 'runs')} failed (see {files}); {again}")
    return failed


def _words(text: str) -> tuple[str, ...] | None:
    return tuple(word.strip() for word in text.split(",")) if text else None
