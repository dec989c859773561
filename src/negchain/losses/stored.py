"""Stored augmentations: k of every item, each an id and a chain of its own.

Shapes: `B` batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negchain.losses.batch import Views, as_ids
from negchain.losses.proposals import Informed
from negchain.losses.settings import InBatch, check_count
from negchain.rng import fit_for_numpy


def stored_ids(
    index: Tensor, augmentation: tuple[Tensor, Tensor], per_item: int
) -> Tensor:  # [B], two [B] -> [2,B]
    """Ids of (item, stored augmentation), for both views.

    Example:
        >>> stored_ids(torch.tensor([3]), (torch.tensor([0]), torch.tensor([1])), 2)
        tensor([[6],
                [7]])
    """
    chosen = [as_ids("augmentation", a, len(index), index.device) for a in augmentation]
    for a in chosen:
        if fit_for_numpy(a) and not bool(((a >= 0) & (a < per_item)).all()):
            raise ValueError(f"augmentation must lie in [0, {per_item}), got {a.tolist()[:8]}")
    return torch.stack([index * per_item + a.clamp(0, per_item - 1) for a in chosen])


def check_stored(augmentations: int, views: Views, proposals: object) -> None:
    """Refuse numbers of stored augmentations, and combinations, that cannot be."""
    check_count("augmentations (stored per item)", augmentations)
    offered = InBatch() if proposals in (None, "batch") else proposals
    if views != "shared" or isinstance(proposals, Informed):
        raise ValueError(
            "augmentations (stored per item) go with views='shared' and proposals other than "
            f"Informed; got {augmentations}, {views!r}, {offered}"
        )
