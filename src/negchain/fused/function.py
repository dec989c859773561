"""The EMC² loss of one side as one differentiable function of the embeddings.

    prepare -> similarities -> rows   (small batch)        -> commit -> value
    prepare -> tiles                  (streaming)          -> commit -> value
    backward: weights x keys, weights^T x queries (sparse when streaming) -> finish

Everything a side needs travels in a `Plan`; nothing here waits for the device.

Shapes: as in `layout_triton`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from negchain import draws
from negchain.fused import MAX_COLUMNS, layout_triton, rows_triton, tiles_triton
from negchain.losses.chains import ChainTable


PANEL = 4096  # rows of i-SIR's weights at a time in its streaming backward pass


@dataclass(frozen=True)
class Plan:
    """What one side of one step works with."""

    index: Tensor  # [B] int64, chain of each item
    own: Tensor  # [B] int64, id of its positive
    chains: ChainTable
    side: int
    step: Tensor  # []
    faults: Tensor  # [2]
    log_partition: Tensor | None  # [M] running partition, denominator="all"
    kernel: str
    shared: bool
    views: int  # rows per item
    normalize: bool
    training: bool
    seed: int
    burn_in: float
    count_every: int
    partition_rate: float
    num_samples: int
    num_keys: int
    multiplicity: int
    stream: bool

    @property
    def blocks(self) -> int:
        """Blocks of columns: both copies of every item, or its one key."""
        return 2 if self.shared else 1

    @property
    def carried(self) -> str:
        """How carried states are scored."""
        return self.chains.keep

    @property
    def num_columns(self) -> int:
        """K."""
        size, tile = len(self.index), tiles_triton.TILE
        return triton.cdiv(size, tile) * tile if self.stream else size

    @property
    def log_negatives(self) -> float:
        """log m_neg."""
        return math.log(max(self.num_keys - 1, 1) * self.multiplicity)


@dataclass
class Walked:
    """What the forward pass of a side leaves for its backward pass and for `info`."""

    queries: Tensor  # [N,P]
    pool: Tensor  # [blocks*K,P]
    pool_ids: Tensor  # [K]
    penalty: Tensor  # [K]
    column: Tensor  # [B]
    norms: Tensor  # [3,B]
    pull: Tensor  # [N]
    carried_weight: Tensor  # [N]
    stats: Tensor  # [7,N] see rows_triton
    moved: Tensor  # [2,B] valid and moved, valid
    last: Tensor  # [N]
    last_logit: Tensor  # [N]
    running: Tensor  # [N]
    held: Tensor  # [B,D] cached embeddings of the carried states; [0] without
    weights: Tensor | None = None  # [N,K] pulled; small batch
    visits: tuple[Tensor, Tensor, Tensor] | None = None  # streaming MH: positions, lengths, runs
    joint: Tensor | None = None  # [N] streaming i-SIR

    def report(self, plan: Plan) -> dict[str, Any]:
        """Numbers for `info`, computed when somebody looks."""
        rows, stats, moved = self.stats.shape[1], self.stats, self.moved
        rate = "moves_per_tile" if plan.stream and plan.kernel == "mh" else "acceptance_rate"
        numbers = {
            rate: lambda: stats[1].sum() / stats[2].sum().clamp(min=1),
            "carried_mass": lambda: stats[3].mean(),
            "dropped_mass": lambda: (stats[3] - stats[4]).mean(),
            "chain_age": lambda: (moved[1].sum() - moved[0].sum()) / moved[0].sum().clamp(min=1),
            "effective_negatives": lambda: stats[5].sum() / rows,
            "global_loss": lambda: stats[0].mean(),
        }
        if plan.stream and plan.kernel == "isir":
            del numbers["acceptance_rate"], numbers["effective_negatives"]
        return numbers


def carried_ids(chains: ChainTable, side: int, index: Tensor) -> Tensor:  # [B] -> [B] int64
    """`ChainTable.ids` in one launch."""
    ids = torch.empty_like(index)
    layout_triton.ids_kernel[(len(index),)](
        ids,
        index,
        chains.states[side],
        draws.seed_key(chains.seed),
        chains.num_states,
        chains.states.shape[1],
        SIDE=side,
        OWN=chains.own,
        num_warps=1,
    )
    return ids


def fused_loss(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> tuple[Tensor, dict[str, Any]]:
    """Loss of one side, [], and its numbers for `info`.

    Args:
        a: [B, D] embeddings of the anchors (or of the first view), any floating type.
        b: [B, D] of the keys (or of the second view).
        carried: [B, D] of the carried states, with carried="encode".
        beta: inverse temperature; a tensor may be learned.
        plan: everything else.
    """
    report: dict[str, Any] = {}
    if not isinstance(beta, Tensor):
        beta = torch.full((), beta, device=a.device)
    loss: Tensor = _Loss.apply(a.contiguous(), b.contiguous(), carried, beta, plan, report)
    return loss, report


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        carried: Tensor | None,
        beta: Tensor,
        plan: Plan,
        report: dict[str, Any],
    ) -> Tensor:
        beta = beta.detach().float()
        carried = None if carried is None else carried.contiguous()
        step = plan.step.clone() if plan.training else plan.step  # the caller counts it on
        walked = _walk(a, b, carried, beta, step, plan)
        report.update(walked.report(plan))
        ctx.plan, ctx.walked, ctx.has_carried = plan, walked, carried is not None
        ctx.save_for_backward(a, b, carried, beta, step)
        return walked.stats[0].mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, carried, beta, step = ctx.saved_tensors
        plan, walked = ctx.plan, ctx.walked
        grads = _backward(a, b, carried, beta, step, grad, plan, walked)
        grad_beta = walked.stats[6].mean() * grad if ctx.needs_input_grad[3] else None
        return *grads, grad_beta, None, None


def _walk(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: Tensor, step: Tensor, plan: Plan
) -> Walked:
    walked, start_logit, start_similarity, positive, valid = _prepare(
        a, b, carried, beta, step, plan
    )
    if plan.stream:
        _tiles(walked, start_logit, start_similarity, positive, beta, step, plan)
    else:
        _rows(walked, start_logit, start_similarity, positive, beta, step, plan)
    size, dim = a.shape
    chains, side = plan.chains, plan.side
    unused = walked.pull
    same = _num_equal(plan.index) if plan.stream else plan.index
    layout_triton.commit_kernel[(size,)](
        plan.index,
        valid,
        walked.last,
        walked.last_logit,
        walked.pool,
        walked.pool_ids,
        walked.running,
        same,
        beta,
        step,
        walked.moved,
        chains.states[side],
        chains.scores[side] if plan.carried == "score" else unused,
        chains.keys[side] if plan.carried == "cached" else unused,
        _given(plan.log_partition, unused),
        plan.faults,
        draws.seed_key(plan.seed),
        size,
        plan.num_columns,
        plan.num_samples,
        SIDE=side,
        D=dim,
        WIDTH=triton.next_power_of_2(dim),
        STRIDE=walked.pool.shape[1],
        CHUNK=min(1024, triton.next_power_of_2(size)),
        COUNTED=plan.stream,
        VIEWS=plan.views,
        SHARED=plan.shared,
        CARRIED=plan.carried,
        ALL=plan.log_partition is not None,
        TRAIN=plan.training,
        num_warps=1 if size <= 256 else 4,
    )
    return walked


def _prepare(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: Tensor, step: Tensor, plan: Plan
) -> tuple[Walked, Tensor, Tensor, Tensor, Tensor]:
    (size, dim), device, chains = a.shape, a.device, plan.chains
    rows, columns = plan.views * size, plan.num_columns
    stride, kind = dim, torch.float32
    if plan.stream:
        stride = triton.cdiv(dim, tiles_triton.DEPTH) * tiles_triton.DEPTH
        kind = a.dtype if a.dtype in (torch.bfloat16, torch.float16) else torch.float32
    times = plan.index
    if plan.kernel == "isir":
        times_from = "items"
    elif size <= MAX_COLUMNS:
        times_from = "count"
    else:
        times_from = "given"
        order = draws.permutation(plan.seed, step, draws.STREAM_ORDER + 16 * plan.side, size)
        times = torch.empty_like(order)
        times[order] = torch.arange(size, device=device)
    in_batch = times
    if plan.kernel == "isir":
        in_batch = _among(carried_ids(chains, plan.side, plan.index), plan.own)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    walked = Walked(
        queries=new(rows, stride, dtype=kind),
        pool=new(plan.blocks * columns, stride, dtype=kind),
        pool_ids=new(columns, dtype=torch.int32),
        penalty=new(columns),
        column=new(size, dtype=torch.int32),
        norms=new(3, size),
        pull=new(rows),
        carried_weight=new(rows),
        stats=new(7, rows),
        moved=new(2, size),
        last=new(rows, dtype=torch.int32),
        last_logit=new(rows),
        running=new(rows),
        held=new(size, dim) if plan.carried == "cached" else new(0),
    )
    start_logit, start_similarity, positive = new(rows), new(rows), new(size)
    valid = new(size, dtype=torch.int32)
    layout_triton.prepare_kernel[(columns,)](
        a,
        b,
        chains.keys[plan.side] if plan.carried == "cached" else _given(carried, positive),
        chains.scores[plan.side] if plan.carried == "score" else positive,
        plan.index,
        plan.own,
        in_batch,
        chains.states[plan.side],
        times,
        step,
        beta,
        walked.queries,
        walked.pool,
        walked.pool_ids,
        walked.penalty,
        walked.column,
        walked.norms,
        positive,
        start_similarity,
        start_logit,
        valid,
        walked.held,
        draws.seed_key(plan.seed),
        size,
        columns,
        plan.num_samples,
        plan.num_keys,
        SIDE=plan.side,
        D=dim,
        WIDTH=triton.next_power_of_2(stride),
        STRIDE=stride,
        ITEMS=triton.next_power_of_2(size) if times_from == "count" else 1,
        SHARED=plan.shared,
        VIEWS=plan.views,
        CARRIED=plan.carried,
        TIMES=times_from,
        TILE=tiles_triton.TILE if plan.stream else 1,
        CHECK_BATCH=plan.kernel == "isir",
        OWN=chains.own,
        NORMALIZE=plan.normalize,
        num_warps=2,
    )
    return walked, start_logit, start_similarity, positive, valid


def _given(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel wants a pointer also for what it does not use."""
    return unused if tensor is None else tensor


