"""The loss of one side as one differentiable function of the embeddings, and its backward pass.

The backward pass: products with the weights, then back to the embeddings. Everything a side needs
travels in a `Plan`; nothing here waits for the device.

Shapes: as in `layout_triton`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from negchain import rng
from negchain.fast.backends import on_its_device
from negchain.fast.fused import gather_triton, layout_triton, tiles_triton
from negchain.fast.fused.forward import tile_launch, walk
from negchain.fast.fused.plan import Numbers, Plan, Walked, given

PANEL = 4096  # rows of i-SIR's weights at a time in the backward pass of tiles


@on_its_device
def fused_loss(
    a: Tensor,  # [B,D] embeddings of the anchors, or of the first view
    b: Tensor,  # [B,D] of the keys, or of the second view
    carried: Tensor | None,  # [B,D] of the carried states, with carried="encode"
    beta: float | Tensor,  # a tensor may be learned
    plan: Plan,
) -> tuple[Tensor, Numbers]:
    """Loss of one side, [], and its numbers for `info`."""
    report: Numbers = {}
    if isinstance(beta, Tensor):
        beta = beta.reshape(()).to(a.device)
    loss: Tensor = _Loss.apply(a.contiguous(), b.contiguous(), carried, beta, plan, report)
    return loss, report


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        carried: Tensor | None,
        beta: float | Tensor,
        plan: Plan,
        report: Numbers,
    ) -> Tensor:
        if isinstance(beta, Tensor):
            beta = beta.detach().float()
        carried = None if carried is None else carried.contiguous()
        walked, value = walk(a, b, carried, beta, plan)
        report.update(walked.report(plan))
        ctx.plan, ctx.walked = plan, walked
        # beta too, though it is read from `walked`: a learned one must not change in between
        ctx.save_for_backward(a, b, carried, walked.beta)
        return value

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, carried, _ = ctx.saved_tensors
        plan, walked = ctx.plan, ctx.walked
        if walked.queries.numel() == 0:
            raise RuntimeError(
                "the loss of a large batch can be differentiated once: its rows are freed to save "
                "memory; call it again instead of passing retain_graph=True"
            )
        stride, (size, dim) = walked.pool.shape[1], a.shape
        with torch.autocast(a.device.type, enabled=False):  # on, where backward() is under it
            grad_queries, grad_pool = _products(plan, walked)
        if plan.tiled:
            walked.queries, walked.pool = walked.queries.new_empty(0), walked.pool.new_empty(0)
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        grad_carried = None if carried is None else torch.empty_like(carried)
        layout_triton.finish_kernel[(size,)](
            a, b, given(carried, a) if plan.keys is None else walked.held, grad_queries, grad_pool,
            walked.column, walked.norms, walked.pull, walked.carried_weight, grad, walked.step,
            grad_a, grad_b, given(grad_carried, grad_a), rng.seed_key(plan.seed), size,
            plan.num_columns, D=dim, WIDTH=triton.next_power_of_2(dim), STRIDE=stride,
            SHARED=plan.shared, VIEWS=plan.views, CARRIED=plan.carried, COPIES=plan.copies,
            NORMALIZE=plan.normalize, num_warps=2,
        )  # fmt: skip
        grad_beta = walked.stats[6].mean() * grad if ctx.needs_input_grad[3] else None
        return grad_a, grad_b, grad_carried, grad_beta, None, None


def _products(plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns."""
    if walked.weights is not None:
        return _dense_products(walked.weights, plan, walked)
    return (_panel_products if walked.visits is None else _sparse_products)(plan, walked)


