"""Metropolis-Hastings: weights are the shares of steps a chain spends at each negative.

    step r:   Z <- Z'  if  log u < logit(Z') - logit(Z),  else Z stays            (eq. 7)
    weights:  W_j = #{r >= P : state after step r is j} / (R - P)                   (eq. 9)

Estimates   p_i by the visit frequencies of the chain of x_i, after P burn-in steps.
State       the final state; the caller stores it (one integer per anchor).
Cost        one comparison per logit; no exponential, no normalisation.
Bias        zero at stationarity with i.i.d. proposals (tests/weights/test_kernels.py); in batch a
            drift that grows with R / m_neg.

Three implementations of one signature: `reference` reads like Algorithm 1, `torch` is an
associative scan over all columns at once, `triton` runs one program per chain. All compare
`logit - log u > current`, in this form and order, so that they agree to the last bit.

Shapes: `N` chains, `K` proposals (columns).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.fast.backends import has_triton, triton_error

Backend = Literal["auto", "reference", "torch", "triton"]


class Scan(NamedTuple):
    """What N chains did in one scan over K columns.

    Example:
        >>> scan = mh_scan(torch.zeros(2, 3), torch.zeros(2), torch.full((2, 3), -0.1), burn_in=0)
        >>> scan.weights.shape, scan.last.tolist()
        (torch.Size([2, 3]), [2, 2])
    """

    weights: Tensor  # [N,K] share of the counted steps spent at each column
    start_weight: Tensor  # [N] share spent at the start state
    last: Tensor  # [N] int64, column of the final state; -1: still the start state
    last_logit: Tensor  # [N] logit of the final state
    accepts: Tensor  # [N] int64, number of accepted proposals


def mh_scan(
    logits: Tensor,
    start_logit: Tensor,
    log_u: Tensor,
    burn_in: int | Tensor,
    backend: Backend = "auto",
    count_every: int = 1,
) -> Scan:
    """Run N Metropolis-Hastings chains over K proposals each, in column order.

    Args:
        logits: [N, K] log target density of each proposal, up to a constant per row. With proposals
            that are not uniform, minus their log probability. -inf: excluded, neither a proposal
            nor a step.
        start_logit: [N] logit of the state each chain starts in; -inf accepts the first proposal.
        log_u: [N, K] logarithms of uniform draws.
        burn_in: P, the number of first steps that are not counted; an int or one per row, [N]. A
            row with no step left to count has its final state as its one sample.
        count_every: 1 counts the state after every step past the burn-in (the paper). c > 1 counts
            the states after columns c - 1, 2c - 1, ... and K - 1 only, from column `burn_in` (an
            int) on: fewer weights that are not zero, for large K.
        backend: "reference", "torch", "triton" (needs a GPU, or TRITON_INTERPRET=1), or "auto":
            triton for CUDA tensors where it is installed, else torch.

    Returns:
        A `Scan`. Rows of `weights` and `start_weight` together sum to one.

    Example:
        >>> logits = torch.tensor([[0.0, 5.0, 0.0]])
        >>> log_u = torch.tensor([[0.5, 0.5, 0.5]]).log()
        >>> scan = mh_scan(logits, torch.zeros(1), log_u, burn_in=1)
        >>> scan.weights                     # moved at steps 0 and 1; step 2 was refused
        tensor([[0., 1., 0.]])
        >>> int(scan.last), int(scan.accepts)
        (1, 2)
    """
    _check(logits, start_logit, log_u, burn_in, count_every)
    if backend == "auto":
        backend = "triton" if logits.is_cuda and has_triton() else "torch"
    if backend == "reference":
        return scan_reference(logits, start_logit, log_u, burn_in, count_every)
    if backend == "torch":
        return scan_torch(logits, start_logit, log_u, burn_in, count_every)
    if backend == "triton":
        reason = triton_error(logits)
        if reason is not None:
            raise ValueError(f"backend='triton' needs {reason}; use backend='torch'")
        from negchain.fast.scan_triton import scan_triton

        return scan_triton(logits, start_logit, log_u, burn_in, count_every)
    raise ValueError(f"backend must be 'auto', 'reference', 'torch' or 'triton', got {backend!r}")


def scan_reference(
    logits: Tensor, start_logit: Tensor, log_u: Tensor, burn_in: int | Tensor, count_every: int = 1
) -> Scan:
    """Algorithm 1, lines 4-8, for N chains side by side; same signature as `mh_scan`."""
    num_chains, num_columns = logits.shape
    rows = torch.arange(num_chains, device=logits.device)
    current = start_logit.clone()
    state = torch.full_like(rows, -1)
    step = torch.zeros_like(rows)  # r in the paper
    visits = logits.new_zeros(num_chains, num_columns + 1)  # the last column counts the start
    accepts, num_counted = torch.zeros_like(rows), torch.zeros_like(rows)
    for column in range(num_columns):
        proposal = logits[:, column]
        is_step = proposal > -math.inf
        accept = is_step & (proposal - log_u[:, column] > current)
        current = torch.where(accept, proposal, current)
        state = torch.where(accept, column, state)
        accepts += accept
        counts = is_step & (step >= burn_in)
        if count_every > 1:
            is_end = (column + 1) % count_every == 0 or column == num_columns - 1
            counts = torch.full_like(is_step, is_end and bool(column >= burn_in))
        visits[rows, state] += counts.to(logits.dtype)
        num_counted += counts
        step += is_step
    visits[rows, state] += (num_counted == 0).to(logits.dtype)
    weights = visits / num_counted.clamp(min=1)[:, None]
    return Scan(weights[:, :-1], weights[:, -1], state, current, accepts)


def scan_torch(
    logits: Tensor, start_logit: Tensor, log_u: Tensor, burn_in: int | Tensor, count_every: int = 1
) -> Scan:
    """The same without a loop over columns, as an associative scan; docs/design.md has the proof.

    Step j moves a chain to logit_j if its own logit is below t_j = logit_j - log u_j. Two steps in
    a row are again such a map of (t, l), "moves to l if t > c":

        (t1, l1) then (t2, l2)  =  (max(t1, t2),  l2 if t2 > l1 else l1).

    All K prefixes follow in log2(K) rounds of three elementwise operations on the [N, K] matrix.
    """
    num_chains, num_columns = logits.shape
    is_step = logits > -math.inf
    threshold = torch.where(is_step, logits - log_u, -math.inf)  # where u is 0, too
    states = _state_logits(threshold, logits, start_logit)  # [N,K+1], after 0 .. K steps
    accepted = threshold > states[:, :-1]
    columns = torch.arange(1, num_columns + 1, device=logits.device)
    slots = torch.cummax(F.pad(accepted * columns, (1, 0)), 1).values  # slot 0 is the start state

    if count_every == 1:
        rank = is_step.cumsum(1)  # number of steps up to and with this column
        limit = burn_in[:, None] if isinstance(burn_in, Tensor) else burn_in
        counted = is_step & (rank > limit)
    else:
        is_end = (columns % count_every == 0) | (columns == num_columns)
        counted = (is_end & (columns > burn_in)).expand(num_chains, -1)
    num_counted, last = counted.sum(1, keepdim=True), slots[:, -1:]
    visits = torch.zeros_like(states)
    visits.scatter_add_(1, slots[:, 1:], counted.to(logits.dtype))
    visits.scatter_add_(1, last, (num_counted == 0).to(logits.dtype))
    weights = visits / num_counted.clamp(min=1)
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
    reach = F.pad(threshold, (1, 0), value=math.nan)  # NaN: known, whatever comes round
    distance = 1
    while distance < level.shape[1]:  # Hillis-Steele: doubles the span each pair stands for
        left = level.roll(distance, 1)
        level = torch.where(left >= reach, left, level)
        reach = torch.maximum(reach, reach.roll(distance, 1))
        distance *= 2
    return level


def _check(
    logits: Tensor, start_logit: Tensor, log_u: Tensor, burn_in: int | Tensor, count_every: int
) -> None:
    if count_every < 1 or (count_every > 1 and isinstance(burn_in, Tensor)):
        raise ValueError(
            f"count_every must be at least 1, and above 1 burn_in one int for all rows; got "
            f"count_every={count_every} and burn_in of type {type(burn_in).__name__}"
        )
    if logits.dim() != 2 or log_u.shape != logits.shape:
        raise ValueError(
            "logits and log_u must both be [N, K], "
            f"got {tuple(logits.shape)} and {tuple(log_u.shape)}"
        )
    if start_logit.shape != logits.shape[:1]:
        raise ValueError(
            f"start_logit must be [N] = [{logits.shape[0]}], got {tuple(start_logit.shape)}"
        )
    if isinstance(burn_in, Tensor):
        if burn_in.shape != logits.shape[:1]:
            raise ValueError(
                f"burn_in must be an int or [N] = [{logits.shape[0]}], got {tuple(burn_in.shape)}"
            )
    elif not 0 <= burn_in < max(1, logits.shape[1]):
        raise ValueError(
            "burn_in must be at least 0 and less than the number of proposals, "
            f"got {burn_in} of {logits.shape[1]}; lower burn_in or propose more"
        )
