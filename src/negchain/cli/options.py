"""Command-line options made from `TrainConfig`: one per field, its help the string under it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from negchain.train.config import TrainConfig, field_help
from negchain.train.presets import FOLDER_DEFAULTS, PRESET_HELP

_GROUPS = {
    "The run": ("preset", "out", "seed", "device", "precision", "graph", "epochs", "steps"),
    "Data": ("data", "recipe", "image_size", "augmentations", "subset", "root", "download",
             "strict", "holdout", "workers", "resident_gb"),
    "Negatives": ("method", "batch_size", "beta", "burn_in", "carried", "denominator", "proposal",
                  "gamma", "refresh"),
    "Encoder and optimizer": ("encoder", "norm", "embedding_dim", "projector", "optimizer", "lr",
                              "weight_decay", "momentum", "warmup_epochs"),
    "Watching": ("eval_every", "probe_samples", "log_every", "checkpoint_every",
                 "keep_checkpoints"),
}  # fmt: skip

Command = Callable[..., int]


def with_config_options(
    extra: list[inspect.Parameter], leave_out: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command taking **settings the options of `TrainConfig`, after `extra` ones.

    Values arrive as None where the user gave nothing, so that defaults and presets can apply.
    """

    def decorate(command: Command) -> Command:
        hints, texts = get_type_hints(TrainConfig), field_help()
        parameters = list(extra)
        for panel, names in _GROUPS.items():
            for name in names:
                if name not in leave_out:
                    parameters.append(_option(name, hints[name], texts[name], panel))
        signature = inspect.Signature(parameters, return_annotation=int)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
        return command

    return decorate


def option(name: str, kind: Any, default: Any, *flags: str, help: str) -> inspect.Parameter:
    """A keyword option for `with_config_options`."""
    annotation = Annotated[kind, typer.Option(*flags, help=help)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _option(name: str, hint: Any, text: str, panel: str) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    default = getattr(TrainConfig, name, None)
    settings: dict[str, Any] = {"help": text, "rich_help_panel": panel, "show_default": False}
    if get_origin(hint) is Literal:
        settings["metavar"] = "|".join(get_args(hint))
        kind: Any = str
    elif hint is bool:
        kind, flag = bool, f"{flag}/--no-{name.replace('_', '-')}"
    else:
        kind = next(k for k in (get_args(hint) or (hint,)) if k is not NoneType)
    if name == "preset":
        settings["metavar"] = "|".join(PRESET_HELP)
    elif default is not None and name not in ("download", "strict"):
        pictures = FOLDER_DEFAULTS.get(name, default)
        shown = ("on" if default else "off") if isinstance(default, bool) else f"{default}"
        if pictures != default:
            shown += f" for digits, {pictures} for folders"
        settings["help"] = f"{text} [default: {shown}]"
    annotation = Annotated[kind | None, typer.Option(flag, **settings)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
