"""The forward pass of a side, kernel by kernel: lay out the batch, weigh its columns, store state.

    prepare -> similarities -> rows   (small batch)   -> commit
    prepare -> tiles -> tile_rows     (large batch)   -> commit

Shapes: as in `layout_triton`; those of tiles as in `tiles_triton`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negchain import rng
from negchain.fast.backends import copies_tiles, float32_products, on_its_device
from negchain.fast.fused import (
    MAX_COLUMNS,
    commit_triton,
    layout_triton,
    rows_triton,
    tiles_triton,
)
from negchain.fast.fused.plan import Plan, Walked, given
from negchain.pool import first_writer, is_among

COMMITTED = 8  # items per program that stores: 8 x 1,024 pairs fit into its registers
WIDTH_OF_A_WARP = 512  # an item's numbers of one embedding; one warp needs no barriers
MAX_SPLIT_BLOCKS = 160  # of rows: more of them fill a GPU without splitting the columns


@on_its_device
def carried_ids(states: Tensor, side: int, index: Tensor, seed: int) -> Tensor:  # -> [B] int64
    """`ChainTable.ids` in one launch, from the states [M] of a side."""
    ids = torch.empty_like(index)
    items = 128
    layout_triton.ids_kernel[(triton.cdiv(len(index), items),)](
        ids, index, states, rng.seed_key(seed), len(index), len(states), SIDE=side, ITEMS=items,
        num_warps=4,
    )  # fmt: skip
    return ids


def walk(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> tuple[Walked, Tensor]:
    """What the backward pass needs, and the value, []; in training mode state changes."""
    walked = _prepare(a, b, carried, beta, plan)
    same = plan.index  # unused where it is not counted
    if plan.weighting == "isir":
        walked.repeated = repeated(plan.index, walked.valid).repeat(plan.copies)
        # {carried state} and batch are a set: a carried state that is in the batch counts once
        as_walked = walked.start_logit[1].view(plan.views, -1)
        as_walked.masked_fill_(_is_in_batch(walked, plan), -math.inf)
    if plan.tiled:
        same = num_equal(plan.index, walked.valid)
        _tiles(walked, same, plan)
    else:
        _rows(walked, plan)
    return walked, _commit(walked, same, plan, a.shape[1])


def _prepare(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> Walked:
    (size, dim), device = a.shape, a.device
    rows, columns = plan.views * size, plan.num_columns
    stride, kind = dim, torch.float32
    if plan.tiled:
        stride = triton.cdiv(dim, tiles_triton.DEPTH) * tiles_triton.DEPTH
        kind = a.dtype  # others than `fused.DTYPES` do not come here
    times = plan.index
    if plan.weighting != "mh":
        times_from = "items"
    elif size <= MAX_COLUMNS:
        times_from = "count"
    else:
        times_from = "given"
        times = proposal_times(plan.seed, plan.step, rng.FOR_ORDER + 16 * plan.side, size)

    new = partial(torch.empty, dtype=torch.float32, device=device)
    walked = Walked(
        beta=beta if isinstance(beta, Tensor) else new(()), step=torch.empty_like(plan.step),
        queries=new(rows, stride, dtype=kind), pool=new(plan.blocks * columns, stride, dtype=kind),
        pool_ids=new(columns, dtype=torch.int32), penalty=new(columns),
        column=new(plan.copies * size, dtype=torch.int32), norms=new(3, size), positive=new(size),
        start_similarity=new(rows), start_logit=new(2, rows), valid=new(size, dtype=torch.int32),
        pull=new(rows), carried_weight=new(rows), stats=new(8, rows), moved=new(2, size),
        last=new(rows, dtype=torch.int32), averages=new(rows),
        held=new(size, dim) if plan.carried == "cached" else new(0),
        repeated=plan.index,  # unless there is i-SIR
    )  # fmt: skip
    width = triton.next_power_of_2(stride)
    items = triton.next_power_of_2(plan.copies * size) if times_from == "count" else 1
    unused = walked.positive
    layout_triton.prepare_kernel[(columns // plan.copies,)](
        a, b, given(carried if plan.keys is None else plan.keys, unused), plan.index,
        given(plan.states, unused), times, plan.step, walked.beta, walked.step, walked.queries,
        walked.pool, walked.pool_ids, walked.penalty, walked.column, walked.norms, walked.positive,
        walked.start_similarity, walked.start_logit, walked.valid, walked.held,
        0.0 if isinstance(beta, Tensor) else beta, rng.seed_key(plan.seed), size, columns,
        plan.num_samples, SIDE=plan.side, D=dim, WIDTH=width, STRIDE=stride, ITEMS=items,
        SHARED=plan.shared, VIEWS=plan.views, CARRIED=plan.carried, TIMES=times_from,
        TILE=tiles_triton.TILE if plan.tiled else 1, ISIR=plan.weighting == "isir",
        COPIES=plan.copies, NORMALIZE=plan.normalize, FIXED=not isinstance(beta, Tensor),
        num_warps=max(1, min(8, max(width, items) // WIDTH_OF_A_WARP)),
    )  # fmt: skip
    return walked


def _is_in_batch(walked: Walked, plan: Plan) -> Tensor:  # [B] bool
    """Whether an item's carried state is a valid item of the batch."""
    assert plan.states is not None
    held = carried_ids(plan.states, plan.side, plan.index, plan.seed)
    return is_among(held, torch.where(walked.valid == 3, plan.index, -1))


