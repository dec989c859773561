"""Command-line options made from `TrainConfig`: one per field."""

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from negchain.methods import import_file
from negchain.train.config import Setting, TrainConfig, flag, hints, setting_of
from negchain.train.presets import FOLDER_DEFAULTS, PRESET_HELP

Command = Callable[..., int]


def with_config_options(
    extra: list[inspect.Parameter], leave_out: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command taking **settings the options of `TrainConfig`, after `extra` ones.

    Values arrive as None where the user gave nothing, so that defaults and presets can apply.
    """

    def decorate(command: Command) -> Command:
        parameters = list(extra)
        for name, hint in hints().items():
            if name not in leave_out:
                parameters.append(_option(name, hint, setting_of(name)))
            if name == "beta":
                parameters.append(_TEMPERATURE)
        signature = inspect.Signature(parameters, return_annotation=int)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
        return command

    return decorate


def option(
    name: str, kind: Any, default: Any, *flags: str, help: str, panel: str | None = None
) -> inspect.Parameter:
    """A keyword option for `with_config_options`."""
    return _keyword(
        name, Annotated[kind, typer.Option(*flags, help=help, rich_help_panel=panel)], default
    )


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _imported(path: Path | None) -> Path | None:
    if path is not None:
        import_file(path)
    return path


Import = Annotated[
    Path | None,
    typer.Option(
        "--import",
        callback=_imported,
        help="A Python file to run first, which registers methods or tasks of your own.",
    ),
]
IMPORT = _keyword("import_", Import)
_TEMPERATURE = option(
    "temperature", float | None, None, help="1/beta: instead of --beta.",
    panel="Negatives",
)  # fmt: skip


def _option(name: str, hint: Any, known: Setting) -> inspect.Parameter:
    word, default, text = flag(name), getattr(TrainConfig, name), known.help
    settings: dict[str, Any] = {"rich_help_panel": known.panel, "show_default": False}
    listed = known.choices() if known.choices else ()
    if choices := listed or (get_origin(hint) is Literal and get_args(hint)):
        settings["metavar"] = "|".join(choices)
        kind: Any = str
    elif hint is bool:
        kind, word = bool, f"{word}/--no-{word[2:]}"
    else:
        kind = next(k for k in (get_args(hint) or (hint,)) if k is not NoneType)
    if name == "preset":
        settings["metavar"] = "|".join(PRESET_HELP)
    elif default is not None and name not in ("download", "strict"):
        pictures = FOLDER_DEFAULTS.get(name, default)
        shown = ("on" if default else "off") if isinstance(default, bool) else f"{default}"
        if pictures != default:
            shown += f" for digits, {pictures} for folders"
        text = f"{text} [default: {shown}]"
    return _keyword(name, Annotated[kind | None, typer.Option(word, help=text, **settings)])