def _among(ids: Tensor, others: Tensor) -> Tensor:  # [B] [B] -> [B] int32
    """Which ids are among the others."""
    ordered = others.sort().values
    at = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return (ordered[at] == ids).int()


def _num_equal(ids: Tensor) -> Tensor:  # [B] -> [B] int32
    """How many of the ids equal each of them."""
    ids = ids.int()
    ordered = ids.sort().values
    first = torch.searchsorted(ordered, ids, out_int32=True)
    return torch.searchsorted(ordered, ids, out_int32=True, right=True) - first


def _rows(
    walked: Walked,
    start_logit: Tensor,
    start_similarity: Tensor,
    positive: Tensor,
    beta: Tensor,
    step: Tensor,
    plan: Plan,
) -> None:
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    similarity = walked.queries @ walked.pool.T
    walked.weights = torch.empty(rows, columns, device=similarity.device)
    tile = triton.next_power_of_2(max(columns, 16))
    rows_triton.rows_kernel[(rows,)](
        similarity,
        plan.own,
        plan.index,
        walked.pool_ids,
        walked.penalty,
        positive,
        start_logit,
        start_similarity,
        _given(plan.log_partition, walked.pull),
        beta,
        step,
        walked.weights,
        walked.pull,
        walked.carried_weight,
        walked.running,
        walked.last,
        walked.last_logit,
        walked.stats,
        draws.seed_key(plan.seed),
        rows,
        size,
        columns,
        plan.num_samples,
        plan.num_keys,
        plan.burn_in,
        plan.count_every,
        plan.log_negatives,
        plan.partition_rate,
        SIDE=plan.side,
        TILE=tile,
        BLOCKS=plan.blocks,
        ISIR=plan.kernel == "isir",
        TRAINED=plan.carried != "score",
        ALL=plan.log_partition is not None,
        num_warps=max(1, min(4, tile // 256)),
    )


def _tiles(
    walked: Walked,
    start_logit: Tensor,
    start_similarity: Tensor,
    positive: Tensor,
    beta: Tensor,
    step: Tensor,
    plan: Plan,
) -> None:
    size, rows, columns = len(plan.index), len(walked.pull), plan.num_columns
    device, isir = positive.device, plan.kernel == "isir"
    skipped = int(size * plan.burn_in + 1e-3) // plan.count_every
    counted = 1 if isir else triton.cdiv(size, plan.count_every) - skipped
    slots = 1 if isir else counted

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    positions, lengths, runs = new(rows, slots), new(rows, slots), new(rows)
    moves = new(rows)
    log_sum, drive, joint = (new(rows, dtype=torch.float32) for _ in range(3))
    tiles_triton.tiles_kernel[(plan.views * triton.cdiv(size, tiles_triton.ROWS),)](
        *_operands(walked),
        plan.own,
        walked.pool_ids,
        walked.penalty,
        start_logit,
        beta,
        step,
        positions,
        lengths,
        runs,
        walked.last,
        walked.last_logit,
        log_sum,
        moves,
        drive,
        draws.seed_key(plan.seed),
        size,
        rows,
        columns,
        slots,
        skipped,
        plan.count_every // tiles_triton.TILE,
        plan.num_keys,
        SIDE=plan.side,
        ISIR=isir,
        **_shape(walked),
    )
    tiles_triton.tile_rows_kernel[(rows,)](
        plan.index,
        (walked.penalty == 0).sum(),
        positive,
        start_logit,
        start_similarity,
        _given(plan.log_partition, walked.pull),
        log_sum,
        _num_equal(plan.own),
        positions,
        lengths,
        runs,
        moves,
        drive,
        beta,
        step,
        walked.pull,
        joint,
        walked.carried_weight,
        walked.running,
        walked.stats,
        rows,
        size,
        plan.num_samples,
        slots,
        columns // tiles_triton.TILE,
        plan.log_negatives,
        plan.partition_rate,
        SLOTS=triton.next_power_of_2(slots),
        ISIR=isir,
        TRAINED=plan.carried != "score",
        ALL=plan.log_partition is not None,
        num_warps=1,
    )
    if isir:
        walked.joint = joint
    else:
        walked.visits = positions, lengths, runs


def _uses_tma(rows: Tensor) -> bool:
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] >= 9


def _operands(walked: Walked) -> tuple[Any, Any]:
    """Queries and pool, as descriptors of their tiles where the hardware copies tiles itself."""
    if not _uses_tma(walked.pool):
        return walked.queries, walked.pool
    depth = tiles_triton.DEPTH
    return (
        TensorDescriptor.from_tensor(walked.queries, [tiles_triton.ROWS, depth]),
        TensorDescriptor.from_tensor(walked.pool, [tiles_triton.TILE, depth]),
    )


def _shape(walked: Walked) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "STRIDE": walked.pool.shape[1],
        "ROWS": tiles_triton.ROWS,
        "TILE": tiles_triton.TILE,
        "DEPTH": tiles_triton.DEPTH,
        "PRECISION": "ieee" if exact else "tf32",
        "TMA": _uses_tma(walked.pool),
        "num_warps": tiles_triton.NUM_WARPS,
        "num_stages": tiles_triton.NUM_STAGES if walked.pool.element_size() == 2 else 2,
    }


