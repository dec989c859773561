"""Launching the tiles of a large batch.

Shapes: as in `tiles_triton`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negchain import draws
from negchain.fast.backends import float32_products
from negchain.fast.fused import tile_rows_triton, tiles_triton
from negchain.fast.fused.plan import Plan, Walked

MAX_SPLIT_BLOCKS = 160  # of rows: beyond, there is enough to do without splitting the columns


def walk_tiles(
    walked: Walked,
    start_logit: Tensor,
    start_similarity: Tensor,
    positive: Tensor,
    same: Tensor,
    plan: Plan,
) -> None:
    """Walk (or weigh) all rows, then what follows for each; fills `walked`."""
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    device, isir, sparse = positive.device, plan.weighting == "isir", plan.is_sparse
    skipped = 0 if isir else plan.skipped // plan.count_every
    counted = triton.cdiv(size, plan.count_every) - skipped if sparse else 0
    slots = counted + 1
    num_tiles, every = columns // tiles_triton.TILE, plan.count_every // tiles_triton.TILE
    blocks = plan.views * triton.cdiv(size, tiles_triton.ROWS)
    split = skipped * every
    if isir:
        split = counted // 2 * every if sparse else num_tiles // 2
    parts = 2 if 0 < split < num_tiles and plan.bounded and blocks <= MAX_SPLIT_BLOCKS else 1

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    positions, runs, last = new(rows, slots), new(rows), new(parts, rows)
    weights, ends, accepts, reached = (
        new(*s, dtype=torch.float32)
        for s in (
            (rows, slots),
            (parts, 5, rows),
            (2, rows),
            (rows, slots) if parts == 2 or isir else (1, 1),
        )
    )
    drive, joint = new(rows, dtype=torch.float32), new(rows, dtype=torch.float32)
    tiles_triton.tiles_kernel[(blocks, parts)](
        *operands(walked), plan.index, walked.pool_ids, walked.penalty, walked.repeated,
        start_logit, walked.beta, walked.step, positions, weights, runs, reached, ends, last,
        accepts, drive, draws.seed_key(plan.seed), size, rows, columns, slots, skipped, every,
        split, plan.num_samples, SIDE=plan.side, ISIR=isir, GROUPED=isir and sparse,
        BOUNDED=plan.bounded, SPLIT=parts == 2, **shape(walked),
    )  # fmt: skip
    tile_rows_triton.tile_rows_kernel[(rows,)](
        (walked.penalty == 0).sum(), positive, start_logit, start_similarity, ends, last, accepts,
        reached, same, positions, weights, runs, drive, walked.beta, walked.step, walked.last,
        walked.pull, joint, walked.carried_weight, walked.stats, plan.faults,
        draws.seed_key(plan.seed), rows, size, counted, plan.log_negatives, SIDE=plan.side,
        TILE=tiles_triton.TILE, SLOTS=triton.next_power_of_2(slots), SPLIT=parts == 2, ISIR=isir,
        GROUPED=isir and sparse, ALL=plan.denominator == "all", num_warps=1,
    )  # fmt: skip
    if sparse:
        walked.visits = positions, weights, runs
    else:
        walked.joint = joint


def _uses_tma(rows: Tensor) -> bool:
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] >= 9


def operands(walked: Walked) -> tuple[Any, Any]:
    """Queries and pool, as descriptors of their tiles where the hardware copies tiles itself."""
    if not _uses_tma(walked.pool):
        return walked.queries, walked.pool
    depth = tiles_triton.DEPTH
    return (
        TensorDescriptor.from_tensor(walked.queries, [tiles_triton.ROWS, depth]),
        TensorDescriptor.from_tensor(walked.pool, [tiles_triton.TILE, depth]),
    )


def shape(walked: Walked) -> dict[str, Any]:
    """Tile sizes and how to launch them."""
    return {
        "STRIDE": walked.pool.shape[1],
        "ROWS": tiles_triton.ROWS,
        "TILE": tiles_triton.TILE,
        "DEPTH": tiles_triton.DEPTH,
        "PRECISION": float32_products(),
        "TMA": _uses_tma(walked.pool),
        "num_warps": tiles_triton.NUM_WARPS,
        "num_stages": tiles_triton.NUM_STAGES if walked.pool.element_size() == 2 else 2,
    }
