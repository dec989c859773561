"""i-SIR (iterated sampling-importance resampling): softmax over the carried state and the pool.

    W_i = softmax( l_i,carried , l_i1 , ..., l_iK ),     next state ~ W_i

With count_every = c > 1 one column speaks for each group of c, so that W has a few entries only:

    W_i,r(g) = sum_{j in g} softmax_j,    r(g) = argmax_{j in g} ( l_ij + gumbel_ij ),  others 0

r(g) is a draw from the softmax inside its group (Gumbel-max) and the group's mass is not random, so
E W_ij = mass(g) * softmax_j / mass(g) is the softmax: fewer columns cost variance, not bias. The
noise is that of the next state, which is the representative of its group, or the carried state.

Estimates   p_i by the expected occupation of one i-SIR transition (Rao-Blackwellised: the whole
            softmax is used, not only the drawn state).
State       the drawn state; the caller stores it (one integer per anchor).
Cost        one exponential per logit; no scan. With c > 1 gradients touch K / c columns.
Bias        zero at stationarity with i.i.d. proposals, a carried state that is among them counted
            beside itself; and with proposals drawn without replacement, where it is counted once
            (tests/weights/test_kernels.py; groups: tests/weights/test_count_every.py).

Shapes: `N` chains, `K` proposals (columns).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.weights.metropolis import Scan
from negchain.weights.softmax import softmax_weights


def isir_weights(logits: Tensor, start_logit: Tensor, gumbel: Tensor, count_every: int = 1) -> Scan:
    """One i-SIR transition of N chains; returns the same record as `mh_scan`.

    Args:
        logits: [N, K] corrected logits of the proposals, -inf = excluded.
        start_logit: [N] corrected logit of the carried state; -inf = none.
        gumbel: [N, K + 1] Gumbel noise; column 0 belongs to the carried state.
        count_every: 1 weighs every column. c > 1 weighs one column of every c consecutive ones (the
            last group may be smaller), drawn from the softmax inside the group, with the mass of
            the group. The carried state keeps its own weight.

    Returns:
        A `Scan`; `accepts` is 1 where the drawn state is a column of the pool.

    Example:
        >>> scan = isir_weights(torch.zeros(1, 3), torch.zeros(1), torch.eye(4)[2:3])
        >>> scan.weights, scan.start_weight, int(scan.last)
        (tensor([[0.2500, 0.2500, 0.2500]]), tensor([0.2500]), 1)
        >>> isir_weights(torch.zeros(1, 3), torch.zeros(1), torch.eye(4)[2:3], 2).weights
        tensor([[0.0000, 0.5000, 0.2500]])
    """
    if count_every < 1:
        raise ValueError(f"count_every must be at least 1, got {count_every}")
    joint = torch.cat([start_logit[:, None], logits], 1)
    weights, _ = softmax_weights(joint)
    noisy = joint + gumbel.nan_to_num()  # -inf + inf were no number, and first in an argmax
    slot = noisy.argmax(1)
    columns = weights[:, 1:]
    if count_every > 1:
        columns = _one_of_each_group(columns, noisy[:, 1:], count_every)
    return Scan(
        weights=columns,
        start_weight=weights[:, 0],
        last=slot - 1,
        last_logit=joint.gather(1, slot[:, None])[:, 0],
        accepts=(slot > 0).long(),
    )


def _one_of_each_group(weights: Tensor, noisy: Tensor, size: int) -> Tensor:  # [N,K] [N,K] -> [N,K]
    """The mass of every group of `size` columns, on its column with the largest noisy logit."""
    num_columns = weights.shape[1]
    size = min(size, max(num_columns, 1))
    groups, extra = math.ceil(num_columns / size), -num_columns % size
    shape = (len(weights), groups, size)
    mass = F.pad(weights, (0, extra)).reshape(shape).sum(2)
    chosen = F.pad(noisy, (0, extra), value=-math.inf).reshape(shape).argmax(2)
    first = size * torch.arange(groups, device=weights.device)
    return torch.zeros_like(weights).scatter_(1, first + chosen, mass)
