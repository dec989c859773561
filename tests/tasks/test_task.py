"""A task nobody in the package knows trains, resumes, is compared, evaluated and reported.

It has two towers, a corpus of keys, known positives, a learned temperature and loaded batches
(tests/tasks/words_task.py), and reaches the tool through `--import` alone.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch

import negchain
from forked import fork
from negchain import methods, tasks, train
from negchain.cli import run as command_line
from negchain.cli.options import import_file
from negchain.progress import Progress
from negchain.train import start, trainer
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder, read_metrics
from negchain.train.step import TrainStep

WORDS = Path(__file__).with_name("words_task.py")
SETTINGS = {"data": "dictionary", "device": "cpu", "steps": 12, "log_every": 1, "eval_every": 1}
SOURCE = Path(negchain.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def words():
    """The task, registered for the tests of this file."""
    import_file(WORDS)
    yield
    forget_words()


def untimed(folder: Path) -> list[dict]:
    clock = ("seconds", "samples_per_second")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(folder)]


@pytest.mark.parametrize("method", ["soft", "emc2", "negcache", "informed"])
def test_it_trains_and_resumes_to_the_bit(method: str, tmp_path: Path, monkeypatch) -> None:
    whole = train.run(**SETTINGS, method=method, out=str(tmp_path / "whole"))
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["recall1"] > summary["untrained_recall1"]
    assert json.loads((whole / "config.json").read_text())["task"] == "words"

    call = TrainStep.__call__

    def stopped(self: TrainStep, number: int, *given) -> None:
        call(self, number, *given)
        if number == 6:
            signal_me()

    def signal_me() -> None:
        run.stop = True

    half = tmp_path / "half"
    config = resolve(None, {**SETTINGS, "method": method})
    run = start.prepare(
        tasks.load(config),
        lambda: RunFolder.create(half, config=(whole / "config.json").read_text()),
    )
    with monkeypatch.context() as patch, run.folder, pytest.raises(trainer.Interrupted):
        patch.setattr(TrainStep, "__call__", stopped)
        run.train(Progress(show=False))
    assert command_line(["train", "--out", str(half), "--resume", "--quiet"]) == 0
    assert untimed(half) == untimed(whole)


def test_the_report_and_evaluate_show_its_numbers(tmp_path: Path, capsys) -> None:
    folder = train.run(**SETTINGS, method="soft", out=str(tmp_path / "run"))
    page = (folder / "report.html").read_text(encoding="utf-8")
    for text in ("Recall at 1", "test words", "Some words", "<p>abacus</p>", "Soft DCL"):
        assert text in page
    commit = json.loads((folder / "config.json").read_text())["commit"]  # may say anything
    body = page.split("<body>")[1].split("<footer>")[0].replace(escape(commit), "")
    assert "image" not in body and "pixels" not in body
    assert command_line(["evaluate", str(folder), "--device", "cpu"]) == 0
    assert "Recall at 1" in capsys.readouterr().out
    best = torch.load(folder / "checkpoints" / "best.pt", weights_only=True, mmap=False)
    assert best["state"]["encoder_config"] == {"dim": 4, "seed": 0}
    assert float(best["state"]["encoder"]["temperature"]) <= 3.001


def forget_words() -> None:
    del tasks.TASKS["words"], methods.METHODS["soft"], sys.modules["negchain_import_words_task"]


class Launched:
    """A run of `compare` that knows nothing but its command line; forked to save its imports."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.process = fork(self.train, arguments, log)

    @staticmethod
    def train(arguments: list[str], log: Path) -> None:
        sys.stdout = sys.stderr = open(log, "a", buffering=1)
        forget_words()
        sys.exit(command_line(["train", *arguments]))

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def test_compare_gives_its_runs_what_it_imported(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("negchain.cli.compare.launch", Launched)
    options = ["--methods", "soft", "--data", "dictionary", "--device", "cpu", "--steps", "2"]
    done = command_line(
        ["compare", "--import", str(WORDS), *options, "--quiet", "--out", str(tmp_path)]
    )
    assert done == 0, (tmp_path / "soft-seed0.log").read_text()
    assert "Recall at 1" in capsys.readouterr().out
    assert "--soft: #123456;" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_later_command_imports_what_a_run_was_made_with(tmp_path: Path, capsys) -> None:
    folder = train.run(**SETTINGS, method="soft", out=str(tmp_path / "run"))
    forget_words()  # as a new process begins
    assert command_line(["evaluate", str(folder)]) == 2
    assert "; one of your own needs --import FILE" in " ".join(capsys.readouterr().err.split())
    own = [str(folder), "--import", str(WORDS)]
    assert command_line(["evaluate", *own]) == 0
    forget_words()
    assert command_line(["report", "--out", str(tmp_path / "page.html"), *own]) == 0
    assert "Recall at 1" in capsys.readouterr().out
    assert "Some words" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["nowhere.py", "."])
