"""i-SIR (iterated sampling-importance resampling): softmax over the carried state and the pool.

    W_i = softmax( l_i,carried , l_i1 , ..., l_iK ),     next state ~ W_i

Estimates   p_i by the expected occupation of one i-SIR transition (Rao-Blackwellised: the whole
            softmax is used, not only the drawn state).
State       the drawn state; the caller stores it (one integer per anchor).
Cost        one exponential per logit; no scan.
Bias        zero at stationarity, with i.i.d. proposals and with proposals drawn without
            replacement, provided a carried state that is itself in the pool is counted once.

Shapes: `N` chains, `K` proposals (columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from negchain.weights.metropolis import Scan
from negchain.weights.softmax import softmax_weights


def isir_weights(logits: Tensor, start_logit: Tensor, gumbel: Tensor) -> Scan:
    """One i-SIR transition of N chains; returns the same record as `mh_scan`.

    Args:
        logits: [N, K] corrected logits of the proposals, -inf = excluded.
        start_logit: [N] corrected logit of the carried state; -inf = none.
        gumbel: [N, K + 1] Gumbel noise; column 0 belongs to the carried state.

    Returns:
        A `Scan`; `accepts` is 1 where the drawn state is a column of the pool.

    Example:
        >>> scan = isir_weights(torch.zeros(1, 3), torch.zeros(1), torch.eye(4)[2:3])
        >>> scan.weights, scan.start_weight, int(scan.last)
        (tensor([[0.2500, 0.2500, 0.2500]]), tensor([0.2500]), 1)
    """
    joint = torch.cat([start_logit[:, None], logits], 1)
    weights, _ = softmax_weights(joint)
    slot = (joint + gumbel).argmax(1)
    return Scan(
        weights=weights[:, 1:],
        start_weight=weights[:, 0],
        last=slot - 1,
        last_logit=joint.gather(1, slot[:, None])[:, 0],
        accepts=(slot > 0).long(),
    )
