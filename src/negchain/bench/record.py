"""What a measurement is, and its dated record: a Markdown page, and the same as JSON.

Rows are medians with quartiles; ratios are formed round by round.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from negchain.files import replacing
from negchain.machine import commit, hardware, versions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure; every subject takes one."""

    device: torch.device
    quick: bool = False  # few rounds and short windows: does everything run?
    seed: int = 0  # of the random inputs
    say: Callable[[str], None] = lambda text: None  # is given what is being measured, as text

    @property
    def on_gpu(self) -> bool:
        """Whether CUDA events and graphs are at hand."""
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Rounds in which everything that is compared takes its turn."""
        return 3 if self.quick else 15

    @property
    def window_ms(self) -> float:
        """How long a turn lasts."""
        return 4.0 if self.quick else 50.0

    def generator(self) -> torch.Generator:
        """A generator on the CPU, so that inputs do not depend on the device."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles.

    >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    >>> Spread(1234.5, 1200.0, 1300.0).text(" ms"), Spread(0.01234, 0.01, 0.02).text()
    ('1,234 ms (1,200–1,300)', '0.0123 (0.0100–0.0200)')
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        some = [*values] if len(values) > 1 else [*values] * 2
        low, median, high = statistics.quantiles(some, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, unit: str = "") -> str:
        """Median with quartiles, three figures."""
        low, median, high = map(_figures, (self.low, self.median, self.high))
        return f"{median}{unit}" + ("" if self.low == self.high else f" ({low}–{high})")


def _figures(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:#.3g}" if value else "0"


@dataclass(frozen=True)
class Row:
    """One line of a table; `ratio` to the row named in `against`.

    >>> row = Row.of("b", [2.0, 4.0, 9.0], "ms", against="a", base=[1.0, 2.0, 3.0])
    >>> row.ratio.median, row.value.median
    (2.0, 4.0)
    """

    name: str
    value: Spread
    unit: str
    against: str = ""
    ratio: Spread | None = None

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        against: str = "",
        base: Sequence[float] = (),
    ) -> Row:
        """A row from its values, one per round, and those of what it is compared with."""
        ratio = [value / other for value, other in zip(values, base, strict=False)]
        return cls(name, Spread.of(values), unit, against, Spread.of(ratio) if ratio else None)


def rows(found: Mapping[str, Sequence[float]], where: str, unit: str = "ms") -> list[Row]:
    """A row each, against the first."""
    base = next(iter(found))
    return [Row.of(f"{n}, {where}", values, unit, base, found[base]) for n, values in found.items()]


@dataclass(frozen=True)
class Check:
    """A fast path compared with its readable twin in the same run."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one subject's measurement found."""

    title: str
    compares: str
    rows: Sequence[Row]
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()


@dataclass
class Record:
    """What was measured, on what; grows by a table at a time."""

    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    commit: str
    seed: int
    quick: bool
    tables: dict[str, Table] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Subject -> why it has no table."""

    @classmethod
    def new(cls, device: torch.device, command: str, seed: int, quick: bool) -> Record:
        """An empty record of this machine, today."""
        used = {**versions(), "cuda": torch.version.cuda or "none"}
        date = time.strftime("%Y-%m-%d")
        return cls(date, command, hardware(device), used, commit(), seed, quick)

    @property
    def mismatches(self) -> list[str]:
        """Fast paths that do not equal their twins."""
        checks = [check for table in self.tables.values() for check in table.checks]
        return [f"{check.name}: {check.found}" for check in checks if not check.ok]

    def page(self) -> str:
        """The record as Markdown."""
        used = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        quick = " A quick run: it shows that everything runs, not how fast." if self.quick else ""
        parts = [
            f"# Speed, {self.date}, {self.hardware.split(',')[0]}",
            f"**Command.** `{self.command}`, seed of the inputs {self.seed}.{quick}",
            f"**Where.** {self.hardware}; {used}; commit {self.commit}.",
            "Medians with quartiles in brackets; ratios are formed round by round.",
        ]
        for table in self.tables.values():
            parts += [f"## {table.title}", f"Ratio: {table.compares}.", grid(table.rows)]
            verdicts = [("equal" if c.ok else "**MISMATCH**", c) for c in table.checks]
            parts += ["\n".join(f"* {v}: {c.name} ({c.found})" for v, c in verdicts) or ""]
            parts += table.notes
        for subject, reason in self.failed.items():
            parts += [f"## {subject}: failed", reason]
        return "\n\n".join(filter(None, parts)) + "\n"

    def write(self, path: Path) -> None:
        """Write FILE.md, and FILE.json with the same numbers."""
        plain = json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"
        for suffix, text in ((".md", self.page()), (".json", plain)):
            with replacing(path.with_suffix(suffix)) as file:
                file.write(text.encode())


def grid(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table, ratios first.

    >>> print(grid([Row.of("a", [2.0], "ms", "b", [1.0])]))
    | ratio | what | against | measured |
    |---|---|---|---|
    | 2.00 | a | b | 2.00 ms |
    """
    lines = ["| ratio | what | against | measured |", "|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else row.ratio.text()
        lines.append(f"| {ratio} | {row.name} | {row.against} | {row.value.text(f' {row.unit}')} |")
    return "\n".join(lines)


def new_path(folder: Path, date: str, device: torch.device) -> Path:
    """A name no record has yet: <date>_bench_<hardware>.md, -2, -3, ...

    >>> new_path(Path("nowhere"), "2026-11-15", torch.device("cpu")).name
    '2026-11-15_bench_cpu.md'
    """
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    stems = (f"{date}_bench_{slug}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
    taken = {path.stem for path in folder.glob("*_bench_*")}
    return folder / f"{next(stem for stem in stems if stem not in taken)}.md"
