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
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from negchain import machine
from negchain.files import parse_object
from negchain.methods import METHODS, title_of
from negchain.printable import show
from negchain.progress import REFRESH, Progress
from negchain.reproduce import load
from negchain.train.presets import ConfigError, choose

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
CONTEXT: Any = multiprocessing.get_context("spawn")
FULL = "full gradient"  # instead of a method: the exact gradient
# what of a job is said to people: words as they are, numbers after their names
WORDS = ("kind", "part", "setting", "burn-in", "augmentations")
NUMBERS = ("beta", "lr", "m", "b", "B", "R", "P", "T", "share", "seed")
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
    needs: tuple[str, ...] = ("job",)
    """What the line of a run must hold: keys, and keys.keys of them or of each of their items."""


def runs_of(name: str) -> tuple[str, ...]:
    """The experiments whose runs one is made from: those it reads, or itself."""
    return load(name).reads or (name,)


def perform(
    waiting: Sequence[tuple[str, Row]],
    options: Options,
    out: Path,
    *,
    minutes: float,
    processes: int,
) -> tuple[int, int]:
    """Make runs; each adds its line to its record. Returns how many failed, and were not made.

    Runs of several experiments share the processes and a bar of progress.
    """
    deadline = time.time() + 60 * minutes
    for name in dict.fromkeys(name for name, _ in waiting):
        out.mkdir(parents=True, exist_ok=True)
        append(out / f"{name}.jsonl", {"record": name, **provenance(options)})
    failed = ended = 0
    with Progress(bool(waiting)) as bar:
        bar.begin(len(waiting), "runs done", "reproduce")

        def moved(shares: float) -> None:
            bar.at(failed + ended + shares)

        results = _results(waiting, deadline, processes, bar.line, moved)
        for number, (name, row) in enumerate(results, 1):
            append(out / f"{name}.jsonl", row)
            failed += "error" in row
            ended += "error" not in row and row.get("complete", True)
            moved(0.0)
            told = f"failed: {_last_line(row)}" if "error" in row else f"{row['wall']:.0f} s"
            bar.line(f"{number}/{len(waiting)} {described(name, row['job'])}: {told}")
    return failed, len(waiting) - failed - ended


def described(name: str, job: Row) -> str:
    """A run, as people call it.

    Example:
        >>> described("stl10", {"seed": 0, "setting": "b32-none", "method": "dcl", "settings": {}})
        'stl10 b32-none DCL seed 0'
    """
    words = [str(job[key]) for key in WORDS if key in job]
    if "method" in job and "augmentations" not in job:  # which names it
        words.append(title_of(job["method"]))
    return " ".join([name, *words, *(f"{key} {job[key]:g}" for key in NUMBERS if key in job)])


_listeners: list[Callable[[float], None]] = []


def tell(share: float) -> None:
    """How much of its work the present run has done, for the bar; cheap enough for every step."""
    for listener in _listeners:
        listener(share)


def _results(
    waiting: Sequence[tuple[str, Row]],
    deadline: float,
    processes: int,
    say: Callable[[str], None],
    moved: Callable[[float], None],
) -> Iterator[tuple[str, Row]]:
    """Finished runs, as they finish: those that measure time one by one, then the others."""
    _listeners[:] = [moved]
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
    yield from _side_by_side(others, deadline, processes, say, moved)


