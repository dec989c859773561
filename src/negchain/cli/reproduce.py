"""`negchain reproduce`: the paper's experiments, rerun and recorded."""

import math
from pathlib import Path
from typing import Annotated

import typer

from negchain.reproduce import NAMES

HELP = """Rerun experiments of the EMC² paper; records, tables and figures.

For example:

    negchain reproduce theory                                # minutes on a CPU
    negchain reproduce stl10 --data stl10-unlabeled --download
    negchain reproduce stl10 burn-in --data ./stl10 --minutes 8
    negchain reproduce stl10 --redraw                        # figures from the record

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
        typer.Option(help="Folder of the records; records/reproduce, with --quick runs/quick."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder of the figures; docs/figures if there is docs/.")
    ] = None,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only tables and figures, from the records.")
    ] = False,
) -> int:
    """See `HELP`."""
    from negchain.data.named import BUILT_IN, named_sources
    from negchain.progress import say
    from negchain.reproduce import common, load, pages
    from negchain.train.presets import ConfigError, choose
    from negchain.train.resolve import resolve
    from negchain.train.team import require_one_process

    require_one_process("reproduce", "")
    if jobs < 0:
        raise ConfigError(f"--jobs must be at least 0, got {jobs}; 0 chooses by machine")
    if math.isnan(minutes) or minutes < 0:
        raise ConfigError(
            f"--minutes must be at least 0, got {minutes:g}; leave it out to start every run"
        )
    chosen = [choose("NAME", name, NAMES) for name in names]
    # what an experiment reads instead of a record of its own is run for it
    runs = list(dict.fromkeys(n for name in chosen for n in common.runs_of(name)))
    if (data or download) and not any(load(name).on_data for name in runs):
        raise ConfigError(
            f"--data and --download belong to experiments on images, got {' '.join(runs)}, which "
            "reads none; leave them out"
        )
    if data:
        named_sources(data)
    if download and not data:  # `resolve` would say that it is 'digits', the default of train
        raise ConfigError(
            "--download belongs to --data cifar10 or stl10 or stl10-unlabeled, and no --data is "
            "given; name one of them or leave out --download"
        )
    if download:
        resolve(None, {"data": data, "download": True})  # refuses what train refuses
    options = common.Options(
        data or None, quick, seeds, epochs, _words(methods), _words(settings), device
    )
    kept = Path("records/reproduce")
    out = out or (Path("runs/quick") if quick else kept)  # small runs are no results
    failed = 0
    if not redraw:
        if data in BUILT_IN:  # refused or fetched here, once, and not by every run
            from negchain.data import load_data

            load_data(data, download=download)
        processes = jobs or (8 if options.on_gpu() else 1)
        failed = common.perform(runs, options, out, minutes=minutes, processes=processes, say=say)
    page = Path("docs/results.md")
    for name in chosen:
        if redraw or any(common.read_rows(out / f"{n}.jsonl") for n in common.runs_of(name)):
            ours = page.exists() and out == kept
            place = figures or (Path("docs/figures") if ours else out)
            pages.redraw(name, out, place, page if ours else None, say)
    return 1 if failed else 0


def _words(text: str) -> tuple[str, ...] | None:
    return tuple(word.strip() for word in text.split(",")) if text else None
