"""Ranks and counts in a batch by comparing all pairs.

A program takes ITEMS items and passes over all items in chunks; what it has counted stays in
registers, so there is one launch and nothing in between. A chunk has as many items as a program
has threads, so that every thread compares the item it read with all ITEMS.

Shapes: `B` items.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from negchain.fast import draws_triton as hashed

LARGEST = tl.constexpr(2**31 - 1)
NOBODY = tl.constexpr(-(2**31))
UNROLL = tl.constexpr(4)  # chunks that are read before the first is compared


@triton.jit
def _keys(items, key):
    """The keys `draws.permutation` sorts, int32 in [0, 2^31)."""
    return hashed.bits(hashed.hash_row(key * 0, key), hashed.hash_column(items, key))


@triton.jit
def _smaller(keys, mine):
    return keys < mine


@triton.jit
def times_kernel(
    times_ptr,  # [B] out
    step_ptr, seed_key, num_items, STREAM: tl.constexpr, ITEMS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many keys are smaller than an item's, or equal and of an earlier item."""
    first = tl.program_id(0) * ITEMS
    items = first + tl.arange(0, ITEMS)
    key = hashed.stream_key(seed_key, tl.load(step_ptr), STREAM)
    mine = _keys(items, key)
    counts = tl.zeros((ITEMS, CHUNK), tl.int32)
    for begin in tl.range(0, num_items, CHUNK, loop_unroll_factor=UNROLL):
        others = begin + tl.arange(0, CHUNK)
        keys = tl.where(others < num_items, _keys(others, key), LARGEST)
        # lowered by one, an equal key counts: one comparison of a pair instead of three
        keys -= (others < first).to(tl.int32)
        counts += _smaller(keys[None, :], mine[:, None]).to(tl.int32)
    ties = (mine[None, :] == mine[:, None]) & (items[None, :] < items[:, None])
    times = tl.sum(counts, 1) + tl.sum(ties.to(tl.int32), 1)
    tl.store(times_ptr + items, times, mask=items < num_items)


@triton.jit
def _valid_ids(ids_ptr, valid_ptr, items, num_items):
    """Ids of items, int32; an item that is not valid or not there has a negative one of its own."""
    there = items < num_items
    ids = tl.load(ids_ptr + items, mask=there, other=0).to(tl.int32)
    valid = tl.load(valid_ptr + items, mask=there, other=0) == 3
    return tl.where(valid, ids, -1 - items)


@triton.jit
def _narrow_ids(ids_ptr, items, num_items):
    """Any int64 ids as int32; one that is none, or not there, is nobody's."""
    wide = tl.load(ids_ptr + items, mask=items < num_items, other=NOBODY)
    ids = wide.to(tl.int32)
    return tl.where(ids == wide, ids, NOBODY)


@triton.jit
def matches_kernel(
    found_ptr,  # [B] out
    ids_ptr,  # [B] those of valid items in [0, 2^31)
    others_ptr,  # [B] where not VALID: any
    valid_ptr,  # [B]
    num_items,
    VALID: tl.constexpr,  # valid items of the batch are compared with each other, else with others
    EARLIER: tl.constexpr,  # with earlier ones only
    COUNT: tl.constexpr,  # how many, else whether there is any
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many of the others have an item's id."""
    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    if VALID:
        mine = _valid_ids(ids_ptr, valid_ptr, items, num_items)
    else:
        mine = tl.load(ids_ptr + items, mask=items < num_items, other=0).to(tl.int32)
    counts = tl.zeros((ITEMS, CHUNK), tl.int32)
    stop = tl.minimum((tl.program_id(0) + 1) * ITEMS, num_items) if EARLIER else num_items
    for begin in tl.range(0, stop, CHUNK, loop_unroll_factor=UNROLL):
        others = begin + tl.arange(0, CHUNK)
        if VALID:
            ids = _valid_ids(ids_ptr, valid_ptr, others, num_items)
        else:
            ids = _narrow_ids(others_ptr, others, num_items)
        equal = ids[None, :] == mine[:, None]
        if EARLIER:
            equal = equal & (others[None, :] < items[:, None])
        counts += equal.to(tl.int32)
    found = tl.sum(counts, 1)
    if not COUNT:
        found = (found > 0).to(tl.int32)
    tl.store(found_ptr + items, found, mask=items < num_items)
