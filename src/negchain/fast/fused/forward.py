"""The forward pass of a side: lay out, walk (or weigh), store.

    prepare -> similarities -> rows | in_batch   (small batch)   -> commit
    prepare -> tiles                             (large batch)   -> commit

Shapes: as in `layout_triton`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from negchain import draws
from negchain.fast.fused import (
    MAX_COLUMNS,
    commit_triton,
    in_batch_triton,
    layout_triton,
    ranks,
    rows_triton,
    tiles_triton,
)
from negchain.fast.fused.plan import Plan, Walked, given
from negchain.fast.fused.tiles import walk_tiles

COMMITTED = 8  # items per program that stores: 8 x 1,024 pairs fit into its registers
WIDTH_OF_A_WARP = 512  # an item's numbers of one embedding; one warp needs no barriers


def carried_ids(states: Tensor, side: int, index: Tensor, seed: int) -> Tensor:  # -> [B] int64
    """`ChainTable.ids` in one launch, from the states [M] of a side."""
    ids = torch.empty_like(index)
    items = 128
    layout_triton.ids_kernel[(triton.cdiv(len(index), items),)](
        ids, index, states, draws.seed_key(seed), len(index), len(states), SIDE=side, ITEMS=items,
        num_warps=4,
    )  # fmt: skip
    return ids


def walk(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> tuple[Walked, Tensor]:
    """What the backward pass needs, and the value, []; in training mode state changes."""
    walked, start_logit, start_similarity, positive, valid = _prepare(a, b, carried, beta, plan)
    same = plan.index  # unused where it is not counted
    if plan.weighting == "isir":
        walked.repeated = ranks.repeated(plan.index, valid).repeat(plan.copies)
    if plan.states is None:
        _in_batch(walked, positive, plan)
    elif plan.tiled:
        same = ranks.num_equal(plan.index, valid)
        walk_tiles(walked, start_logit, start_similarity, positive, same, plan)
    else:
        _rows(walked, start_logit, start_similarity, positive, plan)
    return walked, _commit(walked, valid, same, plan)


def _commit(walked: Walked, valid: Tensor, same: Tensor, plan: Plan) -> Tensor:
    """Store what the next visit needs; the value of the side, []."""
    size, rows, dim = len(plan.index), len(walked.pull), plan.dim
    value = walked.pull.new_empty(())
    unused = walked.pull
    commit_triton.commit_kernel[(triton.cdiv(size, COMMITTED) + 1,)](
        plan.index, valid, walked.last, walked.pool, walked.pool_ids, walked.averages, same,
        walked.step, walked.stats, value, walked.moved, plan.step,
        given(plan.states, unused), given(plan.keys, unused), given(plan.averages, unused),
        plan.faults, draws.seed_key(plan.seed), size, plan.num_columns, plan.num_samples, rows,
        SIDE=plan.side, D=dim, WIDTH=triton.next_power_of_2(dim), STRIDE=walked.pool.shape[1],
        ITEMS=COMMITTED, CHUNK=min(1024, triton.next_power_of_2(size)), COUNTED=plan.tiled,
        VIEWS=plan.views, BLOCKS=plan.blocks, CARRIED=plan.carried, TRAIN=plan.training,
        AVERAGES=plan.averages is not None, ROWS=min(2048, triton.next_power_of_2(rows)),
        COUNTS=plan.counts, num_warps=1 if size <= 256 else 4,
    )  # fmt: skip
    return value


def _prepare(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> tuple[Walked, Tensor, Tensor, Tensor, Tensor]:
    (size, dim), device = a.shape, a.device
    rows, columns = plan.views * size, plan.num_columns
    stride, kind = dim, torch.float32
    if plan.tiled:
        stride = triton.cdiv(dim, tiles_triton.DEPTH) * tiles_triton.DEPTH
        kind = a.dtype if a.dtype in (torch.bfloat16, torch.float16) else torch.float32
    times = plan.index
    if plan.weighting != "mh":
        times_from = "items"
    elif size <= MAX_COLUMNS:
        times_from = "count"
    else:
        times_from = "given"
        times = ranks.times(plan.seed, plan.step, draws.STREAM_ORDER + 16 * plan.side, size)
    in_batch = times
    if plan.weighting == "isir":
        assert plan.states is not None
        held = carried_ids(plan.states, plan.side, plan.index, plan.seed)
        in_batch = ranks.among(held, plan.index)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    walked = Walked(
        beta=beta if isinstance(beta, Tensor) else new(), step=torch.empty_like(plan.step),
        queries=new(rows, stride, dtype=kind), pool=new(plan.blocks * columns, stride, dtype=kind),
        pool_ids=new(columns, dtype=torch.int32), penalty=new(columns),
        column=new(plan.copies * size, dtype=torch.int32), norms=new(3, size), pull=new(rows),
        carried_weight=new(rows), stats=new(8, rows), moved=new(2, size),
        last=new(rows, dtype=torch.int32), averages=new(rows),
        held=new(size, dim) if plan.carried == "cached" else new(0),
        repeated=plan.index,  # unless there is i-SIR
    )  # fmt: skip
    start_logit, start_similarity, positive = new(2, rows), new(rows), new(size)
    valid = new(size, dtype=torch.int32)
    width = triton.next_power_of_2(stride)
    items = triton.next_power_of_2(plan.copies * size) if times_from == "count" else 1
    layout_triton.prepare_kernel[(columns // plan.copies,)](
        a, b, given(carried if plan.keys is None else plan.keys, positive), plan.index, in_batch,
        given(plan.states, positive), times, plan.step, walked.beta, walked.step, walked.queries,
        walked.pool, walked.pool_ids, walked.penalty, walked.column, walked.norms, positive,
        start_similarity, start_logit, valid, walked.held,
        0.0 if isinstance(beta, Tensor) else beta, draws.seed_key(plan.seed), size, columns,
        plan.num_samples, SIDE=plan.side, D=dim, WIDTH=width, STRIDE=stride, ITEMS=items,
        SHARED=plan.shared, VIEWS=plan.views, CARRIED=plan.carried, TIMES=times_from,
        TILE=tiles_triton.TILE if plan.tiled else 1, CHECK_BATCH=plan.weighting == "isir",
        COPIES=plan.copies, NORMALIZE=plan.normalize, FIXED=not isinstance(beta, Tensor),
        num_warps=max(1, min(8, max(width, items) // WIDTH_OF_A_WARP)),
    )  # fmt: skip
    return walked, start_logit, start_similarity, positive, valid


def _in_batch(walked: Walked, positive: Tensor, plan: Plan) -> None:
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    similarity = walked.queries @ walked.pool.T
    walked.weights = torch.empty_like(similarity)
    tile = triton.next_power_of_2(max(plan.blocks * columns, 16))
    in_batch_triton.in_batch_kernel[(rows,)](
        similarity, plan.index, walked.pool_ids, walked.penalty, positive,
        given(plan.averages, walked.pull), walked.beta, walked.weights, walked.pull,
        walked.averages, walked.last, walked.stats, plan.faults, rows, size, columns,
        plan.num_samples, plan.gamma, plan.log_negatives, TILE=tile, BLOCKS=plan.blocks,
        SOGCLR=plan.weighting == "sogclr", ALL=plan.denominator == "all",
        num_warps=max(1, min(4, tile // 256)),
    )  # fmt: skip


def _rows(
    walked: Walked,
    start_logit: Tensor,
    start_similarity: Tensor,
    positive: Tensor,
    plan: Plan,
) -> None:
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    similarity = walked.queries @ walked.pool.T
    walked.weights = torch.empty(rows, columns, device=similarity.device)
    tile = triton.next_power_of_2(max(columns, 16))
    rows_triton.rows_kernel[(rows,)](
        similarity, plan.index, walked.pool_ids, walked.penalty, walked.repeated, positive,
        start_logit, start_similarity, walked.beta, walked.step, walked.weights, walked.pull,
        walked.carried_weight, walked.last, walked.stats, plan.faults,
        draws.seed_key(plan.seed), rows, size, columns, plan.num_samples, plan.burn_in,
        plan.count_every, plan.log_negatives, SIDE=plan.side, TILE=tile,
        BLOCKS=plan.blocks, ISIR=plan.weighting == "isir", ALL=plan.denominator == "all",
        num_warps=max(1, min(4, tile // 256)),
    )  # fmt: skip
