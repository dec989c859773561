"""Any map-style data set with positions, and a loader whose workers fetch what a loss will want.

What the chains of a later batch hold is known while the current batch trains: a chain moves only
when its own sample is in a batch. So the workers of a `DataLoader` can decode it with the batch. If
a sample occurs again before that batch is used, its chain may move; the items that changed are then
fetched in the main process, and the numbers equal those of a loop without workers.

Shapes: `B` batch, `R` positions a loss wants encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss

Plan = tuple[list[int], list[int]]  # positions of a batch, and of what its loss will ask for


class Indexed(Dataset[tuple[Any, ...]]):
    """A map-style data set whose samples begin with their position: `(position, *sample)`.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> indexed = Indexed(TensorDataset(torch.zeros(5, 3), torch.arange(5)))
        >>> position, image, label = indexed[4]
        >>> position, int(label)
        (4, 4)
    """

    def __init__(self, dataset: Any) -> None:
        _refuse_without(dataset, "__len__")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[Any, ...]:
        """Position and sample; a sample that is no tuple counts as a tuple of one."""
        sample = self.dataset[position]
        return (position, *sample) if isinstance(sample, (tuple, list)) else (position, sample)


def _refuse_without(dataset: Any, has: str) -> None:
    """Refuse a data set that only yields samples: nothing can be fetched from it by position."""
    if not hasattr(dataset, has) or isinstance(dataset, IterableDataset):
        raise ValueError(
            f"a sample needs a position, and {type(dataset).__name__} yields samples without "
            "one; give a map-style data set, or use InfoNCELoss, which needs no positions"
        )


class Prefetched(NamedTuple):
    """A batch, and what the loss wants encoded for it."""

    positions: Tensor  # [B]
    batch: Any  # the samples at `positions`, collated
    request: Any  # a `negchain.Request`, to be answered with the embeddings of `items`
    items: Any  # the samples at `request.ids`, collated; None where nothing is wanted


def prefetch(
    loss_fn: ContrastiveLoss,
    dataset: Any,
    batches: Iterable[Sequence[int]],
    *,
    wanted: Any = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    **loader: Any,
) -> Iterator[Prefetched]:
    """Batches with the items their loss asks for, both decoded by a loader's workers.

    Use every batch before the next is taken, as a training loop does.

    Args:
        loss_fn: any loss of one encoder (two towers encode `request.wants` themselves).
        dataset: map-style; sample i belongs to position i.
        batches: positions of each batch, as a `batch_sampler` gives them.
        wanted: map-style data set that items of requests come from, such as one view instead of
            two; None: `dataset`.
        collate: from a list of samples to a batch, `DataLoader`'s by default.
        loader: of `torch.utils.data.DataLoader`: num_workers=, prefetch_factor=, ...

    Example:
        >>> import negchain
        >>> items, encoder = torch.randn(40, 3), torch.nn.Linear(3, 8)
        >>> loss_fn, order = negchain.EMC2Loss(40), torch.randperm(40).split(8)
        >>> for index, batch, request, held in prefetch(loss_fn, items, order):
        ...     answered = request.answer(encoder(held))
        ...     loss = loss_fn(encoder(batch), encoder(batch + 0.1), index, answered)
    """
    source = dataset if wanted is None else wanted
    for each in (dataset, source):
        _refuse_without(each, "__getitem__")
    used = 0  # batches that have been trained on

    def plans() -> Iterator[Plan]:  # runs in this process, as far ahead as the loader likes
        for number, positions in enumerate(batches):
            index = torch.as_tensor(positions)
            ids = loss_fn.request(index, ahead=number - used).ids
            yield index.tolist(), ids.tolist()

    pairs = _Pairs(dataset, source, collate)
    for index, batch, ids, items in DataLoader(
        pairs, sampler=plans(), batch_size=None, collate_fn=tuple, **loader
    ):
        request = loss_fn.request(index)
        yield Prefetched(index, batch, request, pairs.renewed(items, ids, request.ids))
        used += 1


@dataclass(eq=False)
class _Pairs(Dataset[Any]):
    """A whole batch and what is wanted with it, from a plan; runs in the workers."""

    dataset: Any
    source: Any
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, plan: Plan) -> tuple[Tensor, Any, Tensor, Any]:
        index, ids = plan
        batch = self.collate([self.dataset[i] for i in index])
        return torch.tensor(index), batch, torch.tensor(ids, dtype=torch.int64), self.wanted(ids)

    def wanted(self, ids: list[int]) -> Any:
        return self.collate([self.source[i] for i in ids]) if ids else None

    def renewed(self, items: Any, had: Tensor, ids: Tensor) -> Any:
        """The items at `ids`, given those at `had`: where they differ, fetched now.

        Where rows of a batch cannot be exchanged (texts padded to the longest, sums, strings), all
        are.
        """
        ids = ids.cpu()
        if torch.equal(ids, had):
            return items
        if len(ids) == len(had):
            rows = torch.nonzero(ids != had).flatten()
            if _put(items, rows, self.wanted(ids[rows].tolist()), len(ids)):
                return items
        return self.wanted(ids.tolist())


def _put(into: Any, rows: Tensor, values: Any, size: int) -> bool:
    """into[rows] = values, for batches made of tensors with `size` rows; whether it could be."""
    if isinstance(into, Tensor):
        fits = values.shape == (len(rows), *into.shape[1:]) and len(into) == size
        if fits:
            into[rows] = values
        return fits
    if isinstance(into, (dict, tuple, list)) and len(into) == len(values):
        names = into if isinstance(into, dict) else range(len(into))
        return all(_put(into[name], rows, values[name], size) for name in names)
    return False
