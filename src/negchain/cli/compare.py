"""`negchain compare`: several methods and seeds on one recipe, side by side.

Every run is a process of its own (`negchain train`): at small batches one training leaves most of a
GPU idle, and a run that fails does not take the others with it. Where NVIDIA's MPS is available
their kernels run side by side, else they get the GPU in turns (see `negchain.train.sharing`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from negchain.cli.options import option, with_config_options
from negchain.cli.train import Stopped
from negchain.report import comparison_table, write_report
from negchain.train.concurrent import launch, stop
from negchain.train.config import _BELONGS, ConfigError, TrainConfig, resolve, same_run
from negchain.train.export import load_run_config
from negchain.train.presets import choose
from negchain.train.run_folder import is_run, read_metrics
from negchain.train.sharing import Mode, interruptible, shared_gpu

Plan = tuple[Path, TrainConfig, dict[str, Any]]

METHODS = ("infonce", "dcl", "sogclr", "negcache", "emc2", "isir")

HELP = """Train several methods and seeds on one recipe and compare them on one page.

    negchain compare --methods dcl,sogclr,emc2 --seeds 3 --data ./photos --out runs/duel

Takes all options of `negchain train`; an option only some methods know is given to those only.
Runs that are finished in --out are kept, unfinished ones are resumed. Runs on one GPU share it
through NVIDIA's MPS where that works (`--sharing auto`), else they take turns.
"""


@with_config_options(
    [
        option("methods", str, ",".join(METHODS), "--methods", help="Comma-separated methods."),
        option("seeds", int, 1, "--seeds", help="Seeds 0 .. N-1 for each method."),
        option("jobs", int, 0, "--jobs", help="Runs at a time; 0: 4 on a GPU, 1 on a CPU."),
        option("sharing", str, "auto", "--sharing", help="auto|mps|off: share a GPU by MPS."),
    ],
    leave_out=("method", "seed", "graph"),
)
def command(methods: str, seeds: int, jobs: int, sharing: str, **settings: Any) -> int:
    """See `HELP`."""
    chosen = [choose("--methods", name.strip(), METHODS) for name in methods.split(",")]
    if seeds < 1 or jobs < 0:
        raise ConfigError(f"--seeds must be at least 1 and --jobs at least 0, got {seeds}, {jobs}")
    folder = Path(settings.pop("out") or f"runs/{time.strftime('%Y-%m-%d_%H%M%S')}_compare")
    plans: list[Plan] = []
    for method in chosen:
        given = _for_method(method, settings)
        for seed in range(seeds):
            config = resolve(given.get("preset"), {**given, "method": method, "seed": seed})
            path = folder / f"{method}-seed{seed}"
            _refuse_another(path, config)
            plans.append((path, config, given))
    on_gpu = plans[0][1].device != "cpu" and torch.cuda.is_available()
    if on_gpu:  # a run that cannot get it then fails; with "auto" it would train on the CPU
        plans = [(path, config, {**given, "device": "cuda"}) for path, config, given in plans]
    jobs = jobs or (4 if on_gpu else 1)
    waiting = [p for p in plans if not (p[0] / "summary.json").exists()]
    try:
        with interruptible(), _sharing(sharing, on_gpu, jobs, len(waiting)) as environment:
            failed = _run_all(waiting, jobs, environment)
    except KeyboardInterrupt:
        raise Stopped(f"the same command with --out {folder} continues the runs") from None
    runs = [path for path, _, _ in plans if is_run(path) and read_metrics(path)]
    if runs:
        Console(highlight=False).print(comparison_table(runs))
        print(f"report: {write_report(runs, folder / 'report.html')}")
    for path in failed:
        print(f"failed: {path} (see {path}.log)", file=sys.stderr)
    return 1 if failed else 0


def _sharing(
    name: str, on_gpu: bool, jobs: int, runs: int
) -> AbstractContextManager[dict[str, str]]:
    """How the runs share the GPU: the environment they need, while it lasts."""
    mode = cast(Mode, choose("--sharing", name, get_args(Mode)))
    if mode == "mps" and not on_gpu:
        raise ConfigError("--sharing mps needs a GPU and the runs are on the CPU; leave it out")
    if mode == "mps" and jobs < 2:
        raise ConfigError(f"--sharing mps needs --jobs of at least 2, got {jobs}; leave it out")
    if not on_gpu or min(jobs, runs) < 2:
        return nullcontext({})
    return shared_gpu(min(jobs, runs), mode, say=lambda text: print(text, file=sys.stderr))


def _refuse_another(path: Path, config: TrainConfig) -> None:
    """Refuse to take a run of other settings for the one asked for."""
    if is_run(path) and (differences := same_run(load_run_config(path), config)):
        raise ConfigError(
            f"{path} holds a run with other settings: {'; '.join(differences)}; choose another "
            "--out"
        )


def _for_method(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The options a method knows."""
    kept = dict(settings)
    for name, decider, values, _ in _BELONGS:
        if decider == "method" and method not in values:
            kept.pop(name, None)
    if method != "negcache" and kept.get("proposal") != "cache":
        kept.pop("refresh", None)
    if method in ("infonce", "dcl"):
        kept.pop("denominator", None)
    return {name: value for name, value in kept.items() if value is not None}


def _run_all(waiting: list[Plan], jobs: int, environment: dict[str, str]) -> list[Path]:
    """Run the plans, `jobs` at a time; returns those that failed."""
    running: dict[Path, subprocess.Popen[bytes]] = {}
    failed: list[Path] = []
    total = len(waiting)
    bar = Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)
    )
    try:
        with bar:
            task = bar.add_task(f"{total} runs, {jobs} at a time", total=total)
            while waiting or running:
                while waiting and len(running) < jobs:
                    path, config, given = waiting.pop(0)
                    running[path] = _launch(path, config, given, environment)
                for path, process in list(running.items()):
                    if process.poll() is not None:
                        del running[path]
                        bar.advance(task)
                        if process.returncode != 0:
                            failed.append(path)
                time.sleep(0.1)
    finally:
        stop(running.values())  # each can be resumed
    return failed


def _launch(
    path: Path, config: TrainConfig, given: dict[str, Any], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    arguments = ["--quiet", "--out", str(path)]
    if is_run(path):
        arguments += ["--resume", "--device", given.get("device", config.device)]
    else:
        for name, value in {**given, "method": config.method, "seed": config.seed}.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(flag if value else f"--no-{flag[2:]}")
            else:
                arguments += [flag, str(value)]
    path.parent.mkdir(parents=True, exist_ok=True)
    return launch(arguments, Path(f"{path}.log"), environment)
