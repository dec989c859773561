"""Rows and columns of a batch for the fused path, and the way back.

`prepare` brings embeddings to unit length, puts the keys into the order in which they are proposed
and scores the carried states. `finish` turns gradients of rows and columns into gradients of the
embeddings. One program per item in both; it asks for everything it reads before it computes, so
that it waits for memory once.

A *block* of columns holds one key of every item. Shared views have two: block 0 holds the copy of
each item that rows of the first view are offered (a coin per item says which), block 1 the other.
Where every row is offered both copies (COPIES = 2) one block holds all of them.

Shapes: `B` items, `V` rows per item (views), `N` = V B rows, `K` columns per block (COPIES B,
padded), `D` embedding, `P` its stride in rows and columns. Arguments of kernels that are named as
fields of `Walked` are explained there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain import objective, rng
from negchain.fast import rng_triton as hashed
from negchain.fast.fused.tiles_triton import bit_reversed

FOR_ORDER = tl.constexpr(rng.FOR_ORDER)
FOR_INIT = tl.constexpr(rng.FOR_INIT)
FOR_COPY = tl.constexpr(rng.FOR_COPY)
SHORTEST = tl.constexpr(objective.SHORTEST)


@triton.jit
def _load(z_ptr, at, mask):
    """A row in float32."""
    return tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _unit(z, NORMALIZE: tl.constexpr):
    """A row at unit length (`losses.batch.as_embedding`), and its norm."""
    norm = tl.sqrt(tl.sum(z * z, 0))
    return _divided(z, norm, NORMALIZE), norm


@triton.jit
def _divided(z, norm, NORMALIZE: tl.constexpr):
    """z / |z|; a vector without a direction stays 0."""
    if NORMALIZE:
        z = tl.where(norm <= SHORTEST, 0.0, z / tl.where(norm <= SHORTEST, 1.0, norm))
    return z


@triton.jit
def _is_finite(z):
    return tl.abs(z) < float("inf")


@triton.jit
def _all(x):
    return tl.sum(x.to(tl.int32) - 1, 0) == 0


@triton.jit
def heads(seed_key, step, row, column, USE: tl.constexpr):
    """A fair coin."""
    key = hashed.use_key(seed_key, step, USE)
    return hashed.bits(hashed.hash_row(row, key), hashed.hash_column(column, key)) % 2 == 0


@triton.jit
def carried_ids(states_ptr, chain, seed_key, num_states, SIDE: tl.constexpr):
    """`ChainTable.ids`: the stored state, or the initial draw of a chain that never moved."""
    held = tl.load(states_ptr + chain).to(tl.int64)
    key = hashed.use_key(seed_key, chain * 0 + SIDE, FOR_INIT)
    drawn_bits = hashed.bits(hashed.hash_row(chain, key), hashed.hash_column(chain * 0, key))
    choices = num_states - 1  # not the chain's own item
    u = (drawn_bits.to(tl.float64) + 0.5) * 4.656612873077393e-10
    drawn = tl.minimum((u * choices).to(tl.int64), choices - 1)
    drawn = tl.where(drawn >= chain, drawn + 1, drawn)
    return tl.where(held >= 0, held, drawn)


@triton.jit
def ids_kernel(
    ids_ptr, index_ptr, states_ptr, seed_key, num_items, num_samples, SIDE: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """Ids of the carried states of ITEMS items of a batch, for the caller to encode."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    there = item < num_items
    index = tl.load(index_ptr + item, mask=there, other=0)
    chain = tl.minimum(tl.maximum(index, 0), num_samples - 1)
    held = carried_ids(states_ptr, chain, seed_key, num_samples, SIDE)
    tl.store(ids_ptr + item, held, mask=there)


