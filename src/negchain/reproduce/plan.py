"""Which runs a command makes: those that the records lack.

What would fail in every run, or mix runs that do not belong together, is refused before any.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from negchain.printable import counted
from negchain.progress import say
from negchain.reproduce import load
from negchain.reproduce.common import FULL, Options, Row, read_rows
from negchain.reproduce.runs import config_of, images_of
from negchain.reproduce.stationarity import first_images
from negchain.train.presets import ConfigError


def missing(names: Sequence[str], options: Options, out: Path) -> list[tuple[str, Row]]:
    """The runs that the records lack: those that measure time, then first seeds first."""
    waiting: list[tuple[str, Row]] = []
    for name, jobs in _asked(names, options).items():
        path = out / f"{name}.jsonl"
        rows = read_rows(path, load(name).needs)
        _require_one_kind(path, rows, jobs, load(name).alone)
        done = [_named(row["job"]) for row in rows if row.get("complete", True)]
        left = [job for job in jobs if _named(job) not in done]
        rest = f"{len(left)} to make" if left else "none to make; another --out makes them again"
        held = counted(len(jobs), "run is", "runs are")
        say(f"{name}: {len(jobs) - len(left)} of {held} in {path}, {rest}")
        waiting += [(name, job) for job in left]
    _require_images([job for _, job in waiting])
    return sorted(waiting, key=lambda pair: (not load(pair[0]).alone, pair[1].get("seed", 0)))


def _asked(names: Sequence[str], options: Options) -> dict[str, list[Row]]:
    """All runs that the options name; an option that changes none of them is refused."""
    if FULL in (options.methods or ()) and (others := set(names) - {"stationarity"}):
        raise ConfigError(f"--methods {FULL!r} is of stationarity only, got {' '.join(others)}")
    asked = {name: load(name).jobs(options) for name in names}
    for option in ("seeds", "epochs", "settings"):
        if getattr(options, option) is not None and not _changes(asked, options, option):
            where = f"{' '.join(names)}{' --quick' if options.quick else ''}"
            raise ConfigError(f"--{option} changes nothing in {where}; leave it out")
    found = {job.get("method") for jobs in asked.values() for job in jobs}
    if unread := set(options.methods or ()) - found:
        raise ConfigError(f"--methods {min(unread)} is in no run of {' '.join(names)}")
    quick = {"quick": True} if options.quick else {}
    return {name: [{**job, **quick} for job in jobs] for name, jobs in asked.items()}


def _changes(asked: Mapping[str, list[Row]], options: Options, option: str) -> bool:
    """Whether another value of an option makes other runs."""
    value = getattr(options, option)
    other: Row = {option: value + 1 if isinstance(value, int) else ("",)}
    try:
        return any(
            load(name).jobs(replace(options, **other)) != jobs for name, jobs in asked.items()
        )
    except ConfigError:  # who reads it knows no setting without a name
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

    held = {kind(row["job"]) for row in rows}
    there, new = ", ".join(sorted(held)), ", ".join(sorted({kind(job) for job in jobs} - held))
    counts = {
        row["config"]["images"]
        for row in rows
        if "images" in row.get("config", {}) and _place(row["job"]) != _place(jobs[0])
    }
    if counts and not new:  # of the same name elsewhere: are they the same?
        count = len(images_of(config_of(jobs[0])).pretrain)
        if count not in counts:
            there, new = f"{there} of {max(counts):,} images", f"{_place(jobs[0])} of {count:,}"
    if rows and new:
        raise ConfigError(
            f"a record must hold runs on the same data, and {path} has {there}; for {new} give "
            "another --out"
        )


def _require_images(jobs: Sequence[Row]) -> None:
    """Load the images of every setting as its first run will: what is wrong is said once."""
    first: dict[str | None, Row] = {}
    for job in jobs:
        if _place(job):
            first.setdefault(job.get("setting"), job)
    unlabelled = ""
    for job in first.values():
        if "settings" in job:
            config = config_of(job)
            images, batch = images_of(config), config.batch_size
            count = len(images.pretrain)
            unlabelled = unlabelled if images.labelled else _place(job)
        else:
            count, batch = len(first_images(job["data"], job["images"], job["size"])), job["batch"]
        if count < batch:
            raise ConfigError(
                f"--data {_place(job)} must have as many images to train on as a batch, got "
                f"{count} for {batch}; give more, or other --settings"
            )
    if unlabelled:
        say(f"note: {unlabelled} has no labels, so there is no probe and no 1-NN")