def test_what_cannot_be_imported_is_refused(path: str, tmp_path: Path, capsys) -> None:
    assert command_line(["train", "--import", str(tmp_path / path)]) == 2
    assert "--import needs a Python file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("code", ["def (:", "raise KeyError('x')", "import no_such", "exit(3)"])
def test_a_file_of_ones_own_that_fails_is_named(code: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert command_line(["train", "--import", str(tmp_path / "mine.py")]) == 2
    said = capsys.readouterr().err
    assert "mine.py must run without an error, got" in said and said.count("\n") == 1


def test_a_task_is_chosen_by_the_data_or_named() -> None:
    assert resolve(None, {"data": "dictionary"}).task == "words"
    assert resolve(None, {"data": "digits"}).task == "images"
    assert resolve(None, {"data": "digits", "task": "words"}).batch_size == 8
    with pytest.raises(
        ConfigError, match="--task must be one of images, retrieval, image-text, words, got 'word'"
    ):
        resolve(None, {"task": "word"})
    with pytest.raises(
        ConfigError, match="--recipe belongs to --task images or image-text .* is 'words'"
    ):
        resolve(None, {"data": "dictionary", "recipe": "none"})


def test_two_fresh_views_of_a_task_are_both_offered(monkeypatch) -> None:
    assert resolve(None, {"data": "dictionary", "method": "emc2"}).proposal == "batch"
    monkeypatch.setitem(tasks.TASKS, "words", replace(tasks.TASKS["words"], two_views=True))
    assert resolve(None, {"data": "dictionary", "method": "emc2"}).proposal == "both"


def test_filling_a_table_is_shown_and_can_be_stopped(tmp_path: Path, capsys) -> None:
    config = resolve(None, {**SETTINGS, "method": "informed"})
    run = start.prepare(
        tasks.load(config), lambda: RunFolder.create(tmp_path / "run", config="{}\n")
    )
    with run.folder, pytest.raises(trainer.Interrupted, match="before the first step"):
        run.stop = True
        run.train(Progress(show=True))
    assert "filling the table of old embeddings: 60/60 encoded" in capsys.readouterr().err
    assert run.done == 0


def test_nobody_else_knows_a_task_by_name() -> None:
    """Trainer, checkpoints, compare and report import the register and the interface alone."""
    for path in [*SOURCE.glob("train/*.py"), *SOURCE.glob("cli/*.py"), *SOURCE.glob("report/*.py")]:
        if path.name == "trained.py":  # images of a trained encoder
            continue
        found = {
            node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert {m for m in found if m.startswith("negchain.tasks.")} <= {"negchain.tasks.task"}, (
            path
        )


def test_a_task_without_a_score_trains_and_refuses_patience(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delattr(sys.modules[tasks.named("words").load.__module__].WordsJudge, "best_by")
    train.run(**SETTINGS, out=str(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="--patience needs a number to decide by: --task words"):
        train.run(**SETTINGS, patience=2, out=str(tmp_path / "patient"))


def test_what_loads_an_encoder_of_another_task_is_named(tmp_path: Path, capsys) -> None:
    run = train.run(**SETTINGS, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"words; negchain\.train\.pretrained\.load_tr"):
        negchain.load(run)
    assert command_line(["export", str(run), "--format", "timm", "--out", str(tmp_path / "e")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "negchain.train.pretrained.load_trained gives it" in said
