"""The loss of one side as one differentiable function of the embeddings.

Everything a side needs travels in a `Plan`; nothing here waits for the device.

Shapes: as in `layout_triton`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from negchain.fast.fused.backward import backward
from negchain.fast.fused.forward import walk
from negchain.fast.fused.plan import Numbers, Plan


def fused_loss(
    a: Tensor, b: Tensor, carried: Tensor | None, beta: float | Tensor, plan: Plan
) -> tuple[Tensor, Numbers]:
    """Loss of one side, [], and its numbers for `info`.

    Args:
        a: [B, D] embeddings of the anchors (or of the first view), any floating type.
        b: [B, D] of the keys (or of the second view).
        carried: [B, D] of the carried states, with carried="encode".
        beta: inverse temperature; a tensor may be learned.
        plan: everything else.
    """
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
        grads = backward(a, b, carried, grad, plan, walked)
        grad_beta = walked.stats[6].mean() * grad if ctx.needs_input_grad[3] else None
        return *grads, grad_beta, None, None
