"""The backward pass of a large batch whose rows weigh a few columns each.

What the tiles leave is a sparse matrix W of *entries* (row, column, weight), row by row. Its two
products are W pool, gradients of the rows, and Wᵀ queries, gradients of the columns. The first is a
gather: a row adds up its columns in registers. The second, made by the same program, would add the
row to each of its columns in memory: P atomic additions per entry, and those to a popular column
wait for each other. So entries are sorted by column first, and columns are gathered as rows are:

    gather_rows      adds up each row; counts the entries of each column and notes, for each entry,
                     how many of its column were counted before it
    (a cumulative sum of the counts: where each column's entries end)
    sort             writes each entry, 12 bytes, to its place
    gather_columns   adds up sorted entries in registers, a chunk of them per program, and adds to
                     memory only where the column changes

Chunks hold equally many entries however these are spread: a flat target gives every column a few, a
peaked one gives most entries to few columns. A column of n entries is added to memory about
1 + n / CHUNK times.

Entries of a column are counted in no fixed order, nor are its chunks added in one: the last bits of
a gradient may differ between two runs. A fixed order would need a stable sort and a place for the
sum of every chunk, P numbers each.

Shapes: as in `tiles_triton`; `E` entries at most, N (S+1), of which those with weight are stored.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

RUNS = 4  # columns of a row that are on their way at the same time
SORTED_ROWS, SORTED_SLOTS = 8, 32  # entries of a program that sorts: four per thread of two warps
CHUNK = 32  # sorted entries of a program: flat targets then flush about twice per program


@triton.jit
def gather_rows_kernel(
    grad_queries_ptr,  # [N,P] float32, out
    counts_ptr,  # [blocks*K] zeros; out: entries of each column
    earlier_ptr,  # [N,S+1] out: entries of the same column counted before this one
    pool_ptr, positions_ptr,  # [blocks*K,P], [N,S+1]
    weights_ptr,  # [N,S+1] pulled
    runs_ptr,  # [N]
    num_items, num_columns,
    num_slots,  # S + 1
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Gradient of a row, and how many entries of their columns came before its own."""
    row = tl.program_id(0).to(tl.int64)
    first = (row // num_items) * num_columns
    depth = tl.arange(0, WIDTH)
    num_runs = tl.load(runs_ptr + row)
    total = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, num_runs, RUNS):
        run = begin + tl.arange(0, RUNS)
        at = row * num_slots + run
        weights = tl.load(weights_ptr + at, mask=run < num_runs, other=0.0)
        used = weights != 0.0
        column = first + tl.load(positions_ptr + at, mask=run < num_runs, other=0)
        earlier = tl.atomic_add(counts_ptr + column, 1, mask=used, sem="relaxed")
        tl.store(earlier_ptr + at, earlier, mask=used)
        for ahead in tl.static_range(RUNS):
            at_run = row * num_slots + begin + ahead
            inside = begin + ahead < num_runs
            weight = tl.load(weights_ptr + at_run, mask=inside, other=0.0)
            position = tl.load(positions_ptr + at_run, mask=inside, other=0)
            mask = depth < STRIDE * (weight != 0.0).to(tl.int32)
            key_at = (first + position) * STRIDE + depth
            total += tl.load(pool_ptr + key_at, mask=mask, other=0.0).to(tl.float32) * weight
    tl.store(grad_queries_ptr + row * STRIDE + depth, total, mask=depth < STRIDE)


@triton.jit
def sort_kernel(
    entry_column_ptr,  # [E] out, and the next two
    entry_row_ptr, entry_weight_ptr,  # [E]
    ends_ptr,  # [blocks*K] int64: entries of a column and of those before it
    earlier_ptr, positions_ptr, weights_ptr, runs_ptr,  # [N,S+1], [N,S+1], [N,S+1], [N]
    num_rows, num_items, num_columns,
    num_slots,  # S + 1
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the entries of SLOTS slots of ROWS rows to their places in the order of columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)[None, :]
    num_runs = tl.load(runs_ptr + row, mask=row < num_rows, other=0)
    at = row.to(tl.int64) * num_slots + slot
    weight = tl.load(weights_ptr + at, mask=slot < num_runs, other=0.0)
    used = weight != 0.0
    position = tl.load(positions_ptr + at, mask=slot < num_runs, other=0)
    column = (row // num_items) * num_columns + position
    before = tl.load(ends_ptr + column - 1, mask=used & (column > 0), other=0)
    place = before + tl.load(earlier_ptr + at, mask=used, other=0)
    tl.store(entry_column_ptr + place, column, mask=used)
    tl.store(entry_row_ptr + place, row + slot * 0, mask=used)
    tl.store(entry_weight_ptr + place, weight, mask=used)


@triton.jit
def _flush(grad_pool_ptr, column, total, depth, STRIDE: tl.constexpr):
    """Add what a chunk found for a column.

    With WIDTH / 128 warps a thread owns four neighbouring numbers: its additions are 16 bytes wide,
    and no number has to move between threads.
    """
    at = column.to(tl.int64) * STRIDE + depth
    tl.atomic_add(grad_pool_ptr + at, total, mask=depth < STRIDE, sem="relaxed")


@triton.jit
def gather_columns_kernel(
    grad_pool_ptr,  # [blocks*K,P] float32 zeros, added to
    queries_ptr,  # [N,P]
    entry_column_ptr,  # [E], sorted by this
    entry_row_ptr, entry_weight_ptr,  # [E]
    ends_ptr,  # [blocks*K] int64; the last says how many entries there are
    num_ends, STRIDE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradients of the columns of a chunk of sorted entries."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    num_entries = tl.load(ends_ptr + num_ends - 1)
    if begin >= num_entries:
        return
    stop = tl.minimum(begin + CHUNK, num_entries)
    depth = tl.arange(0, WIDTH)
    current = tl.load(entry_column_ptr + begin)
    total = tl.zeros((WIDTH,), tl.float32)
    for entry in range(begin, stop):
        column = tl.load(entry_column_ptr + entry)
        row = tl.load(entry_row_ptr + entry).to(tl.int64)
        weight = tl.load(entry_weight_ptr + entry)
        query = tl.load(queries_ptr + row * STRIDE + depth, mask=depth < STRIDE, other=0.0)
        if column != current:
            _flush(grad_pool_ptr, current, total, depth, STRIDE)
            total = tl.zeros((WIDTH,), tl.float32)
        total += query.to(tl.float32) * weight
        current = column
    _flush(grad_pool_ptr, current, total, depth, STRIDE)
