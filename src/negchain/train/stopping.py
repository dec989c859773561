"""How a run ends before its last step: asked to by a signal, or because it has diverged."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Interrupted(Exception):
    """The run was asked to stop and has written a checkpoint."""


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Stoppable(Protocol):
    """What looks at `stop` after every step."""

    stop: bool


@contextmanager
def stopping(run: Stoppable) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the run after the current step, with a checkpoint."""

    def ask(number: int, frame: FrameType | None) -> None:
        if run.stop:  # asked twice: do not wait any longer
            raise KeyboardInterrupt
        run.stop = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
