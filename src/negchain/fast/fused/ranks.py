"""Ranks and counts in a batch: when each item is proposed, and which ids occur how often.

Sorting answers all these questions in B log B, and on a GPU in a dozen launches that each leave
most of it idle. Comparing all pairs takes B² of its cheapest operations and one launch.

Shapes: `B` items.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from negchain import draws
from negchain.fast.fused import ranks_triton
from negchain.pool import first_writer

MOST_PAIRED = 16384  # chosen, not measured; beyond, items are sorted: pairs grow as the square
SHAPE: dict[str, Any] = {"CHUNK": 128, "num_warps": 4}  # a thread per item of a chunk


def times(seed: int, step: Tensor, stream: int, size: int) -> Tensor:  # [] -> [B] int32
    """When each item is proposed: the inverse of `draws.permutation`."""
    if size > MOST_PAIRED:
        return times_sorted(seed, step, stream, size)
    found = torch.empty(size, dtype=torch.int32, device=step.device)
    # a key takes some 20 operations: 32 items share it, and 8,192 items are still 256 programs
    ranks_triton.times_kernel[(triton.cdiv(size, 32),)](
        found, step, draws.seed_key(seed), size, STREAM=stream, ITEMS=32, **SHAPE
    )
    return found


def num_equal(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """How many valid items share each item's id; 1 for an item that is not valid.

    Args:
        ids: those of valid items must be in [0, 2^31), as the fused path's are.
        valid: 3 for a valid item.
    """
    if len(ids) > MOST_PAIRED:
        return num_equal_sorted(ids, valid)
    return _matches(ids, ids, valid, VALID=True, EARLIER=False, COUNT=True)


def repeated(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """Which valid items have the id of an earlier valid one; arguments as of `num_equal`."""
    if len(ids) > MOST_PAIRED:
        return repeated_sorted(ids, valid)
    return _matches(ids, ids, valid, VALID=True, EARLIER=True, COUNT=False)


def among(ids: Tensor, others: Tensor) -> Tensor:  # [B] [B] int64 -> [B] int32
    """Which ids, each in (-2^31, 2^31), are among the others, which may be any."""
    if len(ids) > MOST_PAIRED:
        return among_sorted(ids, others)
    return _matches(ids, others, ids, VALID=False, EARLIER=False, COUNT=False)


def _matches(ids: Tensor, others: Tensor, valid: Tensor, **which: bool) -> Tensor:
    found = torch.empty_like(ids, dtype=torch.int32)
    ranks_triton.matches_kernel[(triton.cdiv(len(ids), 16),)](
        found, ids, others, valid, len(ids), **which, ITEMS=16, **SHAPE
    )
    return found


# ---------------------------------------------------------------------------- readable twins


def times_sorted(seed: int, step: Tensor, stream: int, size: int) -> Tensor:  # [] -> [B] int32
    """The readable twin of `times`.

    Example:
        >>> order = draws.permutation(0, torch.tensor(7), draws.STREAM_ORDER, 5)
        >>> times_sorted(0, torch.tensor(7), draws.STREAM_ORDER, 5)[order].tolist()
        [0, 1, 2, 3, 4]
    """
    order = draws.permutation(seed, step, stream, size)
    found = torch.empty_like(order, dtype=torch.int32)
    found[order] = torch.arange(size, dtype=torch.int32, device=order.device)
    return found


def num_equal_sorted(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """The readable twin of `num_equal`.

    Example:
        >>> num_equal_sorted(torch.tensor([5, 8, 5, 5]), torch.tensor([3, 3, 3, 2])).tolist()
        [2, 1, 2, 1]
    """
    nobody = -1 - torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    ids = torch.where(valid == 3, ids.int(), nobody)
    ordered = ids.sort().values
    first = torch.searchsorted(ordered, ids, out_int32=True)
    return torch.searchsorted(ordered, ids, out_int32=True, right=True) - first


def repeated_sorted(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """The readable twin of `repeated`.

    Example:
        >>> repeated_sorted(torch.tensor([5, 8, 5, 5]), torch.tensor([2, 3, 3, 3])).tolist()
        [0, 0, 0, 1]
    """
    good = valid == 3
    first = first_writer(ids, good)
    return (good & (first < torch.arange(len(ids), device=ids.device))).int()


def among_sorted(ids: Tensor, others: Tensor) -> Tensor:  # [B] [B] int64 -> [B] int32
    """The readable twin of `among`.

    Example:
        >>> among_sorted(torch.tensor([5, 6, 7]), torch.tensor([7, 0, 5])).tolist()
        [1, 0, 1]
    """
    ordered = others.sort().values
    at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return (ordered[at] == ids).int()
