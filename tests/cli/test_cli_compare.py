"""`compare` starts its runs as processes, and ends them with itself."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from negchain.cli import compare, run
from tool_runs import negchain

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

COMPARE = "compare --data digits --methods dcl --seeds 3 --steps 2"


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: Patch) -> Callable[[str], None]:
    """A machine with a GPU, on which a shell script runs in the place of Python."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def python(text: str) -> None:
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(path))

    return python


def running(pid: int) -> bool:
    """Whether a process is alive; a dead one whose parent does not ask is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_runs_beside_a_gpu_never_train_on_the_cpu(
    on_gpu: Callable[[str], None], tmp_path: Path
) -> None:
    on_gpu('echo "arguments $*" > $NOTES.$$')
    assert negchain(COMPARE, "--out", tmp_path / "out") == 0
    told = [path.read_text() for path in tmp_path.glob("notes.*")]
    assert len(told) == 3 and all("--device cuda" in text for text in told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_compare_leaves_no_process(
    on_gpu: Callable[[str], None], tmp_path: Path, number: int, capsys: Capture
) -> None:
    on_gpu("echo > $NOTES.$$; exec sleep 60")
    if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a job in the background
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)

    def interrupt() -> None:
        until(lambda: len(list(tmp_path.glob("notes.*"))) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert negchain(COMPARE, "--jobs 2 --out", tmp_path / "out") == 130
    thread.join()
    said = " ".join(capsys.readouterr().err.split())
    assert "the same command" in said and "continues the runs" in said
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("notes.*")]
    assert len(pids) == 2 and not any(running(pid) for pid in pids)


def test_a_run_that_has_only_just_been_started_is_ended_too(
    on_gpu: Callable[[str], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Ctrl-C between the start of a process and its being known."""
    on_gpu("exec sleep 60")
    pids: list[int] = []

    launch = compare.launch

    def interrupted(*arguments: Any) -> subprocess.Popen[bytes]:
        process = launch(*arguments)
        pids.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(compare, "launch", interrupted)
    assert negchain(COMPARE, "--jobs 2 --out", tmp_path / "out") == 130
    assert len(pids) == 1 and not running(pids[0])


@pytest.mark.parametrize("out", ["", " ", "a\0b"])
def test_an_out_that_is_no_path_is_refused(out: str, capsys: Capture, monkeypatch: Patch) -> None:
    """As from a shell's variable that is not set."""
    monkeypatch.setattr(compare.Runs, "train", lambda *_, **__: pytest.fail("a run began"))
    assert run([*COMPARE.split(), "--out", out]) == 2
    assert "--out must be a name or a path" in capsys.readouterr().err


def test_a_killed_run_is_not_told_by_an_earlier_failure(
    on_gpu: Callable[[str], None], tmp_path: Path, capsys: Capture
) -> None:
    on_gpu('echo "failed: the disk is full"; exit 1')
    assert negchain(COMPARE, "--seeds 1 --out", tmp_path / "out") == 1
    assert "failed: the disk is full" in capsys.readouterr().err
    on_gpu("kill -9 $$")
    assert negchain(COMPARE, "--seeds 1 --out", tmp_path / "out") == 1
    assert "failed: exit status -9" in capsys.readouterr().err


def test_several_processes_of_torchrun_are_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Each started runs of its own, and these waited for each other."""
    monkeypatch.setattr(compare.Runs, "train", lambda *_, **__: pytest.fail("a run began"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert negchain(COMPARE, "--out", tmp_path / "out") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "compare must be one process, and torchrun started 2; start it without" in said
    assert not (tmp_path / "out").exists()
