"""The command line: `negchain train | evaluate | embed | duplicates | compare | report | bench`.

Exit status: 0 done, 1 failed, 2 refused before starting, 130 interrupted after a checkpoint.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer
from rich.console import Console

from negchain.cli import bench, compare, inspect, train
from negchain.cli.duplicates import duplicates
from negchain.train.config import ConfigError

app = typer.Typer(
    help="Train contrastive encoders on the global loss with small batches (EMC² and relatives).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Typer brings its own copy of click or uses the one installed, by version: its public BadParameter
# leads to the base class of either.
UsageProblem: Any = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")

app.command("train", help=train.HELP)(train.command)
app.command("evaluate")(inspect.evaluate)
app.command("embed")(inspect.embed)
app.command("compare", help=compare.HELP)(compare.command)
app.command("duplicates")(duplicates)
app.command("report")(inspect.report)
app.command("bench", help=bench.HELP)(bench.command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        status = typer.main.get_command(app)(arguments, prog_name="negchain", standalone_mode=False)
        return int(status or 0)
    except typer.Exit as request:
        return request.exit_code
    except train.Stopped as stopped:
        console.print(f"[bold yellow]stopped:[/] {stopped}", markup=True)
        return 130
    except (KeyboardInterrupt, typer.Abort):
        console.print("[bold yellow]stopped[/] before the next checkpoint")
        return 130
    except UsageProblem as error:
        if not arguments:  # then the problem is that help was all there was to show
            error.show()
            return 2
        return _explain(console, "refused", f"{error.format_message()} (see --help)", 2)
    except train.Failed as failed:
        return _explain(console, "failed", failed, 1)
    except (ConfigError, ValueError, OSError) as error:
        return _explain(console, "refused", error, 2)
    except Exception as error:  # our fault: say so in a sentence, details on request
        return _explain(console, "failed", error, 1)


def _explain(console: Console, word: str, error: BaseException | str, status: int) -> int:
    console.print(f"[bold red]{word}:[/]", end=" ")
    console.print(str(error) or type(error).__name__, markup=False)
    if os.environ.get("NEGCHAIN_DEBUG") and isinstance(error, BaseException):
        traceback.print_exception(error)
    elif word == "failed":
        console.print("(set NEGCHAIN_DEBUG=1 for the traceback)", style="dim")
    return status
