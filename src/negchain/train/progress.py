"""The progress line of a run: epochs, images per second, time left, loss; on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A rich progress bar, or nothing when not wanted.

    Example:
        >>> with Progress(show=False) as bar:
        ...     bar.start(total=10, done=0, batch_size=4)
        ...     bar.update(5, loss=1.0, rate=100.0)
    """

    def __init__(self, show: bool) -> None:
        self._bar: RichProgress | None = None
        if show:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=14),  # so that a line of 80 characters holds everything
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("left  {task.fields[rate]}  {task.fields[loss]}"),
                console=Console(stderr=True),
                refresh_per_second=5,
            )

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
            self._bar.stop()

    def start(self, total: int, done: int, batch_size: int) -> None:
        """Show a bar of `total` steps, `done` of them finished."""
        if self._bar is not None:
            self._bar.add_task("training", total=total, completed=done, rate="", loss="")

    def update(self, done: int, loss: float, rate: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=done,
                rate=f"{rate:,.0f} images/s",
                loss=f"loss {loss:.3f}",
            )

    def say(self, what: str) -> None:
        """Name what is going on now."""
        if self._bar is not None and self._bar.task_ids:
            self._bar.update(self._bar.task_ids[0], description=what)
