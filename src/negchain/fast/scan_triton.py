"""The Metropolis-Hastings scan as a Triton kernel: one program per chain.

A program walks over tiles of its row. Inside a tile the state *before* every column comes from the
associative scan explained in `scan_torch`, run over the tile shifted by one column; between tiles
only the current state is carried. Visits need no counter per step: a state entered at column j and
left at column k was counted

    max(0, rank_k - P) - max(0, rank_j - P)   times,   rank = number of steps before a column,

so an accepted step writes the share of the state it replaces. With `count_every` = c > 1 a
column has column // c - P // c counted columns before it instead.

Runs on a GPU, and on a CPU under TRITON_INTERPRET=1 (for tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.fast.backends import on_its_device
from negchain.weights.metropolis import Scan

MAX_TILE = 1024  # widest tile that stays in registers with 4 warps


@triton.jit
def compose(t1, l1, s1, t2, l2, s2):
    """Two steps of a chain as one; see `scan_torch`. `s` says where a step leads to."""
    moves = t2 > l1
    return tl.maximum(t1, t2), tl.where(moves, l2, l1), tl.where(moves, s2, s1)


@triton.jit
def _share(count, total, like):
    """count / total as torch rounds it; Triton's `/` is approximate in float32."""
    if like.dtype == tl.float32:
        return tl.div_rn(count.to(tl.float32), total.to(tl.float32))
    return count.to(like.dtype) / total.to(like.dtype)


@triton.jit
def _scan_kernel(
    logits_ptr, start_logit_ptr, log_u_ptr, burn_in_ptr, weights_ptr, start_weight_ptr, last_ptr,
    last_logit_ptr, accepts_ptr, num_columns, every, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_columns
    log_u_ptr += row * num_columns
    weights_ptr += row * num_columns
    lane = tl.arange(0, TILE)
    minus_inf = float("-inf")

    num_steps = 0
    for begin in range(0, num_columns, TILE):
        column = begin + lane
        logit = tl.load(logits_ptr + column, mask=column < num_columns, other=minus_inf)
        num_steps += tl.sum((logit > minus_inf).to(tl.int32), 0)

    burn_in = tl.load(burn_in_ptr + row).to(tl.int32)
    total = tl.maximum(num_steps - burn_in, 1)  # steps that count; if none, the final state does
    skipped = burn_in // every
    if every > 1:
        total = tl.maximum((num_columns + every - 1) // every - skipped, 1)
    current = tl.load(start_logit_ptr + row)
    start_weight = (current > minus_inf).to(current.dtype) * 0
    state = -1
    entered = 0  # steps counted before the current state was entered
    accepts = 0
    rank_before = 0
    for begin in range(0, num_columns, TILE):
        column = begin + lane
        inside = column < num_columns
        logit = tl.load(logits_ptr + column, mask=inside, other=minus_inf)
        threshold = logit - tl.load(log_u_ptr + column, mask=inside, other=0.0)
        is_step = (logit > minus_inf).to(tl.int32)
        rank = rank_before + tl.cumsum(is_step, 0) - is_step
        counted = tl.maximum(rank - burn_in, 0)
        if every > 1:
            counted = tl.maximum(column // every - skipped, 0)

        shifted = inside & (lane > 0)
        logit_1 = tl.load(logits_ptr + column - 1, mask=shifted, other=minus_inf)
        threshold_1 = logit_1 - tl.load(log_u_ptr + column - 1, mask=shifted, other=0.0)
        counted_1 = tl.maximum(rank - (logit_1 > minus_inf).to(tl.int32) - burn_in, 0)
        if every > 1:
            counted_1 = tl.maximum(tl.maximum(column - 1, 0) // every - skipped, 0)
        packed = counted_1.to(tl.int64) * TILE + (lane - 1)
        reach, level, source = tl.associative_scan((threshold_1, logit_1, packed), 0, compose)
        moved = reach > current  # has left, before this column, the state the tile began with
        event = threshold > tl.where(moved, level, current)

        tl.store(weights_ptr + column, tl.zeros_like(logit), mask=inside)
        tl.debug_barrier()  # the zeros must land before the shares that overwrite them
        share = _share(counted - source // TILE, total, current)
        tl.store(weights_ptr + begin + source % TILE, share, mask=event & moved)
        final = tl.max(tl.where(event, lane, -1), 0)
        if final >= 0:
            first = tl.min(tl.where(event, lane, TILE), 0)
            left = tl.sum(tl.where(lane == first, counted, 0), 0)
            share_of_state = _share(left - entered, total, current)
            if state >= 0:
                tl.store(weights_ptr + state, share_of_state)
            else:
                start_weight = share_of_state
            state = begin + final
            entered = tl.sum(tl.where(lane == final, counted, 0), 0)
            current = tl.max(tl.where(lane == final, logit, minus_inf), 0)
            accepts += tl.sum(event.to(tl.int32), 0)
        rank_before += tl.sum(is_step, 0)

    tl.debug_barrier()
    share_of_state = _share(total - entered, total, current)
    if state >= 0:
        tl.store(weights_ptr + state, share_of_state)
    else:
        start_weight = share_of_state
    tl.store(start_weight_ptr + row, start_weight)
    tl.store(last_ptr + row, state)
    tl.store(last_logit_ptr + row, current)
    tl.store(accepts_ptr + row, accepts)


@on_its_device
def scan_triton(
    logits: Tensor,
    start_logit: Tensor,
    log_u: Tensor,
    burn_in: int | Tensor,
    count_every: int = 1,
) -> Scan:
    """Same signature and the same results as `scan_reference`."""
    num_chains, num_columns = logits.shape
    if not isinstance(burn_in, Tensor):
        burn_in = torch.full((num_chains,), burn_in, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_chains, num_columns, dtype=logits.dtype, device=logits.device)
    start_weight, last_logit = torch.empty_like(start_logit), torch.empty_like(start_logit)
    last, accepts = torch.empty_like(burn_in), torch.empty_like(burn_in)
    tile = min(MAX_TILE, triton.next_power_of_2(max(num_columns, 16)))
    _scan_kernel[(num_chains,)](
        logits.contiguous(), start_logit.contiguous(), log_u.contiguous(), burn_in.contiguous(),
        weights, start_weight, last, last_logit, accepts, num_columns, count_every, TILE=tile,
        num_warps=max(1, min(4, tile // 256)),
    )  # fmt: skip
    return Scan(weights, start_weight, last, last_logit, accepts)
