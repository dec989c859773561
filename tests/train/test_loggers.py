"""The numbers of a run also reach the loggers people have, through their own packages, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from negchain.train.config import ConfigError, TrainConfig
from negchain.train.loggers import check, for_others
from negchain.train.run_folder import RunFolder, own_settings

LINES = [{"step": 1, "loss": 2.5, "note": "x"}, {"step": 2, "loss": 1.5, "knn1": None}]


def logged(folder: Path, config: TrainConfig, resume: bool = False) -> None:
    run = RunFolder.resume(folder) if resume else RunFolder.create(folder, config="{}")
    with run:
        run.logger_settings = config
        for line in LINES:
            run.log({**line, "step": int(line["step"]) + 10 * resume})  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = TrainConfig(logger="mlflow", name="my first", data="/home/me/photos")
    logged(tmp_path / "run", config)
    logged(tmp_path / "run", config, resume=True)
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("negchain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "my first" and run.info.status == "FINISHED"
    assert run.data.params["data"] == "photos" and run.data.params["method"] == "emc2"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.5), (2, 1.5), (11, 2.5), (12, 1.5)]


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in: the package starts a server of its own, which takes seconds."""

    class Made:
        id = "abc123"

        def __init__(self, **given: object) -> None:
            self.given, self.lines, self.finished = given, list[object](), False

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.lines.append((step, numbers))

        def finish(self) -> None:
            self.finished = True

    made: list[Made] = []

    class Package:
        @staticmethod
        def init(**given: object) -> Made:
            made.append(Made(**given))
            return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", Package)
    config = TrainConfig(logger="wandb", name="my first", data="/home/me/photos")
    logged(tmp_path / "run", config)
    logged(tmp_path / "run", config, resume=True)
    first, second = made
    assert first.given["name"] == "my first" and first.given["project"] == "negchain"
    assert first.given["id"] is None and second.given["id"] == "abc123"
    assert first.lines == [(1, {"loss": 2.5}), (2, {"loss": 1.5})] and first.finished
    assert first.given["config"] == for_others(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(tmp_path / "run", TrainConfig(logger="wandb"))
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert json.loads((tmp_path / "run/logger.json").read_text())["wandb"]


def test_none_writes_nothing_else(tmp_path: Path) -> None:
    logged(tmp_path / "run", TrainConfig(logger="none"))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        ".lock", "config.json", "metrics.jsonl",
    }  # fmt: skip


def test_a_missing_package_is_told_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--logger wandb needs its package: pip install wandb"):
        check("wandb")
    check("none")


def test_the_file_of_another_never_reaches_the_network(tmp_path: Path) -> None:
    assert own_settings(TrainConfig(logger="wandb")).logger == "tensorboard"
    assert own_settings(TrainConfig(logger="none")).logger == "none"
    (tmp_path / "logger.json").write_text('{"wandb": "../../etc"}')
    logged(tmp_path / "run", TrainConfig(logger="none"))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json",
        "metrics.jsonl",
        ".lock",
    }
    from negchain.train.loggers import _known

    assert _known(tmp_path, "wandb") is None


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_goes_to_another_logger_for_a_while_comes_back(tmp_path: Path) -> None:
    from negchain.train.loggers import _keep, _known

    _keep(tmp_path, "wandb", "abc123")
    _keep(tmp_path, "mlflow", "def456")
    assert (_known(tmp_path, "wandb"), _known(tmp_path, "mlflow")) == ("abc123", "def456")
