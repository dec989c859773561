"""How many steps to discard: P in {0, b/2, b, 3b/2} (the paper's Fig. 4).

Paper   "performance improves by increasing P, and the improvement stops at around P = b". The
        figure does not say which batch size; here the paper's b = 32.
Ours    the paper's R = 2b - 2 proposals (both copies of every item to each row), and as last line
        our default: one copy each, half discarded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.runs import train
from negchain.reproduce.stl10 import (
    SETTINGS,
    accuracy_figure,
    accuracy_table,
    training_jobs,
)


def jobs(options: Options) -> list[Row]:
    """A run for every P, seed by seed; P is a number of steps."""
    settings = {name: SETTINGS[name] for name in ("b32-none", "b32-batch")}
    found = []
    for job in training_jobs(replace(options, methods=("emc2",)), settings, ()):
        size = 16 if options.quick else 32
        for steps in (0, size // 2, size, 3 * size // 2):
            chain = {"burn_in": min(steps, 2 * size - 3), "copies": 2}
            found.append({**job, "burn-in": f"P = {steps}", "chain": chain})
        found.append({**job, "burn-in": "ours"})
    return found


def table(rows: list[Row]) -> str:
    """Accuracies by P."""
    return accuracy_table(rows, "burn-in")


def draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against samples."""
    return {
        "burn-in-probe": accuracy_figure(rows, "probe", "burn-in"),
        "burn-in-1nn": accuracy_figure(rows, "knn1", "burn-in"),
    }


EXPERIMENT = Experiment("burn-in", jobs, train, table, draw)
