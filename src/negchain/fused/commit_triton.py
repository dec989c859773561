"""Store what the next visit needs: where the chains ended, and running averages.

One program per item; of several items with one chain the first that may write does.

Shapes: as in `layout_triton`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import draws
from negchain.fused.layout_triton import heads
from negchain.fused.objective_triton import log_add_exp

STREAM_VIEW = tl.constexpr(draws.STREAM_VIEW)


@triton.jit
def _final(
    last_ptr, item, other, seed_key, step, num_items, SIDE: tl.constexpr, VIEWS: tl.constexpr
):
    """The row and column an item's chain is stored at (column -1: it did not move)."""
    row = item
    if VIEWS == 2:
        first = heads(seed_key, step, item, item * 0, STREAM_VIEW + 16 * SIDE)
        row = tl.where(first, item, num_items + item)
    return row, tl.load(last_ptr + row, mask=other, other=-1)


@triton.jit
def commit_kernel(
    index_ptr,
    valid_ptr,
    last_ptr,  # [N] column of the final state in its block, -1: unmoved
    last_logit_ptr,  # [N]
    pool_ptr,  # [blocks*K,P]
    pool_ids_ptr,
    running_ptr,  # [N] running log partition
    same_ptr,  # [B] items with the item's chain, where COUNTED
    beta_ptr,
    step_ptr,
    moved_ptr,  # [B] out: valid and moved, valid
    states_ptr,  # state tables, changed where TRAIN
    scores_ptr,
    keys_ptr,
    log_partition_ptr,
    faults_ptr,
    seed_key,
    num_items,
    num_columns,
    num_samples,
    SIDE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    VIEWS: tl.constexpr,
    SHARED: tl.constexpr,
    CARRIED: tl.constexpr,
    ALL: tl.constexpr,
    TRAIN: tl.constexpr,
):
    """Write the state tables, count faults and note who moved."""
    item = tl.program_id(0)
    step = tl.load(step_ptr)
    valid = tl.load(valid_ptr + item)
    ok = valid == 3
    row, column = _final(last_ptr, item, True, seed_key, step, num_items, SIDE, VIEWS)
    moved = ok & (column >= 0)
    tl.store(moved_ptr + item, moved.to(tl.float32))
    tl.store(moved_ptr + num_items + item, ok.to(tl.float32))
    if SIDE == 0:
        tl.atomic_add(faults_ptr, (valid % 2 == 0).to(tl.int64))
        tl.atomic_add(faults_ptr + 1, (valid < 2).to(tl.int64))
    if TRAIN:
        index = tl.load(index_ptr + item)
        chain = tl.minimum(tl.maximum(index, 0), num_samples - 1)
        mean = tl.load(running_ptr + item)
        if VIEWS == 2:
            mean = log_add_exp(mean, tl.load(running_ptr + num_items + item)) - 0.6931471805599453
        writes = ok & (tl.abs(mean) < float("inf"))
        # Of several items with one chain the first that may write does.
        earlier_items = item
        if COUNTED:
            earlier_items = tl.where(tl.load(same_ptr + item) > 1, item, 0)
        for begin in range(0, earlier_items, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            earlier = other < item
            same = earlier & (tl.load(index_ptr + other, mask=earlier, other=-1) == index)
            if tl.sum(same.to(tl.int32), 0) > 0:
                good = same & (tl.load(valid_ptr + other, mask=same, other=0) == 3)
                _, ends = _final(last_ptr, other, good, seed_key, step, num_items, SIDE, VIEWS)
                moved = moved & (tl.sum((good & (ends >= 0)).to(tl.int32), 0) == 0)
                if ALL:
                    theirs = tl.load(running_ptr + other, mask=good, other=float("-inf"))
                    if VIEWS == 2:
                        at = running_ptr + num_items + other
                        theirs = log_add_exp(theirs, tl.load(at, mask=good, other=float("-inf")))
                    known = good & (tl.abs(theirs) < float("inf"))
                    writes = writes & (tl.sum(known.to(tl.int32), 0) == 0)
        if ALL:
            tl.store(log_partition_ptr + chain, mean, mask=writes)
        column = tl.maximum(column, 0)
        if CARRIED != "none":
            state = tl.load(pool_ids_ptr + column)
            tl.store(states_ptr + chain, state.to(states_ptr.dtype.element_ty), mask=moved)
        if CARRIED == "score":
            similarity = tl.load(last_logit_ptr + row) / tl.load(beta_ptr)
            tl.store(scores_ptr + chain, similarity, mask=moved)
        if CARRIED == "cached":
            depth = tl.arange(0, WIDTH)
            block = row // num_items if SHARED else row * 0
            at = (block * num_columns + column).to(tl.int64) * STRIDE + depth
            key = tl.load(pool_ptr + at, mask=depth < D, other=0.0).to(tl.float32)
            tl.store(keys_ptr + chain * D + depth, key, mask=depth < tl.where(moved, D, 0))
