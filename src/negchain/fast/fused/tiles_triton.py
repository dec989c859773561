"""A large batch: tiles of the similarity matrix are computed, scanned and forgotten.

A program owns a block of rows and walks over the columns, a tile at a time, as flash attention
does: products of one tile, acceptance thresholds t = logit - log u, and then only what the tile
does to a chain is kept. With the pairs (t, l) of `scan_torch` that is one composition of
all the tile's steps, made by a tree of pairwise compositions. States inside a tile are never known:
states are counted at ends of tiles only, which is `count_every` = a multiple of the tile's width.

The tree pairs column c of a tile with column c + width / 2, then c + width / 4, ...: neighbours in
the registers of one thread. The order of time inside a tile is therefore the bit-reversed order of
its columns; `layout_triton` puts each proposal at the column of its time.

i-SIR needs no order: an online softmax and an online Gumbel argmax over the same tiles. Where one
column stands for each group of `count_every` (`weights.isir`), both begin anew with every group and
`tile_rows_kernel` joins the groups.

Few rows leave half of a GPU idle. Then the tiles before and after the burn-in (for i-SIR two
halves) are walked at the same time: compositions do not care where a chain starts, so the second
part runs from -inf and notes the largest t up to each counted end. Once the first part's end is
known, `tile_rows_kernel` sees from these at which counted ends the chain had not left it yet.

Shapes: `N` rows in groups (one per block of columns), `K` columns per block (a multiple of TILE),
`P` embedding (a multiple of DEPTH), `S` counted states (or groups of columns) per row. Arguments of
kernels that are named as fields of `Walked` are explained there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import rng
from negchain.fast import rng_triton as hashed
from negchain.fast.fused.objective_triton import log_add_exp
from negchain.fast.scan_triton import compose

TILE = 128  # columns of a tile
ROWS = 64  # rows of a program
DEPTH = 64  # of the embedding per product
NUM_WARPS, NUM_STAGES = 4, 4  # the fastest measured on an H200

FOR_ACCEPT = tl.constexpr(rng.FOR_ACCEPT)
FOR_GUMBEL = tl.constexpr(rng.FOR_GUMBEL)
LOG2_E = tl.constexpr(1.4426950408889634)
SQUARED = tl.constexpr(2.0**-50)  # about e^-35: squares of what is at most e^70 fit, and their sums
LOG_SQUARED = tl.constexpr(-34.657359027997266)


@triton.jit
def _halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # [ROWS,WIDTH] -> two [ROWS,WIDTH/2]
    """Columns c and c + WIDTH / 2 as pairs."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _fold(t, l, s, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # noqa: E741
    """Compose paired steps: what (t1, l1) then (t2, l2) do to a chain."""
    t1, t2 = _halves(t, ROWS, WIDTH)
    l1, l2 = _halves(l, ROWS, WIDTH)
    s1, s2 = _halves(s, ROWS, WIDTH)
    return compose(t1, l1, s1, t2, l2, s2)


@triton.jit
def bit_reversed(x):
    """The time, inside a tile of 128, of each column; and the column of each time."""
    turned = x * 0
    for _ in tl.static_range(7):
        turned = turned * 2 + x % 2
        x = x // 2
    return turned


