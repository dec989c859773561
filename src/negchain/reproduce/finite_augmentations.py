"""Stored against fresh augmentations (the paper's Fig. 3).

Paper   b = 256, β = 5: "as the number of pre-computed augmentations increases, the performance
        approaches that of the infinite augmentation algorithm". How many is not stated.
Ours    2, 4 and 16 stored augmentations, a chain for each of them, and fresh ones, one chain per
        image; the same with DCL, to tell the chain's part from augmentation's.
"""

from __future__ import annotations

from typing import Any

from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.runs import train
from negchain.reproduce.stl10 import (
    SETTINGS,
    accuracy_figure,
    accuracy_table,
    training_jobs,
)

STORED = (2, 4, 16, 0)


def jobs(options: Options) -> list[Row]:
    """EMC² and DCL with every number of stored augmentations, seed by seed."""
    settings = {name: SETTINGS[name] for name in ("b256-none", "b256-batch")}
    found = []
    for job in training_jobs(options, settings, ("emc2", "dcl")):
        for count in STORED:
            label = f"{job['method']}, {count or 'fresh'}"
            stored = {**job["settings"], "augmentations": count}
            found.append({**job, "augmentations": label, "settings": stored})
    return found


def table(rows: list[Row]) -> str:
    """Accuracies by number of stored augmentations."""
    return accuracy_table(rows, "augmentations")


def draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against samples."""
    return {
        "finite-augmentations-probe": accuracy_figure(rows, "probe", "augmentations"),
        "finite-augmentations-1nn": accuracy_figure(rows, "knn1", "augmentations"),
    }


EXPERIMENT = Experiment("finite-augmentations", jobs, train, table, draw)
