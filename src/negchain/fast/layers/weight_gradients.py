"""Gradients of weights beside the backward pass.

The gradient of a layer's weights is needed only by the optimizer, that of its input by the layer
below. In a small batch neither fills a GPU, so the first runs on a stream of its own while the
second goes on: in a CUDA graph, a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from negchain.fast.streams import forked, join

MOST_KEPT = 2**30  # bytes


class WeightGradients:
    """Gradients of weights, computed on a stream of their own, or (None) on the current one.

    A tensor that one stream made and another reads must not be freed in between, so what
    `add` is given lives until `join`, or until there is too much of it: then the streams meet.

    Args:
        stream: where gradients are computed.
        then: called with a weight and its gradient as soon as all expected parts of it have come,
            on the stream they come from; says whether it took it. `join` returns the others.

    Example:
        >>> found = WeightGradients(None)
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> for _ in range(2):
        ...     found.expect(weight)
        ...     found.add(weight, lambda: torch.ones(2), ())
        >>> found.join()[weight]
        tensor([2., 2.])
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None,
        then: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> None:
        self.stream = stream
        self.then = then
        self._found: dict[Tensor, Tensor] = {}
        self._kept: list[tuple[Tensor, ...]] = []
        self._kept_bytes = 0
        self._expected: Counter[Tensor] = Counter()

    def expect(self, weight: Tensor) -> None:
        """A layer uses the weight: if gradients are enabled, one is to come."""
        if torch.is_grad_enabled():
            self._expected[weight] += 1

    def add(self, weight: Tensor, compute: Callable[[], Tensor], reads: tuple[Tensor, ...]) -> None:
        """Compute a gradient of `weight` from the tensors it `reads`, beside what comes next."""
        with forked(self.stream):
            self.add_now(weight, compute())
        self._keep(reads)

    def beside(self, compute: Callable[[], Tensor], reads: tuple[Tensor, ...]) -> Tensor:
        """Compute a tensor that nobody reads before `join`."""
        with forked(self.stream):
            found = compute()
        self._keep((*reads, found))
        return found

    def _keep(self, tensors: tuple[Tensor, ...]) -> None:
        """The streams meet before these are freed."""
        if self.stream is None:
            return
        self._kept.append(tensors)
        self._kept_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._kept_bytes > MOST_KEPT:
            self._meet()

    def add_now(self, weight: Tensor, gradient: Tensor) -> None:
        """A gradient computed on the current stream."""
        earlier = self._found.get(weight)
        if earlier is not None:
            join(self.stream)  # perhaps it is on its way over there
        # Parts are added in float32, as autograd adds what autocast has cast back.
        self._found[weight] = gradient if earlier is None else earlier.float().add_(gradient)
        self._expected[weight] -= 1
        if self.then is None or self._expected[weight] != 0:
            return
        if self.then(weight, self._found[weight]):
            del self._found[weight]

    def join(self) -> dict[Tensor, Tensor]:
        """Wait for all gradients; returns those `then` did not take."""
        self._meet()
        found, self._found = self._found, {}
        self._expected.clear()
        return found

    def _meet(self) -> None:
        """Nobody reads any more what was kept."""
        join(self.stream)
        self._kept, self._kept_bytes = [], 0
