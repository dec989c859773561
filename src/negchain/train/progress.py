"""Progress on stderr: a bar that moves on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

REFRESH = 0.2  # seconds between two states of a bar
PATIENCE = 30.0  # seconds between two lines in a file or a pipe


class Bar:
    """How far something is, how long it will still take, and a few words.

    Args:
        show: False shows nothing.
        total: what `done` reaches at the end.
        done: what was finished before, which took none of this process's time.
        count: `done` in words.
        clock: seconds.

    Example:
        >>> with Bar(False, total=10, count=lambda done: f"{done:.0f}/10 steps") as bar:
        ...     bar.at(5)
    """

    def __init__(
        self,
        show: bool,
        total: float,
        *,
        done: float = 0,
        count: Callable[[float], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._total, self._first, self._done = show, total, done, done
        self._count, self._clock = count, clock
        self._began = self._shown = clock()
        self._what, self._text, self._first_line = "", "", True
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._bar: RichProgress | None = None
        if show and self._console.is_terminal:
            columns = ("{task.description}", "{task.fields[count]}", "{task.fields[text]}")
            texts = [TextColumn(column, markup=False) for column in columns]
            bar = BarColumn(bar_width=14)  # so that a line of 80 characters holds everything
            self._bar = RichProgress(texts[0], bar, *texts[1:], console=Console(stderr=True))
            self._bar.add_task("", total=total, count="", text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._refresh()
            self._bar.stop()

    def at(self, done: float, text: str | None = None) -> None:
        """Move to `done`; cheap enough for every step."""
        self._done = done
        if text is not None:
            self._text = text
        if self._show and (
            self._clock() - self._shown >= (REFRESH if self._bar is not None else PATIENCE)
            or (self._first_line and done > self._first)
        ):
            self._first_line = False
            self._refresh()

    def say(self, what: str) -> None:
        """Name what is going on now, at once."""
        self._what = what
        if self._show:
            self._refresh()

    def left(self) -> str:
        """The time left at the speed so far; empty before the first is done."""
        made = self._done - self._first
        if made <= 0 or self._done >= self._total:
            return ""
        seconds = (self._clock() - self._began) / made * (self._total - self._done)
        return f"{in_words(seconds)} left"

    def _refresh(self) -> None:
        self._shown = self._clock()
        parts = [part for part in (self.left(), self._text) if part]
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], description=self._what, completed=self._done,
                count=self._count(self._done), text=", ".join(parts), refresh=True,
            )  # fmt: skip
        else:
            self._console.print(
                Text(f"{self._what}: {', '.join([self._count(self._done), *parts])}")
            )


class Progress:
    """The progress of a training run.

    Example:
        >>> with Progress(show=False) as bar:
        ...     bar.start(total=10, done=0)
        ...     bar.step(5)
        ...     bar.update(loss=1.0, rate=100.0)
    """

    def __init__(self, show: bool, noun: str = "samples") -> None:
        self._show, self._noun = show, noun
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, value, trace)

    def fill(self, done: int, total: int) -> None:
        """Show how much of a table is filled before the first step."""
        if self._bar is None:
            self._bar = Bar(
                self._show, total, count=lambda n: f"{n:,.0f}/{total:,} encoded"
            ).__enter__()
            self._bar.say("filling the table of old embeddings")
        self._bar.at(done)

    def start(self, total: int, done: int) -> None:
        """Show a bar of `total` steps, `done` of them finished."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
        self._bar = Bar(
            self._show, total, done=done, count=lambda n: f"{n:,.0f}/{total:,} steps"
        ).__enter__()
        self._bar.say("training")

    def step(self, done: int) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.at(done)

    def update(self, loss: float, rate: float) -> None:
        """The newest numbers, shown when the bar next moves."""
        if self._bar is not None:
            self._bar.at(self._bar._done, f"{rate:,.0f} {self._noun}/s, loss {loss:.3f}")

    def say(self, what: str) -> None:
        """Name what is going on now."""
        if self._bar is not None:
            self._bar.say(what)


def in_words(seconds: float) -> str:
    """A span of time as people say it.

    >>> in_words(8), in_words(95), in_words(4000), in_words(200_000)
    ('8 s', '2 min', '1 h 7 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
