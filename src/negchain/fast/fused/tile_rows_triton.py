"""What follows the tiles: value, weights and numbers of each row.

Shapes: as in `tiles_triton`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import rng
from negchain.fast import rng_triton as hashed
from negchain.fast.fused.objective_triton import (
    log_add_exp,
    log_sum_exp,
    row_objective,
    store_row,
)
from negchain.fast.fused.tiles_triton import bit_reversed

FOR_GUMBEL = tl.constexpr(rng.FOR_GUMBEL)


@triton.jit
def _next_of_groups(noisy, position, start, row, key, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Logits of the groups' columns, and the column of the next state (-1: the start)."""
    row_hash = hashed.hash_row(row, key)
    column = tl.maximum(position, 0)
    time = column // TILE * TILE + bit_reversed(column % TILE)
    level = noisy - hashed.gumbel(row_hash, hashed.hash_column(time + 1, key))
    best = tl.max(noisy, 0)
    slot = tl.arange(0, SLOTS)
    winner = slot == tl.min(tl.where(noisy == best, slot, SLOTS), 0)
    moves = best > start + hashed.gumbel(row_hash, hashed.hash_column(row * 0, key))
    return level, tl.where(moves, tl.sum(tl.where(winner, position, 0), 0), -1)


@triton.jit
def tile_rows_kernel(
    num_usable_ptr,  # [] usable columns of a block
    positive_ptr,  # [B]
    start_logit_ptr,  # [2,N] and as the walk sees it
    start_similarity_ptr,  # [N]
    ends_ptr, part_last_ptr, accepts_ptr, reached_ptr,  # [parts,5,N], [parts,N], [2,N], [N,S+1]
    same_ptr,  # [B] columns with the item's own id
    positions_ptr,  # [N,S+1]
    weights_ptr,  # [N,S+1] in: as the tiles left them; out: weights, pulled
    runs_ptr, drive_ptr,  # [N]
    beta_ptr, step_ptr,
    last_ptr,  # [N] out, and all below
    pull_ptr,  # [N]
    joint_ptr,  # [N] i-SIR: log of the sum over columns and carried state
    carried_weight_ptr,  # [N]
    stats_ptr,  # [8,N] as in rows_triton; MH: "accepts" and "steps" of one proposal
    faults_ptr, seed_key, num_rows, num_items,
    num_counted,  # S
    log_negatives, SIDE: tl.constexpr, TILE: tl.constexpr,
    SLOTS: tl.constexpr,  # S + 1 rounded up to a power of two
    SPLIT: tl.constexpr, ISIR: tl.constexpr, GROUPED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Value, factor and numbers for `info` of each row, one program per row."""
    row = tl.program_id(0)
    item = row % num_items
    beta, step = tl.load(beta_ptr), tl.load(step_ptr)
    positive = tl.load(positive_ptr + item)
    start, held = tl.load(start_logit_ptr + row), tl.load(start_logit_ptr + num_rows + row)
    slot = tl.arange(0, SLOTS)
    at = row.to(tl.int64) * (num_counted + 1) + slot
    second = 5 * num_rows + row
    logit, log_sum = tl.load(ends_ptr + row), tl.load(ends_ptr + 2 * num_rows + row)
    if SPLIT:
        log_sum = log_add_exp(log_sum, tl.load(ends_ptr + second + 2 * num_rows))
    if GROUPED:
        is_group = slot < num_counted
        log_mass = tl.load(weights_ptr + at, mask=is_group, other=float("-inf"))
        noisy = tl.load(reached_ptr + at, mask=is_group, other=float("-inf"))
        position = tl.load(positions_ptr + at, mask=is_group, other=-1)
        key = hashed.use_key(seed_key, step, FOR_GUMBEL + 16 * SIDE)
        level, last = _next_of_groups(noisy, position, held, row, key, TILE, SLOTS)
    else:
        first_last = tl.load(part_last_ptr + row)
        last = first_last
        if SPLIT:
            reach = tl.load(ends_ptr + second + num_rows)
            goes_on = reach > (tl.load(ends_ptr + num_rows + row) if ISIR else logit)
            last = tl.where(goes_on, tl.load(part_last_ptr + num_rows + row), last)
    tl.store(last_ptr + row, last)
    count = tl.maximum(tl.load(num_usable_ptr).to(tl.int32) - tl.load(same_ptr + item), 0)
    low, value, high, pull = row_objective(
        log_sum, count, start, positive, beta, log_negatives, faults_ptr, ALL
    )
    scale = pull * beta / num_rows
    if ISIR:
        if GROUPED:
            single = log_sum_exp(log_mass)
        else:
            single = tl.load(ends_ptr + 3 * num_rows + row)
            squares = tl.load(ends_ptr + 4 * num_rows + row)
            if SPLIT:
                single = log_add_exp(single, tl.load(ends_ptr + second + 3 * num_rows))
                squares = log_add_exp(squares, tl.load(ends_ptr + second + 4 * num_rows))
        joint = log_add_exp(single, held)
        tl.store(joint_ptr + row, joint)
        shift = tl.where(joint > float("-inf"), joint, 0.0)
        start_weight, mass = tl.exp(held - shift), tl.exp(single - shift)
        accepts, num_steps = (last >= 0).to(tl.float32), row * 0 + 1
        if not GROUPED:  # a learned beta, which asks for the drive, does not come here
            squares, drive = tl.exp(squares - 2 * shift), 0.0
    if GROUPED:
        share = tl.exp(log_mass - shift)
        squares = tl.sum(share * share, 0)
        drive = tl.sum(tl.where(share > 0, share * level, 0.0), 0) / beta
        # a group without a column has no weight, also in a row that is no number
        weight = tl.where(position >= 0, share * scale, 0.0)
        tl.store(weights_ptr + at, weight, mask=is_group)
        tl.store(runs_ptr + row, num_counted)
    if not ISIR:
        runs = tl.load(runs_ptr + row)
        position = tl.load(positions_ptr + at, mask=slot < runs, other=-1)
        length = tl.load(weights_ptr + at, mask=slot < runs, other=0.0).to(tl.int32)
        if SPLIT:  # the first counts of the second part may still belong to the end of the first
            ends = slot < num_counted
            reached = tl.load(reached_ptr + at, mask=ends, other=float("inf"))
            early = tl.sum((ends & (reached <= logit)).to(tl.int32), 0)
            left = tl.cumsum(length, 0) - early
            length = tl.maximum(tl.minimum(left, length), 0)
            length = tl.where(slot == runs, early, length)
            position = tl.where(slot == runs, first_last, position)
            runs += 1
            tl.store(positions_ptr + at, position, mask=slot < runs)
            tl.store(runs_ptr + row, runs)
        # where there was no state at first, ends before the first proposal have counted nothing
        none = tl.where(start > float("-inf"), 0, tl.sum(tl.where(position < 0, length, 0), 0))
        total = tl.maximum(num_counted - none, 1)
        share = length.to(tl.float32) / total
        weight = tl.where(position >= 0, share * scale, 0.0)
        tl.store(weights_ptr + at, weight, mask=slot < runs)
        start_weight = tl.sum(tl.where(position < 0, share, 0.0), 0)
        share = tl.where(position >= 0, share, 0.0)
        mass, squares = tl.sum(share, 0), tl.sum(share * share, 0)
        # only a learned beta asks for it, and then nothing is split
        drive = tl.load(drive_ptr + row) / (total * beta)
        accepts = tl.load(accepts_ptr + row)
        num_steps = tl.load(accepts_ptr + num_rows + row)
    store_row(
        row, num_rows, low, value, high, pull, scale, positive, start, start_weight, mass,
        squares, drive, accepts, num_steps, start_similarity_ptr, pull_ptr, carried_weight_ptr,
        stats_ptr,
    )  # fmt: skip
