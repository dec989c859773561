"""Draws from a stale table, corrected by their probabilities, and hard negatives that are not.

    q(z) = (1 - share) / M + share * mean_i softmax_z(sharpness * beta * x_i . psi_old(z))
    W_ij = softmax_j( beta s_ij - log q(z_j) )
    Z_i  = 1/n sum_j e^{beta s_ij} / q(z_j)

Estimates   p_i by self-normalised importance weights over the batch and the draws; no chain.
State       the table: M x D floats, and a refresh cursor.
Cost        M D per row for q, one encode per draw, refresh * M encodes per step.
Bias        of the partition: none, whatever the table holds (draws alone, the default). Of the
            weights: O(1/n), as for every ratio of two means; small where q is close to p
            (tests/losses/test_importance.py).

With uniform draws, or the batch, in place of the table and denominator="all" this is the corrected
logQ of Khrylchenko et al. (2025, arXiv 2507.09331). With f = beta s, Z the sum of e^f over the
negatives and p+ = e^f+ / (e^f+ + Z), the softmax loss over all keys has the gradient

    (1 - p+) [ sum_j pi_j grad f_j - grad f+ ],     pi_j = e^f_j / Z over the negatives alone.

Only pi and Z need draws from q: pi_j by weights e^f_j / q_j over their sum, Z by their mean. The
positive is there with certainty and takes no correction; the older logQ corrects it as well.

`TopKLoss` is the baseline: of T_i, the `top` keys with the largest x_i . psi_old(z), row i adds
`num` by lot, and W_ij = softmax_j(beta s_ij) over the batch and everything the rows added, as if
all had been in the batch. ADORE and ANCE do that between refreshes, mined hard negatives where the
table is never refreshed. It takes M D per row for the top and `num` encodes per row; the negatives
below the top are counted as if there were few of them, a bias that does not vanish.
"""

from __future__ import annotations

import warnings
from typing import Any, Unpack

import torch
from torch import Tensor

from negchain import rng
from negchain.losses.columns import Key
from negchain.losses.request import Part
from negchain.losses.settings import Informed, Proposals, Shared, check_count
from negchain.losses.softmax import without_probabilities
from negchain.losses.table import StaleTable
from negchain.losses.weighted import WeightedLoss
from negchain.pool import Side
from negchain.weights.softmax import softmax_weights


class ImportanceLoss(WeightedLoss):
    r"""The global loss from draws of a stale table, corrected by log q; the partition is fresh.

    $$ W_{ij} \propto \frac{e^{\beta s_{ij}}}{q(z_j)}, \qquad
       \hat Z_i = \frac1n \sum_j \frac{e^{\beta s_{ij}}}{q(z_j)} $$

    What to use where every step can afford a product with a table of all keys: dense retrieval,
    image-text pairs, image sets up to some millions.

    Args:
        num_samples: number of anchors; also of keys unless `num_keys` is given.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        proposals: where the draws come from: `Informed(...)`; or `Uniform(...)` or `InBatch()`,
            which need no table: with denominator="all" that is the corrected logQ of Khrylchenko
            et al. (2025). Columns of the batch beside informed draws (alone=False) bias the
            partition by O(1/B): which keys a stale table proposes depends on who is in the batch.
        views, symmetric, num_keys, key_counts, dim, normalize, seed, gather, shard_state: as for
            `InfoNCELoss`.
        denominator: "negatives" (eq. (1)), or for labelled pairs "all": the positive kept in,
            against the estimate of the *global* partition, so that solved pairs stop pulling.

    Example:
        >>> import torch
        >>> encoder, items = torch.nn.Linear(5, 8), torch.randn(50, 5)
        >>> loss_fn = ImportanceLoss(50, beta=10.0)
        >>> encode = lambda ids: encoder(items[ids])
        >>> loss_fn.fill(encode)
        >>> index = torch.arange(4)
        >>> loss_fn(encode(index), encode(index), index, encode=encode).backward()
    """

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        proposals: Proposals | None = None,
        *,
        key_counts: Tensor | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        offered = proposals or Informed(alone=True)
        super().__init__(num_samples, beta, proposals=offered, key_counts=key_counts, **shared)

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, None]:
        """Self-normalised importance weights; the partition is the global one."""
        return softmax_weights(logits)[0], None


class TopKLoss(WeightedLoss):
    """The in-batch softmax with `num` of each row's `top` nearest keys of a stale table added.

    The baseline for `ImportanceLoss`: the same table, the same encodes, no correction. All rows
    share what each of them added. Value and saturation are of the columns at hand, so `info` makes
    no claim about the global loss.

    Args:
        num_samples: number of anchors; also of keys unless `num_keys` is given.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        num: keys every row adds.
        top: how many of its nearest keys they are drawn from.
        refresh: share of the table that is encoded anew per step.
        views, symmetric, num_keys, dim, normalize, seed, gather, shard_state: as for `InfoNCELoss`.
        denominator: "all" (InfoNCE's) or "negatives" (DCL's).

    Example:
        >>> encoder, items = torch.nn.Linear(5, 8), torch.randn(50, 5)
        >>> loss_fn = TopKLoss(50, beta=10.0, top=10)
        >>> encode = lambda ids: encoder(items[ids])
        >>> loss_fn.fill(encode)
        >>> index = torch.arange(4)
        >>> loss_fn(encode(index), encode(index), index, encode=encode).backward()
    """

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        num: int = 2,
        top: int = 20,
        refresh: float = 0.01,
        **shared: Unpack[Shared],
    ) -> None:
        check_count("top (nearest keys)", top)
        if not 1 <= num <= top:
            raise ValueError(
                f"num (keys a row adds) must be from 1 to top={top} (drawn from these), got {num}"
            )
        shared = {"denominator": "all", **shared}
        table = Informed(num=num, refresh=refresh)
        super().__init__(num_samples, beta, proposals=table, **shared)
        self.num, self.top = num, top

    def _drawn(self, side: Side, table: StaleTable, key: Key) -> Part:
        """`num` of the `top` of every row."""
        if table.embeddings.shape[1] == 0:
            warnings.warn(
                "the table of TopKLoss is empty, so the nearest keys of all rows are the same "
                "few; call loss_fn.fill(encode) once before training",
                stacklevel=2,
            )
        seed, step, number = key
        nearest = table.top(self.top, side)
        row = torch.arange(side.num_rows, device=nearest.device)
        lot = rng.bits(seed, step, rng.FOR_PROPOSE + 16 * number, row, nearest.shape[1])
        ids = nearest.gather(1, lot.argsort(1)[:, : self.num])
        return Part("draw", number, ids.flatten())

    def _begin(self, *given: Any, **layout: Any) -> list[Side]:
        """Columns without probabilities, from a set of unknown size."""
        return [without_probabilities(side) for side in super()._begin(*given, **layout)]

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax over the columns, and their own sum."""
        return softmax_weights(logits)
