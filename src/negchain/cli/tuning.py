"""`negchain compare --tune`: settings each method chooses for itself, by its held-out score."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from negchain.files import read_object
from negchain.printable import show
from negchain.train.config import ConfigError, flag, hints
from negchain.train.presets import choose

FIXED = ("method", "seed", "out", "task", "data", "preset")
KINDS = {int: "an integer", float: "a number", str: "text"}


def grid(tune: Sequence[str], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values to try; one empty one where nothing is tuned.

    >>> grid(["beta=20,50", "lr=1e-4"], {})
    [{'beta': 20.0, 'lr': 0.0001}, {'beta': 50.0, 'lr': 0.0001}]
    """
    tried: dict[str, list[Any]] = {}
    for text in tune:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        choose("the setting of --tune", name, [n for n in hints() if n not in FIXED])
        if not equals or given.get(name) is not None or name in tried:
            why = f"{flag(name)} is given twice" if equals else "no value is named"
            raise ConfigError(
                f"--tune takes SETTING=VALUE,VALUE and each setting once, got {show(text)}: {why}"
            )
        tried[name] = [_value(name, value.strip()) for value in values.split(",")]
    return [dict(zip(tried, chosen, strict=True)) for chosen in itertools.product(*tried.values())]


def _value(name: str, text: str) -> Any:
    hint: Any = hints()[name]
    kind = next((k for k in (hint, *get_args(hint)) if k in KINDS), str)
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--tune {name} must be {KINDS[kind]}, got {show(text)}") from None


def label(tuned: dict[str, Any]) -> str:
    """What a combination is called in the name of a run's folder.

    >>> label({"beta": 20.0, "lr": 5e-05})
    '-beta=20-lr=5e-05'
    """
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in tuned.items()}
    return "".join(f"-{name}={value.replace('/', '_')}" for name, value in shown.items())


def score(run: Path) -> float:
    """The score of a finished run by its task's judge; minus infinity of any other."""
    path = run / "summary.json"
    value = read_object(path).get("score") if path.exists() else None
    return float(value) if isinstance(value, int | float) else -math.inf
