"""Processes that use one GPU at the same time, through NVIDIA's Multi-Process Service (MPS).

Without MPS, processes get the GPU in turns. As clients of an MPS daemon their kernels run side by
side; small batches leave room for that. The daemon here is private: it runs as the user, for as
long as the `with` block, with its pipes in a folder of its own, and serves the one GPU that the
runs use. A daemon that somebody else runs already is used and left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROGRAM = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPE = "/tmp/nvidia-mps"  # noqa: S108 - where NVIDIA's own daemon listens
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/bin", "/usr/local/cuda/bin")
SHORT = "/tmp"  # noqa: S108 - whatever TMPDIR says: a unix socket's path has at most 107 letters
PATIENCE = 10.0  # seconds for an answer of the control program
QUIT = ("quit", "quit -t 1")  # the first waits for clients to end, the second one second
TRIAL_PATIENCE = 30.0  # the first client waits for the server, and both for the driver

APART = {PIPE: os.devnull}  # keeps a process away from any daemon: clients find it by its folder
NOT_READY = "CUDA error 807"  # a server that is still starting turns clients away

# A client that makes a CUDA context and then asks which servers there are. It shows whether runs
# will see the GPU (else they would train on the CPU) and really share it. It uses libcuda directly,
# because importing torch takes seconds.
TRIAL = """
import ctypes, subprocess, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
code = code or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
if code:
    sys.exit(f"CUDA error {code}")
subprocess.run([sys.argv[1]], input=b"get_server_list\\n", check=True)
"""


class Unavailable(Exception):
    """Why MPS cannot be used, as a clause."""


@contextmanager
def shared_gpu(jobs: int, *, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Let `jobs` processes started inside the block share the GPU; `say` tells whether they do.

    Yields variables to add to a child's environment; none if MPS is not used. End the processes
    inside the block: leaving it stops the daemon.
    """
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        try:
            environment = stack.enter_context(_daemon())
            say(f"{jobs} runs share the GPU through MPS")
        except Unavailable as reason:
            say(f"{reason}: {jobs} runs take turns on the GPU")
        yield environment


@contextmanager
def _daemon() -> Iterator[dict[str, str]]:
    """The environment of the clients of a daemon: one that runs already, or a private one."""
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(PLACES))
    if program is None:
        raise Unavailable(f"MPS was not found ({PROGRAM} is neither on PATH nor in {PLACES[0]})")
    if (running := _running(program)) is not None:
        yield {PIPE: running}
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="negchain-mps-", dir=SHORT))
    except OSError as error:
        raise Unavailable(f"MPS found no place for its pipes ({error})") from None
    own = {PIPE: str(folder / "pipe"), LOG: str(folder / "log")}
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    # The daemon renumbers what it sees: its clients know the one GPU as 0, or by its name.
    client = {**own, "CUDA_VISIBLE_DEVICES": "0" if gpu.isdigit() else gpu}
    try:
        _start(program, {**own, "CUDA_VISIBLE_DEVICES": gpu}, folder)
        _try_client(program, client)
        yield client
    finally:
        _stop(program, own, folder)


def _running(program: str) -> str | None:
    """The pipe folder of a daemon that runs already and answers."""
    folder = os.environ.get(PIPE) or DEFAULT_PIPE
    if not (Path(folder) / "control").exists():
        return None
    return folder if _ask(program, {PIPE: folder}, "get_server_list") else None


def _start(program: str, environment: dict[str, str], folder: Path) -> None:
    """Start a daemon and wait until it answers."""
    for place in (environment[PIPE], environment[LOG]):
        Path(place).mkdir()
    end = time.monotonic() + PATIENCE
    try:
        # Into a file: the daemon keeps its output open, and a pipe to it would never end.
        with open(folder / "start.log", "wb") as log:
            words = [program, "-d"]
            code = _run(words, environment, PATIENCE, stdout=log, stderr=log).returncode
    except subprocess.TimeoutExpired:
        raise Unavailable(f"MPS did not start within {PATIENCE:g} s") from None
    except OSError as error:
        raise Unavailable(f"MPS could not be started ({error})") from None
    while code == 0 and time.monotonic() < end:
        if _ask(program, environment, "get_server_list"):
            return
        time.sleep(0.05)
    logs = (folder / "start.log", folder / "log" / "control.log")
    said = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
    raise Unavailable(f"MPS did not start ({_last_line(said) or f'exit status {code}'})")


def _try_client(program: str, environment: dict[str, str]) -> None:
    """Check that a process can use the GPU through the daemon, before the runs do."""
    end = time.monotonic() + TRIAL_PATIENCE
    while True:
        try:
            words = [sys.executable, "-P", "-c", TRIAL, program]
            trial = _run(words, environment, max(end - time.monotonic(), 0.1), capture_output=True)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"MPS gave no process the GPU within {TRIAL_PATIENCE:g} s") from None
        if NOT_READY not in trial.stderr or time.monotonic() > end:
            break
        time.sleep(0.2)
    if trial.returncode != 0:
        raise Unavailable(f"MPS gave no process the GPU ({_last_line(trial.stderr)})")
    if not trial.stdout.strip():
        raise Unavailable("MPS started no server")


def _stop(program: str, environment: dict[str, str], folder: Path) -> None:
    """End the daemon, by force if it does not listen, and remove its folder."""
    file = Path(environment[PIPE]) / f"{PROGRAM}.pid"
    try:
        pid = int(file.read_text()) if file.exists() else None
        if pid is not None and not any(_ask(program, environment, c) for c in QUIT):
            os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        pass  # it ended meanwhile
    finally:
        for attempt in range(20):  # a daemon on its way out may still write
            if attempt > 10 or not file.exists():  # it removes the file last
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _ask(program: str, environment: dict[str, str], command: str) -> bool:
    """Whether the daemon took a command."""
    try:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        done = _run([program], environment, PATIENCE, input=f"{command}\n", **quiet)
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0


def _run(
    words: list[str], environment: dict[str, str], timeout: float, **streams: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program. Ctrl-C does not reach it: the daemon must outlive the runs."""
    streams = streams if "input" in streams else {"stdin": subprocess.DEVNULL, **streams}
    own = {**os.environ, **environment}
    return subprocess.run(
        words, text=True, env=own, start_new_session=True, timeout=timeout, **streams
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
