"""From what the user gave to a `TrainConfig`, with contradictions refused.

`resolve` lays the sources of a value over each other,

    field default  <  data set's default  <  preset  <  what the user gave,

and remembers what the user gave, because only that can contradict: `--gamma 0.5` with EMC² is a
mistake, gamma's default in an EMC² run is not. This module, and the task it asks, are the only ones
that look at the machine (folders, GPU).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from negchain import methods, tasks
from negchain.printable import show
from negchain.train import presets
from negchain.train.config import (
    ConfigError,
    TrainConfig,
    flag,
    hints,
    method_named,
    same_run,
    setting_of,
)
from negchain.train.presets import choose

if TYPE_CHECKING:
    import torch

_STORED = ("cifar10", "stl10", "stl10-unlabeled")
# Options that need a value of another setting: option, that setting, the values, and why.
_BELONGS: tuple[tuple[str, str, tuple[str | None, ...], str], ...] = (
    ("momentum", "optimizer", ("sgd", "lars"), "Adam has its own"),
    ("download", "data", _STORED, "nothing else can be downloaded"),
    ("root", "data", _STORED, "other data is not stored there"),
)


def resolve(
    preset: str | None, overrides: Mapping[str, object], saved: TrainConfig | None = None
) -> TrainConfig:
    """Lay defaults, preset and the user's settings over each other, and refuse contradictions.

    An override of None counts as not given. 0 takes back what a preset or a data set asked for,
    where a setting allows that (`Setting.zero_is_none`). `temperature` is 1/beta. `saved`, the
    settings of another run, takes the place of defaults and preset. Folders become absolute.

    >>> resolve("stl10-b32", {"epochs": 20}).warmup_epochs  # a tenth of the run
    2.0
    """
    given = _given(overrides)
    if saved is not None:
        return _resolve_from(saved, given)
    name = given.pop("preset", preset)
    chosen = {} if name is None else presets.PRESETS[choose("--preset", name, presets.PRESETS)]
    data: Any = given.get("data", chosen.get("data", TrainConfig.data))
    if name is not None and "data" not in chosen and "data" not in given:
        raise ConfigError(f"--preset {name} needs --data PATH, the folder of its images")
    place = data if isinstance(data, str) else ""  # anything else is refused with the rest
    kind = tasks.named(given["task"]) if "task" in given else tasks.of_data(place)
    base = {**kind.defaults(place), **chosen, "preset": name, "task": kind.name}
    config = _fit(TrainConfig(**{**base, **given}), base, set(given))
    _refuse_contradictions(config, given)
    return _on_this_machine(config)


def _resolve_from(saved: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    if "preset" in given:
        raise ConfigError(
            "--preset and --config both hold settings to start from; give one of them"
        )
    if "epochs" in given and "steps" not in given:
        saved = replace(saved, steps=None)  # else the saved steps would decide
    config = replace(saved, **given)
    kept = ["lr", "warmup_epochs"] + ["proposal"] * _keeps_proposal(saved, config)
    config = _fit(config, {}, {*given, *kept})
    _refuse_contradictions(config, given)
    return _on_this_machine(config)


def continued(saved: TrainConfig, overrides: Mapping[str, object]) -> TrainConfig:
    """Settings of a resumed run: the saved ones, with those changed that may change.

    A longer --epochs or --steps extends the run.

    >>> continued(TrainConfig(epochs=60), {"log_every": 5, "epochs": 80}).epochs
    80
    """
    given = _given(overrides)
    config = _on_this_machine(replace(saved, **given))
    unit, other = ("epochs", "steps") if saved.steps is None else ("steps", "epochs")
    if given.get(other) not in (None, getattr(saved, other)):
        raise ConfigError(f"the length of this run is set by {flag(unit)}; extend it with that")
    now, before = getattr(config, unit), getattr(saved, unit)
    if now < before:
        raise ConfigError(
            f"a run can be extended and not shortened: {flag(unit)} was {before} and is now {now}; "
            "start a new run in another --out"
        )
    if differences := same_run(saved, replace(config, epochs=saved.epochs, steps=saved.steps)):
        raise ConfigError(
            f"a resumed run keeps its settings, but {'; '.join(differences)}: leave these "
            "options out, or start a new run in another --out"
        )
    _refuse_contradictions(config, given)
    return config


def for_method(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given and that a method knows.

    >>> for_method("dcl", {"burn_in": 0.5, "lr": 0.1, "seed": None})
    {'lr': 0.1}
    """
    kept = {name: value for name, value in settings.items() if value is not None}
    known = methods.named(method)
    for name in _method_options() - set(known.options):
        kept.pop(name, None)
    if "proposal" in known.options and kept.get("proposal") != "informed":
        kept.pop("refresh", None)
    if known.denominator is not None:
        kept.pop("denominator", None)
    return kept


