"""The register of tasks: the one place where a task has a name.

A task is what the trainer is given: data with stable positions, one or two towers, an evaluation,
and what the report shows. `negchain.tasks.task` has the interface. The command line, the trainer,
checkpoints, `compare` and the report read this register and know no task by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from negchain.train import presets

if TYPE_CHECKING:  # the command line reads names and options, and torch takes seconds
    from torch import nn

    from negchain.report.measures import Shown
    from negchain.tasks.task import Task
    from negchain.train.config import TrainConfig


@dataclass(frozen=True)
class Kind:
    """A task as the tool knows it before any data is read.

    Attributes:
        name: on the command line and in run folders.
        noun: what its samples are, in plural.
        load: (settings, whether to show progress, the `encoder_config` that the data has to suit
            or None) to the task with its data.
        rebuild: an encoder from its `encoder_config`, to load a checkpoint's weights into.
        shown: what the report shows of its runs.
        claims: whether what stands after --data is this task's.
        check: settings to settings with absolute paths; refuses what this machine has not got.
        defaults: settings that suit what stands after --data.
        options: settings that belong to this task and others like it; the rest refuse them.
        fits: refuses an `encoder_config` whose weights cannot be in a file of so many bytes, before
            anything is built: whoever wrote the file chose its names.
    """

    name: str
    noun: str
    load: Callable[[TrainConfig, bool, Mapping[str, Any] | None], Task]
    rebuild: Callable[[Mapping[str, Any]], nn.Module]
    shown: Callable[[], Shown]
    claims: Callable[[str], bool]
    check: Callable[[TrainConfig], TrainConfig]
    defaults: Callable[[str], Mapping[str, presets.Value]] = lambda data: {}
    options: tuple[str, ...] = ()
    fits: Callable[[Mapping[str, Any], int], None] = lambda described, num_bytes: None


TASKS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a task known under its name; the last one of a name counts."""
    TASKS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """The tasks there are.

    >>> names()[0]
    'images'
    """
    return tuple(TASKS)


def named(name: str) -> Kind:
    """The task of a name.

    >>> named("images").noun
    'images'
    """
    return TASKS[presets.choose("--task", name, TASKS)]


def of_data(data: str) -> Kind:
    """The task of what stands after --data: the last registered that claims it.

    >>> of_data("digits").name
    'images'
    """
    return next(kind for kind in reversed(TASKS.values()) if kind.claims(data))


def load(
    config: TrainConfig, progress: bool = False, encoder_config: Mapping[str, Any] | None = None
) -> Task:
    """The task a run's settings name, with its data; see `Kind.load`."""
    return named(config.task).load(config, progress, encoder_config)


def options() -> set[str]:
    """Settings that belong to some tasks and not to others."""
    return {name for kind in TASKS.values() for name in kind.options}


def _load_images(
    config: TrainConfig, progress: bool, encoder_config: Mapping[str, Any] | None
) -> Task:
    from negchain.tasks.images import ImageTask

    return ImageTask.load(config, progress, encoder_config)


def _rebuild_image_encoder(described: Mapping[str, Any]) -> nn.Module:
    from negchain.encoders import rebuild_encoder

    return rebuild_encoder(dict(described))


def _refuse_larger(described: Mapping[str, Any], num_bytes: int) -> None:
    from negchain.encoders import refuse_larger

    refuse_larger(described, num_bytes)


def _shown_of_images() -> Shown:
    from negchain.report.images import SHOWN

    return SHOWN


def _check_images(config: TrainConfig) -> TrainConfig:
    from negchain.tasks.image_settings import check

    return check(config)


register(
    Kind(
        "images",
        "images",
        _load_images,
        _rebuild_image_encoder,
        _shown_of_images,
        claims=lambda data: True,  # and says what is wrong with it
        check=_check_images,
        defaults=lambda data: presets.DATA_DEFAULTS.get(data, presets.FOLDER_DEFAULTS),
        options=(
            "recipe", "image_size", "augmentations", "resident_gb", "stem", "norm", "projector",
            "embedding_dim", "probe_samples",
        ),
        fits=_refuse_larger,
    )
)  # fmt: skip


def _load_texts(
    config: TrainConfig, progress: bool, encoder_config: Mapping[str, Any] | None
) -> Task:
    from negchain.tasks.retrieval import RetrievalTask

    return RetrievalTask.load(config, progress, encoder_config)


def _rebuild_text_encoder(described: Mapping[str, Any]) -> nn.Module:
    from negchain.tasks.text_encoder import TextEncoder

    return TextEncoder(described["folder"], described["max_length"])


def _shown_of_texts() -> Shown:
    from negchain.report.retrieval import SHOWN

    return SHOWN


def _is_beir(data: str) -> bool:
    from negchain.tasks.beir import claims

    return claims(data)


def _check_texts(config: TrainConfig) -> TrainConfig:
    from negchain.tasks.retrieval import check

    return check(config)


_TEXT_DEFAULTS: dict[str, presets.Value] = {
    "encoder": "none",  # and `check` says that one must be named
    "method": "informed",
    "denominator": "all",
    "batch_size": 16,
    "beta": 50.0,
    "optimizer": "adamw",
    "lr": 5e-5,
    "weight_decay": 0.01,
    "epochs": 6,
    "eval_every": 1,
    "patience": 3,
}

register(
    Kind(
        "retrieval",
        "queries",
        _load_texts,
        _rebuild_text_encoder,
        _shown_of_texts,
        claims=_is_beir,
        check=_check_texts,
        defaults=lambda data: _TEXT_DEFAULTS,
        options=("max_length", "draws"),
    )
)


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is called."""
    return lambda *given: getattr(importlib.import_module(module), name)(*given)


register(
    Kind(
        "image-text",
        "images",
        _later("negchain.tasks.image_text", "load"),
        _later("negchain.tasks.image_text_towers", "rebuild"),
        _later("negchain.report.image_text", "shown"),
        claims=lambda data: bool(_later("negchain.tasks.captions", "find_tables")(data)),
        check=_later("negchain.tasks.image_text_settings", "check"),
        defaults=lambda data: presets.CAPTION_DEFAULTS,
        options=(
            "text_encoder",
            "recipe",
            "image_size",
            "resident_gb",
            "stem",
            "norm",
            "projector",
            "embedding_dim",
            "probe_samples",
        ),
    )
)
