"""`negchain train` in processes of its own, and how fast several of them are on one GPU.

A row of the table is k processes training at the same time. They are given more steps than they
will do; once all have warmed up, each one's metrics say how many images it saw in how many seconds
of a window in which all were training; then they are stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from negchain.files import open_plain, read_object
from negchain.train.run_folder import last_metrics

ENDLESS = 10**7  # steps


def launch(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `negchain train`; its output is appended to `log`.

    It is a process group of its own: Ctrl-C reaches only who started it, who sends one SIGTERM, and
    not two signals, of which the second would mean not to wait for the checkpoint.
    """
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with open_plain(log, "ab") as file:
        return subprocess.Popen(
            # -P: what lies in the working directory is never imported
            [sys.executable, "-P", "-m", "negchain", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": path, **environment},
            process_group=0,
        )


def stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Stop runs: each finishes its step and writes a checkpoint."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def images_per_second(
    jobs: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    seconds: float = 8.0,
    warm_up: int = 100,
) -> list[float]:
    """Speed of each of `jobs` runs of `negchain train *arguments` that train at the same time.

    Args:
        jobs: number of processes; they differ in their seed.
        arguments: options of `negchain train`, without --out, --seed, --steps and --epochs.
        environment: what `shared_gpu` yielded.
        seconds: length of the window that is measured.
        warm_up: steps each run has done before the window begins.
    """
    common = f"--quiet --steps {ENDLESS} --eval-every 0 --checkpoint-every 0".split()
    with tempfile.TemporaryDirectory(prefix="negchain-") as folder:
        runs = [Path(folder) / f"run{number}" for number in range(jobs)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for seed, run in enumerate(runs):
                own = [*arguments, *common, "--seed", str(seed), "--out", str(run)]
                processes.append(launch(own, run.with_suffix(".log"), environment))
            while any(_latest(run, "step") < warm_up for run in runs):
                _watch(runs, processes, 0.1)
            before = [(_latest(run, "samples"), _latest(run, "seconds")) for run in runs]
            _watch(runs, processes, seconds)
            after = [(_latest(run, "samples"), _latest(run, "seconds")) for run in runs]
        finally:
            stop(processes)
    if any(b == a for b, a in zip(before, after, strict=True)):
        raise RuntimeError(f"a run wrote no metrics within {seconds:g} s; measure for longer")
    return [(a[0] - b[0]) / (a[1] - b[1]) for b, a in zip(before, after, strict=True)]


def progress_of(run: Path) -> float:
    """The share of its steps that a run has done, as far as its folder says."""
    try:
        config, step = read_object(run / "config.json"), last_metrics(run).get("step", 0)
        size, batch = config["data_info"]["num_samples"], config["batch_size"]
        total = config["steps"] or config["epochs"] * (size // batch)
        return min(1.0, float(step or 0) / float(total))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0  # it has only begun


def _latest(run: Path, name: str) -> float:
    """A number of the last line of metrics, 0 while there is none."""
    value = last_metrics(run).get(name, 0)
    assert isinstance(value, int | float)
    return value


def _watch(runs: list[Path], processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait, then see that all processes still run."""
    time.sleep(seconds)
    for run, process in zip(runs, processes, strict=True):
        if process.poll() is not None:
            said = run.with_suffix(".log").read_text(errors="replace").strip()
            raise RuntimeError(f"a run ended with status {process.returncode}: {said[-500:]}")
