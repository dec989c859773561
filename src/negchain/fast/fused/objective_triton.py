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
    """Logits of columns, -inf where excluded."""
    logit = tl.load(at, mask=mask, other=0.0) * beta
    ids = tl.load(ids_at, mask=mask, other=-2)
    usable = mask & (tl.load(penalty_at, mask=mask, other=float("-inf")) == 0.0)
    usable = usable & (ids != own) & (tl.abs(logit) < float("inf"))
    return tl.where(usable, logit, float("-inf"))


@triton.jit
def row_objective(
    log_sum,  # of the usable columns
    count,  # how many
    positive,  # similarity to the positive
    beta,
    log_negatives,  # log m_neg
    old,  # running log partition, -inf before the first visit
    rate,  # of the running partition
    ALL: tl.constexpr,
):
    """The row's value, the factor c_i of its gradient, and the new running partition."""
    has_negatives = log_sum > float("-inf")
    log_partition = log_sum + log_negatives - tl.log(tl.maximum(count, 1).to(tl.float32))
    running = log_partition
    logit = beta * positive
    value = log_partition - logit
    pull = tl.where(has_negatives, 1.0, 0.0)
    if ALL:
        mixed = log_add_exp(old + tl.log(1 - rate), log_partition + tl.log(rate))
        running = tl.where(old > float("-inf"), mixed, log_partition)
        running = tl.where(has_negatives, running, old)
        value = tl.maximum(value, 0.0) + tl.log(1 + tl.exp(-tl.abs(value)))
        pull *= 1 / (1 + tl.exp(logit - running))
    # A positive that is not a number makes the value NaN, which a gradient scaler looks for.
    return tl.where(has_negatives, value, 0.0) + positive * 0, pull, running


@triton.jit
def earlier_partition(log_partition_ptr, chain, step, num_items, num_samples, least_rate):
    """The running log partition before this visit, and the rate at which it follows the new one."""
    visits = step * num_items // num_samples
    rate = tl.maximum(1 / (1 + visits.to(tl.float32)), least_rate)
    return tl.load(log_partition_ptr + chain), rate


@triton.jit
def store_row(
    row,
    num_rows,
    value,
    pull,
    scale,  # beta / N times pull
    running,
    positive,
    start,
    start_weight,
    mass,  # of the columns, and the sum of their squared weights
    squares,
    drive,  # sum of weight times similarity over the columns
    moves,
    steps,
    start_similarity_ptr,
    pull_ptr,
    carried_weight_ptr,
    running_ptr,
    stats_ptr,
    TRAINED: tl.constexpr,
):
    """What a row of an EMC² walk leaves behind, the carried state joined to its columns."""
    # A chain that had nowhere to go may still sit on an excluded state: that has no weight.
    start_weight = tl.where(start > float("-inf"), start_weight, 0.0)
    carried = start_weight if TRAINED else start_weight * 0
    drive = drive - positive
    if TRAINED:
        drive += tl.where(carried > 0, carried * tl.load(start_similarity_ptr + row), 0.0)
    mass = mass + carried
    squares = squares + carried * carried
    tl.store(pull_ptr + row, scale)
    tl.store(carried_weight_ptr + row, carried * scale)
    tl.store(running_ptr + row, running)
    tl.store(stats_ptr + row, value)
    tl.store(stats_ptr + num_rows + row, moves.to(tl.float32))
    tl.store(stats_ptr + 2 * num_rows + row, steps * 1.0)
    tl.store(stats_ptr + 3 * num_rows + row, start_weight)
    tl.store(stats_ptr + 4 * num_rows + row, carried)
    tl.store(stats_ptr + 5 * num_rows + row, mass * mass / tl.maximum(squares, 1e-37))
    tl.store(stats_ptr + 6 * num_rows + row, drive * pull)
