"""The register of tasks: the one place where a task has a name.

A task is what the trainer is given: data with stable positions, one or two towers, an evaluation,
and what the report shows. `task.py` has the interface. The command line, the trainer, checkpoints,
`compare` and the report read this register and know no task by name.

    images       images, image_judge
    retrieval    retrieval, retrieval_judge, beir (the data), text (the encoder)
    image-text   image_text, image_text_judge, image_text_towers, captions (the data), text
    all          checks: what a machine must have
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from negchain.train import presets

if TYPE_CHECKING:  # the command line reads names and options, and torch takes seconds
    from torch import nn

    from negchain.report.measures import Shown
    from negchain.tasks.task import Task
    from negchain.train.config import TrainConfig

EXACT = "global_loss"
"""The name of the exact loss, which decides where a task has no validation data."""
LOSS_OF = ("beta", "recipe", "image_size", "subset", "probe_samples")
"""The settings that say what it is of: where they differ, it compares nothing."""
COLLAPSED = 0.02
"""Variance of unit embeddings below this: all within a few degrees of one direction."""


@dataclass(frozen=True)
class Kind:
    """A task as the tool knows it before any data is read.

    Attributes:
        name: on the command line and in run folders.
        noun: what its samples are, in plural.
        load: the task with its data, from settings, whether to show progress, and the
            `encoder_config` that the data has to suit, or None.
        rebuild: an encoder from its `encoder_config`, as it was before its first step (unless
            --pretrained brought weights), to load a checkpoint's into.
        shown: what the report shows of its runs.
        claims: whether the value of --data belongs to this task.
        check: returns settings with absolute paths; refuses what this machine does not have.
        defaults: settings that suit the value of --data.
        needs: what --data must be for this task, in words.
        options: settings of this task that not all tasks have; tasks without them refuse them.
        two_views: whether an item comes in two views that are made anew in every step: chains are
            then offered both of other items (`Method.proposal`).
        fits: refuses an `encoder_config` whose weights cannot be in a file of so many bytes, before
            anything is built: somebody else may have written the file.
    """

    name: str
    noun: str
    load: Callable[[TrainConfig, bool, Mapping[str, Any] | None], Task]
    rebuild: Callable[[Mapping[str, Any]], nn.Module]
    shown: Callable[[], Shown]
    claims: Callable[[str], bool]
    check: Callable[[TrainConfig], TrainConfig] = lambda config: config
    defaults: Callable[[str], Mapping[str, presets.Value]] = lambda data: {}
    needs: str = "data of its own"
    options: tuple[str, ...] = ()
    two_views: bool = False
    fits: Callable[[Mapping[str, Any], int], None] = lambda described, num_bytes: None


TASKS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Make a task known under its name; the last one of a name counts."""
    TASKS[kind.name] = kind
    return kind


def names() -> tuple[str, ...]:
    """The tasks there are."""
    return tuple(TASKS)


def named(name: str) -> Kind:
    """The task of a name.

    >>> named("images").noun
    'images'
    """
    return TASKS[presets.choose("--task", name, TASKS)]


def of_data(data: str) -> Kind:
    """The task of the value of --data: the last registered one that claims it.

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


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is called."""
    return lambda *given: attrgetter(name)(_module(module))(*given)


def _module(name: str) -> Any:
    return importlib.import_module(f"negchain.{name}")


_PICTURES = (
    "recipe", "image_size", "resident_gb", "stem", "norm", "projector", "embedding_dim",
    "probe_samples",
)  # fmt: skip

for _kind in (
    Kind(
        "images",
        "images",
        _later("tasks.images", "ImageTask.load"),
        _later("encoders", "rebuild_encoder"),
        lambda: _module("report.images").SHOWN,
        claims=lambda data: True,  # and says what is wrong with it
        check=_later("tasks.checks", "check_images"),
        defaults=lambda data: presets.DATA_DEFAULTS.get(data, presets.FOLDER_DEFAULTS),
        needs="pictures",
        options=(*_PICTURES, "augmentations"),
        two_views=True,
        fits=_later("encoders", "refuse_larger"),
    ),
    Kind(
        "retrieval",
        "queries",
        _later("tasks.retrieval", "RetrievalTask.load"),
        _later("tasks.text", "TextEncoder.rebuilt"),
        lambda: _module("report.retrieval").SHOWN,
        claims=_later("tasks.beir", "claims"),
        check=_later("tasks.checks", "check_texts"),
        defaults=lambda data: presets.TEXT_DEFAULTS,
        needs="a folder of corpus.jsonl, queries.jsonl and qrels/",
        options=("max_length", "draws"),
        fits=_later("tasks.text", "TextEncoder.refuse_larger"),
    ),
    Kind(
        "image-text",
        "images",
        _later("tasks.image_text", "load"),
        _later("tasks.image_text_towers", "rebuild"),
        lambda: _module("report.image_text").SHOWN,
        claims=lambda data: bool(_later("tasks.captions", "find_tables")(data)),
        check=_later("tasks.checks", "check_captioned"),
        defaults=lambda data: presets.CAPTION_DEFAULTS,
        needs="a folder with a .csv whose first line names the columns image and caption",
        options=(*_PICTURES, "text_encoder"),
        fits=_later("tasks.image_text_towers", "refuse_larger"),
    ),
):
    register(_kind)
