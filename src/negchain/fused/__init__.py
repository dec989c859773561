"""EMC² on a GPU in a dozen kernel launches; the readable twin is `negchain.losses`.

    layout     rows and columns of a batch: unit length, order of proposal, carried states; and back
    rows       a small batch: one program per row turns its similarities into weights
    tiles      a large batch: similarities are computed, scanned and forgotten, tile by tile
    function   the loss of one side as one differentiable function of the embeddings

Draws, results and state are those of the twin for the same seed and step, up to rounding: a
Metropolis-Hastings comparison within rounding of a tie may fall the other way.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from negchain.losses.batch import as_ids, per_side

if TYPE_CHECKING:
    from negchain.losses.emc2 import EMC2Loss

MAX_COLUMNS = 1024  # a row's columns that fit into one program's registers
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def applies(loss_fn: EMC2Loss, like: Tensor) -> bool:
    """Whether the fused path takes a batch of such embeddings [B, D], or of such positions [B]."""
    if like.is_floating_point() and like.dtype not in DTYPES:
        return False
    return (
        (like.is_cuda or (loss_fn.backend == "fused" and _interpreted()))
        and importlib.util.find_spec("triton") is not None
        and _settings_apply(loss_fn)
        and _size_applies(loss_fn, like.shape[0])
    )


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _settings_apply(loss_fn: EMC2Loss) -> bool:
    chains = loss_fn.chains
    return (
        loss_fn.walk == "parallel"
        and loss_fn.proposal == "batch"
        and loss_fn.augmentations is None
        and chains.corrections.shape[1] == 0
        and max(chains.num_states, chains.states.shape[1]) <= 2**31
        and (loss_fn.carried_mode != "cached" or chains.keys.shape[2] > 0)
    )


def _size_applies(loss_fn: EMC2Loss, size: int) -> bool:
    if not loss_fn.stream:
        return 2 <= size <= MAX_COLUMNS
    learned = isinstance(loss_fn.beta, Tensor) and loss_fn.beta.requires_grad
    if loss_fn.kernel == "isir":
        return size >= 2 and not learned  # its tiles do not add up what beta's gradient needs
    return size >= 2 and loss_fn.count_every % 128 == 0


def carried_ids(loss_fn: EMC2Loss, side: int, index: Tensor) -> Tensor:  # [B] -> [B]
    """Ids of the carried states of a batch, for the caller to encode."""
    from negchain.fused import function

    return function.carried_ids(loss_fn.chains, side, index)


def forward(
    loss_fn: EMC2Loss,
    z_a: Tensor,
    z_b: Tensor,
    index: Tensor,
    key_index: Tensor | None,
    carried: Tensor | tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of a batch, [], and its numbers for `info`; in training mode the chains move."""
    from negchain.fused import function

    if z_a.dim() != 2 or z_a.shape != z_b.shape:
        raise ValueError(
            "z_a and z_b must be embeddings of one shape [B, D], "
            f"got {tuple(z_a.shape)} and {tuple(z_b.shape)}"
        )
    if (key_index is None) != (loss_fn.num_keys is None):
        raise ValueError("key_index= goes with num_keys= at construction; pass both or neither")
    own = index if key_index is None else as_ids("key_index", key_index, len(z_a), z_a.device)
    assert loss_fn.num_samples is not None and loss_fn.num_positions is not None
    results = []
    for side, held in enumerate(per_side("carried", carried, loss_fn.num_sides)):
        if held is not None and (not isinstance(held, Tensor) or held.shape != z_a.shape):
            raise ValueError(f"carried must be [B, D] = {tuple(z_a.shape)}")
        shared = loss_fn.views == "shared"
        plan = function.Plan(
            index=index,
            own=own if side == 0 else index,
            chains=loss_fn.chains,
            side=side,
            step=loss_fn.step,
            faults=loss_fn._faults,
            log_partition=loss_fn.log_partition[side] if loss_fn.denominator == "all" else None,
            kernel=loss_fn.kernel,
            shared=shared,
            views=2 if shared and loss_fn.symmetric else 1,
            normalize=loss_fn.normalize,
            training=loss_fn.training,
            seed=loss_fn.seed,
            burn_in=loss_fn.burn_in,
            count_every=loss_fn.count_every,
            partition_rate=loss_fn.partition_rate,
            num_samples=loss_fn.num_samples,
            num_keys=loss_fn.num_positions,
            multiplicity=loss_fn.multiplicity,
            stream=loss_fn.stream,
        )
        pair = (z_a, z_b) if side == 0 else (z_b, z_a)
        results.append(function.fused_loss(*pair, held, loss_fn.beta, plan))
    if len(results) == 1:
        return results[0]
    (first, report), (second, other) = results
    both = {name: _mean_of(report[name], other[name]) for name in report}
    return (first + second) / 2, both


def _mean_of(first: Any, second: Any) -> Any:
    return lambda: (first() + second()) / 2
