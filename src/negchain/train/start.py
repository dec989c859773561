"""Starting a run: from its settings to a `trainer.Run` in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from negchain import tasks
from negchain.machine import commit, hardware, versions
from negchain.tasks.task import Task
from negchain.train import loggers, trainer
from negchain.train.config import TrainConfig
from negchain.train.device import choose_device
from negchain.train.run_folder import RunFolder, check_writable, default_out, refuse_taken
from negchain.train.team import here


def start(
    config: TrainConfig, show: bool, augment: Callable[[Tensor], Tensor] | None = None
) -> tuple[trainer.Run, list[str]]:
    """A new run, prepared, and what the user should know.

    Args:
        config: its settings.
        show: progress of loading data.
        augment: in the place of the recipe; see `negchain.train.run`.
    """
    team = here()
    if team.leads:
        check_writable(Path(config.out or "runs"))
        if config.out is not None:
            refuse_taken(Path(config.out))
    loggers.check(config.logger)
    task = load(config, show)
    if augment is not None:
        task.augment_by(augment)
    text = json.dumps(record(task), indent=2) + "\n"

    def folder() -> RunFolder:
        path = config.out or default_out(
            method=config.name or config.method, data=config.data, seed=config.seed
        )
        return RunFolder.create(path, config=text)

    run = trainer.prepare(task, folder)
    return run, [*task.notes, *run.notes]


def load(config: TrainConfig, show: bool) -> Task:
    """The task of the settings; what is fetched is fetched by rank 0, before the others look."""
    team = here()
    if config.download and team.world > 1:
        team.first(lambda: tasks.load(config, show) and None)
    return tasks.load(config, show and team.leads)


def record(task: Task) -> dict[str, Any]:
    """config.json: what was asked for, and what it ran on."""
    data = {
        "num_samples": task.num_samples,
        **task.info(),
        "skipped": [list(pair) for pair in task.skipped],
        "fingerprint": task.fingerprint,
        "notes": list(task.notes),
    }
    return {
        **asdict(task.config),
        "versions": versions(),
        "hardware": hardware(choose_device(task.config.device)),
        "commit": commit(),
        "data_info": data,
    }