# ---------------------------------------------------------------------------- backward


def _backward(
    a: Tensor,
    b: Tensor,
    carried: Tensor | None,
    beta: Tensor,
    step: Tensor,
    grad: Tensor,
    plan: Plan,
    walked: Walked,
) -> tuple[Tensor, Tensor, Tensor | None]:
    if walked.queries.numel() == 0:
        raise RuntimeError(
            "a streaming loss can be differentiated once: its rows are freed to save memory; call "
            "it again instead of passing retain_graph=True"
        )
    if walked.weights is not None:
        grad_queries, grad_pool = _dense_products(walked.weights, plan, walked)
    elif walked.visits is not None:
        grad_queries, grad_pool = _sparse_products(walked.visits, plan, walked)
    else:
        grad_queries, grad_pool = _panel_products(beta, plan, walked)
    stride = walked.pool.shape[1]
    if plan.stream:
        walked.queries, walked.pool = walked.queries.new_empty(0), walked.pool.new_empty(0)
    size, dim = a.shape
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    grad_carried = None if carried is None else torch.empty_like(carried)
    layout_triton.finish_kernel[(size,)](
        a,
        b,
        walked.held if plan.carried == "cached" else _given(carried, a),
        grad_queries,
        grad_pool,
        walked.column,
        walked.norms,
        walked.pull,
        walked.carried_weight,
        grad,
        step,
        grad_a,
        grad_b,
        _given(grad_carried, grad_a),
        draws.seed_key(plan.seed),
        size,
        plan.num_columns,
        D=dim,
        WIDTH=triton.next_power_of_2(dim),
        STRIDE=stride,
        SHARED=plan.shared,
        VIEWS=plan.views,
        CARRIED=plan.carried,
        NORMALIZE=plan.normalize,
        num_warps=2,
    )
    return grad_a, grad_b, grad_carried


