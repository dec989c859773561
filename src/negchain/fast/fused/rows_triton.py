"""One program per row: its weights, value and end state.

A small batch's similarities come from one matrix product; everything after it (exclusions, draws,
the scan or the softmax, partition, objective) happens in registers. `rows_kernel` is EMC², with the
steps of `mh_scan` and `isir_weights`; `in_batch_kernel` is InfoNCE, DCL and SogCLR, with those of
`softmax_weights` and `sogclr_weights`. `tile_rows_kernel` goes on where the tiles of a large batch
end.

Shapes: `N` rows, `K` columns per block, `C` of all blocks; of tiles as in `tiles_triton`. Arguments
of kernels that are named as fields of `Walked` are explained there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import rng
from negchain.fast import rng_triton as hashed
from negchain.fast.fused.objective_triton import (
    count_lonely,
    log_add_exp,
    log_sum_exp,
    masked_logits,
    row_objective,
    row_value,
    store_row,
)
from negchain.fast.fused.tiles_triton import bit_reversed
from negchain.fast.scan_triton import compose

FOR_ACCEPT = tl.constexpr(rng.FOR_ACCEPT)
FOR_GUMBEL = tl.constexpr(rng.FOR_GUMBEL)


@triton.jit
def rows_kernel(
    similarity_ptr,  # [N,C]
    index_ptr, pool_ids_ptr, penalty_ptr, repeated_ptr, positive_ptr, start_logit_ptr,
    start_similarity_ptr, beta_ptr, step_ptr,
    weights_ptr, pull_ptr, carried_weight_ptr, last_ptr, stats_ptr,  # out
    faults_ptr, seed_key, num_rows, num_items, num_columns, num_samples,
    burn_in,  # a share below 1, or steps
    every, log_negatives, SIDE: tl.constexpr, TILE: tl.constexpr,
    BLOCKS: tl.constexpr, ISIR: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Weights, value, factor and end state of a row."""
    row = tl.program_id(0)
    item, block = row % num_items, (row // num_items if BLOCKS == 2 else row * 0)
    lane = tl.arange(0, TILE)
    inside = lane < num_columns
    beta, step = tl.load(beta_ptr), tl.load(step_ptr)
    own = tl.minimum(tl.maximum(tl.load(index_ptr + item), 0), num_samples - 1)
    row_at = similarity_ptr + row.to(tl.int64) * (BLOCKS * num_columns)
    offered = row_at + block * num_columns
    ids_at, penalty_at = pool_ids_ptr + lane, penalty_ptr + lane
    logit, usable = masked_logits(offered + lane, ids_at, penalty_at, inside, own, beta)
    count = tl.sum(usable.to(tl.int32), 0)
    log_sum = log_sum_exp(logit)
    if BLOCKS == 2:
        hidden = row_at + (1 - block) * num_columns
        other, _ = masked_logits(hidden + lane, ids_at, penalty_at, inside, own, beta)
        log_sum, count = log_add_exp(log_sum, log_sum_exp(other)), 2 * count

    positive, start = tl.load(positive_ptr + item), tl.load(start_logit_ptr + row)
    low, value, high, pull = row_objective(
        log_sum, count, start, positive, beta, log_negatives, faults_ptr, ALL
    )
    scale = pull * beta / num_rows
    weights_at = weights_ptr + row.to(tl.int64) * num_columns
    use: tl.constexpr = (FOR_GUMBEL if ISIR else FOR_ACCEPT) + 16 * SIDE
    key = hashed.use_key(seed_key, step, use)
    row_hash = hashed.hash_row(row, key)
    if ISIR:
        # {carried state} and batch are a set: an item in it twice is there once
        again = tl.load(repeated_ptr + lane, mask=inside, other=1)
        logit = tl.where(again == 0, logit, float("-inf"))
        held = tl.load(start_logit_ptr + num_rows + row)
        joint = log_add_exp(log_sum_exp(logit), held)
        shift = tl.where(joint > float("-inf"), joint, 0.0)
        weights = tl.exp(logit - shift)
        start_weight = tl.exp(held - shift)
        tl.store(weights_at + lane, weights * scale, mask=inside)
        noisy = logit + hashed.gumbel(row_hash, hashed.hash_column(lane + 1, key))
        best = tl.max(noisy, 0)
        first = held + hashed.gumbel(row_hash, hashed.hash_column(row * 0, key))
        winner = tl.min(tl.where(noisy == best, lane, TILE), 0)
        last = tl.where(best > first, winner, -1)
        accepts, num_steps = (last >= 0).to(tl.int32), row * 0 + 1
        mass, squares = tl.sum(weights, 0), tl.sum(weights * weights, 0)
        drive = tl.sum(tl.where(weights > 0, weights * logit, 0.0), 0)
    else:
        is_step = (logit > float("-inf")).to(tl.int32)
        num_steps = tl.sum(is_step, 0)
        t = logit - hashed.log_uniform(row_hash, hashed.hash_column(lane, key))
        rank = tl.cumsum(is_step, 0) - is_step
        shifted = inside & (lane > 0)
        logit_1, _ = masked_logits(
            offered + lane - 1, pool_ids_ptr + lane - 1, penalty_ptr + lane - 1, shifted, own, beta
        )
        t_1 = logit_1 - hashed.log_uniform(row_hash, hashed.hash_column(lane - 1, key))
        rank_1 = rank - (logit_1 > float("-inf")).to(tl.int32)
        # counted steps before a column, and before the column to its left
        if every == 1:
            share_of = num_steps * burn_in + 1e-3
            skipped = tl.where(burn_in >= 1, burn_in, share_of).to(tl.int32)
            counted, counted_1 = tl.maximum(rank - skipped, 0), tl.maximum(rank_1 - skipped, 0)
            ends = tl.maximum(num_steps - skipped, 1)
        else:
            share_of = num_columns * burn_in + 1e-3
            first_end = tl.where(burn_in >= 1, burn_in, share_of).to(tl.int32)
            first_end = tl.minimum(first_end, num_columns - 1) // every
            counted = tl.maximum(lane // every - first_end, 0)
            counted_1 = tl.maximum((lane - 1) // every - first_end, 0)
            ends = (num_columns + every - 1) // every - first_end
        packed = counted_1.to(tl.int64) * TILE + tl.maximum(lane - 1, 0)
        reach, level, source = tl.associative_scan((t_1, logit_1, packed), 0, compose)
        left = reach > start  # the start state was left before this column
        event = t > tl.where(left, level, start)
        tl.store(weights_at + lane, tl.zeros((TILE,), tl.float32), mask=inside)
        tl.debug_barrier()  # the zeros must land before the shares that overwrite them
        first = tl.min(tl.where(event, lane, TILE), 0)
        until = tl.sum(tl.where(lane == first, counted, 0), 0)
        total = ends - tl.where(start > float("-inf"), 0, until)  # no state, so nothing counted
        share = (counted - (source // TILE).to(tl.int32)).to(tl.float32) / total
        share = tl.where(event & left, share, 0.0)
        tl.store(weights_at + source % TILE, share * scale, mask=event & left)
        last = tl.max(tl.where(event, lane, -1), 0)
        last_logit = tl.max(tl.where(lane == last, logit, float("-inf")), 0)
        entered = tl.sum(tl.where(lane == last, counted, 0), 0)
        final = (ends - entered).to(tl.float32) / total
        tl.debug_barrier()
        tl.store(weights_at + last, final * scale, mask=last >= 0)
        start_weight = tl.where(last >= 0, until.to(tl.float32) / total, 1.0)
        accepts = tl.sum(event.to(tl.int32), 0)
        moved_final = tl.where(last >= 0, final, 0.0)
        mass = tl.sum(share, 0) + moved_final
        squares = tl.sum(share * share, 0) + moved_final * moved_final
        drive = tl.sum(tl.where(share > 0, share * level, 0.0), 0)
        drive += tl.where(moved_final > 0, moved_final * last_logit, 0.0)
    tl.store(last_ptr + row, last)
    store_row(
        row, num_rows, low, value, high, pull, scale, positive, start, start_weight, mass,
        squares, drive / beta, accepts, num_steps, start_similarity_ptr, pull_ptr,
        carried_weight_ptr, stats_ptr,
    )  # fmt: skip


@triton.jit
def in_batch_kernel(
    similarity_ptr,  # [N,C]
    index_ptr, pool_ids_ptr, penalty_ptr, positive_ptr,
    log_u_ptr,  # [M] SogCLR's moving average
    beta_ptr,
    weights_ptr, pull_ptr, averages_ptr, last_ptr, stats_ptr,  # out
    faults_ptr, num_rows, num_items, num_columns, num_samples, gamma, log_negatives,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, SOGCLR: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Weights, value and factor of a row."""
    row = tl.program_id(0)
    item = row % num_items
    lane = tl.arange(0, TILE)
    inside = lane < BLOCKS * num_columns
    beta = tl.load(beta_ptr)
    own = tl.minimum(tl.maximum(tl.load(index_ptr + item), 0), num_samples - 1)
    at = row.to(tl.int64) * (BLOCKS * num_columns) + lane
    column = lane % num_columns
    logit, usable = masked_logits(
        similarity_ptr + at, pool_ids_ptr + column, penalty_ptr + column, inside, own, beta
    )
    count = tl.sum(usable.to(tl.int32), 0)
    log_count = tl.log(tl.maximum(count, 1).to(tl.float32))
    log_sum = log_sum_exp(logit)
    has_negatives = log_sum > float("-inf")
    count_lonely(faults_ptr, has_negatives)
    gap = log_negatives - log_count  # of the global estimate to the batch's own sum
    positive = tl.load(positive_ptr + item)
    shift, log_partition, saturation = log_sum, log_sum, log_sum
    average = log_sum
    if SOGCLR:
        old, mean = tl.load(log_u_ptr + own), log_sum - log_count
        mixed = log_add_exp(old + tl.log(1 - gamma), mean + tl.log(gamma))
        average = tl.where(old > float("-inf"), mixed, mean)
        average = tl.where(has_negatives, average, old)
        shift = average + log_count
        log_partition = log_sum + gap
        saturation = average + log_negatives
    pull = tl.where(has_negatives, 1.0, 0.0)
    if ALL:
        pull *= 1 / (1 + tl.exp(beta * positive - saturation))
    value = row_value(log_partition, beta * positive, ALL) + positive * 0
    low = row_value(log_sum + gap, beta * positive, ALL)
    weights = tl.exp(logit - tl.where(shift > float("-inf"), shift, 0.0))
    scale = pull * beta / num_rows
    tl.store(weights_ptr + at, weights * scale, mask=inside)
    share = weights / tl.maximum(tl.sum(weights, 0), 1e-37)  # SogCLR's may be too small to square
    mass, squares = tl.sum(share, 0), tl.sum(share * share, 0)
    drive = tl.sum(tl.where(weights > 0, weights * logit, 0.0), 0) / beta - positive
    tl.store(pull_ptr + row, scale)
    tl.store(averages_ptr + row, average)
    tl.store(last_ptr + row, -1)
    tl.store(stats_ptr + row, value)
    tl.store(stats_ptr + 4 * num_rows + row, low)
    tl.store(stats_ptr + 5 * num_rows + row, mass * mass / tl.maximum(squares, 1e-37))
    tl.store(stats_ptr + 6 * num_rows + row, drive * pull)


# ---------------------------------------------------------------------- after tiles


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
    positive_ptr, start_logit_ptr, start_similarity_ptr,
    ends_ptr, part_last_ptr, accepts_ptr, reached_ptr,  # [parts,5,N], [parts,N], [2,N], [N,S+1]
    same_ptr,  # [B] columns with the item's own id
    positions_ptr,  # [N,S+1]
    weights_ptr,  # [N,S+1] in: as the tiles left them; out: weights, pulled
    runs_ptr, drive_ptr,  # [N]
    beta_ptr, step_ptr,
    last_ptr, pull_ptr, joint_ptr, carried_weight_ptr, stats_ptr,  # out
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
