"""What commands say: words on stderr, results on stdout.

Names of files and classes come from other people: what a terminal would take for a command (escape
sequences) or rich for markup (`[/]`) is shown as text.
"""

from rich.text import Text

from negchain.printable import printable
from negchain.progress import Screen


class Stopped(Exception):
    """The run was interrupted and can be continued; the message says where and how."""


class Failed(Exception):
    """The run began and could not go on."""


def say(text: str, lead: str = "", style: str = "bold") -> None:
    """A line on stderr; `lead` stands in front of it in a style of its own."""
    console = Screen(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble((printable(lead), style), printable(text)))


def result(text: str) -> None:
    """A line on stdout."""
    print(printable(text), flush=True)
