"""What a measurement is: rows of medians with quartiles, their ratios, and the bars they must meet.

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
        """Whether CUDA events and graphs are at hand; bars are for a GPU."""
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


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a row's medians must reach.

    >>> bar = Bar(ratio_at_least=100, value_at_most=0.02)
    >>> bar.text("ms"), bar.met(Spread(250, 240, 260), Spread(0.03, 0.03, 0.03))
    ('≥ 100×, ≤ 0.02 ms', False)
    """

    ratio_at_most: float | None = None
    ratio_at_least: float | None = None
    value_at_most: float | None = None

    def text(self, unit: str) -> str:
        """The bar in words."""
        parts = [
            (self.ratio_at_most, "≤ {:g}×"),
            (self.ratio_at_least, "≥ {:g}×"),
            (self.value_at_most, f"≤ {{:g}} {unit}"),
        ]
        return ", ".join(form.format(limit) for limit, form in parts if limit is not None)

    def met(self, ratio: Spread | None, value: Spread) -> bool:
        """Whether all of it holds."""
        if self.value_at_most is not None and value.median > self.value_at_most:
            return False
        if ratio is None:
            return self.ratio_at_most is None and self.ratio_at_least is None
        below = self.ratio_at_most is None or ratio.median <= self.ratio_at_most
        return below and (self.ratio_at_least is None or ratio.median >= self.ratio_at_least)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table; `ratio` to the row or thing named in `against`."""

    name: str
    against: str
    ratio: Spread | None
    value: Spread
    unit: str
    bar: str = ""
    met: bool | None = None
    headline: bool = False
    """Stands in the summary."""

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
        bar: Bar | None = None,
        headline: bool = False,
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
        return cls(
            name=name,
            against=against,
            ratio=ratio,
            value=value,
            unit=unit,
            bar="" if bar is None else bar.text(unit),
            met=None if bar is None else bar.met(ratio, value),
            headline=headline,
        )


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
            rows.append(Row(**{**row, "ratio": ratio, "value": Spread(**row["value"])}))
        return cls(
            subject=plain["subject"],
            title=plain["title"],
            compares=plain["compares"],
            rows=tuple(rows),
            checks=tuple(Check(**check) for check in plain["checks"]),
            notes=tuple(plain["notes"]),
        )