@triton.jit
def prepare_kernel(
    a_ptr,  # [B,D] anchors, or first view
    b_ptr,  # [B,D] keys, or second view
    carried_ptr,  # "encode" [B,D], "cached" the table [M,D], else unused
    index_ptr,  # [B] chain of each item, and id of its key
    states_ptr,
    times_ptr,  # [B] time at which each item is proposed, where it is not counted here
    counter_ptr,  # the caller's step, which `commit` counts on
    beta_ptr,  # out where FIXED
    step_ptr, queries_ptr, pool_ptr, pool_ids_ptr, penalty_ptr, column_ptr, norms_ptr,  # out
    positive_ptr, start_similarity_ptr, start_logit_ptr, valid_ptr, held_ptr,  # out
    fixed_beta, seed_key, num_items, num_columns, num_samples, SIDE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    ITEMS: tl.constexpr,  # COPIES*B rounded up to a power of two, where times are counted here
    SHARED: tl.constexpr, VIEWS: tl.constexpr, CARRIED: tl.constexpr,
    TIMES: tl.constexpr,  # "items", "count" or "given"
    TILE: tl.constexpr,  # columns of a tile are in bit-reversed order; 1: no tiles
    ISIR: tl.constexpr, COPIES: tl.constexpr, NORMALIZE: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Rows, columns and carried state of an item."""
    item = tl.program_id(0)
    depth = tl.arange(0, WIDTH)
    wide, stored = depth < D, depth < STRIDE
    if item >= num_items:  # padding of the last tile
        column = _tile_column(item, TILE)
        tl.store(pool_ids_ptr + column, -2)
        tl.store(penalty_ptr + column, float("-inf"))
        for block in tl.static_range(2 if SHARED else 1):
            at = (block * num_columns + column).to(tl.int64) * STRIDE + depth
            tl.store(pool_ptr + at, tl.zeros((WIDTH,), pool_ptr.dtype.element_ty), mask=stored)
        return
    step = tl.load(counter_ptr)
    beta = fixed_beta if FIXED else tl.load(beta_ptr)
    index = tl.load(index_ptr + item)
    time = item
    if TIMES == "given":
        time = tl.load(times_ptr + item).to(tl.int32)
    at = item.to(tl.int64) * D + depth
    a, b = _load(a_ptr, at, wide), _load(b_ptr, at, wide)
    if CARRIED == "encode":
        held = _load(carried_ptr, at, wide)
    tl.store(step_ptr, step, mask=item == 0)
    if FIXED:
        tl.store(beta_ptr, beta, mask=item == 0)
    in_range = (index >= 0) & (index < num_samples)
    chain = tl.minimum(tl.maximum(index, 0), num_samples - 1)
    if CARRIED != "none":
        held_id = carried_ids(states_ptr, chain, seed_key, num_samples, SIDE)
    if CARRIED == "cached":
        held = _load(carried_ptr, chain * D + depth, wide)

    a, norm_a = _unit(a, NORMALIZE)
    b, norm_b = _unit(b, NORMALIZE)
    positive = tl.sum(a * b, 0)
    finite = _all(_is_finite(a) & _is_finite(b))
    valid = in_range & finite
    tl.store(norms_ptr + item, norm_a)
    tl.store(norms_ptr + num_items + item, norm_b)
    tl.store(valid_ptr + item, finite.to(tl.int32) + 2 * in_range.to(tl.int32))

    # ---- the order of proposal
    second_time = num_items + item
    if TIMES == "count":
        key = hashed.use_key(seed_key, step, FOR_ORDER + 16 * SIDE)
        time = _time(item, COPIES * num_items, key, ITEMS)
        if COPIES == 2:
            second_time = _time(num_items + item, COPIES * num_items, key, ITEMS)
    column = _tile_column(time, TILE)
    for copy in tl.static_range(COPIES):
        place = column if copy == 0 else second_time
        tl.store(column_ptr + copy * num_items + item, place)
        tl.store(pool_ids_ptr + place, chain.to(tl.int32))
        tl.store(penalty_ptr + place, tl.where(valid, 0.0, float("-inf")))

    # ---- rows and columns
    kind = queries_ptr.dtype.element_ty
    row_at = item.to(tl.int64) * STRIDE + depth
    tl.store(queries_ptr + row_at, a.to(kind), mask=stored)
    if VIEWS == 2:
        second = (num_items + item).to(tl.int64) * STRIDE + depth
        tl.store(queries_ptr + second, b.to(kind), mask=stored)
    if SHARED:
        first, second = _places(column, second_time, seed_key, step, item, num_columns, COPIES)
        pool_at = first.to(tl.int64) * STRIDE + depth
        tl.store(pool_ptr + pool_at, tl.where(valid, a, 0.0).to(kind), mask=stored)
    else:
        second = column
    pool_at = second.to(tl.int64) * STRIDE + depth
    tl.store(pool_ptr + pool_at, tl.where(valid, b, 0.0).to(kind), mask=stored)

    if CARRIED == "encode":
        held, norm = _unit(held, NORMALIZE)
        tl.store(norms_ptr + 2 * num_items + item, norm)
        # as in the twin, a carried embedding that is no number makes the row's value none
        positive += 0 * tl.sum(held, 0)
    tl.store(positive_ptr + item, positive)
    if CARRIED != "none":  # ---- the carried state
        usable = held_id != chain
        if CARRIED == "cached":
            seen = _all(_is_finite(held))
            usable = usable & seen
            held = tl.where(seen, held, 0.0)
            tl.store(held_ptr + at, held, mask=wide)  # the table may change before `finish`
        for view in tl.static_range(VIEWS):
            similarity = tl.sum((a if view == 0 else b) * held, 0)
            logit = similarity * beta
            logit = tl.where(tl.abs(logit) < float("inf"), logit, float("-inf"))
            row = view * num_items + item
            tl.store(start_similarity_ptr + row, similarity)
            tl.store(start_logit_ptr + row, tl.where(usable, logit, float("-inf")))
            row += VIEWS * num_items
            if COPIES == 2 and ISIR:  # the set holds the carried item as often as any other
                logit += 0.6931471805599453
            tl.store(start_logit_ptr + row, tl.where(usable, logit, float("-inf")))


@triton.jit
def _time(column, num_columns, key, COLUMNS: tl.constexpr):
    """When a column is proposed: how many have a smaller key (`rng.permutation`)."""
    others = tl.arange(0, COLUMNS)
    zero = hashed.hash_row(column * 0, key)
    keys = hashed.bits(zero, hashed.hash_column(others, key))
    mine = hashed.bits(zero, hashed.hash_column(column, key))
    before = (keys < mine) | ((keys == mine) & (others < column))
    return tl.sum((before & (others < num_columns)).to(tl.int32), 0)


@triton.jit
def _places(column, second_column, seed_key, step, item, num_columns, COPIES: tl.constexpr):
    """Where in the pool of shared views the two copies of an item stand."""
    if COPIES == 2:
        first, second = column, second_column
    else:
        block = 1 - heads(seed_key, step, item * 0, item, FOR_COPY).to(tl.int32)
        first, second = block * num_columns + column, (1 - block) * num_columns + column
    return first, second


@triton.jit
def _tile_column(time, TILE: tl.constexpr):
    """Where in the pool the proposal of a time stands: bit-reversed inside its tile."""
    if TILE > 1:
        time = time // TILE * TILE + bit_reversed(time % TILE)
    return time


@triton.jit
def finish_kernel(
    a_ptr, b_ptr,
    carried_ptr,  # "encode" as given, "cached" as held by `prepare`
    grad_queries_ptr, grad_pool_ptr,  # [N,P] and [blocks*K,P] float32
    column_ptr, norms_ptr, pull_ptr, carried_weight_ptr,
    grad_ptr,  # [] gradient of the loss
    step_ptr, grad_a_ptr, grad_b_ptr, grad_carried_ptr,  # [], [B,D] out
    seed_key, num_items, num_columns, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, SHARED: tl.constexpr, VIEWS: tl.constexpr,
    CARRIED: tl.constexpr, COPIES: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of an item's embeddings."""
    item = tl.program_id(0)
    depth = tl.arange(0, WIDTH)
    wide = depth < D
    at = item.to(tl.int64) * D + depth
    column = tl.load(column_ptr + item)
    second_column = column
    if COPIES == 2:
        second_column = tl.load(column_ptr + num_items + item)
    outer = tl.load(grad_ptr).to(tl.float32)
    norm_a, norm_b = tl.load(norms_ptr + item), tl.load(norms_ptr + num_items + item)
    a, b = _load(a_ptr, at, wide), _load(b_ptr, at, wide)
    pull = tl.load(pull_ptr + item)
    row_at = item.to(tl.int64) * STRIDE + depth
    grad_a = tl.load(grad_queries_ptr + row_at, mask=wide, other=0.0)
    grad_b = tl.zeros((WIDTH,), tl.float32)
    if VIEWS == 2:
        pull += tl.load(pull_ptr + num_items + item)
        second = (num_items + item).to(tl.int64) * STRIDE + depth
        grad_b += tl.load(grad_queries_ptr + second, mask=wide, other=0.0)
    if CARRIED != "none":
        held = _load(carried_ptr, at, wide)
        weight_a = tl.load(carried_weight_ptr + item)
        weight_b = 0.0
        if VIEWS == 2:
            weight_b = tl.load(carried_weight_ptr + num_items + item)
    if CARRIED == "encode":
        norm = tl.load(norms_ptr + 2 * num_items + item)
    if SHARED:
        step = tl.load(step_ptr)
        at_a, at_b = _places(column, second_column, seed_key, step, item, num_columns, COPIES)
        pool_at = at_a.to(tl.int64) * STRIDE + depth
        grad_a += tl.load(grad_pool_ptr + pool_at, mask=wide, other=0.0)
    else:
        at_b = column
    pool_at = at_b.to(tl.int64) * STRIDE + depth
    grad_b += tl.load(grad_pool_ptr + pool_at, mask=wide, other=0.0)

    a, b = _divided(a, norm_a, NORMALIZE), _divided(b, norm_b, NORMALIZE)
    grad_a -= pull * b
    grad_b -= pull * a
    if CARRIED == "encode":
        held = _divided(held, norm, NORMALIZE)
        grad_held = weight_a * a + weight_b * b
        grad_held = _through_norm(grad_held, held, norm, NORMALIZE) * outer
        tl.store(grad_carried_ptr + at, grad_held, mask=wide)
    if CARRIED != "none":
        grad_a += weight_a * held
        grad_b += weight_b * held
    grad_a = _through_norm(grad_a, a, norm_a, NORMALIZE) * outer
    grad_b = _through_norm(grad_b, b, norm_b, NORMALIZE) * outer
    tl.store(grad_a_ptr + at, grad_a, mask=wide)
    tl.store(grad_b_ptr + at, grad_b, mask=wide)


@triton.jit
def _through_norm(grad, unit, norm, NORMALIZE: tl.constexpr):
    """Gradient of z from that of z / |z|; none where z has no direction."""
    if NORMALIZE:
        grad = _divided(grad - tl.sum(grad * unit, 0) * unit, norm, NORMALIZE)
    return grad
