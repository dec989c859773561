"""Processes forked from the tests' own, which has imported all they need: that takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing as mp


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Python 3.12 warns where a process has threads: pytest-xdist's and torch's hold nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def fork(target: Callable[..., Any], *given: Any) -> BaseProcess:
    """Start a process that calls `target`, whatever that is: nothing is pickled."""
    child = multiprocessing.get_context("fork").Process(target=target, args=given)
    with forking():
        child.start()
    return child


def fork_ranks(world: int, target: Callable[..., Any], *given: Any) -> None:
    """Call `target(rank, ...)` in `world` processes and wait; what one raises is raised here."""
    with forking():
        mp.start_processes(target, given, nprocs=world, start_method="fork")
