"""`negchain train`: from images to an encoder, its quality and a report."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from negchain.cli.options import option, with_config_options
from negchain.data import DataBundle
from negchain.report import summary_table
from negchain.train import trainer
from negchain.train.config import ConfigError, TrainConfig, resolve, resume
from negchain.train.export import load_run_config
from negchain.train.presets import PRESET_HELP
from negchain.train.progress import Progress
from negchain.train.run_folder import RunFolder, default_out, is_run, versions

HELP = """Train an encoder and write its run folder: config, metrics, checkpoints, report.

With no options it trains EMC² on scikit-learn's digits, on a CPU in about a minute.

    negchain train --data ./photos --method emc2 --epochs 100 --out runs/photos
    negchain train --out runs/photos --resume

`--data` is a folder with `train/`, `test/` and optionally `unlabeled/` in class sub-folders, or any
folder of images. Presets hold the paper's settings; every value can be overridden:

""" + "\n".join(f"* `{name}`: {text}" for name, text in PRESET_HELP.items())  # fmt: skip

PACKAGES = ("negchain", "torch", "torchvision", "timm", "triton", "numpy", "scikit-learn")


class Stopped(Exception):
    """The run was interrupted and can be continued."""


class Failed(Exception):
    """The run began and could not go on."""


@with_config_options(
    [
        option("resume_", bool, False, "--resume", help="Continue the run in --out exactly."),
        option("quiet", bool, False, "--quiet", help="No progress bar."),
    ]
)
def command(resume_: bool, quiet: bool, **settings: Any) -> int:
    """See `HELP`."""
    console = Console(stderr=True, highlight=False)
    show = not quiet
    if resume_:
        run, notes = _resumed(settings, show)
    else:
        run, notes = _started(settings, show)
    with run.folder:
        _announce(console, run, notes)
        try:
            summary = run.train(Progress(show))
        except trainer.Interrupted as error:
            where = f"continue with: negchain train --out {run.folder.path} --resume"
            raise Stopped(f"{error}; {where}") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            raise Failed(f"{error}") from error
    _show(run, summary)
    return 0


def _started(settings: dict[str, Any], show: bool) -> tuple[trainer.Run, list[str]]:
    config = resolve(settings.pop("preset", None), settings)
    if config.out is not None and is_run(config.out):
        raise ConfigError(
            f"--out {config.out} already holds a run; add --resume to continue it, or name "
            "another folder"
        )
    data = trainer.load_images(config, show)
    text = json.dumps(record(config, data), indent=2) + "\n"
    run = trainer.prepare(config, data, lambda: RunFolder.create(folder_for(config), config=text))
    return run, list(data.notes)


def _resumed(settings: dict[str, Any], show: bool) -> tuple[trainer.Run, list[str]]:
    if settings.get("out") is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    path = Path(settings["out"])
    config = resume(load_run_config(path), settings)
    data = trainer.load_images(config, show)
    run = trainer.prepare(config, data, lambda: RunFolder.resume(path))
    try:
        return run, [*data.notes, *run.restore()]
    except BaseException:
        run.folder.close()
        raise


def folder_for(config: TrainConfig) -> Path:
    """Where the run goes: where the user said, or a new folder."""
    if config.out is not None:
        return Path(config.out)
    return default_out(method=config.method, data=config.data, seed=config.seed)


def record(config: TrainConfig, data: DataBundle) -> dict[str, Any]:
    """config.json: what was asked for, and what it ran on."""
    hardware = f"{platform.machine()} CPU"
    if trainer.choose_device(config).type == "cuda":
        hardware = torch.cuda.get_device_name()
    sizes = {
        "pretrain": len(data.pretrain),
        "train": 0 if data.train is None else len(data.train),
        "test": 0 if data.test is None else len(data.test),
        "held_out": data.held_out,
        "unprobed": None if data.labelled else data.unprobed,
        "classes": list(data.classes),
        "skipped": [list(pair) for pair in data.skipped],
        "fingerprint": data.fingerprint,
        "notes": list(data.notes),
    }
    return {
        **asdict(config),
        "versions": versions(PACKAGES),
        "hardware": hardware,
        "commit": _commit(),
        "data_info": sizes,
    }


def _commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def _announce(console: Console, run: trainer.Run, notes: list[str]) -> None:
    config = run.config
    console.print(
        f"[bold]{config.method}[/] on {config.data}: {len(run.data.pretrain):,} images, "
        f"batch {config.batch_size}, {run.total_steps:,} steps, {config.encoder}, {run.device}"
    )
    console.print(f"run folder: {run.folder.path}")
    for note in notes:
        console.print(f"note: {note}", markup=False)
    for name, reason in run.data.skipped[:5]:
        console.print(f"left out: {name} ({reason})", markup=False)
    if len(run.data.skipped) > 5:
        console.print(f"left out: {len(run.data.skipped) - 5} more files, named in config.json")


def _show(run: trainer.Run, summary: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(summary_table(summary))
    if not run.data.labelled:
        console.print(f"nothing was probed: {run.data.unprobed}", markup=False)
    print(f"report: {run.folder.path / 'report.html'}")
    sys.stdout.flush()
