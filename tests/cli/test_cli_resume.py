"""A run that was stopped, killed or resumed ends exactly as one that was left alone."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from negchain.train import checkpoint
from negchain.train.stopping import stopping
from tool_runs import (
    DIGITS,
    TINY,
    assert_same_run,
    class_folder,
    interrupt_at,
    metrics_of,
    negchain,
    picture_folder,
    process,
    snapshot,
    state_of,
)

METHODS = [  # every kind of state, optimizer and stored views; losses: losses/test_state.py
    "sogclr --denominator all",
    "negcache --refresh 0.2",
    "emc2",
    "emc2 --denominator all --optimizer sgd",
    "emc2 --proposal informed --refresh 0.2",
    "isir --optimizer lars",
    "isir --carried cached --augmentations 3",
]
MORE = ["infonce", "dcl", "sogclr", "emc2 --carried cached", "emc2 --augmentations 2"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "pictures")


@pytest.mark.parametrize(
    "method", [*METHODS, *(pytest.param(words, marks=pytest.mark.slow) for words in MORE)]
)
def test_k_and_k_steps_are_2k_steps(
    method: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("train", TINY, f"--method {method} --steps 10 --data", pictures, "--out")
    assert negchain(*common, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=4)
        assert negchain(*common, tmp_path / "halves") == 130
    assert state_of(tmp_path / "halves")["step"] == 5
    assert negchain("train --quiet --resume --out", tmp_path / "halves") == 0
    assert state_of(tmp_path / "whole")["step"] == 10
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def test_an_epoch_that_ends_in_the_middle_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = class_folder(tmp_path / "data")
    options = TINY.replace("--log-every 1 --eval-every 0", "--log-every 3 --eval-every 2")
    common = ("train", options, "--epochs 6 --subset 20 --data", data, "--out")
    assert negchain(*common, tmp_path / "whole") == 0
    for step in (3, 6):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            again = " --resume" if step > 3 else ""
            assert negchain(*common, tmp_path / "parts", again) == 130
    assert negchain("train --quiet --resume --out", tmp_path / "parts") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "parts") if "probe" in line] == [
        0,
        4,
        8,
        12,
    ]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_resuming_a_finished_run_changes_nothing(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert negchain("train", TINY, "--steps 3 --data", pictures, "--out", out) == 0
    before, summary = snapshot(out), json.loads((out / "summary.json").read_text())
    assert negchain("train --quiet --resume --out", out) == 0
    after = snapshot(out)
    kept = ("config.json", "metrics.jsonl", "checkpoints/step-000000003.pt")
    assert [after[name] == before[name] for name in kept] == [True] * 3
    assert json.loads((out / "summary.json").read_text()) == summary


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 5),
        (signal.SIGHUP, 3),
        *(pytest.param(signal.SIGINT, step, marks=pytest.mark.slow) for step in (3, 5)),
        *(pytest.param(signal.SIGTERM, step, marks=pytest.mark.slow) for step in (0, 3)),
    ],
)
def test_a_signal_checkpoints_and_says_how_to_go_on(
    number: int,
    step: int,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out, before = tmp_path / "run", signal.getsignal(number)
    if before == signal.SIG_IGN:  # of tests under nohup, say
        signal.signal(number, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, number)
        assert negchain("train", TINY, "--steps 6 --data", pictures, "--out", out) == 130
    signal.signal(number, before)
    said = " ".join(capfd.readouterr().err.split())
    assert ("stopping after this step" in said) == (number == signal.SIGINT)  # heard, at once
    assert f"stopped after step {step + 1} of 6" in said
    assert f"continue with: negchain train --out {out} --resume" in said
    assert not (out / "summary.json").exists()
    assert negchain("train --quiet --resume --out", out) == 0
    assert metrics_of(out)[-1]["step"] == 6 and (out / "report.html").exists()


def test_asked_twice_a_run_ends_at_once_and_says_how_to_go_on(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also during the evaluation before the first step, when there is no checkpoint yet."""

    def pressed(*args: object, **named: object) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("negchain.train.trainer.Run._first_line", pressed)
        assert negchain("train", TINY, "--steps 2 --data", pictures, "--out", out) == 130
    said = capfd.readouterr().err.splitlines()[-1]
    again = f"continue with: negchain train --out {out} --resume"
    assert said == f"stopped at once, without a checkpoint; {again}"
    assert negchain("train --quiet --resume --out", out) == 0


@pytest.mark.parametrize("answer", [signal.SIG_DFL, signal.SIG_IGN], ids=["closed", "nohup"])
def test_a_closed_terminal_is_not_asking_twice(answer: signal.Handlers) -> None:
    """It sends SIGHUP, and so does its shell; where that is ignored it stays ignored."""
    before = signal.signal(signal.SIGHUP, answer)
    run = SimpleNamespace(stop=False)
    try:
        with stopping(run):
            for _ in range(2):
                signal.raise_signal(signal.SIGHUP)
            assert run.stop == (answer is signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == answer
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_diverging_run_fails_with_a_sentence(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = "--steps 60 --optimizer sgd --norm none --lr 1000 --weight-decay 1 --data"
    assert negchain("train", TINY, options, pictures, "--out", out) == 1
    said = capsys.readouterr().err
    assert "failed:" in said and "Traceback" not in said
    assert "--lr" in said or "learning rate" in said


def run_with_kills(arguments: str, out: Path, log: Path, kills: int, seed: int) -> None:
    """Run to the end, killed `kills` times on the way, each time resumed."""
    rng = random.Random(seed)
    for turn in range(kills):
        child = process(f"{arguments} {'--resume' if turn else ''}", log)
        begun = _newest(out)
        while child.is_alive() and _newest(out) == begun:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.15))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, f"too fast to be killed: {log.read_text()}"
        loaded = checkpoint.load_latest(out / "checkpoints")  # what a resume would read
        assert loaded is not None and loaded.warnings == []
    child = process(f"{arguments} --resume", log)
    child.join()
    assert child.exitcode == 0, log.read_text()


def _newest(out: Path) -> str:
    folder = out / "checkpoints"
    return max((p.name for p in folder.glob("step-*.pt")), default="") if folder.is_dir() else ""


def test_killed(pictures: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = f"train {TINY} --steps 60 --checkpoint-every 3 --data {pictures} --out"
    assert negchain(arguments, whole) == 0
    run_with_kills(f"{arguments} {killed}", killed, tmp_path / "log", kills=1, seed=0)
    assert_same_run(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_ten_times(tmp_path: Path, seed: int) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = f"train {DIGITS} --steps 1500 --checkpoint-every 5 --out"
    assert negchain(arguments, whole) == 0
    run_with_kills(f"{arguments} {killed}", killed, tmp_path / "log", kills=10, seed=seed)
    assert_same_run(whole, killed)
