"""How a run ends before its last step: by a signal, or because its loss has diverged.

`_answered` sets the signal handlers, in a run and in the command that starts runs.
"""

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
        # asked twice: end now. Not for SIGHUP, which a closed terminal and its shell both send.
        if run.stop and number != signal.SIGHUP:
            raise KeyboardInterrupt
        run.stop = True
        if number == signal.SIGINT:  # whoever pressed Ctrl-C wants to see that it was heard
            with suppress(OSError):
                os.write(2, STOPPING.encode())

    # SIGINT and SIGTERM even if ignored: a script's background job ignores SIGINT, and is sent one
    # only on purpose. An ignored SIGHUP (nohup) stays ignored.
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
    """Hold back signals that end the program until the block is done.

    A process that is started inside is then known to whoever has to end it.
    """
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
    """Answer signals by `handler` inside the block; with `ignored`, also those now ignored."""
    watched = [s for s in numbers if ignored or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, handler) for s in watched}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
