"""A pass whose backward pass goes over some of its images only.

Which carried images are worth a backward pass is known when all have been embedded. So a pass is
made without gradient and its layers' results are recorded; then the results of the wanted images
are moved together, and the pass is made once more over these, with gradient, every layer answering
with what it recorded. That second pass launches nothing: it only tells autograd what was computed.

Shapes: `N` images, `K` of which are wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from negchain.fast import backends


class Recorded:
    """Results of layers, first over all images, after `keep` over some.

    Args:
        images: [N,...] what the pass begins with; `keep` overwrites some of it.

    Every layer asks `result` for its result, in the same order in both passes; rows of results are
    images.

    Example:
        >>> import torch
        >>> recorded = Recorded(torch.arange(4.0))
        >>> recorded.result(lambda: (2 * recorded.images,))
        (tensor([0., 2., 4., 6.]),)
        >>> recorded.keep(1, torch.tensor([2, 1]))  # of those from 1 on the third and the second
        tensor([0., 3., 2.])
        >>> recorded.result(lambda: ())
        (tensor([0., 6., 4.]),)
    """

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self._results: list[tuple[Tensor, ...]] = []
        self._versions: list[int] = []
        self._rows: int | None = None

    def result(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `compute` returns, or has returned for the images that were kept."""
        if self._rows is not None:
            return tuple(tensor[: self._rows] for tensor in self._results.pop(0))
        found = compute()
        assert all(len(tensor) == len(self.images) for tensor in found)
        self._results.append(found)
        self._versions += [tensor._version for tensor in found]
        return found

    def keep(self, first: int, source: Tensor) -> Tensor:
        """Keep images 0, ..., first - 1 and first + `source`, [K]; returns them.

        `source` as in `move_rows`, no number twice.
        """
        tensors = [tensor for found in self._results for tensor in found]
        versions = [tensor._version for tensor in tensors]
        assert versions == self._versions, "a recorded result has been changed in place"
        move_rows([self.images, *tensors], first, source)
        self._rows = first + len(source)
        return self.images[: self._rows]

    def end(self) -> None:
        """Nothing is asked any more."""
        assert not self._results, "layers recorded more than they asked for"


def move_rows(tensors: list[Tensor], first: int, source: Tensor) -> None:
    """Put row first + source[s] of each tensor at first + s, in place; `source` [K].

    A row that is read is not written: source[s] = s or source[s] >= K. On a GPU one launch.

    Example:
        >>> import torch
        >>> x = torch.arange(5)
        >>> move_rows([x], 1, torch.tensor([3, 1]))
        >>> x
        tensor([0, 4, 2, 3, 4])
    """
    if backends.prefers_triton(source):
        from negchain.fast.layers.recorded_triton import move_rows_triton

        move_rows_triton(tensors, first, source)
        return
    for tensor in tensors:
        tensor[first : first + len(source)] = tensor[first + source]


def recorded_result(
    recorded: Recorded | None, compute: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """`Recorded.result`, or without one what `compute` returns."""
    return compute() if recorded is None else recorded.result(compute)