def _dense_products(weights: Tensor, plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    groups, columns = (plan.views if plan.shared else 1), plan.num_columns
    stride = walked.pool.shape[1]
    by_group = weights.view(groups, -1, columns)
    offered = walked.pool[: groups * columns].view(groups, columns, stride)
    grad_queries = (by_group @ offered).view(-1, stride)
    grad_pool = (by_group.mT @ walked.queries.view(groups, -1, stride)).view(-1, stride)
    if groups < plan.blocks:  # nobody was offered the second block
        grad_pool = torch.cat([grad_pool, torch.zeros_like(grad_pool)])
    return grad_queries, grad_pool


def _sparse_products(
    visits: tuple[Tensor, Tensor, Tensor], plan: Plan, walked: Walked
) -> tuple[Tensor, Tensor]:
    positions, lengths, runs = visits
    queries, pool = walked.queries, walked.pool
    grad_queries = torch.empty(queries.shape, device=queries.device)
    grad_pool = torch.zeros(pool.shape, device=pool.device)
    tiles_triton.gather_kernel[(len(queries),)](
        grad_queries,
        grad_pool,
        queries,
        pool,
        positions,
        lengths,
        runs,
        walked.pull,
        len(plan.index),
        plan.num_columns,
        positions.shape[1],
        STRIDE=pool.shape[1],
        WIDTH=triton.next_power_of_2(pool.shape[1]),
        RUNS=16,
        num_warps=4,
    )
    return grad_queries, grad_pool


def _panel_products(beta: Tensor, plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    """i-SIR's weights are dense: a panel of rows at a time."""
    queries, pool, size, columns = walked.queries, walked.pool, len(plan.index), plan.num_columns
    grad_queries = torch.empty(queries.shape, device=queries.device)
    grad_pool = torch.zeros(pool.shape, device=pool.device)
    tile, block = tiles_triton.TILE, tiles_triton.ROWS
    for begin in range(0, len(queries), size):
        offered = slice(begin // size * columns, (begin // size + 1) * columns)
        for first in range(begin, begin + size, PANEL):
            count = min(PANEL, begin + size - first)
            weights = torch.empty(count, columns, dtype=pool.dtype, device=pool.device)
            tiles_triton.panel_kernel[(columns // tile, triton.cdiv(count, block))](
                *_operands(walked),
                plan.own,
                walked.pool_ids,
                walked.penalty,
                walked.joint,
                walked.pull,
                beta,
                weights,
                first,
                count,
                size,
                columns,
                plan.num_keys,
                **_shape(walked),
            )
            panel = slice(first, first + count)
            grad_queries[panel] = weights @ pool[offered]
            grad_pool[offered] += weights.mT @ queries[panel]
    return grad_queries, grad_pool
