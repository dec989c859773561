"""The losses on a GPU in a dozen kernel launches; the readable twin is `negchain.losses`.

    layout     rows and columns of a batch: unit length, order of proposal, carried states; and back
    rows       a small batch: one program per row turns its similarities into EMC²'s weights
    in_batch   the same for InfoNCE, DCL and SogCLR
    tiles      a large batch: similarities are computed, scanned and forgotten, tile by tile
    gather     its backward pass: what the rows weigh, sorted by column
    ranks      order of proposal and repeated ids of a large batch, by comparing all pairs
    commit     state for the next visit, and the value
    function   the loss of one side as one differentiable function of the embeddings, made of
               `forward` and `backward`; what they share is a `plan`

Draws, results and state are those of the twin for the same seed and step, up to rounding: a
Metropolis-Hastings comparison within rounding of a tie may fall the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from negchain.fast.backends import prefers_triton, triton_error
from negchain.losses.batch import as_ids, check_carried_shape, check_shapes, per_side

if TYPE_CHECKING:
    from negchain.fast.fused.plan import Numbers
    from negchain.losses.base import ContrastiveLoss
    from negchain.losses.chains import ChainTable
    from negchain.losses.emc2 import EMC2Loss

MAX_COLUMNS = 1024  # a row's columns that fit into one program's registers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def applies(loss_fn: EMC2Loss, like: Tensor) -> bool:
    """Whether the fused path takes a batch of such embeddings [B, D], or of such positions [B]."""
    chains = loss_fn.chains
    return (
        can_run(loss_fn.backend, like)
        and loss_fn.walk == "parallel"
        and loss_fn.proposal == "batch"
        and loss_fn.augmentations is None
        and chains.corrections.shape[1] == 0
        and max(chains.num_states, chains.states.shape[1]) <= 2**31
        and (loss_fn.carried_mode != "cached" or chains.keys.shape[2] > 0)
        and _size_applies(loss_fn, like.shape[0])
    )


def can_run(backend: str, like: Tensor) -> bool:
    """Whether kernels can run on such a tensor, and may."""
    if backend not in ("auto", "fused") or (like.is_floating_point() and like.dtype not in DTYPES):
        return False
    return prefers_triton(like) if backend == "auto" else triton_error(like) is None


def applies_in_batch(backend: str, like: Tensor) -> bool:
    """Whether the fused path takes a batch of such embeddings [B, D] for an in-batch loss."""
    return can_run(backend, like) and 2 <= like.shape[0] <= MAX_COLUMNS


def not_applicable(like: Tensor) -> ValueError:
    """The error of a requested fused path that does not take such a batch."""
    return ValueError(
        "backend='fused' needs a GPU with Triton, negatives from the batch only (no draw=, known=, "
        "augmentation=), dim= for carried='cached', embeddings in float32, bfloat16 or float16, "
        f"2 to {MAX_COLUMNS} of them unless stream=True, count_every a multiple of 128 with "
        "stream=True, and for kernel='isir' 1 without it; "
        f"got {like.dtype} {tuple(like.shape)} on {like.device}; use backend='auto'"
    )


def _size_applies(loss_fn: EMC2Loss, size: int) -> bool:
    dense = loss_fn.kernel == "isir" and loss_fn.count_every == 1
    if not loss_fn.stream:
        return 2 <= size <= MAX_COLUMNS and (loss_fn.kernel == "mh" or dense)
    learned = isinstance(loss_fn.beta, Tensor) and loss_fn.beta.requires_grad
    if dense:
        return size >= 2 and not learned  # its tiles do not add up what beta's gradient needs
    return size >= 2 and loss_fn.count_every % 128 == 0


def carried_ids(loss_fn: EMC2Loss, side: int, index: Tensor) -> Tensor:  # [B] -> [B]
    """Ids of the carried states of a batch, for the caller to encode."""
    from negchain.fast.fused import forward

    return forward.carried_ids(loss_fn.chains, side, index)


def emc2(
    loss_fn: EMC2Loss,
    z_a: Tensor,
    z_b: Tensor,
    index: Tensor,
    key_index: Tensor | None,
    carried: Tensor | tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Numbers]:
    """The EMC² loss of a batch, [], and its numbers for `info`; in training the chains move."""
    settings = {
        "weighting": loss_fn.kernel,
        "burn_in": loss_fn.burn_in,
        "count_every": loss_fn.count_every,
        "partition_rate": loss_fn.partition_rate,
        "stream": loss_fn.stream,
        "bounded": loss_fn.normalize
        and not isinstance(loss_fn.beta, Tensor)
        and loss_fn.beta <= 75,
    }
    tables = loss_fn.log_partition if loss_fn.denominator == "all" else None
    return _both_sides(loss_fn, z_a, z_b, index, key_index, carried, tables, settings)


def in_batch(
    loss_fn: ContrastiveLoss,
    z_a: Tensor,
    z_b: Tensor,
    index: Tensor | None,
    key_index: Tensor | None,
    *,
    tables: Tensor | None = None,
    gamma: float = 0.0,
) -> tuple[Tensor, Numbers]:
    """InfoNCE, DCL or (with `tables`, its moving averages [sides, M]) SogCLR of a batch."""
    if index is None:
        if loss_fn.num_samples is not None:
            raise ValueError("index= is missing: pass the data set positions of the batch, [B]")
        index = torch.arange(len(z_a), device=z_a.device)
    index = as_ids("index", index, len(z_a), z_a.device)
    if loss_fn.num_samples is None:  # any integers will do: only which are equal matters
        index = torch.searchsorted(index.sort().values, index)
    settings = {"weighting": "softmax" if tables is None else "sogclr", "gamma": gamma}
    return _both_sides(loss_fn, z_a, z_b, index, key_index, None, tables, settings)


def _both_sides(
    loss_fn: ContrastiveLoss,
    z_a: Tensor,
    z_b: Tensor,
    index: Tensor,
    key_index: Tensor | None,
    carried: Tensor | tuple[Tensor, Tensor] | None,
    tables: Tensor | None,
    settings: dict[str, Any],
) -> tuple[Tensor, Numbers]:
    from negchain.fast.fused import function, plan

    check_shapes(z_a, z_b, key_index, loss_fn.num_keys)
    chains: ChainTable | None = getattr(loss_fn, "chains", None)
    if chains is not None and chains.keep == "cached":
        chains.check_width(z_a.shape[1])
    own = index if key_index is None else as_ids("key_index", key_index, len(z_a), z_a.device)
    shared, unknown = loss_fn.views == "shared", 2**31 - 1
    results = []
    counts = loss_fn.training and settings["weighting"] != "softmax"
    for side, held in enumerate(per_side("carried", carried, loss_fn.num_sides)):
        held = None if held is None else check_carried_shape(held, z_a)
        one = plan.Plan(
            index=index,
            own=own if side == 0 else index,
            chains=chains,
            side=side,
            step=loss_fn.step,
            counts=counts and side == loss_fn.num_sides - 1,
            faults=loss_fn._faults,
            running=None if tables is None else tables[side],
            dim=z_a.shape[1],
            denominator=loss_fn.denominator,
            shared=shared,
            views=2 if shared and loss_fn.symmetric else 1,
            normalize=loss_fn.normalize,
            training=loss_fn.training,
            seed=loss_fn.seed,
            num_samples=loss_fn.num_samples or unknown,
            num_keys=loss_fn.num_positions or unknown,
            multiplicity=loss_fn.multiplicity,
            **settings,
        )
        pair = (z_a, z_b) if side == 0 else (z_b, z_a)
        results.append(function.fused_loss(*pair, held, loss_fn.beta, one))
    if len(results) == 1:
        return results[0]
    (first, report), (second, other) = results
    return (first + second) / 2, {n: _mean_of(report[n], other[n]) for n in report}


def _mean_of(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: (first() + second()) / 2
