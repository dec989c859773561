"""From similarities to a row's value inside a kernel; `negchain.objective` says why."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_add_exp(a, b):
    """log(e^a + e^b), also where one or both are -inf."""
    top = tl.maximum(a, b)
    shift = tl.where(top > float("-inf"), top, 0.0)
    return tl.where(top > float("-inf"), shift + tl.log(tl.exp(a - shift) + tl.exp(b - shift)), top)


@triton.jit
def log_sum_exp(x):
    """log sum e^x of a vector, -inf if it holds nothing else."""
    top = tl.max(x, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    return tl.where(top > float("-inf"), shift + tl.log(tl.sum(tl.exp(x - shift), 0)), top)


@triton.jit
def masked_logits(at, ids_at, penalty_at, mask, own, beta):
    """Logits of columns, -inf where excluded or not finite; and which are not excluded."""
    logit = tl.load(at, mask=mask, other=0.0) * beta
    ids = tl.load(ids_at, mask=mask, other=-2)
    usable = mask & (tl.load(penalty_at, mask=mask, other=float("-inf")) == 0.0) & (ids != own)
    return tl.where(usable & (tl.abs(logit) < float("inf")), logit, float("-inf")), usable


@triton.jit
def row_objective(
    log_sum,  # of the usable columns
    count,  # how many
    start,  # logit of the carried state, -inf: not usable
    positive,  # similarity to the positive
    beta,
    log_negatives,  # log m_neg
    faults_ptr,
    ALL: tl.constexpr,
):
    """The row's value between its bounds, and its factor c_i, as in `EMC2Loss._weigh`."""
    missing = float("-inf")
    low = log_sum + log_negatives - tl.log(tl.maximum(count, 1).to(tl.float32))
    high = log_add_exp(log_sum, start) + log_negatives - tl.log((count + 1).to(tl.float32))
    high = tl.where(start > missing, high, low)
    middle = tl.where(low > missing, (low + high) / 2, high)
    logit = beta * positive
    pull = tl.where(middle > missing, 1.0, 0.0)
    count_lonely(faults_ptr, middle > missing)
    if ALL:
        saturation = tl.where(low > missing, low, high)
        pull *= 1 / (1 + tl.exp(logit - saturation))
    # A positive that is not a number makes the value NaN, which a gradient scaler looks for.
    value = row_value(middle, logit, ALL) + positive * 0
    return row_value(low, logit, ALL), value, row_value(high, logit, ALL), pull


@triton.jit
def row_value(log_partition, logit, ALL: tl.constexpr):
    """A row's loss against a partition over its negatives; 0 without any."""
    value = log_partition - logit
    if ALL:
        value = tl.maximum(value, 0.0) + tl.log(1 + tl.exp(-tl.abs(value)))
    return tl.where(log_partition > float("-inf"), value, 0.0)


@triton.jit
def store_row(
    row, num_rows, low, value, high, pull,
    scale,  # beta / N times pull
    positive, start, start_weight,
    mass,  # of the columns, and the sum of their squared weights
    squares,
    drive,  # sum of weight times similarity over the columns
    moves, steps, start_similarity_ptr, pull_ptr, carried_weight_ptr, stats_ptr,
):  # fmt: skip
    """What a row of an EMC² walk leaves behind, the carried state joined to its columns."""
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    start_weight = tl.where(start > float("-inf"), start_weight, 0.0)
    similarity = tl.load(start_similarity_ptr + row)
    drive += tl.where(start_weight > 0, start_weight * similarity, 0.0) - positive
    mass += start_weight
    squares += start_weight * start_weight
    tl.store(pull_ptr + row, scale)
    tl.store(carried_weight_ptr + row, start_weight * scale)
    tl.store(stats_ptr + row, value)
    tl.store(stats_ptr + num_rows + row, moves.to(tl.float32))
    tl.store(stats_ptr + 2 * num_rows + row, steps * 1.0)
    tl.store(stats_ptr + 3 * num_rows + row, start_weight)
    tl.store(stats_ptr + 4 * num_rows + row, low)
    tl.store(stats_ptr + 5 * num_rows + row, mass * mass / tl.maximum(squares, 1e-37))
    tl.store(stats_ptr + 6 * num_rows + row, drive * pull)
    tl.store(stats_ptr + 7 * num_rows + row, high)


@triton.jit
def count_lonely(faults_ptr, has_negatives):
    """Note a row without any negative, for `info`."""
    tl.atomic_add(faults_ptr + 2, 1, mask=has_negatives == 0)
