"""`negchain train`: from images or texts to an encoder, its quality and a report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from negchain import tasks
from negchain.cli.options import Import, Quiet, with_config_options
from negchain.files import FileRefused, read_object
from negchain.printable import counted
from negchain.progress import Progress, result, say
from negchain.train.config import ConfigError, TrainConfig, from_saved, same_run
from negchain.train.presets import PRESET_HELP
from negchain.train.resolve import continued, resolve
from negchain.train.run_folder import is_run, load_run_config, own_settings
from negchain.train.stopping import Interrupted
from negchain.train.team import PATIENCE, Silent, here, joined

if TYPE_CHECKING:  # what brings torch is imported by the functions below, so that --help is quick
    from negchain.train.trainer import Run

HELP = """Train an encoder and write its run folder: config, metrics, checkpoints, report.

With no options it trains EMC² on scikit-learn's digits, on a CPU in about a minute.

    negchain train --data ./photos --method emc2 --epochs 100 --out runs/photos
    negchain train --out runs/photos --resume                  # go on; --epochs 200 extends
    negchain train --config runs/photos --seed 1 --out runs/b  # the same settings again
    negchain train --data ./scifact --encoder ./all-MiniLM-L6-v2  # texts: a retriever

`--data` is a folder with `train/`, `test/` and optionally `unlabeled/` in class sub-folders, any
folder of images, or texts in BEIR's layout (docs/retrieval.md). Presets hold the paper's
settings, and the authors' code's where it states none; every value can be overridden:

""" + "\n".join(f"* `{name}`: {text}" for name, text in PRESET_HELP.items())  # fmt: skip


@with_config_options()
def command(
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out exactly.")
    ] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Start from the settings of another run: its folder, or its config.json.",
        ),
    ] = None,
    import_: Import = None,
    quiet: Quiet = False,
    rank_timeout: Annotated[
        float,
        typer.Option(
            help="Under torchrun: seconds after which a rank that does not answer is given up."
        ),
    ] = PATIENCE,
    **settings: Any,
) -> None:
    """See `HELP`."""
    if resume and config_file is not None:
        raise ConfigError("--resume reads the config of the run in --out; leave out --config")
    if not rank_timeout > 0:
        raise ConfigError(f"--rank-timeout must be above 0, got {rank_timeout:g}")
    try:
        with joined(rank_timeout):
            _train(resume, config_file, not quiet, settings)
    except Silent:
        raise typer.Exit(1) from None


def _train(resume: bool, config_file: Path | None, show: bool, settings: dict[str, Any]) -> None:
    try:
        run = _resumed(settings, show) if resume else _started(settings, config_file, show)
    except KeyboardInterrupt:
        raise Interrupted("before the first step; give the same command again") from None
    show = show and run.team.leads

    with run.folder:
        if run.team.leads:
            _announce(run)
        try:
            summary = run.train(Progress(show))
        except (Interrupted, KeyboardInterrupt) as error:
            when = str(error) or "at once, without a checkpoint"
            where = f"continue with: negchain train --out {run.folder.path} --resume"
            raise Interrupted(f"{when}; {where}") from None
        except Exception as error:
            raise RuntimeError(str(error)) from error  # no wrong setting, whatever its type
    if run.team.leads:
        _show(run, summary)


def _started(settings: dict[str, Any], file: Path | None, show: bool) -> Run:
    saved = None if file is None else _read_config(file, settings)
    config = resolve(None, settings, saved)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and config.out is None:
        raise ConfigError(
            "torchrun --max-restarts needs --out, the folder in which a restarted run goes on"
        )
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if here().on_rank_0(lambda: restarted and _same_as_there(config)):
        return _resumed(settings, show)

    _reading(config, show)
    from negchain.train.start import start

    return start(config, show)


def _reading(config: TrainConfig, show: bool) -> None:
    """The first word to who watches: torch and the models take seconds to import."""
    if show and here().leads and sys.stderr.isatty():
        say(f"reading {config.data}")


def _same_as_there(config: TrainConfig) -> bool:
    """Whether --out holds the run these settings start."""
    if config.out is None or not is_run(config.out):
        return False
    return not same_run(load_run_config(Path(config.out)), own_settings(config))


def _read_config(file: Path, settings: dict[str, Any]) -> TrainConfig:
    """The settings of another run, without where it wrote to and what it downloaded."""
    file = file / "config.json" if file.is_dir() else file
    try:
        saved = from_saved(read_object(file))
    except FileRefused as error:  # it begins with the path
        raise ConfigError(f"--config {error}") from None
    except ConfigError as error:
        raise ConfigError(f"--config {file}: {error}") from None
    if saved.pretrained is not None and settings.get("pretrained") is None:
        raise ConfigError(
            f"{file} starts from --pretrained {saved.pretrained}, which a file alone may not fetch "
            "or read; give --pretrained as well"
        )
    return own_settings(saved)


def _resumed(settings: dict[str, Any], show: bool) -> Run:
    if settings.get("out") is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    path = Path(settings["out"])
    config = continued(load_run_config(path), settings)
    _reading(config, show)

    from negchain.train.start import resume

    return resume(path, config, show, settings.get("pretrained") is not None)


def _announce(run: Run) -> None:
    config, task = run.config, run.task
    count, noun = task.num_samples, tasks.named(config.task).noun
    say(
        f" on {config.data}: {count:,} {noun}, batch {config.batch_size}, "
        f"{counted(run.total_steps, 'step', 'steps')}, {config.encoder}, {run.device}",
        config.method,
    )
    say(f"run folder: {run.folder.path}")
    if left := count % config.batch_size:
        others = "a different one" if left == 1 else "different ones"
        say(
            f"note: every epoch leaves out {left:,} of {count:,} {noun}, {others} each time: "
            "the last batch would not be full"
        )
    for note in run.notes:
        say(f"note: {note}")
    for name, reason in task.skipped[:5]:
        say(f"left out: {name} ({reason})")
    if len(task.skipped) > 5:
        say(f"left out: {len(task.skipped) - 5} more, named in config.json")


def _show(run: Run, summary: dict[str, Any]) -> None:
    from negchain.report import load_run, summary_table
    from negchain.report.advice import against_baselines, best_by

    written = load_run(run.folder.path)
    Console(highlight=False).print(summary_table(written))
    for sentence in against_baselines(written):
        result(sentence)
    if summary["step"] < run.total_steps:
        evaluations = counted(run.config.patience or 0, "evaluation", "evaluations")
        waited = f"{evaluations} found nothing better (--patience)"
        result(f"ended after step {summary['step']:,} of {run.total_steps:,}: {waited}")
    if (best := summary.get("best_step")) == 0:
        result("kept: the encoder as it was, since no evaluation found a better one")
    elif best is not None:
        result(f"kept: the encoder of step {best:,}, the best by {best_by(written)}")
    if run.task.unjudged is not None:
        result(f"nothing was probed: {run.task.unjudged}")
    result(f"report: {run.folder.path / 'report.html'}")
