"""The tables of `negchain bench`: measured, shown and written to a record."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from negchain import bench
from negchain.bench import record as records
from negchain.train.config import ConfigError
from negchain.train.presets import choose

WIDTH = 140  # of tables in a file or a pipe
Report = Callable[[int, str], None]  # tables done, what is being measured


def measure(
    only: str,
    device: str,
    out: Path | None,
    quick: bool,
    large: bool,
    seed: int,
    show: Path | None,
) -> int:
    """What `negchain bench` does; see `negchain.cli.bench` for the options."""
    if show is not None:
        return _show(records.read(show))
    where = _device(device)
    subjects = _subjects(only)
    if not -1 <= seed < 2**31:
        raise ConfigError(f"--seed must be from 0 to 2147483647, or -1, got {seed}")
    words = ["negchain bench", *(["--only", ",".join(subjects)] if only else [])]
    words += [] if device == "auto" else ["--device", device]
    words += ["--quick"] * quick + ["--large"] * large
    folder = out or Path("records" if Path("records").is_dir() else ".")
    folder.mkdir(parents=True, exist_ok=True)
    record = records.new_record(where, " ".join(words), _seed(seed), quick)
    path = records.new_path(folder, record.date, where)
    _measure(record, path, subjects, where, large)
    _show(record)
    print(f"record: {path.with_suffix('.md')}")
    return _verdict(record)


def _seed(given: int) -> int:
    return secrets.randbelow(2**31) if given < 0 else given


def _subjects(only: str) -> list[str]:
    if only:
        return list({choose("--only", n.strip(), bench.SUBJECTS): None for n in only.split(",")})
    return list(bench.SUBJECTS)


def _device(name: str) -> torch.device:
    choose("--device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU and none is visible; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _measure(
    record: records.Record, path: Path, subjects: list[str], device: torch.device, large: bool
) -> None:
    """Fill the record, writing it after every table: an interrupted run keeps what it has."""
    with _progress(len(subjects)) as report:
        for number, subject in enumerate(subjects):
            settings = bench.Settings(
                device=device,
                quick=record.quick,
                large=large,
                seed=record.seed,
                say=lambda text, n=number, s=subject: report(n, f"{s}: {text}"),  # type: ignore[misc]
            )
            report(number, subject)
            try:
                record.tables.append(bench.measure(subject, settings))
            except Exception as error:  # the other tables are still worth having
                record.failed[subject] = f"{type(error).__name__}: {error}"
                if os.environ.get("NEGCHAIN_DEBUG"):
                    traceback.print_exception(error)
            records.write(path, record)


@contextmanager
def _progress(total: int) -> Iterator[Report]:
    """A line on stderr with what is measured and what is left; plain lines where none can move."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        begin = time.perf_counter()

        def tell(done: int, text: str) -> None:
            seconds = time.perf_counter() - begin
            console.print(f"[{done}/{total}, {seconds:.0f} s] {text}", markup=False, soft_wrap=True)

        yield tell
        return
    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("tables"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def _show(record: records.Record) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    console.print(f"{record.date}: {record.hardware}", markup=False)
    console.print(f"{versions}; commit {record.commit}", markup=False)
    for table in record.tables:
        console.print(_rendered(table))
    for subject, reason in record.failed.items():
        console.print(Text(f"\n{subject} failed: {reason}", style="red"))
    return 0


def _rendered(table: bench.Table) -> Group:
    heads, lines = records.cells(table.rows)
    shown = RichTable(box=None, pad_edge=False)
    for head in heads:
        shown.add_column(
            head, justify="right" if head == "ratio" else "left", no_wrap=head == "ratio"
        )
    for line in lines:
        shown.add_row(*(Text(text.replace("**", "")) for text in line))
    checks = [
        Text(f"{'equal' if c.ok else 'MISMATCH'}: {c.name} ({c.found})", "green" if c.ok else "red")
        for c in table.checks
    ]
    notes = [Text(note, style="dim") for note in table.notes]
    title = Text(f"\n{table.title}", style="bold")
    return Group(title, Text(f"ratio: {table.compares}"), shown, *checks, *notes)


def _verdict(record: records.Record) -> int:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for text in record.mismatches:
        console.print(f"mismatch: {text}", markup=False)
    for subject, reason in record.failed.items():
        console.print(f"failed: {subject}: {reason}", markup=False)
    return 1 if record.mismatches or record.failed else 0
