"""Work on a second CUDA stream, beside the current one.

"Current" is that of the stream's own device, which need not be the current one. A device without
streams (a CPU) has None for one: the work then runs on the spot.

The gradient of a layer's weights is needed only by the optimizer, that of its input by the layer
below. In a small batch neither fills a GPU, so the first runs on a stream of its own while the
second goes on: in a CUDA graph, a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_KEPT = 2**30  # bytes
WIDENED_AT_ONCE = 2**23  # bytes: large enough to fill a GPU's memory bus


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


class WeightGradients:
    """Gradients of weights, computed on a stream of their own, or (None) on the current one.

    A tensor that one stream made and another reads must not be freed in between. So what `add` and
    `beside` read is kept until `join`; where it becomes too much, the streams meet earlier.

    Example:
        >>> found = WeightGradients(None)
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> for _ in range(2):
        ...     found.add(weight, lambda: torch.ones(2), ())
        >>> found.join()[weight]
        tensor([2., 2.])
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self._found: dict[Tensor, Tensor] = {}
        self._narrow: list[Tensor] = []  # weights whose gradients are not float32 yet
        self._kept: list[tuple[Tensor, ...]] = []
        self._kept_bytes = 0

    def add(self, weight: Tensor, compute: Callable[[], Tensor], reads: tuple[Tensor, ...]) -> None:
        """Compute a gradient of `weight` from the tensors it `reads`, beside what comes next."""
        with forked(self.stream):
            self.add_now(weight, compute())
            self._widen(weight)
        self._keep(reads)

    def add_now(self, weight: Tensor, gradient: Tensor) -> None:
        """A gradient computed on the current stream."""
        earlier = self._found.get(weight)
        if earlier is not None:
            join(self.stream)  # the other stream may still be computing it
        # Parts are added in float32, as autograd adds what autocast has cast back.
        self._found[weight] = gradient if earlier is None else earlier.float().add_(gradient)

    def _widen(self, weight: Tensor) -> None:
        """Make gradients float32 beside the backward pass too, many in one launch."""
        self._narrow.append(weight)
        narrow = {w: self._found[w] for w in self._narrow if self._found[w].itemsize < 4}
        if sum(gradient.nbytes for gradient in narrow.values()) < WIDENED_AT_ONCE:
            return
        wide = [torch.empty_like(g, dtype=torch.float32) for g in narrow.values()]
        torch._foreach_copy_(wide, list(narrow.values()))
        self._found.update(zip(narrow, wide, strict=True))
        self._narrow = []

    def beside(self, compute: Callable[[], Tensor], reads: tuple[Tensor, ...]) -> Tensor:
        """Compute a tensor that is not read before `join`."""
        with forked(self.stream):
            found = compute()
        self._keep((*reads, found))
        return found

    def join(self, weights: Iterable[Tensor] | None = None) -> dict[Tensor, Tensor]:
        """Wait for everything; returns the gradients that were added, of these weights or all."""
        self._meet()
        weights = list(self._found) if weights is None else weights
        found = {w: self._found.pop(w) for w in weights if w in self._found}
        self._narrow = [weight for weight in self._narrow if weight in self._found]
        return found

    def _keep(self, tensors: tuple[Tensor, ...]) -> None:
        """Hold tensors until the streams meet."""
        if self.stream is None:
            return
        self._kept.append(tensors)
        self._kept_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._kept_bytes > MOST_KEPT:
            self._meet()

    def _meet(self) -> None:
        """The current stream waits for the other one; what was kept may be freed."""
        join(self.stream)
        self._kept, self._kept_bytes = [], 0
