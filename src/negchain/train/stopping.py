"""How a run ends before its last step: asked to by a signal, or because it has diverged.

Signals are answered in one way (`_answered`), in a run and where runs are started.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

STOPPING = "\nstopping after this step or evaluation; Ctrl-C again: at once, without a checkpoint\n"


class Interrupted(Exception):
    """The run was asked to stop and has written a checkpoint."""


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Stoppable(Protocol):
    """What looks at `stop` after every step."""

    stop: bool


@contextmanager
def stopping(run: Stoppable) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the run after the current step, with a checkpoint."""

    def ask(number: int, frame: FrameType | None) -> None:
        # asked twice: do not wait any longer; a closed terminal and its shell both send SIGHUP
        if run.stop and number != signal.SIGHUP:
            raise KeyboardInterrupt
        run.stop = True
        if number == signal.SIGINT:  # whoever pressed Ctrl-C wants to see that it was heard
            with suppress(OSError):
                os.write(2, STOPPING.encode())

    # ignored ones too: a job in the background of a script ignores SIGINT, and is sent one on
    # purpose only; an ignored SIGHUP (nohup) is meant
    with (
        _answered(ask, signal.SIGINT, signal.SIGTERM, ignored=True),
        _answered(ask, signal.SIGHUP),
    ):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP arrive as Ctrl-C does, so that what was started is ended."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _answered(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that end the program wait until the block is done: whom it starts, it can end."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with _answered(remember, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield
    if came:
        raise KeyboardInterrupt


@contextmanager
def _answered(
    handler: Callable[[int, FrameType | None], None],
    *numbers: signal.Signals,
    ignored: bool = False,
) -> Iterator[None]:
    """Answer signals in this way meanwhile; those that are ignored (nohup) only if told."""
    watched = [s for s in numbers if ignored or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, handler) for s in watched}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
