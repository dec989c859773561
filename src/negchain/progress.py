"""What commands show: words on stderr, results on stdout, and how far something is.

Progress is a bar that moves on a terminal, elsewhere a line every half minute. Names of files and
classes come from other people: what a terminal would take for a command (escape sequences) or rich
for markup (`[/]`) is shown as text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from negchain.printable import printable

REFRESH = 0.2  # seconds between two states of a bar
PATIENCE = 30.0  # seconds between two lines in a file or a pipe


class Screen(Console):
    """A console whose reader may go away, as in `| head`: rich would end the program then."""

    def on_broken_pipe(self) -> None:
        """Nobody reads: say nothing more."""
        self.quiet = True


def say(text: str, lead: str = "", style: str = "bold") -> None:
    """A line on stderr; `lead` stands in front of it in a style of its own."""
    console = Screen(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble((printable(lead), style), printable(text)))


def result(text: str) -> None:
    """A line on stdout."""
    print(printable(text), flush=True)


class Progress:
    """How far something is, how long it will still take, and a few words; one thing at a time.

    Example:
        >>> with Progress(show=False) as progress:
        ...     progress.begin(10, "steps", "training")
        ...     progress.at(5, "loss 1.0")
    """

    def __init__(self, show: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._console = Screen(stderr=True, soft_wrap=True, highlight=False)
        self._bar: RichProgress | None = None
        self.begin(0, "")

    def begin(self, total: int, nouns: str, what: str = "", done: float = 0) -> None:
        """Show `total` of something; `done` of them were made before this process began.

        `nouns` is in plural, with an s at the end of the first word.
        """
        self.__exit__()
        self._total, self._first, self._done = total, done, done
        self._nouns = re.sub(r"s\b", "", nouns, count=1) if total == 1 else nouns
        self._began = self._shown = self._clock()
        self._what, self._within, self._text, self._moved = what, "", "", False
        if total and self._show and self._console.is_terminal:
            columns = ("{task.description}", "{task.fields[count]}", "{task.fields[text]}")
            texts = [TextColumn(column, markup=False) for column in columns]
            bar = BarColumn(bar_width=14)  # so that a line of 80 characters holds everything
            screen = Screen(stderr=True)
            self._bar = RichProgress(texts[0], bar, *texts[1:], console=screen, auto_refresh=False)
            self._bar.add_task("", total=total, count="", text="")
            self._bar.start()
        if what:
            self.say(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._refresh()
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None

    def at(self, done: float, text: str | None = None) -> None:
        """Move to `done`; cheap enough for every step."""
        self._done = done
        self._text = self._text if text is None else text
        if self._show and (
            self._clock() - self._shown >= (REFRESH if self._bar is not None else PATIENCE)
            or (not self._moved and done > self._first)
        ):
            self._moved = True
            self._refresh()

    def within(self, text: str) -> None:
        """How far the present work is where no step is made, until the next `say`."""
        self._within = f" {text}"
        self.at(self._done)

    def say(self, what: str) -> None:
        """Name what is going on now, at once."""
        self._what, self._within = what, ""
        if self._show:
            self._refresh()

    def line(self, text: str) -> None:
        """A line that stays; `say` of this module would write it into the bar."""
        if self._bar is None:
            say(text)
        else:
            with suppress(OSError):
                self._bar.console.print(Text(printable(text)), soft_wrap=True)

    def left(self) -> str:
        """The time left at the speed so far; empty before the first is done."""
        made = self._done - self._first
        if made <= 0 or self._done >= self._total:
            return ""
        seconds = (self._clock() - self._began) / made * (self._total - self._done)
        return f"{in_words(seconds)} left"

    def _refresh(self) -> None:
        self._shown = self._clock()
        count = f"{int(self._done + 1e-9):,}/{self._total:,} {self._nouns}"
        parts = [part for part in (self.left(), self._text) if part]
        what = self._what + self._within
        try:
            if self._bar is not None:
                self._bar.update(
                    self._bar.task_ids[0], description=what, completed=self._done,
                    count=count, text=", ".join(parts), refresh=True,
                )  # fmt: skip
            else:
                self._console.print(Text(f"{what}: {', '.join([count, *parts])}"))
        except OSError:  # the terminal was closed: what is shown goes on without it
            self._show, self._bar = False, None


def in_words(seconds: float) -> str:
    """A span of time as people say it.

    >>> in_words(8), in_words(59.7), in_words(95), in_words(4000), in_words(200_000)
    ('8 s', '1 min', '2 min', '1 h 7 min', '2 d 7 h')
    """
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