def _dense_products(weights: Tensor, plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    if plan.states is None:  # every row weighs all columns
        return weights @ walked.pool, weights.mT @ walked.queries
    groups, columns = (plan.views if plan.blocks == 2 else 1), plan.num_columns
    stride = walked.pool.shape[1]
    by_group = weights.view(groups, -1, columns)
    offered = walked.pool[: groups * columns].view(groups, columns, stride)
    grad_queries = (by_group @ offered).view(-1, stride)
    grad_pool = (by_group.mT @ walked.queries.view(groups, -1, stride)).view(-1, stride)
    if groups < plan.blocks:  # no row was offered the second block
        grad_pool = torch.cat([grad_pool, torch.zeros_like(grad_pool)])
    return grad_queries, grad_pool


def _sparse_products(plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    """A row weighs a few columns; see `gather_triton`.

    Buffers are freed after their last use, and gradients of columns made after the sort: what it
    needs is gone when memory peaks, with the gradients of the embeddings.
    """
    assert walked.visits is not None
    visits, pool, device = walked.visits, walked.pool, walked.pool.device
    (rows, slots), (columns, stride) = visits[0].shape, pool.shape
    sizes, width = (len(plan.index), plan.num_columns, slots), triton.next_power_of_2(stride)
    launch = {"STRIDE": stride, "WIDTH": width, "num_warps": max(1, min(8, width // 128))}
    grad_queries = torch.empty(rows, stride, device=device)
    counts = torch.zeros(columns, dtype=torch.int32, device=device)
    earlier = torch.empty_like(visits[0])
    gather_triton.gather_rows_kernel[(rows,)](
        grad_queries, counts, earlier, pool, *visits, *sizes, RUNS=gather_triton.RUNS, **launch
    )
    walked.visits, walked.pool = None, pool.new_empty(0)
    del pool
    kinds = torch.int32, torch.int32, torch.float32  # columns, rows and weights of the entries
    entries = [torch.empty(rows * slots, dtype=kind, device=device) for kind in kinds]
    ends = counts.cumsum(0)
    height, breadth = gather_triton.SORTED_ROWS, gather_triton.SORTED_SLOTS
    gather_triton.sort_kernel[(triton.cdiv(rows, height), triton.cdiv(slots, breadth))](
        *entries, ends, earlier, *visits, rows, *sizes, ROWS=height, SLOTS=breadth, num_warps=2
    )
    del visits, earlier, counts
    grad_pool = torch.zeros(columns, stride, device=device)
    chunk = gather_triton.CHUNK
    gather_triton.gather_columns_kernel[(triton.cdiv(rows * slots, chunk),)](
        grad_pool, walked.queries, *entries, ends, columns, CHUNK=chunk, **launch
    )
    return grad_queries, grad_pool


def _panel_products(plan: Plan, walked: Walked) -> tuple[Tensor, Tensor]:
    """i-SIR's weights are dense: a panel of rows at a time."""
    queries, pool, size, columns = walked.queries, walked.pool, len(plan.index), plan.num_columns
    grad_queries = torch.empty(queries.shape, device=queries.device)
    grad_pool = torch.zeros(pool.shape, device=pool.device)
    tile, block = tiles_triton.TILE, tiles_triton.ROWS
    operands, launch = tile_launch(walked)
    for begin in range(0, len(queries), size):
        offered = slice(begin // size * columns, (begin // size + 1) * columns)
        for first in range(begin, begin + size, PANEL):
            count = min(PANEL, begin + size - first)
            weights = torch.empty(count, columns, dtype=pool.dtype, device=pool.device)
            tiles_triton.panel_kernel[(columns // tile, triton.cdiv(count, block))](
                *operands, plan.index, walked.pool_ids, walked.penalty, walked.repeated,
                walked.joint, walked.pull, walked.beta, weights, first, count, len(queries), size,
                columns, plan.num_samples, **launch,
            )  # fmt: skip
            panel = slice(first, first + count)
            grad_queries[panel] = weights @ pool[offered]
            grad_pool[offered] += weights.mT @ queries[panel]
    scale = walked.beta / len(queries)
    return grad_queries.mul_(scale), grad_pool.mul_(scale)
