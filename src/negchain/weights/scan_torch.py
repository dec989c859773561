"""The Metropolis-Hastings scan without a loop over columns, as an associative scan.

With t_j = logit_j - log u_j, step j maps the logit c of the current state to

    f_j(c) = logit_j  if t_j > c  else  c,          logit_j <= t_j because u <= 1.

Two steps in a row are again such a map: with the pairs (t, l) for "moves to l if t > c",

    (t1, l1) then (t2, l2)  =  (max(t1, t2),  l2 if t2 > l1 else l1).

(If t2 <= l1 then t2 <= t1, so whoever passes t1 stays at l1 and whoever does not passes neither.)
The operation is associative: all K prefixes follow in log2(K) rounds of three elementwise
operations on the [N, K] matrix. Only comparisons are made, so results equal the loop's to the bit,
whatever the acceptance rate, and the host never looks at a value.

Shapes: `N` chains, `K` columns.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from negchain.draws import fit_for_numpy
from negchain.weights.metropolis import Scan


def scan_torch(
    logits: Tensor,
    start_logit: Tensor,
    log_u: Tensor,
    burn_in: int | Tensor,
    count_every: int = 1,
) -> Scan:
    """Same signature and the same results as `scan_reference`."""
    if count_every == 1 and fit_for_numpy(logits) and fit_for_numpy(start_logit):
        return _scan_numpy(logits.detach(), start_logit.detach(), log_u.detach(), burn_in)
    num_chains, num_columns = logits.shape
    threshold = logits - log_u
    states = _state_logits(threshold, logits, start_logit)  # [N,K+1], after 0 .. K steps
    accepted = threshold > states[:, :-1]
    columns = torch.arange(1, num_columns + 1, device=logits.device)
    reached = accepted * columns
    reached = torch.cummax(reached, 1).values if num_columns else reached
    slots = torch.nn.functional.pad(reached, (1, 0))

    if count_every == 1:
        is_step = logits > -math.inf
        rank = is_step.cumsum(1)  # number of steps up to and with this column
        limit = burn_in[:, None] if isinstance(burn_in, Tensor) else burn_in
        counted = is_step & (rank > limit)
    else:
        is_end = (columns % count_every == 0) | (columns == num_columns)
        counted = (is_end & (columns > burn_in)).expand(num_chains, -1)
    num_counted = counted.sum(1)
    visits = torch.zeros_like(states)  # slot 0 is the start state
    visits.scatter_add_(1, slots[:, 1:], counted.to(logits.dtype))
    last = slots[:, -1:]
    visits.scatter_add_(1, last, (num_counted == 0).to(logits.dtype)[:, None])
    weights = visits / num_counted.clamp(min=1)[:, None]
    return Scan(
        weights=weights[:, 1:],
        start_weight=weights[:, 0],
        last=last[:, 0] - 1,
        last_logit=states[:, -1],
        accepts=accepted.sum(1),
    )


def _state_logits(threshold: Tensor, logits: Tensor, start_logit: Tensor) -> Tensor:
    """Logit of the chain's state before the first step and after each, [N, K+1]."""
    level = torch.cat([start_logit[:, None], logits], 1)
    reach = torch.cat([torch.full_like(start_logit[:, None], math.inf), threshold], 1)
    distance = 1
    while distance < level.shape[1]:  # Hillis-Steele: doubles the span each pair stands for
        left, right = level[:, :-distance], level[:, distance:]
        moves = reach[:, distance:] > left
        reach = torch.cat(
            [reach[:, :distance], torch.maximum(reach[:, :-distance], reach[:, distance:])], 1
        )
        level = torch.cat([level[:, :distance], torch.where(moves, right, left)], 1)
        distance *= 2
    return level


def _scan_numpy(logits: Tensor, start_logit: Tensor, log_u: Tensor, burn_in: int | Tensor) -> Scan:
    """The same on a CPU, in place: numpy takes a fraction of torch's time over small arrays."""
    num_chains, num_columns = logits.shape
    columns = logits.numpy()
    level = np.concatenate([start_logit.numpy()[:, None], columns], 1)
    threshold = columns - log_u.numpy()
    reach = np.concatenate([np.full_like(level[:, :1], math.inf), threshold], 1)
    distance = 1
    while distance <= num_columns:
        left = level[:, :-distance].copy()
        moves = reach[:, distance:] > left
        np.maximum(reach[:, :-distance].copy(), reach[:, distance:], out=reach[:, distance:])
        np.copyto(level[:, distance:], left, where=~moves)
        distance *= 2
    accepted = threshold > level[:, :-1]
    slots = np.maximum.accumulate(accepted * np.arange(1, num_columns + 1), 1)
    is_step = columns > -math.inf
    limit = burn_in.numpy()[:, None] if isinstance(burn_in, Tensor) else burn_in
    counted = is_step & (is_step.cumsum(1) > limit)
    number = counted.sum(1, keepdims=True)
    last = slots[:, -1] if num_columns else np.zeros(num_chains, dtype=np.int64)
    # a flat histogram: row * (K + 1) + slot, slot 0 being the start state
    flat = (slots + np.arange(num_chains)[:, None] * (num_columns + 1))[counted]
    visits = np.bincount(flat, minlength=level.size).reshape(level.shape)
    visits[np.flatnonzero(number == 0), last[number[:, 0] == 0]] = 1
    weights = torch.from_numpy((visits / np.maximum(number, 1)).astype(columns.dtype))
    return Scan(
        weights=weights[:, 1:],
        start_weight=weights[:, 0],
        last=torch.from_numpy(last - 1),
        last_logit=torch.from_numpy(level[:, -1]),
        accepts=torch.from_numpy(accepted.sum(1)),
    )
