"""What a loss hands the kernels of `negchain.fast.fused`: a `Plan` per side, and when it may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from negchain.fast.backends import prefers_triton, triton_error
from negchain.fast.fused import MAX_COLUMNS
from negchain.losses.batch import Call, check_call, positions
from negchain.losses.request import Request, answered
from negchain.losses.settings import ISIR, MH, InBatch
from negchain.losses.state import Report

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss
    from negchain.losses.emc2 import EMC2Loss

Sides = tuple[list[Tensor], Report]  # the loss of each side, [], and its numbers for `info`
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def applies(loss_fn: EMC2Loss, like: Tensor) -> bool:
    """Whether the fused path takes a batch of such embeddings [B, D], or of such positions [B]."""
    kernel, proposals, size = loss_fn.kernel, loss_fn.proposals, like.shape[0]
    if not _can_run(loss_fn, like) or loss_fn.augmentations is not None or size < 2:
        return False
    if loss_fn.carried == "cached" and loss_fn.chains.keys.shape[2] == 0:
        return False
    assert isinstance(proposals, InBatch)
    softmax = isinstance(kernel, ISIR) and kernel.count_every == 1
    if loss_fn.large_batch:  # tiles of a softmax do not add up what beta's gradient needs
        return not isinstance(loss_fn.beta, Tensor) if softmax else kernel.count_every % 128 == 0
    # it takes both copies of as many, as in-batch losses do
    most = MAX_COLUMNS if softmax else MAX_COLUMNS // proposals.copies
    return size <= most and (softmax or isinstance(kernel, MH))


def _can_run(loss_fn: Any, like: Tensor) -> bool:
    """Whether kernels run on such a tensor, `backend` allows it, and negatives are the batch's."""
    if like.is_floating_point() and like.dtype not in DTYPES:
        return False
    if loss_fn.backend == "auto":
        able = prefers_triton(like)
    else:
        able = loss_fn.backend == "fused" and triton_error(like) is None
    return (
        able
        and loss_fn.rows.ranks is None
        and isinstance(loss_fn.proposals, InBatch)
        and loss_fn.num_keys is None
        and (loss_fn.num_samples or 0) <= 2**31  # kernels compare ids in int32
    )


def not_applicable(like: Tensor) -> ValueError:
    """The error of a requested fused path that does not take such a batch."""
    return ValueError(
        "backend='fused' needs a GPU with Triton, negatives from the batch only (no draws, known=, "
        "num_keys= or stored augmentations) of at most 2^31 samples, dim= for carried='cached', "
        f"embeddings in float32, bfloat16 or float16, 2 to {MAX_COLUMNS} of them "
        "(Metropolis-Hastings with both copies: half as many), and for i-SIR count_every=1; "
        "LargeBatchEMC2Loss takes more, with count_every a multiple of 128 (or ISIR() with a "
        "fixed beta); "
        f"got {like.dtype} {tuple(like.shape)} on {like.device}; use backend='auto'"
    )


def carried_ids(loss_fn: EMC2Loss, side: int, index: Tensor) -> Tensor:  # [B] -> [B]
    """Ids of the carried states of a batch, for the caller to encode."""
    from negchain.fast.fused import forward

    return forward.carried_ids(loss_fn.chains.states[side], side, index, loss_fn.seed)


def emc2(loss_fn: EMC2Loss, call: Call, requests: Sequence[Request]) -> Sides:
    """The EMC² loss of a batch; in training mode its chains move."""
    kernel, chains, beta = loss_fn.kernel, loss_fn.chains, loss_fn.beta
    carried, keys = [], None
    assert isinstance(loss_fn.proposals, InBatch)
    loss_fn.check_batch_size(len(call.z_a))
    if loss_fn.carried == "encode":
        carried = [answered(requests, "carried", n)[1] for n in range(loss_fn.num_sides)]
    else:
        keys = chains.wide("keys", call.z_a.shape[1], math.nan)
    return _sides(
        loss_fn,
        call,
        carried,
        {"states": chains.states, "keys": keys},
        weighting="mh" if isinstance(kernel, MH) else "isir",
        burn_in=float(kernel.burn_in) if isinstance(kernel, MH) else 0.0,
        count_every=kernel.count_every,
        copies=loss_fn.proposals.copies,
        tiled=loss_fn.large_batch,
        bound=math.inf if isinstance(beta, Tensor) or not loss_fn.normalize else beta,
    )


def in_batch(
    loss_fn: Any, call: Call, *, log_u: Tensor | None = None, gamma: float = 0.0
) -> Sides | None:
    """InfoNCE, DCL or (with `log_u`, its moving averages [sides, M]) SogCLR of a batch.

    None where the kernels do not take it, which with backend="fused" is an error.
    """
    small = 2 <= call.z_a.shape[0] <= MAX_COLUMNS
    plain = call.known is None and not call.one_way
    if not (small and plain and _can_run(loss_fn, call.z_a)):
        if loss_fn.backend == "fused":
            raise not_applicable(call.z_a)
        return None
    weighting = "softmax" if log_u is None else "sogclr"
    total, report = _sides(loss_fn, call, [], {"averages": log_u}, weighting=weighting, gamma=gamma)
    if loss_fn.num_positions is None:
        del report["global_loss_low"]
    return total, report


def _sides(
    loss_fn: ContrastiveLoss,
    call: Call,
    carried: Sequence[Tensor],  # [B, D] of each side; empty: none has any
    tables: dict[str, Tensor | None],  # [sides, M, ...] each
    **settings: Any,  # of a `Plan`
) -> Sides:
    from negchain.fast.fused import function, plan

    z_a, z_b = call.z_a, call.z_b
    check_call(loss_fn, call)
    index = positions(call, loss_fn.num_samples)
    if loss_fn.num_samples is None:  # any integers will do: only which are equal matters
        index = torch.searchsorted(index.sort().values, index)
    shared = loss_fn.views == "shared"
    total: list[Tensor] = []
    report: Report = {}
    counts = loss_fn.training and settings["weighting"] != "softmax"
    for side in range(loss_fn.num_sides):
        mine: dict[str, Any] = {n: table[side] for n, table in tables.items() if table is not None}
        one = plan.Plan(
            index=index, side=side, step=loss_fn.step,
            counts=counts and side == loss_fn.num_sides - 1, faults=loss_fn.faults,
            denominator=loss_fn.denominator, shared=shared,
            views=2 if shared and loss_fn.symmetric else 1, normalize=loss_fn.normalize,
            training=loss_fn.training, seed=loss_fn.seed,
            num_samples=loss_fn.num_samples or 2**31 - 1, **mine, **settings,
        )  # fmt: skip
        pair = (z_a, z_b) if side == 0 else (z_b, z_a)
        value, numbers = function.fused_loss(
            *pair, carried[side] if carried else None, loss_fn.beta, one
        )
        total.append(value)
        for name, number in numbers.items():
            report.setdefault(name, []).append(number)
    return total, report