@triton.jit
def _product(
    similarity, queries, pool, row, first, tile, k, inside, lane, depth,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the k-th slice of the embedding to the products of a tile."""
    if TMA:
        a = queries.load([row, k * DEPTH])
        b = pool.load([first + tile * TILE, k * DEPTH])
    else:
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        a = tl.load(
            queries + rows[:, None] * STRIDE + k * DEPTH + depth[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        columns = (first + tile * TILE + lane).to(tl.int64)
        b = tl.load(pool + columns[:, None] * STRIDE + k * DEPTH + depth[None, :])
    return tl.dot(a, tl.trans(b), similarity, input_precision=PRECISION)


@triton.jit
def tiles_kernel(
    queries, pool,  # pointers or descriptors
    index_ptr, pool_ids_ptr, penalty_ptr, repeated_ptr, start_logit_ptr, beta_ptr, step_ptr,
    positions_ptr,  # [N,S+1] out: columns visited at counted ends, run by run; -1: the start
    weights_ptr,  # [N,S+1] how often each was; of a group the log of its sum
    runs_ptr,  # [N] how many runs
    reached_ptr,  # [N,S+1] largest t up to each counted end, where SPLIT; of a group its noisy best
    ends_ptr,  # [parts,5,N] at a part's end: logit of the state, largest t, log sum of all columns;
    # i-SIR: of those that are proposals, and of their squares
    last_ptr,  # [parts,N] and: column of the state (-1: the start)
    accepts_ptr,  # [2,N] whether one proposal was accepted, and whether it was one
    drive_ptr,  # [N] sum of the logits of the counted columns
    seed_key, num_items, num_rows, num_columns,
    num_slots,  # S + 1
    first_end,  # ends before the first that counts
    every,  # tiles between two ends
    split,  # first tile of the second part, where SPLIT
    num_samples,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ISIR: tl.constexpr,
    GROUPED: tl.constexpr,  # i-SIR with one column per group
    BOUNDED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Walk a block of rows over all tiles of its columns."""
    blocks_per_group = tl.cdiv(num_items, ROWS)
    group = tl.program_id(0) // blocks_per_group
    item = (tl.program_id(0) % blocks_per_group) * ROWS + tl.arange(0, ROWS)
    first_row = group * num_items + (tl.program_id(0) % blocks_per_group) * ROWS
    inside = item < num_items
    row = (group * num_items + item).to(tl.int64)
    first = group * num_columns
    lane, depth = tl.arange(0, TILE), tl.arange(0, DEPTH)
    beta = tl.load(beta_ptr)
    use: tl.constexpr = (FOR_GUMBEL if ISIR else FOR_ACCEPT) + 16 * SIDE
    key = hashed.use_key(seed_key, tl.load(step_ptr), use)
    row_hash = hashed.hash_row(row, key)
    own = tl.load(index_ptr + item, mask=inside, other=-1)
    own = tl.minimum(tl.maximum(own, 0), num_samples - 1).to(tl.int32)
    current = tl.load(start_logit_ptr + num_rows + row, mask=inside, other=0.0)
    reach = tl.full((ROWS,), float("-inf"), tl.float32)  # i-SIR: the best so far
    if ISIR and not GROUPED:
        reach = current + hashed.gumbel(row_hash, hashed.hash_column(row * 0, key))
    num_tiles = num_columns // TILE
    part = tl.program_id(1)
    begin, stop = 0, num_tiles
    if SPLIT:
        begin, stop = tl.where(part == 0, 0, split), tl.where(part == 0, split, num_tiles)
        current = tl.where(part == 0, current, float("-inf"))
        reach = tl.where(part == 0, reach, float("-inf"))
    state = tl.full((ROWS,), -1, tl.int32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    if BOUNDED:  # logits lie in [-beta, beta], beta <= 75: e^(logit - beta + 70) and its sums fit
        largest = tl.zeros((ROWS,), tl.float32) + (beta - 70.0)
    total = tl.zeros((ROWS,), tl.float32)  # of all columns, with i-SIR of the current group
    whole = tl.full((ROWS,), float("-inf"), tl.float32)  # log sum of the groups before
    single = tl.zeros((ROWS,), tl.float32)  # i-SIR: of the proposals, and of their squares
    squares = tl.zeros((ROWS,), tl.float32)
    drive = tl.zeros((ROWS,), tl.float32)
    run = tl.full((ROWS,), -1, tl.int32)
    length = tl.zeros((ROWS,), tl.int32)
    counted = tl.full((ROWS,), -2, tl.int32)  # the state of the current run
    time = bit_reversed(lane)
    SLICES: tl.constexpr = STRIDE // DEPTH
    similarity = tl.zeros((ROWS, TILE), tl.float32)
    # One flat loop, so that the next tile is loaded while this one is scanned.
    for turn in range(begin * SLICES, stop * SLICES):
        tile = turn // SLICES
        similarity = _product(
            similarity, queries, pool, first_row, first, tile, turn % SLICES, inside, lane, depth,
            STRIDE, ROWS, TILE, DEPTH, PRECISION, TMA,
        )  # fmt: skip
        if turn % SLICES == SLICES - 1:
            column = tile * TILE + lane
            is_own = tl.load(pool_ids_ptr + column)[None, :] == own[:, None]
            logit = similarity * beta + tl.load(penalty_ptr + column)[None, :]
            logit = tl.where(is_own, float("-inf"), logit)
            if BOUNDED:  # nothing underflows: 2^x, which does not mind it, costs a third
                mass = tl.exp2(logit * LOG2_E - largest[:, None] * LOG2_E)
            else:
                top = tl.maximum(largest, tl.max(logit, 1))
                shift = tl.where(top > float("-inf"), top, 0.0)
                mass, scale = tl.exp(logit - shift[:, None]), tl.exp(largest - shift)
                total, single, squares = total * scale, single * scale, squares * scale * scale
                largest = top
            total += tl.sum(mass, 1)
            if ISIR:
                member = tile * TILE + time
                again = tl.load(repeated_ptr + member, mask=member < num_items, other=1)
                logit = tl.where((again == 0)[None, :], logit, float("-inf"))
                mass = tl.where((again == 0)[None, :], mass, 0.0)
                single += tl.sum(mass, 1)
                if not GROUPED:
                    mass *= SQUARED if BOUNDED else 1.0
                    squares += tl.sum(mass * mass, 1)
                column_hash = hashed.hash_column(tile * TILE + time + 1, key)
                noisy = logit + hashed.gumbel(row_hash[:, None], column_hash[None, :])
                t = tl.max(noisy, 1)
                winner = noisy == t[:, None]
                moved = t > reach
                source = tl.max(tl.where(winner, column[None, :], -1), 1)
                level = t  # unused
            else:
                column_hash = hashed.hash_column(tile * TILE + time, key)
                t2 = logit - hashed.log_uniform(row_hash[:, None], column_hash[None, :])
                if (tile + 1 == stop) & (part == 0):  # its first proposal meets a known state
                    first_t = tl.sum(tl.where((lane == 0)[None, :], t2, 0.0), 1)
                    tl.store(accepts_ptr + row, (first_t > current).to(tl.float32), mask=inside)
                    offered = (first_t > float("-inf")).to(tl.float32)
                    tl.store(accepts_ptr + num_rows + row, offered, mask=inside)
                s2 = column[None, :] + tl.zeros((ROWS, TILE), tl.int32)
                for fold in tl.static_range(7):
                    t2, logit, s2 = _fold(t2, logit, s2, ROWS, 128 >> fold)
                t, level, source = tl.max(t2, 1), tl.max(logit, 1), tl.max(s2, 1)
                moved = t > current
            reach = tl.maximum(reach, t)
            current = tl.where(moved, level, current)
            state = tl.where(moved, source, state)
            if GROUPED or not ISIR:
                end = (tile + every) // every  # ends up to and with this tile
                is_end = ((tile + 1) % every == 0) | (tile + 1 == num_tiles)
            if GROUPED:
                if is_end:
                    at = row * num_slots + (end - 1)
                    tl.store(positions_ptr + at, state, mask=inside)
                    tl.store(weights_ptr + at, largest + tl.log(single), mask=inside)
                    tl.store(reached_ptr + at, reach, mask=inside)
                    whole = log_add_exp(whole, largest + tl.log(total))
                    state = tl.full((ROWS,), -1, tl.int32)
                    reach = tl.full((ROWS,), float("-inf"), tl.float32)
                    total = tl.zeros((ROWS,), tl.float32)
                    single = tl.zeros((ROWS,), tl.float32)
                    if not BOUNDED:
                        largest = tl.full((ROWS,), float("-inf"), tl.float32)
            elif not ISIR:
                if is_end & (end > first_end):
                    fresh = state != counted
                    run = tl.where(fresh, run + 1, run)
                    length = tl.where(fresh, 1, length + 1)
                    counted = state
                    drive += tl.where(state >= 0, current, 0.0)
                    at = row * num_slots + run
                    tl.store(positions_ptr + at, state, mask=inside)
                    tl.store(weights_ptr + at, length.to(tl.float32), mask=inside)
                    if SPLIT:
                        at = row * num_slots + (end - 1 - first_end)
                        tl.store(reached_ptr + at, reach, mask=inside)
            similarity = tl.zeros((ROWS, TILE), tl.float32)
    at = part * 5 * num_rows + row
    if GROUPED:
        tl.store(ends_ptr + at + 2 * num_rows, whole, mask=inside)
        return
    tl.store(ends_ptr + at, current, mask=inside)
    tl.store(ends_ptr + at + num_rows, reach, mask=inside)
    tl.store(ends_ptr + at + 2 * num_rows, largest + tl.log(total), mask=inside)
    tl.store(last_ptr + part * num_rows + row, state, mask=inside)
    if ISIR:
        tl.store(ends_ptr + at + 3 * num_rows, largest + tl.log(single), mask=inside)
        largest -= LOG_SQUARED if BOUNDED else 0.0
        tl.store(ends_ptr + at + 4 * num_rows, 2 * largest + tl.log(squares), mask=inside)
    if stop == num_tiles:
        tl.store(runs_ptr + row, run + 1, mask=inside)
        tl.store(drive_ptr + row, drive, mask=inside)


@triton.jit
def panel_kernel(
    queries, pool,  # pointers or descriptors
    index_ptr, pool_ids_ptr, penalty_ptr, repeated_ptr, joint_ptr, pull_ptr, beta_ptr,
    weights_ptr,  # [n,K] out: factor times weight, in [0, 1], of rows begin .. begin + n
    begin, num_panel, num_rows, num_items, num_columns, num_samples, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """i-SIR's weights of a panel of rows of one block, for the products of its backward pass."""
    tile = tl.program_id(0)
    in_panel = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first_row = begin + tl.program_id(1) * ROWS
    inside = in_panel < num_panel
    row = (begin + in_panel).to(tl.int64)
    group = begin // num_items
    first = group * num_columns
    lane, depth = tl.arange(0, TILE), tl.arange(0, DEPTH)
    similarity = tl.zeros((ROWS, TILE), tl.float32)
    for k in range(STRIDE // DEPTH):
        similarity = _product(
            similarity, queries, pool, first_row, first, tile, k, inside, lane, depth,
            STRIDE, ROWS, TILE, DEPTH, PRECISION, TMA,
        )  # fmt: skip
    column = tile * TILE + lane
    own = tl.load(index_ptr + row - group * num_items, mask=inside, other=-1)
    own = tl.minimum(tl.maximum(own, 0), num_samples - 1).to(tl.int32)
    joint = tl.load(joint_ptr + row, mask=inside, other=0.0)
    pull = tl.load(pull_ptr + row, mask=inside, other=0.0)
    beta = tl.load(beta_ptr)
    pull *= num_rows / beta  # float16 has no beta / N of a large batch
    logit = similarity * beta + tl.load(penalty_ptr + column)[None, :]
    member = tile * TILE + bit_reversed(lane)
    again = tl.load(repeated_ptr + member, mask=member < num_items, other=1)
    unused = (tl.load(pool_ids_ptr + column)[None, :] == own[:, None]) | (again != 0)[None, :]
    shift = tl.where(joint > float("-inf"), joint, 0.0)
    weight = tl.where(unused, 0.0, tl.exp(logit - shift[:, None]) * pull[:, None])
    at = in_panel.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(weights_ptr + at, weight.to(weights_ptr.dtype.element_ty), mask=inside[:, None])
