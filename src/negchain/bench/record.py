"""Dated records of measurements: JSON, and the same as a Markdown page rendered from it."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from negchain.bench.table import Row, Spread, Table
from negchain.files import replacing
from negchain.train.config import ConfigError
from negchain.train.run_folder import versions

FORMAT = 1
PACKAGES = ("negchain", "torch", "torchvision", "triton", "numpy")


@dataclass
class Record:
    """What was measured, on what; grows by a table at a time.

    >>> record = Record(date="2026-11-15", command="negchain bench", hardware="a CPU",
    ...                 versions={}, commit="unknown", seed=0, quick=True)
    >>> Record.from_json(record.to_json()) == record
    True
    """

    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    commit: str
    seed: int
    quick: bool
    tables: list[Table] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Subject -> why it has no table."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        plain = {**vars(self), "tables": [table.to_json() for table in self.tables]}
        return {"format": FORMAT, **plain}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Record:
        """The record `to_json` was made of."""
        given = {name: value for name, value in plain.items() if name != "format"}
        return cls(**{**given, "tables": [Table.from_json(t) for t in plain["tables"]]})

    def table(self, subject: str) -> Table | None:
        """The table of a subject, None if it was not measured."""
        return next((table for table in self.tables if table.subject == subject), None)

    @property
    def mismatches(self) -> list[str]:
        """Fast paths that do not equal their twins."""
        return [f"{c.name}: {c.found}" for table in self.tables for c in table.mismatches]


def new_record(device: torch.device, command: str, seed: int, quick: bool) -> Record:
    """An empty record of this machine, today."""
    return Record(
        date=time.strftime("%Y-%m-%d"),
        command=command,
        hardware=hardware(device),
        versions=_versions(),
        commit=_commit(),
        seed=seed,
        quick=quick,
    )


def hardware(device: torch.device) -> str:
    """The GPU by name, with the CPU beside it."""
    cpu = f"{os.cpu_count()} cores of {_cpu_name()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, {cpu}" if device.type == "cuda" else cpu


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = versions(PACKAGES)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _commit() -> str:
    """The commit of the source that is measured, "+changes" if src/ is not as committed.

    A copy without its .git or with an old one, as on a machine lent for a run, can be told by
    NEGCHAIN_COMMIT.
    """
    if told := os.environ.get("NEGCHAIN_COMMIT"):
        return told
    here = Path(__file__).resolve().parents[3]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True)
        return done.stdout.strip()

    if not (here / ".git").exists():
        return "unknown"
    commit = git("rev-parse", "--short", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--", "src") else commit


# ---------------------------------------------------------------------- files


def new_path(folder: Path, date: str, device: torch.device) -> Path:
    """A name no record has yet: <date>_bench_<hardware>.json, -2, -3, ...

    >>> new_path(Path("nowhere"), "2026-11-15", torch.device("cpu")).name
    '2026-11-15_bench_cpu.json'
    """
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    for number in itertools.count(1):
        stem = f"{date}_bench_{slug}" + (f"-{number}" if number > 1 else "")
        if not any((folder / f"{stem}{suffix}").exists() for suffix in (".json", ".md")):
            return folder / f"{stem}.json"
    raise AssertionError("unreachable")


def write(path: Path, record: Record) -> None:
    """Write FILE.json, and FILE.md rendered from it."""
    text = json.dumps(record.to_json(), indent=1, ensure_ascii=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())
    with replacing(path.with_suffix(".md")) as file:
        file.write(page(read(path)).encode())


def read(path: Path) -> Record:
    """The record in FILE.json."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, not {FORMAT}")
        return Record.from_json(plain)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a record") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no record of negchain bench ({type(error).__name__}: {error}); name the "
            ".json file it wrote"
        ) from None


# ---------------------------------------------------------------------- Markdown


def page(record: Record) -> str:
    """The record as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    quick = " A quick run: it shows that everything runs, not how fast." if record.quick else ""
    parts = [
        f"# Speed, {record.date}, {record.hardware.split(',')[0]}",
        f"**Command.** `{record.command}`, seed of the inputs {record.seed}.{quick}",
        f"**Where.** {record.hardware}; {versions}; commit {record.commit}.",
        "Medians with quartiles in brackets; ratios are formed round by round.",
    ]
    for table in record.tables:
        parts += [f"## {table.title}", markdown(table)]
    for subject, reason in record.failed.items():
        parts += [f"## {subject}: failed", reason]
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """A table with its checks and notes."""
    parts = [f"Ratio: {table.compares}.", grid(table.rows)]
    if table.checks:
        shown = [
            f"{'equal' if c.ok else '**MISMATCH**'}: {c.name} ({c.found})" for c in table.checks
        ]
        parts.append("\n".join(f"* {line}" for line in shown))
    return "\n\n".join([*parts, *table.notes])


def grid(rows: tuple[Row, ...]) -> str:
    """Rows as a Markdown table; columns nobody fills are left out.

    >>> print(grid((Row.of("a", [2.0], "ms", base=[1.0], against="b"),)))
    | ratio | what | against | measured |
    |---|---|---|---|
    | 2.00 | a | b | 2.00 ms |
    """
    heads, lines = cells(rows)
    table = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else _line(line) for line in table)


def _line(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def cells(rows: tuple[Row, ...]) -> tuple[list[str], list[list[str]]]:
    """Heads and texts of the columns: ratios first."""
    columns = {
        "ratio": ["" if row.ratio is None else spread_text(row.ratio) for row in rows],
        "what": [row.name for row in rows],
        "against": [row.against if row.ratio is not None else "" for row in rows],
        "measured": [spread_text(row.value, f" {row.unit}") for row in rows],
    }
    used = {head: texts for head, texts in columns.items() if any(texts)}
    return list(used), [list(line) for line in zip(*used.values(), strict=True)]


def spread_text(spread: Spread, unit: str = "") -> str:
    """Median with quartiles, three figures.

    >>> spread_text(Spread(1234.5, 1200.0, 1300.0), " ms"), spread_text(Spread(0.01234, 0.01, 0.02))
    ('1,234 ms (1,200–1,300)', '0.0123 (0.0100–0.0200)')
    """
    if spread.low == spread.high:
        return f"{_figures(spread.median)}{unit}"
    return f"{_figures(spread.median)}{unit} ({_figures(spread.low)}–{_figures(spread.high)})"


def _figures(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:#.3g}" if value else "0"
