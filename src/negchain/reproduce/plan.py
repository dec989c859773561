"""Which runs a command makes: those that the records lack.

What would fail in every run, or mix runs that do not belong together, is refused before any.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from negchain.printable import counted
from negchain.reproduce import load
from negchain.reproduce.common import FULL, Options, Row, read_rows
from negchain.reproduce.runs import config_of, images_of
from negchain.reproduce.stationarity import first_images
from negchain.train.presets import ConfigError

TWO: dict[str, tuple[Any, Any]] = {"seeds": (1, 2), "epochs": (1, 2), "settings": (None, ("",))}
"""Two values of each option: where they give equal runs, the option is not read."""


def missing(
    names: Sequence[str], options: Options, out: Path, say: Callable[[str], None]
) -> list[tuple[str, Row]]:
    """The runs that the records lack: those that measure time, then first seeds first."""
    _require_read(names, options)
    waiting: list[tuple[str, Row]] = []
    for name in names:
        path, quick = out / f"{name}.jsonl", {"quick": True} if options.quick else {}
        rows, jobs = read_rows(path, load(name).needs), load(name).jobs(options)
        jobs = [{**job, **quick} for job in jobs]
        _require_one_kind(path, rows, jobs, load(name).alone)
        done = [_named(row["job"]) for row in rows if row.get("complete", True)]
        left = [job for job in jobs if _named(job) not in done]
        rest = f"{len(left)} to make" if left else "none to make; another --out makes them again"
        held = counted(len(jobs), "run is", "runs are")
        say(f"{name}: {len(jobs) - len(left)} of {held} in {path}, {rest}")
        waiting += [(name, job) for job in left]
    _require_images([job for _, job in waiting], say)
    return sorted(waiting, key=lambda pair: (not load(pair[0]).alone, pair[1].get("seed", 0)))


def _require_read(names: Sequence[str], options: Options) -> None:
    """Refuse options that change no run."""
    for option in TWO:
        if getattr(options, option) is None or any(_reads(n, options, option) for n in names):
            continue
        where = f"{' '.join(names)}{' --quick' if options.quick else ''}"
        raise ConfigError(f"--{option} changes nothing in {where}; leave it out")
    if FULL in (options.methods or ()) and (others := set(names) - {"stationarity"}):
        raise ConfigError(f"--methods {FULL!r} is of stationarity only, got {' '.join(others)}")
    found = {job.get("method") for name in names for job in load(name).jobs(options)}
    if unread := set(options.methods or ()) - found:
        raise ConfigError(f"--methods {min(unread)} is in no run of {' '.join(names)}")


def _reads(name: str, options: Options, option: str) -> bool:
    given = [replace(options, **{option: value}) for value in TWO[option]]
    try:
        return load(name).jobs(given[0]) != load(name).jobs(given[1])
    except ValueError:  # it says what it takes
        return True


# ---------------------------------------------------------------------- data


def _place(job: Row) -> str:
    return str(job.get("data") or job.get("settings", {}).get("data") or "")


def _data(job: Row) -> str:
    """The data of a run without where they lie: a folder may be moved."""
    return ",".join(os.path.basename(os.path.abspath(p)) for p in _place(job).split(",") if p)


def _named(job: Row) -> Row:
    """A job by which its run is known wherever its data lie."""
    return {**job, "settings": {**job.get("settings", {}), "data": ""}, "data": _data(job)}


def _require_one_kind(path: Path, rows: list[Row], jobs: list[Row], alone: bool) -> None:
    """Refuse to add to a record what its table would take for more seeds of the same."""

    def kind(job: Row) -> str:  # times are told apart by their number of images
        data = "" if alone else _data(job)
        return f"{data or 'all'}{', --quick' if job.get('quick') else ''}"

    held, ours = {kind(row["job"]) for row in rows}, {kind(job) for job in jobs}
    there, new = ", ".join(sorted(held)), ", ".join(sorted(ours - held))
    if rows and not new and "settings" in jobs[0] and not alone:  # elsewhere: are they the same?
        moved = [row for row in rows if _place(row["job"]) != _place(jobs[0])]
        counts = {row["config"]["images"] for row in moved if "images" in row["config"]}
        if counts and (count := len(images_of(jobs[0]).pretrain)) not in counts:
            there, new = f"{there} of {max(counts):,} images", f"{_place(jobs[0])} of {count:,}"
    if rows and new:
        raise ConfigError(
            f"a record must hold runs on the same data, and {path} has {there}; for {new} give "
            "another --out"
        )


def _require_images(jobs: Sequence[Row], say: Callable[[str], None]) -> None:
    """Load the images of every setting as its first run will: what is wrong is said once."""
    first: dict[tuple[Any, ...], Row] = {}
    for job in jobs:
        if _place(job):
            first.setdefault((job.get("setting"), "settings" in job), job)
    notes = dict[str, None]()
    for job in first.values():
        if "settings" in job:
            images, batch = images_of(job), config_of(job).batch_size
            count = len(images.pretrain)
            if not images.labelled:
                notes[f"note: {_place(job)} has no labels, so there is no probe and no 1-NN"] = None
        else:
            count, batch = len(first_images(job["data"], job["images"], job["size"])), job["batch"]
        if count < batch:
            raise ConfigError(
                f"--data {_place(job)} must have as many images to train on as a batch, got "
                f"{count} for {batch}; give more, or other --settings"
            )
    for note in notes:
        say(note)
