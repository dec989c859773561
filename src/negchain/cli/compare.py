"""`negchain compare`: several methods and seeds on one recipe, side by side.

Every run is a process of its own (`negchain train`): one that fails does not take the others with
it. Several on one GPU get it in turns, and evaluate or compile while others train.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer
from rich.console import Console

from negchain.cli.options import Import, Quiet, with_config_options
from negchain.files import open_plain, read_object, real_folder
from negchain.methods import trained
from negchain.printable import plain, show
from negchain.progress import Progress, result, say
from negchain.tasks import EXACT, LOSS_OF
from negchain.train.config import ConfigError, TrainConfig, flag, hints, method_named, same_run
from negchain.train.presets import choose
from negchain.train.resolve import for_method, resolve
from negchain.train.run_folder import is_run, last_metrics, load_run_config
from negchain.train.stopping import Interrupted, stopping
from negchain.train.team import require_one_process

if TYPE_CHECKING:
    from negchain.report.tuning import Tuned


OWN = ("method", "seed", "graph", "name")  # settings of one run that compare does not take


@with_config_options(leave_out=OWN)
def command(
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = ",".join(trained()),
    seeds: Annotated[int, typer.Option(help="Seeds 0 .. N-1 for each method.")] = 1,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="SETTING=VALUE,VALUE: values each method chooses from; several times for several."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: 4 on a GPU, 1 on a CPU.")] = 0,
    import_: Import = None,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Train several methods and seeds on one recipe and compare them on one page.

    For example:

        negchain compare --methods dcl,sogclr,emc2 --seeds 3 --data ./photos --out runs/duel

        negchain compare --methods dcl,hard --import own_method.py

        negchain compare --methods infonce,informed --tune beta=20,50 \\
            --tune lr=2e-5,5e-5 --data ./scifact --encoder ./all-MiniLM-L6-v2

    With `--tune` every method is run with each combination (seed 0) and keeps the one with the best
    validation score (without labels: the lowest exact loss); its other seeds run with that. The
    page compares these runs, and shows the scores of all values (tuning.json has them too).

    Takes all options of `negchain train`; an option only some methods know is given to those only.
    Runs that are finished in --out are kept, unfinished ones are resumed.
    """
    require_one_process(
        "compare", ", or train each method under torchrun and give the runs to negchain report"
    )
    chosen = [method_named("--methods", name.strip()) for name in methods.split(",")]
    if len(set(chosen)) < len(chosen):
        twice = max(chosen, key=chosen.count)
        raise ConfigError(f"--methods names {twice} twice, got {methods}; name every method once")
    if seeds < 1 or jobs < 0:
        raise ConfigError(f"--seeds must be at least 1 and --jobs at least 0, got {seeds}, {jobs}")
    out = TrainConfig(out=settings.pop("out")).out  # refuses an empty one
    folder = Path(out or f"runs/{time.strftime('%Y-%m-%d_%H%M%S')}_compare")
    combinations = grid(tune or [], settings)
    tried = _plans(chosen, seeds, combinations, settings, folder)

    import torch  # the settings are right: now it is worth its seconds

    from negchain.report import comparison_table, write_report
    from negchain.report.tuning import write_tuned

    always = [] if import_ is None else ["--import", str(import_.absolute())]  # of every run
    on_gpu = tried[chosen[0]][0][0].config.device != "cpu" and torch.cuda.is_available()
    if on_gpu:  # a run that cannot get it then fails; with "auto" it would train on the CPU
        always += ["--device", "cuda"]
    runs = Runs(jobs or (4 if on_gpu else 1), always, show=not quiet)
    try:
        with stopping(runs):
            tuned_first = [p for several in tried.values() if len(several) > 1 for p in several]
            chosen_once = sum(seeds - (len(several) > 1) for several in tried.values())
            runs.train([plans[0] for plans in tuned_first], later=chosen_once)
            best = {method: _best(method, several) for method, several in tried.items()}
            runs.train([plan for choice in best.values() for plan in choice.plans])
    except KeyboardInterrupt:
        raise Interrupted(
            f"early; the same command with --out {folder} continues the runs"
        ) from None
    every = [plan.path for choice in best.values() for plan in choice.plans]
    begun = [path for path in every if is_run(path) and last_metrics(path)]
    tuned = [
        _tuned(method, several, best[method], combinations[0])
        for method, several in tried.items()
        if len(several) > 1
    ]
    if tuned:
        write_tuned(tuned, folder / "tuning.json")
    elif begun:  # the page of an earlier --tune is replaced too
        (folder / "tuning.json").unlink(missing_ok=True)
    if begun:
        Console(highlight=False).print(comparison_table(begun))
        result(f"report: {write_report(begun, folder / 'report.html', tuned)}")
    for path, status in runs.failed.items():
        said = Path(f"{path}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        # what a killed run said last is of an earlier session
        why = [s for s in said if status > 0 and s.startswith(("refused:", "failed:"))]
        say(f"{[f'failed: exit status {status}', *why][-1]} ({path.name}, see {path}.log)")
    return 0 if not runs.failed else 2 if set(runs.failed.values()) == {2} else 1


# ---------------------------------------------------------------------- what is run


class Plan(NamedTuple):
    """A run: its folder, its settings, and those of them that are given to `negchain train`."""

    path: Path
    config: TrainConfig
    given: dict[str, Any]


def _plans(
    methods: Sequence[str],
    seeds: int,
    combinations: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    folder: Path,
) -> dict[str, list[list[Plan]]]:
    """For each method a list of plans, seed by seed, per combination that it chooses from."""
    tried: dict[str, list[list[Plan]]] = {method: [] for method in methods}
    for method, tuned in itertools.product(methods, combinations):
        known = for_method(method, tuned)
        given = for_method(method, {**settings, **known})
        plans = []
        for seed in range(seeds):
            config = resolve(None, {**given, "method": method, "seed": seed})
            path = folder / f"{method}{label(known)}-seed{seed}"
            if path.is_symlink():
                real_folder(path)  # refuses it
            if is_run(path) and (differences := same_run(load_run_config(path), config)):
                raise ConfigError(
                    f"{path} holds a run with other settings: {'; '.join(differences)}; choose "
                    "another --out"
                )
            plans.append(Plan(path, config, given))
        if plans not in tried[method]:  # a method may not know what is tuned
            tried[method].append(plans)
    return tried


# ---------------------------------------------------------------------- what is tuned

FIXED = (*OWN, "out", "task", "data", "preset", "holdout")  # what is run, and judged on
KINDS = {int: "an integer", float: "a number", str: "text"}
YES_NO = {"true": True, "false": False}


def grid(tune: Sequence[str], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values to try; one empty one where nothing is tuned.

    >>> grid(["beta=20,50", "lr=1e-4"], {})
    [{'beta': 20.0, 'lr': 0.0001}, {'beta': 50.0, 'lr': 0.0001}]
    """
    tried: dict[str, list[Any]] = {}
    for text in tune:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name in FIXED:
            raise ConfigError(
                f"{flag(name)} must be the same in all that --tune chooses from, got {show(text)}; "
                "tune another setting"
            )
        choose("the setting of --tune", name, [n for n in hints() if n not in FIXED])
        if not equals or given.get(name) is not None or name in tried:
            why = f"{flag(name)} is given twice" if equals else "no value is named"
            raise ConfigError(
                f"--tune takes SETTING=VALUE,VALUE and each setting once, got {show(text)}: {why}"
            )
        tried[name] = [_value(name, value.strip()) for value in values.split(",")]
    return [dict(zip(tried, chosen, strict=True)) for chosen in itertools.product(*tried.values())]


def _value(name: str, text: str) -> Any:
    hint: Any = hints()[name]
    if hint is bool:
        if text not in YES_NO:
            raise ConfigError(f"{flag(name)} must be true or false, got {show(text)}")
        return YES_NO[text]
    kind = next((k for k in (hint, *get_args(hint)) if k in KINDS), str)
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--tune {name} must be {KINDS[kind]}, got {show(text)}") from None


def label(tuned: dict[str, Any]) -> str:
    """A combination as part of the name of a run's folder.

    Another one has another name: "/" is written %2F, and % then %25.

    >>> label({"beta": 20.0, "lr": 5e-05}), label({"encoder": "models/a"})
    ('-beta=20-lr=5e-05', '-encoder=models%2Fa')
    """
    named = {k: plain(v).replace("%", "%25").replace("/", "%2F") for k, v in tuned.items()}
    return "".join(f"-{name}={text}" for name, text in named.items())


def ended(run: Path) -> bool:
    """Whether a run reached its end."""
    return (run / "summary.json").exists()


def score(run: Path) -> tuple[float, str]:
    """The score of a finished run by its task's judge, and of what; minus infinity of any other."""
    summary = read_object(run / "summary.json") if ended(run) else {}
    value, by = summary.get("score"), str(summary.get("score_by"))
    return float(value) if isinstance(value, int | float) else -math.inf, by


class Choice(NamedTuple):
    """The plans of the combination that is kept; `note` says why none could be called best."""

    plans: list[Plan]
    note: str = ""


def _best(method: str, several: list[list[Plan]]) -> Choice:
    """The combination whose first seed has the best score."""
    if len(several) == 1:
        return Choice(several[0])
    best = max(several, key=lambda plans: score(plans[0].path)[0])
    path = best[0].path
    value, by = score(path)
    differ = {name: {getattr(plans[0].config, name) for plans in several} for name in LOSS_OF}
    apart = [flag(name) for name, values in differ.items() if len(values) > 1]
    unjudged = "has no score to choose by"
    if value == -math.inf:
        choice = Choice(several[0], f"{unjudged}: the first of {len(several)} is taken")
    elif by == EXACT and apart:
        why = f"exact losses of another {' and '.join(apart)} are no better or worse"
        first = next(plans for plans in several if ended(plans[0].path))
        choice = Choice(first, f"{unjudged}: {why}: the first that ended is taken")
    else:
        choice = Choice(best)
    name = path.name.removeprefix(f"{method}-").removesuffix("-seed0")
    found = f"{name} is best of {len(several)} ({by} {_measured(value, by):.4f})"
    say(f" {choice.note or found}", method)
    return choice


def _measured(value: float, by: str) -> float:
    """The number that a score is made of: of losses the least is best."""
    return -value if by == EXACT else value


def _tuned(method: str, several: list[list[Plan]], choice: Choice, names: Iterable[str]) -> Tuned:
    """All combinations of a method with the scores of the runs that ended."""
    from negchain.report.tuning import Tried, Tuned

    tried, kinds = [], []
    for plans in several:
        found = {plan.config.seed: score(plan.path) for plan in plans}
        known = {seed: pair for seed, pair in found.items() if pair[0] > -math.inf}
        kinds += [by for _, by in known.values()]
        settings = {name: plans[0].given[name] for name in names if name in plans[0].given}
        scores = {seed: _measured(*pair) for seed, pair in known.items()}
        tried.append(Tried(settings, scores, plans is choice.plans))
    return Tuned(method, (kinds or [""])[0], choice.note, tried)


# ---------------------------------------------------------------------- processes


class Runs:
    """Runs of `negchain train`, `jobs` at a time."""

    def __init__(self, jobs: int, always: list[str], show: bool) -> None:
        """`always` are words that every run is given, `show` is whether to show progress."""
        self.jobs, self.always, self.show = jobs, always, show
        self.stop, self.done = False, 0
        self.failed: dict[Path, int] = {}  # with their exit status

    def train(self, plans: list[Plan], later: int = 0) -> None:
        """Train what has neither ended nor failed, before `later` others."""
        waiting = [p for p in plans if not ended(p.path) and p.path not in self.failed]
        running: dict[Path, subprocess.Popen[bytes]] = {}
        total = self.done + len(waiting) + later
        with Progress(self.show) as bar:
            bar.begin(total if waiting else 0, "runs done", done=self.done)
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs and not self.stop:
                        plan = waiting.pop(0)
                        running[plan.path] = _launch(plan, self.always)
                        bar.say(f"run {self.done + len(running)} of {total}: {plan.path.name}")
                    if self.stop:  # not raised by a signal: whatever was started is known by now
                        raise KeyboardInterrupt
                    for path, process in list(running.items()):
                        if process.poll() is not None:
                            del running[path]
                            self.done += 1
                            if process.returncode != 0:
                                self.failed[path] = process.returncode
                    shares = {path.name: progress_of(path) for path in running}
                    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
                    if len(shares) == 1:  # it is named in front
                        text = f"{sum(shares.values()):.0%} of it"
                    bar.at(self.done + sum(shares.values()), text)
                    time.sleep(0.1)
            finally:
                for process in running.values():  # each finishes its step, writes a checkpoint
                    process.terminate()
                for process in running.values():
                    process.wait()


def _launch(plan: Plan, always: list[str]) -> subprocess.Popen[bytes]:
    path, config, given = plan
    arguments = ["--quiet", "--out", str(path)]
    if is_run(path):
        arguments += ["--resume", "--device", given.get("device", config.device)]
    else:
        for name, value in {**given, "method": config.method, "seed": config.seed}.items():
            word = flag(name)
            if isinstance(value, bool):
                arguments.append(word if value else f"--no-{word[2:]}")
            else:
                arguments += [word, str(value)]
    path.parent.mkdir(parents=True, exist_ok=True)
    return launch([*arguments, *always], Path(f"{path}.log"))


def launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `negchain train`; its output is appended to `log`.

    It is a process group of its own, so that Ctrl-C does not reach it. `compare` sends it one
    SIGTERM instead: a second signal would end it without a checkpoint.
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
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
        )


def progress_of(run: Path) -> float:
    """The share of its steps that a run has done, by its folder."""
    try:
        config, step = read_object(run / "config.json"), last_metrics(run).get("step", 0)
        size, batch = config["data_info"]["num_samples"], config["batch_size"]
        total = config["steps"] or config["epochs"] * (size // batch)
        return min(1.0, float(step or 0) / float(total))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0  # it has only begun