def _side_by_side(
    waiting: list[tuple[str, Row]],
    deadline: float,
    processes: int,
    say: Callable[[str], None],
    moved: Callable[[float], None],
) -> Iterator[tuple[str, Row]]:
    """Runs in some processes, each of which serves one after the other.

    A run that fails or whose process dies is tried once more, in a new process: a
    CUDA context does not survive its first error.
    """
    queue = [(name, job, 1) for name, job in waiting]
    busy: dict[Connection, tuple[BaseProcess, tuple[str, Row, int]]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    shares: dict[Connection, float] = {}  # of the runs under way, as they tell
    try:
        while (queue or busy) and (left := deadline + GRACE - time.time()) > 0:
            while queue and len(busy) < processes:
                connection, process = idle.pop() if idle else _worker()
                busy[connection] = process, queue.pop(0)
                connection.send((*busy[connection][1][:2], deadline))
            moved(sum(shares.values()))
            for answering in multiprocessing.connection.wait(list(busy), timeout=min(left, 1.0)):
                connection = cast(Connection, answering)
                process, (name, job, attempt) = busy[connection]
                row = _answer(connection, process, job)
                if isinstance(row, float):
                    shares[connection] = row
                    continue
                del busy[connection]
                shares.pop(connection, None)
                failed = row is not None and "error" in row
                if failed:
                    _end(connection, process)
                else:
                    idle.append((connection, process))
                if failed and attempt == 1:
                    say(f"{described(name, job)}: once more, {_last_line(row)}")
                    queue.append((name, job, 2))
                elif row is not None:
                    yield name, row
    finally:
        for connection, process in [*idle, *((c, busy[c][0]) for c in busy)]:
            _end(connection, process)


def _answer(connection: Connection, process: BaseProcess, job: Row) -> Any:
    """What a process says: how far its run is, or the line of it."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        return {"job": job, "error": f"its process died (exit code {process.exitcode})"}


def _worker() -> tuple[Connection, BaseProcess]:
    """A process that runs jobs sent to it."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs,))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for us, who then end it
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()  # so that its death ends the pipe
    return ours, process


def _serve(connection: Connection) -> None:
    """Make runs until nobody asks for one; tell how far the present one is, now and then."""
    faulthandler.enable()
    told = 0.0

    def send(share: float) -> None:
        nonlocal told
        if time.monotonic() - told > REFRESH:
            told = time.monotonic()
            connection.send(float(share))

    _listeners[:] = [send]
    with suppress(EOFError, OSError):
        while True:
            connection.send(one(*connection.recv()))


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
    """Add a line to a record, whose last one an editor may have left without its end."""
    line = json.dumps(_finite(row), ensure_ascii=False) + "\n"
    with open(path, "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())


def _finite(value: Any) -> Any:
    """Plain JSON: rounded to six figures; what is no number becomes null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def read_rows(path: Path, needs: Sequence[str] = ()) -> list[Row]:
    """The runs of a record that did not fail; of equal ones the last that ended counts."""
    if not path.exists():
        return []
    texts = path.read_bytes().split(b"\n")
    lines = [_row(path, n, text, needs) for n, text in enumerate(texts, 1) if text]
    lines.sort(key=lambda row: row.get("complete", True))  # slices may come in any order
    rows = {json.dumps(row["job"]): row for row in lines if "job" in row and "error" not in row}
    return list(rows.values())


def _row(path: Path, number: int, text: bytes, needs: Sequence[str]) -> Row:
    row = parse_object(text)
    if row is None or (wrong := _fault(row, needs)):
        raise ConfigError(
            f"line {number} of {path} must {'be a JSON object' if row is None else wrong}, got "
            f"{show(text[:40].decode(errors='replace'))}; delete the line: if it was a run, that "
            "is made again"
        )
    return row


def _fault(row: Row, needs: Sequence[str]) -> str:
    """What the line of a run must hold and does not; empty if it is as it must be."""
    if not needs or "job" not in row or "error" in row:
        return ""
    for need in (*needs, "curve") if "curve" in row else needs:
        head, _, key = need.partition(".")
        held = row.get(head)
        parts = held if isinstance(held, list) else [held]
        if not parts or not all(isinstance(p, dict) and (not key or key in p) for p in parts):
            return f"have {need}"
    points = [point for point in row.get("curve", []) if isinstance(point, dict)]
    if any(isinstance(value, str | list | dict) for point in points for value in point.values()):
        return "have numbers in its curve"
    return ""
