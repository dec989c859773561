"""What a measurement is: rows of medians with quartiles, and their ratios.

Plain data, so that a table goes to JSON and back unchanged; `record` and the command line only
render it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


def _silent(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure; every table function takes one.

    >>> Settings(device=torch.device("cpu"), quick=True).rounds
    3
    """

    device: torch.device
    quick: bool = False
    """Few rounds and short windows: shows that everything runs, not how fast."""
    large: bool = False
    """Also what needs gigabytes of memory."""
    seed: int = 0
    """Of the random inputs."""
    say: Callable[[str], None] = field(default=_silent, compare=False)
    """Told what is being measured."""

    @property
    def on_gpu(self) -> bool:
        """Whether CUDA events and graphs are at hand."""
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Rounds in which everything that is compared takes its turn."""
        return 3 if self.quick else 15

    def generator(self) -> torch.Generator:
        """A generator on the CPU, so that inputs do not depend on the device."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles.

    >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Row:
    """One line of a table; `ratio` to the row or thing named in `against`."""

    name: str
    against: str
    ratio: Spread | None
    value: Spread
    unit: str

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        against: str = "",
        base: Sequence[float] | None = None,
        speed_up: bool = False,
    ) -> Row:
        """A row from its values, one per round, and those of what it is compared with.

        Ratios are formed round by round, `value / base`, or `base / value` for a speed-up.

        >>> row = Row.of("b", [2.0, 4.0, 9.0], "ms", base=[1.0, 2.0, 3.0], against="a")
        >>> row.ratio.median, row.value.median
        (2.0, 4.0)
        """
        ratio = None
        if base is not None:
            pairs = zip(values, base, strict=True)
            ratio = Spread.of([b / v if speed_up else v / b for v, b in pairs])
        value = Spread.of(values)
        return cls(name=name, against=against, ratio=ratio, value=value, unit=unit)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A fast path compared with its readable twin in the same run."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one subject's measurement found.

    >>> row = Row.of("b", [2.0], "ms", base=[1.0], against="a")
    >>> table = Table(subject="s", title="S", compares="b with a", rows=(row,))
    >>> Table.from_json(table.to_json()) == table
    True
    """

    subject: str
    title: str
    compares: str
    rows: tuple[Row, ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def mismatches(self) -> tuple[Check, ...]:
        """Checks that failed."""
        return tuple(check for check in self.checks if not check.ok)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        plain = asdict(self)
        return {**plain, **{k: list(plain[k]) for k in ("rows", "checks", "notes")}}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Table:
        """The table `to_json` was made of."""
        rows = []
        for row in plain["rows"]:
            ratio = None if row["ratio"] is None else Spread(**row["ratio"])
            value = Spread(**row["value"])
            rows.append(Row(row["name"], row["against"], ratio, value, row["unit"]))
        return cls(
            subject=plain["subject"],
            title=plain["title"],
            compares=plain["compares"],
            rows=tuple(rows),
            checks=tuple(Check(**check) for check in plain["checks"]),
            notes=tuple(plain["notes"]),
        )
