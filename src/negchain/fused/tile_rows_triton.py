"""What follows the tiles: value and numbers of each row, and the sparse backward pass.

Shapes: as in `tiles_triton`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain.fused.objective_triton import (
    earlier_partition,
    log_add_exp,
    row_objective,
    store_row,
)


@triton.jit
def tile_rows_kernel(
    index_ptr,  # [B]
    num_usable_ptr,  # [] usable columns of a block
    positive_ptr,  # [B]
    start_logit_ptr,  # [N]
    start_similarity_ptr,  # [N]
    log_partition_ptr,  # [M]
    ends_ptr,  # [parts,3,N]
    part_last_ptr,  # [parts,2,N]
    reached_ptr,  # [N,S+1]
    same_ptr,  # [B] columns with the item's own id
    positions_ptr,  # [N,S+1]
    lengths_ptr,  # [N,S+1]
    runs_ptr,  # [N]
    drive_ptr,  # [N]
    beta_ptr,
    step_ptr,
    last_ptr,  # [N] out, and all below
    last_logit_ptr,  # [N]
    pull_ptr,  # [N]
    joint_ptr,  # [N] i-SIR: log of the sum over columns and carried state
    carried_weight_ptr,  # [N]
    running_ptr,  # [N]
    stats_ptr,  # [7,N] as in rows_triton; "accepts" are tiles with a move, "steps" tiles
    num_rows,
    num_items,
    num_samples,
    num_counted,
    num_tiles,
    log_negatives,
    partition_rate,
    SLOTS: tl.constexpr,  # S + 1 rounded up to a power of two
    SPLIT: tl.constexpr,
    ISIR: tl.constexpr,
    TRAINED: tl.constexpr,
    ALL: tl.constexpr,
):
    """Value, factor and numbers for `info` of each row, one program per row."""
    row = tl.program_id(0)
    item = row % num_items
    beta, step = tl.load(beta_ptr), tl.load(step_ptr)
    positive = tl.load(positive_ptr + item)
    logit, log_sum = tl.load(ends_ptr + row), tl.load(ends_ptr + 2 * num_rows + row)
    last, moves = tl.load(part_last_ptr + row), tl.load(part_last_ptr + num_rows + row)
    first_logit, first_last = logit, last
    if SPLIT:
        second = 3 * num_rows + row
        reach = tl.load(ends_ptr + second + num_rows)
        goes_on = reach > (tl.load(ends_ptr + num_rows + row) if ISIR else logit)
        logit = tl.where(goes_on, tl.load(ends_ptr + second), logit)
        log_sum = log_add_exp(log_sum, tl.load(ends_ptr + second + 2 * num_rows))
        last = tl.where(goes_on, tl.load(part_last_ptr + 2 * num_rows + row), last)
        if ISIR:  # the second part of a Metropolis-Hastings walk moved from a start it did not have
            moves += tl.load(part_last_ptr + 3 * num_rows + row)
    tl.store(last_ptr + row, last)
    tl.store(last_logit_ptr + row, logit)
    count = tl.load(num_usable_ptr).to(tl.int32) - tl.load(same_ptr + item)
    old, rate = 0.0, 0.0
    if ALL:
        index = tl.minimum(tl.maximum(tl.load(index_ptr + item), 0), num_samples - 1)
        old, rate = earlier_partition(
            log_partition_ptr, index, step, num_items, num_samples, partition_rate
        )
    value, pull, running = row_objective(
        log_sum, count, positive, beta, log_negatives, old, rate, ALL
    )
    scale = pull * beta / num_rows
    start = tl.load(start_logit_ptr + row)
    joint = log_add_exp(log_sum, start)
    if ISIR:
        start_weight = tl.exp(start - tl.where(joint > float("-inf"), joint, 0.0))
        mass, squares, drive = 1 - start_weight, 1.0, 0.0
    else:
        slot = tl.arange(0, SLOTS)
        runs = tl.load(runs_ptr + row)
        at = row.to(tl.int64) * (num_counted + 1) + slot
        position = tl.load(positions_ptr + at, mask=slot < runs, other=-1)
        length = tl.load(lengths_ptr + at, mask=slot < runs, other=0)
        if SPLIT:  # the first counts of the second part may still belong to the end of the first
            ends = slot < num_counted
            reached = tl.load(reached_ptr + at, mask=ends, other=float("inf"))
            early = tl.sum((ends & (reached <= first_logit)).to(tl.int32), 0)
            left = tl.cumsum(length, 0) - early
            length = tl.maximum(tl.minimum(left, length), 0)
            length = tl.where(slot == runs, early, length)
            position = tl.where(slot == runs, first_last, position)
            tl.store(positions_ptr + at, position, mask=slot <= runs)
            tl.store(lengths_ptr + at, length, mask=slot <= runs)
            tl.store(runs_ptr + row, runs + 1)
        share = length.to(tl.float32) / num_counted
        start_weight = tl.sum(tl.where(position < 0, share, 0.0), 0)
        share = tl.where(position >= 0, share, 0.0)
        mass, squares = tl.sum(share, 0), tl.sum(share * share, 0)
        # only a learned beta asks for it, and then nothing is split
        drive = tl.load(drive_ptr + row) / (num_counted * beta)
    tl.store(joint_ptr + row, joint)
    store_row(
        row,
        num_rows,
        value,
        pull,
        scale,
        running,
        positive,
        start,
        start_weight,
        mass,
        squares,
        drive,
        moves,
        num_tiles,
        start_similarity_ptr,
        pull_ptr,
        carried_weight_ptr,
        running_ptr,
        stats_ptr,
        TRAINED,
    )


@triton.jit
def gather_kernel(
    grad_queries_ptr,  # [N,P] float32, out
    grad_pool_ptr,  # [blocks*K,P] float32, added to
    queries_ptr,  # [N,P]
    pool_ptr,  # [blocks*K,P]
    positions_ptr,  # [N,S+1]
    lengths_ptr,  # [N,S+1]
    runs_ptr,  # [N]
    pull_ptr,  # [N]
    num_items,
    num_columns,
    num_counted,  # S
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Gradients of rows and columns: only the visited columns are touched."""
    row = tl.program_id(0).to(tl.int64)
    first = (row // num_items) * num_columns
    depth = tl.arange(0, WIDTH)
    wide = depth < STRIDE
    query = tl.load(queries_ptr + row * STRIDE + depth, mask=wide, other=0.0).to(tl.float32)
    scale = tl.load(pull_ptr + row) / num_counted
    num_runs = tl.load(runs_ptr + row)
    total = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, num_runs, RUNS):
        run = begin + tl.arange(0, RUNS)
        at = row * (num_counted + 1) + run
        position = tl.load(positions_ptr + at, mask=run < num_runs, other=-1)
        length = tl.load(lengths_ptr + at, mask=run < num_runs, other=0)
        visited = (position >= 0) & (length > 0)
        weight = tl.where(visited, length.to(tl.float32) * scale, 0.0)
        key_at = (first + position)[:, None] * STRIDE + depth[None, :]
        mask = visited[:, None] & wide[None, :]
        keys = tl.load(pool_ptr + key_at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(keys * weight[:, None], 0)
        # Added in no fixed order: the last bits of a gradient may differ between two runs.
        added = weight[:, None] * query[None, :]
        tl.atomic_add(grad_pool_ptr + key_at, added, mask=mask, sem="relaxed")
    tl.store(grad_queries_ptr + row * STRIDE + depth, total, mask=wide)
