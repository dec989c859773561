"""CUDA streams that leave the current one and come back; None, on a CPU, is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """A stream; the smaller the number, the sooner its launches get a free multiprocessor."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


@contextmanager
def forked(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside runs on another stream, after what the current one has."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream | None) -> None:
    """The current stream goes on after what another one has."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
