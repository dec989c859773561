"""The command line.

    train.py        negchain train
    compare.py      negchain compare: many trainings, each a process of its own
    inspect.py      negchain evaluate, embed, export, duplicates, report: what finished runs hold
    reproduce.py    negchain reproduce: the paper's experiments
    bench.py        negchain bench
    options.py      options of several commands, and those made from the settings

Exit status: 0 done, 1 failed, 2 refused before starting, 130 interrupted.
Nothing here imports torch: a command does when it runs, so that help and refusals are quick.
"""

import functools
import itertools
import os
import signal
import sys
import threading
import traceback
from typing import Annotated, Any

import typer

from negchain import __version__
from negchain.__main__ import missing
from negchain.cli import bench, compare, inspect, reproduce, train
from negchain.progress import result, say
from negchain.train.stopping import Interrupted

app = typer.Typer(
    help="Train contrastive encoders on the global loss with small batches (EMC² and relatives).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Typer has its own copy of click, or uses the installed one, depending on its version. The base
# class of typer.BadParameter is the right one in both cases.
UsageProblem: Any = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")

app.command("train", help=train.HELP)(train.command)
app.command("evaluate")(inspect.evaluate)
app.command("embed")(inspect.embed)
app.command("export")(inspect.export)
app.command("compare")(compare.command)
app.command("duplicates")(inspect.duplicates)
app.command("report")(inspect.report)
app.command("bench")(bench.command)
app.command("reproduce", help=reproduce.HELP)(reproduce.command)


def _version(wanted: bool) -> None:
    if wanted:
        result(f"negchain {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    threading.excepthook = _thread_failed
    status = run(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of whatever torch is tidying up
    sys.exit(status)


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Show no traceback of a full disk: TensorBoard's thread passes it on to `run`, which tells."""
    if not issubclass(failure.exc_type, OSError):
        threading.__excepthook__(failure)


@functools.cache
def _commands() -> Any:
    """All commands with their options; putting them together takes 30 ms."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        status = _commands()(arguments, prog_name="negchain", standalone_mode=False)
        if status == 130:  # typer's word for Ctrl-C; older ones raise Abort
            raise KeyboardInterrupt
        return int(status or 0)
    except Interrupted as stopped:
        say(f" {stopped}", "stopped", "bold yellow")
        return 130
    except (KeyboardInterrupt, typer.Abort) as stopped:
        if isinstance(stopped.__cause__, EOFError):  # typer takes it for the end of typing
            return _explain("failed", stopped.__cause__, 1)
        say(" before the end", "stopped", "bold yellow")
        return 130
    except UsageProblem as error:
        if not arguments:  # `negchain` alone shows the help
            error.show()
            return 2
        said = f"{error.format_message()}{_value(error, arguments)} (see --help)"
        return _explain("refused", said, 2)
    except ModuleNotFoundError as error:
        if (install := missing(error)) is None:
            return _explain("failed", error, 1)
        return _explain("refused", install, 2)
    except (ValueError, OSError) as error:
        return _explain("refused", error, 2)
    except Exception as error:  # our fault: say so in a sentence, details on request
        return _explain("failed", error, 1)


def _value(error: Any, arguments: list[str]) -> str:
    """What typer's message lacks: the value of the wrong option, or that data go with --data."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    if "unexpected extra argument" in error.format_message():
        takes_data = any(param.name == "data" for param in getattr(command, "params", ()))
        return "; data go with --data" if takes_data else ""
    flags = getattr(getattr(error, "param", None), "opts", ())
    given = [value for word, value in itertools.pairwise(arguments) if word in flags]
    return f", got {given[-1]!r}" if given else ""


def _explain(word: str, error: BaseException | str, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        path = error.filename2 or error.filename  # when renaming, the first is a temporary file
        text = f"{path} cannot be read or written ({error.strerror}); "
        text += "check the path, or choose another"
    say(f" {text}", f"{word}:", "bold red")
    if os.environ.get("NEGCHAIN_DEBUG") and isinstance(error, BaseException):
        traceback.print_exception(error)
    elif word == "failed":
        say("", "(set NEGCHAIN_DEBUG=1 for the traceback)", "dim")
    return status
