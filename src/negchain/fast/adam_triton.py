"""Adam's step of one tensor in one pass over memory.

Per number it reads the gradient (bf16 or float32), the weight and both moments, and writes the
weight and the moments: 26 bytes from a bf16 gradient, where a cast of it and torch's fused step
move 34 in two passes. The formula is in `negchain.fast.adam`, whose `update_torch` is the readable
twin. Arithmetic is float32, the betas rounded to it, as in torch's CUDA kernel; only the root and
the quotient are the GPU's short forms, so what is subtracted from a weight differs in its last
bits.

The kernel works in memory order, so all tensors must lie in memory alike.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from negchain.fast.adam import rounded_betas

BLOCK = 1024  # numbers per program
TOGETHER = tl.constexpr(4)  # neighbours per thread and access: 16 bytes of float32


@triton.jit
def update_kernel(
    weight_ptr,  # [numel] float32, in and out
    exp_avg_ptr,  # [numel] float32, in and out
    exp_avg_sq_ptr,  # [numel] float32, in and out
    gradient_ptr,  # [numel]
    step_ptr,  # [] float32: t, counted from 1
    lr_ptr,  # [] float32
    numel,
    beta1,
    beta2,
    log2_beta1,
    log2_beta2,
    eps,
    weight_decay,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of numbers."""
    # Left alone, the compiler gives a thread 8 neighbours, 16 bytes of bf16; its two accesses per
    # float32 tensor then each touch every other 16 bytes.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.max_contiguous(at, TOGETHER)
    some = at < numel
    gradient = tl.load(gradient_ptr + at, mask=some, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=some, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + at, mask=some, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=some, other=0.0)
    step, lr = tl.load(step_ptr).to(tl.float64), tl.load(lr_ptr)
    # float64: 1 - beta^t loses four digits of float32 at the first steps
    correction1 = (1.0 - tl.exp2(step * log2_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp2(step * log2_beta2)).to(tl.float32)
    if DECOUPLED:
        weight = tl.fma(-lr * weight_decay, weight, weight)
    else:
        gradient = tl.fma(weight_decay, weight, gradient)
    square = gradient * gradient
    exp_avg = tl.fma(beta1, exp_avg, tl.fma(-beta1, gradient, gradient))
    exp_avg_sq = tl.fma(beta2, exp_avg_sq, tl.fma(-beta2, square, square))
    scale, rate = tl.div_rn(1.0, tl.sqrt_rn(correction2)), tl.div_rn(lr, correction1)
    weight -= rate * exp_avg / tl.fma(tl.sqrt(exp_avg_sq), scale, eps)
    tl.store(weight_ptr + at, weight, mask=some)
    tl.store(exp_avg_ptr + at, exp_avg, mask=some)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=some)


def update_triton(
    parameter: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> None:
    """`negchain.fast.adam.update_torch` in one launch; nothing asks the host."""
    beta1, beta2 = rounded_betas(group)
    log2_beta1, log2_beta2 = (math.log2(b) if b > 0 else -math.inf for b in (beta1, beta2))
    update_kernel[(triton.cdiv(parameter.numel(), BLOCK),)](
        parameter, state["exp_avg"], state["exp_avg_sq"], gradient, state["step"],
        group["lr"], parameter.numel(), beta1, beta2, log2_beta1, log2_beta2,
        float(group["eps"]), float(group["weight_decay"]),
        DECOUPLED=group["decoupled_weight_decay"], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