def _method_options() -> set[str]:
    """Options that belong to some methods and not to others."""
    return {name for method in methods.METHODS.values() for name in method.options}


def _given(overrides: Mapping[str, object]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in overrides.items():
        choose("the setting", name, [*hints(), "temperature"])
        if value is not None and name != "temperature":
            zero = setting_of(name).zero_is_none and type(value) is int and value == 0
            given[name] = None if zero else value
    temperature = overrides.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float) or not 0.001 <= temperature < math.inf:
            raise ConfigError(
                f"--temperature must be a number of at least 0.001, got {show(temperature)}"
            )
        if "beta" in given:
            raise ConfigError(
                "--temperature and --beta are one setting (beta = 1/temperature); give one of them"
            )
        given["beta"] = 1 / temperature
    if "method" in given:
        given["method"] = method_named("--method", given["method"])
    if isinstance(given.get("pretrained"), str):
        given["pretrained"] = _weights_path(given["pretrained"])
    return given


def _fit(config: TrainConfig, base: dict[str, Any], given: set[str]) -> TrainConfig:
    """Adapt defaults that depend on what was given: rate, warm-up, denominator, proposals.

    A preset's proposals are those of fresh views.
    """
    method, changed = methods.named(config.method), dict[str, Any]()
    if "lr" not in given and "lr" in base and base["preset"] is None:
        changed["lr"] = float(f"{config.lr * method.lr_share:.3g}")
    if "lr" not in given and config.optimizer != base.get("optimizer", TrainConfig.optimizer):
        growth = math.sqrt(config.batch_size) if config.optimizer == "lars" else 1.0
        changed["lr"] = round(presets.OPTIMIZER_LR[config.optimizer] * growth, 6)
    if "warmup_epochs" not in given:
        changed["warmup_epochs"] = min(config.warmup_epochs, config.epochs / 10)
    if "denominator" not in given and method.denominator is not None:
        changed["denominator"] = method.denominator
    if "proposal" not in given and (config.augmentations or "proposal" not in base):
        fresh = method.proposal if _has_fresh_views(config) else "batch"
        changed["proposal"] = method.stored_proposal if config.augmentations else fresh
    return replace(config, **changed)


def _keeps_proposal(saved: TrainConfig, config: TrainConfig) -> bool:
    """Whether a saved `proposal` was a chain's and can still be.

    Views are fresh, or stored, as then; chains of stored views differ in what they can be offered.
    """
    both = saved, config
    chains = all("proposal" in methods.named(c.method).options for c in both)
    fresh, stored = (all(bool(c.augmentations) == s for c in both) for s in (False, True))
    same = fresh or (stored and saved.method == config.method)
    return chains and (same or saved.proposal == "informed")


def _has_fresh_views(config: TrainConfig) -> bool:
    """Whether an item comes in two views that are made anew, none of them stored."""
    return tasks.named(config.task).two_views and not config.augmentations


