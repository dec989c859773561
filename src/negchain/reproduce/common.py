"""Experiments as lists of runs, and the record they leave.

A record is a file of JSON lines, NAME.jsonl. A header says command, commit, machine and versions.
Each finished run adds its line at once. So an experiment that ends early keeps what it has, and the
same command goes on with the runs that are missing.
"""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from negchain import machine
from negchain.files import parse_object
from negchain.methods import METHODS
from negchain.printable import show
from negchain.reproduce import load
from negchain.train.presets import ConfigError, choose

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
CONTEXT: Any = multiprocessing.get_context("spawn")
FULL = "full gradient"  # instead of a method: the exact gradient
GRACE = 30.0  # seconds after the deadline in which runs may hand over what they have


@dataclass(frozen=True)
class Options:
    """What the user asked for; None: the experiment's own."""

    data: str | None = None
    quick: bool = False
    seeds: int | None = None
    epochs: int | None = None
    methods: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, value in (("seeds", self.seeds), ("epochs", self.epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, got {value}; leave it out")
        for method in self.methods or ():
            choose("--methods", method, [*METHODS, FULL])

    def on_gpu(self) -> bool:
        """Whether runs are on a GPU."""
        return self.device != "cpu" and torch.cuda.is_available()


@dataclass(frozen=True)
class Experiment:
    """An experiment: its runs, and what becomes of their record."""

    table: Callable[[list[Row]], str]
    """The record as Markdown."""
    draw: Callable[[list[Row]], dict[str, Figure]]
    """Figures by file name."""
    jobs: Callable[[Options], list[Row]] = lambda options: []
    """What to run, most important first; a job is a JSON object, by which its run is known."""
    work: Callable[[Row, float], Row] = lambda job, deadline: {}
    """Do one run: a job, and the time (of `time.time`) by which to return what there is."""
    alone: bool = False
    """Runs measure time and must not share the machine."""
    on_data: bool = True
    """Runs are on what --data names, or can be."""
    reads: tuple[str, ...] = ()
    """Other records its tables and figures are made from, instead of one of its own."""
    also: tuple[str, ...] = ()
    """Records that are read too where they are there, but not run for it."""


def runs_of(name: str) -> tuple[str, ...]:
    """The experiments whose runs one is made from: those it reads, or itself."""
    return load(name).reads or (name,)


def perform(
    names: Sequence[str],
    options: Options,
    out: Path,
    *,
    minutes: float,
    processes: int,
    say: Callable[[str], None],
) -> int:
    """Run what is missing in the records of some experiments; returns how many runs failed.

    Runs of several experiments share the processes, first seeds first.
    """
    deadline = time.time() + 60 * minutes
    waiting: list[tuple[str, Row]] = []
    for name in names:
        path = out / f"{name}.jsonl"
        done = [row["job"] for row in read_rows(path) if row.get("complete", True)]
        jobs = [job for job in load(name).jobs(options) if job not in done]
        if jobs:
            out.mkdir(parents=True, exist_ok=True)
            append(path, {"record": name, **provenance(options)})
        waiting += [(name, job) for job in jobs]
    waiting.sort(key=lambda pair: (not load(pair[0]).alone, pair[1].get("seed", 0)))
    failed, total = 0, len(waiting)
    for number, (name, row) in enumerate(_results(waiting, deadline, processes, say), 1):
        append(out / f"{name}.jsonl", row)
        failed += "error" in row
        told = _last_line(row) or f"{row['wall']:.0f} s"
        say(f"{number}/{total} {name} {json.dumps(row['job'])}: {told}")
    return failed


def _results(
    waiting: list[tuple[str, Row]], deadline: float, processes: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Row]]:
    """Finished runs, as they finish: those that measure time one by one, then the others."""
    alone = [pair for pair in waiting if load(pair[0]).alone or processes == 1]
    for name, job in alone:
        row = one(name, job, deadline)
        if row is not None:
            yield name, row
    others = [pair for pair in waiting if pair not in alone]
    if not others:
        return
    threads = str(max(1, (os.cpu_count() or 1) // processes))  # each would take all cores
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, threads)  # what the user said counts
    yield from _side_by_side(others, deadline, processes, say)


def _side_by_side(
    waiting: list[tuple[str, Row]], deadline: float, processes: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Row]]:
    """Runs in some processes, each of which serves one after the other.

    A run that fails or whose process dies is tried once more, in a new process: a
    CUDA context does not survive its first error.
    """
    queue = [(name, job, 1) for name, job in waiting]
    busy: dict[Connection, tuple[BaseProcess, tuple[str, Row, int]]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    try:
        while (queue or busy) and (left := deadline + GRACE - time.time()) > 0:
            while queue and len(busy) < processes:
                connection, process = idle.pop() if idle else _worker()
                busy[connection] = process, queue.pop(0)
                connection.send((*busy[connection][1][:2], deadline))
            for answering in multiprocessing.connection.wait(list(busy), timeout=min(left, 3600.0)):
                connection = cast(Connection, answering)
                process, (name, job, attempt) = busy.pop(connection)
                try:
                    row = connection.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    row = {"job": job, "error": f"its process died (exit code {process.exitcode})"}
                failed = row is not None and "error" in row
                if failed:
                    _end(connection, process)
                else:
                    idle.append((connection, process))
                if failed and attempt == 1:
                    say(f"{name} {json.dumps(job)}: once more, {_last_line(row)}")
                    queue.append((name, job, 2))
                elif row is not None:
                    yield name, row
    finally:
        for connection, process in [*idle, *((c, busy[c][0]) for c in busy)]:
            _end(connection, process)


def _worker() -> tuple[Connection, BaseProcess]:
    """A process that runs jobs sent to it."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # so that its death ends the pipe
    return ours, process


def _serve(connection: Connection) -> None:
    faulthandler.enable()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(one(*job))


def _end(connection: Connection, process: BaseProcess) -> None:
    connection.close()
    process.terminate()
    process.join(5)
    if process.exitcode is None:
        process.kill()


def _last_line(row: Row) -> str:
    return str(row.get("error", "")).strip().split("\n")[-1]


def one(name: str, job: Row, deadline: float) -> Row | None:
    """Run a job: its line of the record, with the error if it failed; None: no time was left."""
    begin = time.time()
    if begin >= deadline:
        return None
    try:
        found = load(name).work(job, deadline)
    except Exception:
        found = {"error": traceback.format_exc()[-1500:]}
    return {"job": job, **found, "wall": round(time.time() - begin, 1)}


# ---------------------------------------------------------------------- records


def provenance(options: Options) -> Row:
    """Where and from what a record was made."""
    script = Path(sys.argv[0]).absolute()  # it may have been called from its own folder
    named = f"benchmarks/{script.name}" if script.parent.name == "benchmarks" else "negchain"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join([named, *sys.argv[1:]]),
        **machine.provenance(torch.device("cuda" if options.on_gpu() else "cpu")),
    }


def append(path: Path, row: Row) -> None:
    """Add a line to a record."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(row), ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    """Plain JSON: rounded to six figures; what is no number becomes null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def read_rows(path: Path) -> list[Row]:
    """The runs of a record that did not fail; of equal ones the last that ended counts."""
    if not path.exists():
        return []
    texts = path.read_bytes().split(b"\n")
    lines = [_row(path, n, text) for n, text in enumerate(texts, 1) if text]
    lines.sort(key=lambda row: row.get("complete", True))  # slices may come in any order
    rows = {json.dumps(row["job"]): row for row in lines if "job" in row and "error" not in row}
    return list(rows.values())


def _row(path: Path, number: int, text: bytes) -> Row:
    row = parse_object(text)
    if row is None:
        raise ConfigError(
            f"line {number} of {path} must be a JSON object, got "
            f"{show(text[:40].decode(errors='replace'))}; delete the line: if it was a run, that "
            "is made again"
        )
    return row
