"""What is known of a setting beside its type and default: help, rule, place in `--help`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Panel = Literal["The run", "Data", "Negatives", "Encoder and optimizer", "Watching"]
Rule = tuple[Callable[[Any], bool], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What is known of a field beside its type and default."""

    help: str
    panel: Panel
    """Where `--help` shows it."""
    rule: Rule | None = None
    """What a value must fulfil, and that in words."""
    choices: Callable[[], tuple[str, ...]] | None = None
    """The names a text may be now; a Literal has its own."""
    free: bool = False
    """May change when a run is continued: where and how it runs, never what it computes."""
    zero_is_none: bool = False
    """0 takes back what a preset or a data set asked for."""


def setting(default: T, help: str, panel: Panel, **known: Any) -> T:
    """A field of a dataclass with its default, and a `Setting` of the rest as its metadata."""
    return field(default=default, metadata={"": Setting(help, panel, **known)})


def between(low: int, high: int = 2**31 - 1) -> Rule:  # steps and positions are 32-bit integers
    """Both ends are allowed.

    >>> fulfilled, words = between(1, 5)
    >>> fulfilled(5), words
    (True, 'from 1 to 5')
    """
    return lambda v: low <= v <= high, f"from {low} to {high}"


share: Rule = (lambda v: 0 < v <= 1, "above 0 and at most 1")
named: Rule = (lambda v: v.strip() != "" and "\0" not in v, "a name or a path")
in_0_1: Rule = (lambda v: 0 <= v < 1, "at least 0 and below 1")
