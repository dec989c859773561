"""InfoNCE, DCL and SogCLR of a small batch: one program per row, all columns of both blocks.

Same weights as `softmax_weights` and `sogclr_weights`, same objective as `negchain.objective`.

Shapes: `N` rows, `C` columns of all blocks, `K` of one, `T` the power of two from C.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain.fast.fused.objective_triton import (
    count_lonely,
    log_add_exp,
    log_sum_exp,
    masked_logits,
    row_value,
)


@triton.jit
def in_batch_kernel(
    similarity_ptr, index_ptr, pool_ids_ptr, penalty_ptr, positive_ptr,  # [N,C], [B], [K], [K], [B]
    log_u_ptr,  # [M] SogCLR's moving average
    beta_ptr,
    weights_ptr,  # [N,C] out: beta / N times factor times weight
    pull_ptr,  # [N]
    averages_ptr,  # [N] SogCLR: the new average
    last_ptr,  # [N] no chain moves
    stats_ptr,  # [8,N] value, -, -, -, low, negatives, drive, -
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