def _rows(walked: Walked, plan: Plan) -> None:
    """A small batch: all columns of a row at once."""
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    width = plan.blocks * columns if plan.states is None else columns
    similarity = walked.queries @ walked.pool.T
    walked.weights = torch.empty(rows, width, device=similarity.device)
    tile = triton.next_power_of_2(max(width, 16))
    launch: dict[str, Any] = {
        "TILE": tile, "BLOCKS": plan.blocks, "ALL": plan.denominator == "all",
        "num_warps": max(1, min(4, tile // 256)),
    }  # fmt: skip
    if plan.states is None:
        rows_triton.in_batch_kernel[(rows,)](
            similarity, plan.index, walked.pool_ids, walked.penalty, walked.positive,
            given(plan.averages, walked.pull), walked.beta, walked.weights, walked.pull,
            walked.averages, walked.last, walked.stats, plan.faults, rows, size, columns,
            plan.num_samples, plan.gamma, plan.log_negatives, SOGCLR=plan.weighting == "sogclr",
            **launch,
        )  # fmt: skip
        return
    rows_triton.rows_kernel[(rows,)](
        similarity, plan.index, walked.pool_ids, walked.penalty, walked.repeated, walked.positive,
        walked.start_logit, walked.start_similarity, walked.beta, walked.step, walked.weights,
        walked.pull, walked.carried_weight, walked.last, walked.stats, plan.faults,
        rng.seed_key(plan.seed), rows, size, columns, plan.num_samples, plan.burn_in,
        plan.count_every, plan.log_negatives, SIDE=plan.side, ISIR=plan.weighting == "isir",
        **launch,
    )  # fmt: skip


def _tiles(walked: Walked, same: Tensor, plan: Plan) -> None:
    """Walk (or weigh) all rows in tiles, then what follows for each row."""
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    device, isir, sparse = walked.pull.device, plan.weighting == "isir", plan.is_sparse
    burn_in = plan.burn_in if plan.burn_in >= 1 else size * plan.burn_in + 1e-3
    skipped = min(int(burn_in), size - 1) // plan.count_every  # ends of tiles before one counts
    counted = triton.cdiv(size, plan.count_every) - skipped if sparse else 0
    slots = counted + 1
    num_tiles, every = columns // tiles_triton.TILE, plan.count_every // tiles_triton.TILE
    blocks = plan.views * triton.cdiv(size, tiles_triton.ROWS)
    split = skipped * every
    if isir:
        split = counted // 2 * every if sparse else num_tiles // 2
    parts = 2 if 0 < split < num_tiles and plan.bounded and blocks <= MAX_SPLIT_BLOCKS else 1

    integers = partial(torch.empty, dtype=torch.int32, device=device)
    floats = partial(torch.empty, dtype=torch.float32, device=device)
    positions, runs, last = integers(rows, slots), integers(rows), integers(parts, rows)
    weights, ends, accepts = floats(rows, slots), floats(parts, 5, rows), floats(2, rows)
    reached = floats(rows, slots) if parts == 2 or isir else floats(1, 1)
    drive, joint = floats(rows), floats(rows)
    operands, launch = tile_launch(walked)
    shared = {"SIDE": plan.side, "ISIR": isir, "GROUPED": isir and sparse, "SPLIT": parts == 2}
    tiles_triton.tiles_kernel[(blocks, parts)](
        *operands, plan.index, walked.pool_ids, walked.penalty, walked.repeated,
        walked.start_logit, walked.beta, walked.step, positions, weights, runs, reached, ends, last,
        accepts, drive, rng.seed_key(plan.seed), size, rows, columns, slots, skipped, every,
        split, plan.num_samples, BOUNDED=plan.bounded, **shared, **launch,
    )  # fmt: skip
    rows_triton.tile_rows_kernel[(rows,)](
        (walked.penalty == 0).sum(), walked.positive, walked.start_logit, walked.start_similarity,
        ends, last, accepts, reached, same, positions, weights, runs, drive, walked.beta,
        walked.step, walked.last, walked.pull, joint, walked.carried_weight, walked.stats,
        plan.faults, rng.seed_key(plan.seed), rows, size, counted, plan.log_negatives,
        TILE=tiles_triton.TILE, SLOTS=triton.next_power_of_2(slots),
        ALL=plan.denominator == "all", num_warps=1, **shared,
    )  # fmt: skip
    if sparse:
        walked.visits = positions, weights, runs
    else:
        walked.joint = joint


def tile_launch(walked: Walked) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Queries and pool as a kernel of tiles takes them, and its sizes and options.

    Where the hardware copies tiles itself, it needs their descriptors.
    """
    queries, pool = walked.queries, walked.pool
    rows, tile, depth = tiles_triton.ROWS, tiles_triton.TILE, tiles_triton.DEPTH
    launch = {
        "STRIDE": pool.shape[1], "ROWS": rows, "TILE": tile, "DEPTH": depth,
        "PRECISION": float32_products(), "TMA": copies_tiles(pool),
        "num_warps": tiles_triton.NUM_WARPS,
        "num_stages": tiles_triton.NUM_STAGES if pool.element_size() == 2 else 2,
    }  # fmt: skip
    if not launch["TMA"]:
        return (queries, pool), launch
    described = TensorDescriptor.from_tensor
    return (described(queries, [rows, depth]), described(pool, [tile, depth])), launch


def _commit(walked: Walked, same: Tensor, plan: Plan, dim: int) -> Tensor:
    """Store what the next visit needs; the value of the side, []."""
    size, rows = len(plan.index), len(walked.pull)
    value = walked.pull.new_empty(())
    unused = walked.pull
    commit_triton.commit_kernel[(triton.cdiv(size, COMMITTED) + 1,)](
        plan.index, walked.valid, walked.last, walked.pool, walked.pool_ids, walked.averages, same,
        walked.step, walked.stats, value, walked.moved, plan.step,
        given(plan.states, unused), given(plan.keys, unused), given(plan.averages, unused),
        plan.faults, rng.seed_key(plan.seed), size, plan.num_columns, plan.num_samples, rows,
        SIDE=plan.side, D=dim, WIDTH=triton.next_power_of_2(dim), STRIDE=walked.pool.shape[1],
        ITEMS=COMMITTED, CHUNK=min(1024, triton.next_power_of_2(size)), COUNTED=plan.tiled,
        VIEWS=plan.views, BLOCKS=plan.blocks, CARRIED=plan.carried, TRAIN=plan.training,
        AVERAGES=plan.averages is not None, ROWS=min(2048, triton.next_power_of_2(rows)),
        COUNTS=plan.counts, num_warps=1 if size <= 256 else 4,
    )  # fmt: skip
    return value


# ---------------------------------------------------------------------- ids, by sorting


def proposal_times(seed: int, step: Tensor, use: int, size: int) -> Tensor:  # [] -> [B] int32
    """When each item is proposed: the inverse of `rng.permutation`."""
    order = rng.permutation(seed, step, use, size)
    found = torch.empty_like(order, dtype=torch.int32)
    found[order] = torch.arange(size, dtype=torch.int32, device=order.device)
    return found


def num_equal(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """How many valid items (marked by 3) share each item's id; 1 for an item that is not valid.

    Ids of valid items must be in [0, 2^31), as the fused path's are.
    """
    different = -1 - torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    ids = torch.where(valid == 3, ids.int(), different)
    ordered = ids.sort().values
    first = torch.searchsorted(ordered, ids, out_int32=True)
    return torch.searchsorted(ordered, ids, out_int32=True, right=True) - first


def repeated(ids: Tensor, valid: Tensor) -> Tensor:  # [B] int64, [B] int32 -> [B] int32
    """Which valid items have the id of an earlier valid one."""
    good = valid == 3
    return (good & (first_writer(ids, good) < torch.arange(len(ids), device=ids.device))).int()
