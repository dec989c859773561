"""Store what the next visit needs: where the chains ended, and moving averages.

A program takes ITEMS items; of several items with one chain the first valid one decides.

Shapes: as in `layout_triton`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import rng
from negchain.fast.fused.layout_triton import heads
from negchain.fast.fused.objective_triton import log_add_exp

FOR_VIEW = tl.constexpr(rng.FOR_VIEW)


@triton.jit
def _mean(averages_ptr, item, mask, num_items, VIEWS: tl.constexpr):
    """An item's new average: the mean of its rows'."""
    mean = tl.load(averages_ptr + item, mask=mask, other=float("-inf"))
    if VIEWS == 2:
        second = tl.load(averages_ptr + num_items + item, mask=mask, other=float("-inf"))
        mean = log_add_exp(mean, second) - 0.6931471805599453
    return mean


@triton.jit
def _any(pairs):  # [ITEMS,CHUNK] -> [ITEMS]
    return tl.sum(pairs.to(tl.int32), 1) > 0


@triton.jit
def commit_kernel(
    index_ptr, valid_ptr, last_ptr, pool_ptr, pool_ids_ptr, averages_ptr,
    same_ptr,  # [B] items with the item's chain, where COUNTED
    step_ptr, stats_ptr,
    value_ptr,  # [] out: the mean of the rows' values
    moved_ptr,  # out
    counter_ptr,  # the caller's step, changed where COUNTS
    states_ptr,  # state tables, changed where TRAIN
    keys_ptr, table_ptr, faults_ptr, seed_key, num_items, num_columns, num_samples,
    num_rows, SIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    ITEMS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr, VIEWS: tl.constexpr,
    BLOCKS: tl.constexpr, CARRIED: tl.constexpr, AVERAGES: tl.constexpr, TRAIN: tl.constexpr,
    ROWS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Write the state tables, count faults, note who moved; the last program sums the values."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        total = tl.zeros((ROWS,), tl.float32)
        for begin in range(0, num_rows, ROWS):
            rows = begin + tl.arange(0, ROWS)
            total += tl.load(stats_ptr + rows, mask=rows < num_rows, other=0.0)
        tl.store(value_ptr, tl.sum(total, 0) / num_rows)
        if COUNTS:
            tl.store(counter_ptr, tl.load(step_ptr) + 1)
        return
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    there = item < num_items
    step = tl.load(step_ptr)
    index = tl.load(index_ptr + item, mask=there, other=0)
    valid = tl.load(valid_ptr + item, mask=there, other=0)
    ok = valid == 3
    row = item
    if VIEWS == 2:  # a coin says whose final state is stored
        first = heads(seed_key, step, item, item * 0, FOR_VIEW + 16 * SIDE)
        row = tl.where(first, item, num_items + item)
    column = tl.load(last_ptr + row, mask=there, other=-1)
    moved = ok & (column >= 0)
    tl.store(moved_ptr + item, moved.to(tl.float32), mask=there)
    tl.store(moved_ptr + num_items + item, ok.to(tl.float32), mask=there)
    if SIDE == 0:  # all items add to one number: only those that have something to add
        tl.atomic_add(faults_ptr + item * 0, 1, mask=there & (valid % 2 == 0))
        tl.atomic_add(faults_ptr + 1 + item * 0, 1, mask=there & (valid < 2))
    if TRAIN:
        chain = tl.minimum(tl.maximum(index, 0), num_samples - 1)
        if AVERAGES:
            mean = _mean(averages_ptr, item, there, num_items, VIEWS)
            writes = ok & (tl.abs(mean) < float("inf"))
        # Of several items with one chain the first valid one decides, of averages a finite one.
        ahead = tl.minimum((tl.program_id(0) + 1) * ITEMS, num_items)
        if COUNTED:
            shared = tl.load(same_ptr + item, mask=there, other=1) > 1
            ahead = tl.where(tl.sum(shared.to(tl.int32), 0) > 0, ahead, 0)
        for begin in range(0, ahead, CHUNK):
            other = begin + tl.arange(0, CHUNK)
            theirs = tl.load(index_ptr + other, mask=other < ahead, other=-1)
            same = (theirs[None, :] == index[:, None]) & (other[None, :] < item[:, None])
            if tl.sum(tl.sum(same.to(tl.int32), 1), 0) > 0:
                good = tl.load(valid_ptr + other, mask=other < ahead, other=0) == 3
                moved = moved & ~_any(same & good[None, :])
                if AVERAGES:
                    known = tl.abs(_mean(averages_ptr, other, good, num_items, VIEWS))
                    known = known < float("inf")
                    writes = writes & ~_any(same & (good & known)[None, :])
        if AVERAGES:
            tl.store(table_ptr + chain, mean, mask=writes)
        column = tl.maximum(column, 0)
        if CARRIED != "none":
            state = tl.load(pool_ids_ptr + column, mask=moved, other=0)
            tl.store(states_ptr + chain, state.to(states_ptr.dtype.element_ty), mask=moved)
        if CARRIED == "cached":
            depth = tl.arange(0, WIDTH)[None, :]
            block = row // num_items if BLOCKS == 2 else row * 0
            at = (block * num_columns + column).to(tl.int64)[:, None] * STRIDE + depth
            stored = moved[:, None] & (depth < D)
            key = tl.load(pool_ptr + at, mask=stored, other=0.0).to(tl.float32)
            tl.store(keys_ptr + chain[:, None] * D + depth, key, mask=stored)
