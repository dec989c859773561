"""`negchain train` in processes of its own: started, stopped, watched by what they write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from negchain.files import open_plain, read_object
from negchain.train.run_folder import last_metrics


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


def progress_of(run: Path) -> float:
    """The share of its steps that a run has done, as far as its folder says."""
    try:
        config, step = read_object(run / "config.json"), last_metrics(run).get("step", 0)
        size, batch = config["data_info"]["num_samples"], config["batch_size"]
        total = config["steps"] or config["epochs"] * (size // batch)
        return min(1.0, float(step or 0) / float(total))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0  # it has only begun
