"""Work on a second CUDA stream, beside the current one.

"Current" is that of the stream's own device, which need not be the current one. A device without
streams (a CPU) has None for one: the work then runs on the spot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """A new stream; launches of a smaller `priority` get a free multiprocessor first."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


@contextmanager
def forked(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launches inside go to `stream`, and wait for what the current stream was given before."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream | None) -> None:
    """What the current stream is given from now on waits for what `stream` was given."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
