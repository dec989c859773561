"""Where the numbers of a run also go: TensorBoard, Weights & Biases or MLflow.

`metrics.jsonl` has them all; a logger is a copy for those who watch many runs in one place. W&B and
MLflow are used through their own packages, and read their own environment variables: project
(`WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`; "negchain" unless set), server, offline mode. The id
they gave a run is kept in its folder, so that a resumed run goes on in the same place.
"""

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from negchain.files import is_plain, read_object, real_folder, replacing
from negchain.train.config import TrainConfig
from negchain.train.presets import ConfigError


class Logger(NamedTuple):
    """A place for numbers: what takes those of a step, and what ends the run there."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


def check(kind: str) -> None:
    """Refuse a logger whose package is not installed, before anything is read."""
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise ConfigError(f"--logger {kind} needs its package: pip install {kind}")


def open_logger(config: TrainConfig, folder: Path, purge_step: int | None) -> Logger:
    """The logger the settings name; TensorBoard drops what it has from `purge_step` on."""
    name = config.name or folder.resolve().name
    if config.logger == "wandb":
        return _wandb(folder, name, for_others(config))
    if config.logger == "mlflow":
        return _mlflow(folder, name, for_others(config))
    if config.logger == "none":
        return Logger(lambda numbers, step: None, lambda: None)
    return _tensorboard(folder, purge_step)


def for_others(config: TrainConfig) -> dict[str, Any]:
    """Settings for other people: absolute paths are cut to their last name, our folders left out.

    >>> for_others(TrainConfig(data="/home/me/photos", out="/home/me/run"))["data"]
    'photos'
    """

    def name(text: str) -> str:
        return Path(text).name if Path(text).is_absolute() else text

    return {
        key: ",".join(map(name, value.split(","))) if isinstance(value, str) else value
        for key, value in asdict(config).items()
        if key not in ("out", "root")
    }


def _tensorboard(folder: Path, purge_step: int | None) -> Logger:
    from torch.utils.tensorboard import SummaryWriter  # takes a second: when first needed

    writer = SummaryWriter(str(real_folder(folder / "tensorboard")), purge_step=purge_step)

    def log(numbers: Mapping[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    return Logger(log, writer.close)


def _wandb(folder: Path, name: str, settings: dict[str, Any]) -> Logger:
    import wandb

    known = _known(folder, "wandb")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "negchain"), name=name, dir=str(folder),
        config=settings, id=known, resume="allow" if known else None,
    )  # fmt: skip
    _keep(folder, "wandb", run.id)
    return Logger(lambda numbers, step: run.log(dict(numbers), step=step), run.finish)


def _mlflow(folder: Path, name: str, settings: dict[str, Any]) -> Logger:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, place = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", "negchain")
    found = client.get_experiment_by_name(place)
    experiment = found.experiment_id if found else client.create_experiment(place)
    if (run := _known(folder, "mlflow")) is None:
        run = client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            client.log_param(run, key, value)
        _keep(folder, "mlflow", run)

    def log(numbers: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(key, float(value), now, step) for key, value in numbers.items()]
        client.log_batch(run, metrics=metrics)

    return Logger(log, lambda: client.set_terminated(run))


def _known(folder: Path, kind: str) -> str | None:
    """The id of this run at a logger, where it has one."""
    found = _ids(folder).get(kind)
    return found if isinstance(found, str) and re.fullmatch(r"[\w-]{1,64}", found) else None


def _ids(folder: Path) -> dict[str, Any]:
    file = folder / "logger.json"
    return read_object(file) if is_plain(file) else {}


def _keep(folder: Path, kind: str, identity: str) -> None:
    known = {**_ids(folder), kind: identity}  # a resumed run may have gone to another logger
    with replacing(folder / "logger.json") as file:
        file.write(json.dumps(known).encode() + b"\n")
