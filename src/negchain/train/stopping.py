"""How a run ends before its last step: by a signal, or because its loss has diverged.

`stopping` is for a run, and for the command that starts runs; `at_once` is for a command whose work
needs no step to end at.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPPING = "\nstopping after this step or evaluation; Ctrl-C again: at once, without a checkpoint\n"


class Interrupted(Exception):
    """A run or a command was asked to stop; the message says when, to a user also how to go on."""


class Diverged(RuntimeError):
    """The loss is no longer a number."""


@contextmanager
def stopping(run: Any) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP set `run.stop`, which ends a run after its current step."""

    def ask(number: int, frame: FrameType | None) -> None:
        # asked twice: end now. Not for SIGHUP, which a closed terminal and its shell both send.
        if run.stop and number != signal.SIGHUP:
            raise KeyboardInterrupt
        run.stop = True
        if number == signal.SIGINT:  # whoever pressed Ctrl-C wants to see that it was heard
            with suppress(OSError):
                os.write(2, STOPPING.encode())

    with _answered(ask):
        yield


@contextmanager
def at_once() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: by KeyboardInterrupt."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _answered(end):
        yield


@contextmanager
def _answered(answer: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # SIGINT and SIGTERM even if ignored: a script's background job ignores SIGINT, and is sent one
    # only on purpose. An ignored SIGHUP (nohup) stays ignored.
    answered = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        answered.append(signal.SIGHUP)
    before = {number: signal.signal(number, answer) for number in answered}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
