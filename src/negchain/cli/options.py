"""Options that several commands have, and those made from `TrainConfig`: one per field."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from negchain.train.config import TrainConfig, flag, hints, setting_of
from negchain.train.presets import FOLDER_DEFAULTS

Command = Callable[..., int | None]


def import_file(path: Path | None) -> Path | None:
    """Run a Python file that registers methods or tasks of your own.

    Only what the user names is run, never what a run folder or the working directory holds.
    """
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(f"negchain_import_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"--import needs a Python file, and {str(path)!r} is none")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # workers of a DataLoader look classes up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--import {path} must run without an error, got {type(error).__name__}: {error}; "
            "correct it (NEGCHAIN_DEBUG=1 shows the line)"
        ) from error
    return path


Import = Annotated[
    Path | None,
    typer.Option(
        "--import",
        callback=import_file,
        help="A Python file to run first, which registers methods or tasks of your own.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
_Temperature = Annotated[
    float | None, typer.Option(help="1/beta: instead of --beta.", rich_help_panel="Negatives")
]


def with_config_options(leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command taking **settings the options of `TrainConfig`, after its own ones.

    Values arrive as None where the user gave nothing, so that defaults and presets can apply.
    """

    def decorate(command: Command) -> Command:
        made = {}
        for name, hint in hints().items():
            if name not in leave_out:
                made[name] = _option(name, hint)
            if name == "beta":
                made["temperature"] = _Temperature
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in made.items()]
        signature = inspect.signature(command, eval_str=True)
        *own, _ = signature.parameters.values()  # the last is **settings
        command.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own + added}
        return command

    return decorate


def _option(name: str, hint: Any) -> Any:
    """The annotation of a setting's option."""
    known, word, default = setting_of(name), flag(name), getattr(TrainConfig, name)
    text, settings = known.help, dict[str, Any](rich_help_panel=known.panel, show_default=False)
    listed = known.choices() if known.choices else ()
    if choices := listed or (get_origin(hint) is Literal and get_args(hint)):
        settings["metavar"] = "|".join(choices)
        kind: Any = str
    elif hint is bool:
        kind, word = bool, f"{word}/--no-{word[2:]}"
    else:
        kind = next(k for k in (get_args(hint) or (hint,)) if k is not NoneType)
    if default is not None and name not in ("download", "strict", "proposal"):
        pictures = FOLDER_DEFAULTS.get(name, default)
        shown = ("on" if default else "off") if isinstance(default, bool) else f"{default}"
        if pictures != default:
            shown += f" for digits, {pictures} for folders"
        text = f"{text} [default: {shown}]"
    return Annotated[kind | None, typer.Option(word, help=text, **settings)]