def _refuse_contradictions(config: TrainConfig, given: Mapping[str, object]) -> None:
    for name, decider, values, reason in _BELONGS:
        actual = getattr(config, decider)
        if name in given and given[name] is not False and actual not in values:
            owners = " or ".join(value or "0" for value in values)
            _refuse(name, f"{flag(decider)} {owners}", decider, actual, reason)
    task, method = tasks.named(config.task), methods.named(config.method)
    for name in method.options:  # of a method of the user's own
        choose(f"an option of --method {config.method}", name, hints())
    for name in sorted((tasks.options() - set(task.options)) & given.keys()):
        kinds = [kind for kind in tasks.TASKS.values() if name in kind.options]
        having = " or ".join(kind.name for kind in kinds)
        change = "change --task"
        if "task" not in given:  # it was told from the data, which may be misspelt
            task.check(config)
            needed = ", or ".join(kind.needs for kind in kinds)
            change = f"give --data what --task {having} needs: {needed}"
        _refuse(name, f"--task {having}", "task", task.name, "the other tasks have none", change)
    for name in sorted((_method_options() - set(method.options)) & given.keys()):
        offered = [n for n in methods.trained() if name in methods.METHODS[n].options]
        owners = f"--method {' or '.join(offered)}"
        _refuse(name, owners, "method", config.method, "the other methods have none")
    if "refresh" in given and "proposal" in method.options and config.proposal != "informed":
        owners = "--proposal informed"
        _refuse("refresh", owners, "proposal", config.proposal, "only this keeps a table")
    if config.proposal == "informed" and config.augmentations:
        raise ConfigError(
            "--proposal informed keeps one embedding of an image, and --augmentations stores "
            "several views of each; leave out one of them"
        )
    stored = config.augmentations and method.stored_proposal == "both"
    if config.proposal == "both" and not (stored or _has_fresh_views(config)):
        why = "texts and captions have no two"
        if config.augmentations:
            why = (
                f"with --augmentations chains of --method {config.method} would leave their target"
            )
        raise ConfigError(
            f"--proposal both offers both views of an image, and {why}; leave out --proposal"
        )
    size, number = config.batch_size, _num_proposals(config)
    if "burn_in" in method.options and config.burn_in >= number:
        raise ConfigError(
            f"--burn-in must be less than the proposals of a visit, got {config.burn_in:g}, and "
            f"--batch-size {size} with --proposal {config.proposal} has {number}; lower --burn-in "
            "(below 1 it is a share), raise --batch-size, or choose another --proposal"
        )
    if config.denominator != (method.denominator or config.denominator):
        others = [n for n, m in methods.METHODS.items() if m.denominator == config.denominator]
        raise ConfigError(
            f"--method {config.method} has --denominator {method.denominator} built in and "
            f"--denominator {config.denominator} was given; choose --method "
            f"{' or '.join(others)} for that"
        )
    if "epochs" in given and "steps" in given:
        raise ConfigError("--epochs and --steps both set the length of the run; give one of them")
    if "warmup_epochs" in given and config.steps is None and config.warmup_epochs > config.epochs:
        raise ConfigError(
            f"--warmup-epochs {config.warmup_epochs:g} is longer than --epochs {config.epochs}; "
            "lower --warmup-epochs or raise --epochs"
        )


def _num_proposals(config: TrainConfig) -> int:
    """R, what the batch and draws beside it offer a chain; see `losses.settings.num_proposals`."""
    size, drawn = config.batch_size, 0
    if "draws" in tasks.named(config.task).options:
        drawn = size * max(config.draws - 1, 0)  # one of a query's is its carried document
    elif config.proposal == "informed":
        drawn = size
    return (size - 1) * (2 if config.proposal == "both" else 1) + drawn


def _refuse(
    name: str, owners: str, decider: str, actual: str, reason: str, change: str | None = None
) -> None:
    raise ConfigError(
        f"{flag(name)} belongs to {owners} ({reason}) and {flag(decider)} is "
        f"{show(actual)}; leave out {flag(name)} or {change or f'change {flag(decider)}'}"
    )


def _on_this_machine(config: TrainConfig) -> TrainConfig:
    """Refuse what is not there; return `config` with absolute folders."""
    config = replace(config, root=os.path.abspath(config.root))
    config = tasks.named(config.task).check(config)
    if config.device == "cuda":
        choose_device(config.device)
    return config


def choose_device(name: str) -> torch.device:
    """The device of a name: "auto" takes a GPU if there is one, "cuda" refuses to do without."""
    import torch  # takes seconds

    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("--device cuda needs a GPU and none is visible; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and there else "cpu")


def _weights_path(start: str) -> str:
    """`--pretrained` as an absolute path, unless it is no path."""
    if start == "timm":
        return start
    if not os.path.exists(start):
        raise ConfigError(
            f"--pretrained must be timm, a run folder or a file of weights, and there is no "
            f"{show(start)}; check the path"
        )
    return os.path.abspath(start)
