"""Negative Cache as a module: one negative per anchor, drawn exactly from yesterday's softmax.

Estimates   p_i by one Gumbel-max draw over a stale table of all keys, re-encoded with gradient.
State       the table: M x D floats, and a refresh cursor.
Cost        M D per anchor for the draw, one encode per anchor, refresh * M encodes per step.
Bias        staleness of the table (tests/losses/test_planted.py); none if nothing is stale and an
            item's views are equal (tests/losses/test_battery.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from negchain.losses.base import ContrastiveLoss
from negchain.losses.batch import Call, check_answer, check_batch
from negchain.losses.columns import Key, rows_alone, with_private
from negchain.losses.request import Part, Request, answered
from negchain.losses.settings import Informed, Shared, require_samples
from negchain.losses.state import Report, keep
from negchain.losses.table import StaleTable
from negchain.objective import Estimate, effective_negatives
from negchain.pool import Side


class NegativeCacheLoss(ContrastiveLoss):
    r"""Negative Cache: winners of a draw from a stale table are encoded anew and pushed away.

    $$ z_i = \arg\max_z \big[ \beta\, \phi(x_i)^\top \psi_{old}(z) + \text{Gumbel} \big], \qquad
       \nabla \approx \tfrac{\beta}{B} \sum_i \big[ -\nabla s(x_i,y_i) + \nabla s(x_i,z_i) \big] $$

    Negatives are whole items: m_neg = M - 1. Encode all keys alike and without random augmentation
    (positive, negatives, table): a table that holds another view than the one encoded next draws
    negatives at random (docs/methods/negative_cache.md).

    Args:
        num_samples: number of anchors; also of keys unless `num_keys` is given.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        refresh: share of the table that is encoded anew per step (rho in the paper).
        dim: dimension of the embeddings; None waits for the first batch.
        views, symmetric, num_keys, normalize: as for `InfoNCELoss`.
        denominator: "negatives" (eq. (1)) or "all"; the partition comes from the stale table.
        seed: of the Gumbel noise.
        gather, shard_state: as for `InfoNCELoss`.

    Example:
        >>> encoder, items = torch.nn.Linear(5, 8), torch.randn(50, 5)
        >>> loss_fn = NegativeCacheLoss(50, beta=10.0, refresh=0.1)
        >>> loss_fn.fill(lambda ids: encoder(items[ids]))       # better than starting from zeros
        >>> index = torch.arange(4)
        >>> z_a, z_b = encoder(items[index]), encoder(items[index])
        >>> loss_fn(z_a, z_b, index, encode=lambda ids: encoder(items[ids])).backward()
    """

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        refresh: float = 0.01,
        **shared: Unpack[Shared],
    ) -> None:
        require_samples(num_samples)
        table = Informed(refresh=refresh, alone=True)
        super().__init__(num_samples, beta, proposals=table, **shared)
        self.multiplicity = 1  # every item is one negative
        self._counts_keys = False  # of no use: the batch is no column here

    def _drawn(self, side: Side, table: StaleTable, key: Key) -> Part:
        """One draw per row from its stale softmax."""
        ids, log_partition = table.winners(side, self._beta(side.queries), key)
        return Part("draw", key[2], ids, log_partition=log_partition)

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        batch = check_batch(self, call)
        sides = rows_alone(self, batch)
        total: list[Tensor] = []
        report: Report = {"global_loss": [], "effective_negatives": []}
        for number, side in enumerate(sides):
            part, answer = answered(requests, "draw", number)
            assert part.log_partition is not None
            keys = check_answer(answer, part.ids, batch.both, self.normalize)
            similarity = torch.linalg.vecdot(side.queries, keys)[:, None]
            weights = (~side.excludes(part.ids)).to(similarity.dtype)[:, None]
            estimate = Estimate(weights, part.log_partition)
            total.append(self._value(side, similarity, estimate))
            report["global_loss"].append(keep(total[-1]))
            report["effective_negatives"].append(partial(effective_negatives, weights))
            sides[number] = with_private(side, part.ids[:, None], keys[:, None])
        if self.training:
            self._remember(batch, sides, requests)
            self.step += 1
        return self._finish(total, report, batch.faults)
