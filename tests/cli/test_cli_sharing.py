"""Runs that share a GPU through MPS, with a control program that only plays the real one's part."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from negchain.cli import compare
from negchain.train import sharing
from negchain.train.sharing import PIPE, shared_gpu
from tool_runs import negchain

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

# As the real one: -d leaves a daemon behind and its pid beside the pipes; commands come on stdin
# and fail without a daemon. What it is asked is written to $NOTES.
CONTROL = """#!/bin/sh
folder=${CUDA_MPS_PIPE_DIRECTORY:-$DEFAULT}
file=$folder/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    echo "-d $CUDA_VISIBLE_DEVICES" >> "$NOTES"
    sleep 60 &
    echo $! > "$file"
    touch "$folder/control"
    exit 0
fi
read -r command
kill -0 "$(cat "$file" 2>/dev/null)" 2>/dev/null || exit 1
echo "$command" >> "$NOTES"
case $command in
    get_server_list) echo 4242;;
    quit*) kill "$(cat "$file")"; rm "$file";;
esac
"""
DEAF = CONTROL.replace("quit*)", "quit*) exec sleep 60;")
REFUSES = "#!/bin/sh\necho 'some line' >&2\necho 'the device is busy' >&2\nexit 3\n"
HANGS = "#!/bin/sh\nexec sleep 60\n"


@dataclass
class Machine:
    """A machine with a GPU, a control program and nothing else of MPS."""

    folder: Path
    patch: Patch

    def program(self, text: str) -> None:
        self._script("bin/" + sharing.PROGRAM, text)

    def python(self, text: str) -> None:
        """What runs, and the client that is tried first, are instead of Python."""
        self.patch.setattr("sys.executable", self._script("python", "#!/bin/sh\n" + text))

    def _script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def asked(self) -> list[str]:
        notes = self.folder / "notes"
        return notes.read_text().splitlines() if notes.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Iterator[Machine]:
    for name in (PIPE, sharing.LOG, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("DEFAULT", str(tmp_path / "default"))
    monkeypatch.setattr(sharing, "PLACES", (str(tmp_path / "elsewhere"),))
    monkeypatch.setattr(sharing, "DEFAULT_PIPE", str(tmp_path / "default"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    made = Machine(tmp_path, monkeypatch)
    made.python("echo 4242")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # of this test alone
        monkeypatch.setattr(sharing, "SHORT", short)
        yield made


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


def daemon_of(environment: dict[str, str]) -> int:
    return int((Path(environment[PIPE]) / f"{sharing.PROGRAM}.pid").read_text())


def leftovers() -> set[Path]:
    return set(Path(sharing.SHORT).glob("negchain-mps-*"))


def start_daemon(machine: Machine, folder: Path) -> int:
    folder.mkdir()
    program = machine.folder / "bin" / sharing.PROGRAM
    subprocess.run([program, "-d"], env={**os.environ, PIPE: str(folder)}, check=True)
    return daemon_of({PIPE: str(folder)})


# ------------------------------------------------------------------------------ the daemon's life


def test_a_private_daemon_lives_as_long_as_the_block(machine: Machine) -> None:
    machine.program(CONTROL)
    machine.python("env > $NOTES.client; echo 4242")
    said: list[str] = []
    with shared_gpu(4, say=said.append) as environment:
        pid, folder = daemon_of(environment), Path(environment[PIPE]).parent
        assert running(pid) and folder.stat().st_mode & 0o777 == 0o700
        assert len(environment[PIPE]) < 60  # a unix socket's path has at most 107 characters
    assert said == ["4 runs share the GPU through MPS"]
    assert machine.asked() == ["-d 0", "get_server_list", "quit"]
    client = (machine.folder / "notes.client").read_text().splitlines()
    assert [f"{k}={v}" for k, v in environment.items() if f"{k}={v}" not in client] == []
    assert until(lambda: not running(pid)) and not folder.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_daemon_ends_with_an_exception(machine: Machine, error: type[BaseException]) -> None:
    machine.program(CONTROL)
    with pytest.raises(error), shared_gpu(2, say=print) as environment:
        pid = daemon_of(environment)
        raise error
    assert until(lambda: not running(pid)) and not Path(environment[PIPE]).parent.exists()


def test_a_daemon_that_does_not_listen_is_killed(machine: Machine) -> None:
    machine.program(DEAF)
    machine.patch.setattr(sharing, "PATIENCE", 0.5)
    machine.patch.setattr(sharing, "QUIT", ("quit",))
    with shared_gpu(2, say=print) as environment:
        pid = daemon_of(environment)
    assert until(lambda: not running(pid)) and not Path(environment[PIPE]).parent.exists()


@pytest.mark.parametrize("default", [True, False])
def test_a_daemon_of_somebody_else_is_used_and_left_alone(machine: Machine, default: bool) -> None:
    machine.program(CONTROL)
    folder = machine.folder / ("default" if default else "theirs")
    pid = start_daemon(machine, folder)
    if not default:
        machine.patch.setenv(PIPE, str(folder))
    try:
        with shared_gpu(2, say=print) as environment:
            assert environment == {PIPE: str(folder)}
        assert running(pid) and folder.exists() and "quit" not in machine.asked()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_a_dead_daemon_left_is_not_taken_for_one(machine: Machine) -> None:
    machine.program(CONTROL)
    folder = machine.folder / "theirs"
    folder.mkdir()
    (folder / "control").touch()
    (folder / f"{sharing.PROGRAM}.pid").write_text("99999999\n")
    machine.patch.setenv(PIPE, str(folder))
    with shared_gpu(2, say=print) as environment:
        assert environment[PIPE].startswith(f"{sharing.SHORT}/negchain-mps-")


@pytest.mark.parametrize(
    ("visible", "daemon", "client"),
    [("3", "3", "0"), ("2,1", "2", "0"), ("GPU-a,1", "GPU-a", "GPU-a"), ("MIG-a", *["MIG-a"] * 2)],
)
def test_the_daemon_serves_the_gpu_the_runs_use(
    machine: Machine, visible: str, daemon: str, client: str
) -> None:
    machine.program(CONTROL)
    machine.patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with shared_gpu(2, say=print) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == client
    assert machine.asked()[0] == f"-d {daemon}"


def test_a_server_that_is_still_starting_is_waited_for(machine: Machine) -> None:
    machine.program(CONTROL)
    machine.python(
        'echo x >> $NOTES.tries\n[ "$(wc -l < $NOTES.tries)" -ge 3 ] && echo 4242 && exit\n'
        "echo CUDA error 807 >&2; exit 1"
    )
    with shared_gpu(2, say=print) as environment:
        assert environment


# -------------------------------------------------------------------------------- when it fails


@pytest.mark.parametrize(
    ("program", "python", "reason"),
    [
        (None, "echo 1", "MPS was not found"),
        (REFUSES, "echo 1", "MPS did not start (the device is busy)"),
        (HANGS, "echo 1", "MPS did not start within 0.5 s"),
        ("not a program", "echo 1", "MPS could not be started"),
        (CONTROL, "echo error 805 >&2; exit 1", "MPS gave no process the GPU (error 805)"),
        (CONTROL, "exec sleep 60", "MPS gave no process the GPU within 0.6 s"),
        (CONTROL, "true", "MPS started no server"),
    ],
)
def test_without_mps_runs_take_turns(
    machine: Machine, program: str | None, python: str, reason: str
) -> None:
    machine.patch.setattr(sharing, "PATIENCE", 0.5)
    machine.patch.setattr(sharing, "TRIAL_PATIENCE", 0.6)
    before = leftovers()
    if program is not None:
        machine.program(program)
    machine.python(python)
    said: list[str] = []
    with shared_gpu(4, say=said.append) as environment:
        assert environment == {}
    (line,) = said
    assert line.startswith(reason) and line.endswith(": 4 runs take turns on the GPU")
    assert leftovers() <= before


# ------------------------------------------------------------------------------------- compare

COMPARE = "compare --data digits --methods dcl --seeds 3 --steps 2"


def test_compare_gives_the_environment_to_its_runs(machine: Machine, capsys: Capture) -> None:
    machine.program(CONTROL)
    machine.python('[ "$2" = -m ] && { env; echo "arguments $*"; } > $NOTES.$$; echo 4242')
    assert negchain(COMPARE, "--out", machine.folder / "out") == 0
    assert "3 runs share the GPU through MPS" in capsys.readouterr().err
    dumps = [path.read_text() for path in machine.folder.glob("notes.*")]
    assert len(dumps) == 3 and all(
        f"{PIPE}={sharing.SHORT}/negchain-mps-" in text for text in dumps
    )
    assert all("--device cuda" in text for text in dumps)  # never the CPU because MPS failed
    assert machine.asked()[-1] == "quit"
    assert PIPE not in os.environ


@pytest.mark.parametrize(
    "options", ["--no-sharing", "--jobs 1", "--device cpu --jobs 2", "--seeds 1"]
)
def test_compare_without_sharing(machine: Machine, options: str, capsys: Capture) -> None:
    machine.program(CONTROL)
    machine.python("env > $NOTES.$$")
    assert negchain(COMPARE, options, "--out", machine.folder / "out") == 0
    assert machine.asked() == [] and "through MPS" not in capsys.readouterr().err
    dumps = [path.read_text() for path in machine.folder.glob("notes.*")]
    apart = f"{PIPE}={os.devnull}\n"  # from a daemon that somebody else runs
    assert dumps and all((apart in text) == (options == "--no-sharing") for text in dumps)
    assert not any("negchain-mps-" in text for text in dumps)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_compare_leaves_no_process(
    machine: Machine, number: int, capsys: Capture
) -> None:
    machine.program(CONTROL)
    machine.python('[ "$2" = -m ] || { echo 4242; exit; }\n'
                   "echo $CUDA_MPS_PIPE_DIRECTORY > $NOTES.$$; exec sleep 60")  # fmt: skip
    before = leftovers()
    if signal.getsignal(number) is signal.SIG_IGN:  # nohup, or a job in the background
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)

    def interrupt() -> None:
        until(lambda: len(list(machine.folder.glob("notes.*"))) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert negchain(COMPARE, "--jobs 2 --out", machine.folder / "out") == 130
    thread.join()
    said = " ".join(capsys.readouterr().err.split())
    assert "the same command" in said and "continues the runs" in said
    pids = [int(path.suffix[1:]) for path in machine.folder.glob("notes.*")]
    assert len(pids) == 2 and not any(running(pid) for pid in pids)
    assert machine.asked()[-1] == "quit" and leftovers() <= before


def test_a_run_that_has_only_just_been_started_is_ended_too(
    machine: Machine, monkeypatch: Patch
) -> None:
    """Ctrl-C between the start of a process and its being known."""
    machine.program(CONTROL)
    machine.python('[ "$2" = -m ] || { echo 4242; exit; }\nexec sleep 60')
    pids: list[int] = []

    launch = compare.launch

    def interrupted(*arguments: Any) -> subprocess.Popen[bytes]:
        process = launch(*arguments)
        pids.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(compare, "launch", interrupted)
    assert negchain(COMPARE, "--jobs 2 --out", machine.folder / "out") == 130
    assert len(pids) == 1 and not running(pids[0])
