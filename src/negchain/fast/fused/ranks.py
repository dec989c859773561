"""Ranks and counts in a batch, by sorting: when items are proposed, which ids occur how often.

Shapes: `B` items.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negchain import rng
from negchain.pool import first_writer


def times(seed: int, step: Tensor, use: int, size: int) -> Tensor:  # [] -> [B] int32
    """When each item is proposed: the inverse of `rng.permutation`.

    Example:
        >>> order = rng.permutation(0, torch.tensor(7), rng.FOR_ORDER, 5)
        >>> times(0, torch.tensor(7), rng.FOR_ORDER, 5)[order].tolist()
        [0, 1, 2, 3, 4]
    """
    order = rng.permutation(seed, step, use, size)
    found = torch.empty_like(order, dtype=torch.int32)
    found[order] = torch.arange(size, dtype=torch.int32, device=order.device)
    return found


def num_equal(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """How many valid items (marked by 3) share each item's id; 1 for an item that is not valid.

    Ids of valid items must be in [0, 2^31), as the fused path's are.

    Example:
        >>> num_equal(torch.tensor([5, 8, 5, 5]), torch.tensor([3, 3, 3, 2])).tolist()
        [2, 1, 2, 1]
    """
    different = -1 - torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    ids = torch.where(valid == 3, ids.int(), different)
    ordered = ids.sort().values
    first = torch.searchsorted(ordered, ids, out_int32=True)
    return torch.searchsorted(ordered, ids, out_int32=True, right=True) - first


def repeated(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """Which valid items have the id of an earlier valid one; arguments as of `num_equal`.

    Example:
        >>> repeated(torch.tensor([5, 8, 5, 5]), torch.tensor([2, 3, 3, 3])).tolist()
        [0, 0, 0, 1]
    """
    good = valid == 3
    first = first_writer(ids, good)
    return (good & (first < torch.arange(len(ids), device=ids.device))).int()


def among(ids: Tensor, others: Tensor) -> Tensor:  # [B] [B] int64 -> [B] int32
    """Which ids are among the others.

    Example:
        >>> among(torch.tensor([5, 6, 7]), torch.tensor([7, 0, 5])).tolist()
        [1, 0, 1]
    """
    ordered = others.sort().values
    at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return (ordered[at] == ids).int()
