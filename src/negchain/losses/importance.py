"""Informed importance weights: fresh draws from a stale table, corrected by their probabilities.

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
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from negchain.losses.settings import Informed, Proposals, Shared
from negchain.losses.weighted import WeightedLoss
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
