"""A method of your own: `logits -> weights`, and the loss around it is there.

Shapes: `N` rows, `K` columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from negchain.losses.base import ContrastiveLoss
from negchain.losses.batch import Batch, Call, check_batch
from negchain.losses.request import Request
from negchain.losses.state import Report
from negchain.objective import (
    Estimate,
    constant,
    detached_logits,
    effective_negatives,
    global_log_partition,
    mean_loss,
)
from negchain.pool import Side
from negchain.printable import show

Learn = Callable[[Batch], None]


class WeightedLoss(ContrastiveLoss):
    """Base of a method that weighs the columns at hand; implement `weigh`.

    Views, known positives, draws (`proposals=`), denominators, reports, checkpoints and the trainer
    come with it. State goes through `add_state`, and changes in `commit` only.

    Example:
        >>> import torch
        >>> class Hardest(WeightedLoss):
        ...     def weigh(self, logits, ids):
        ...         hardest = logits == logits.amax(1, keepdim=True)
        ...         return hardest.float(), logits.logsumexp(1)
        >>> z_a, z_b = torch.randn(2, 8, 4).requires_grad_().unbind()
        >>> Hardest(100, 10.0)(z_a, z_b, torch.arange(8)).backward()
    """

    _counts_steps = True  # False: nothing is drawn, and a call changes nothing at all

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The method: an estimate of the softmax over all negatives; changes nothing.

        Args:
            logits: [N, K] beta * similarity of every row to every column, without gradient, minus
                log(q m_neg) where a column was not drawn uniformly; -inf: no negative of the row.
            ids: [N] data set positions of the rows.

        Returns:
            Weights [N, K] (made 0 where a logit is -inf), and the log of the sum over the negatives
            [N] that value and saturation are made with (`logits.logsumexp(1)`: the batch's own);
            None: the estimate over the whole data set, log(m_neg / n sum_j exp(logit_j)).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have weigh(self, logits, ids) -> weights, log_sum; see "
            "docs/own_method.md"
        )

    def commit(self, logits: Tensor, ids: Tensor) -> None:
        """Change the method's state after a step in training mode; by default there is none."""

    def _estimate(self, number: int, side: Side, logits: Tensor) -> tuple[Estimate, Learn]:
        """What a method says about side `number`, and how its state changes by it."""
        found = self.weigh(logits, side.anchor_ids)
        both = found if isinstance(found, tuple) else ()
        shapes = [each.shape if isinstance(each, Tensor) else type(each) for each in both]
        if shapes not in ([logits.shape, type(None)], [logits.shape, logits.shape[:1]]):
            raise ValueError(
                f"weigh must return weights {list(logits.shape)} and the log of a sum "
                f"[{len(logits)}] (or None), got {show(found)}; return both"
            )
        weights, log_sum = found
        if log_sum is None:
            log_sum = global_log_partition(side, logits)
            if log_sum is None:
                raise ValueError(
                    "weigh returned None for the log of the sum, which is then estimated over the "
                    "data set, but num_samples=None; give its size, or return logits.logsumexp(1)"
                )
        # a plain softmax is NaN where a row has no negative, as in a last batch of one sample
        weights = weights.detach().to(logits.dtype).masked_fill(logits == -math.inf, 0.0)
        estimate = Estimate(weights, log_sum.detach())
        return estimate, lambda batch: self.commit(logits, side.anchor_ids)

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        batch = check_batch(self, call)
        sides = self._begin(batch, call, requests)
        values: list[Tensor] = []
        report: Report = {"global_loss_low": [], "effective_negatives": []}
        learned: list[Learn] = []
        for number, side in enumerate(sides):
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            estimate, learn = self._estimate(number, side, logits)
            values.append(self._value(side, similarity, estimate))
            log_partition = global_log_partition(side, logits)
            if log_partition is not None:
                positive_logit = side.to_positives.detach() * constant(self._beta(similarity))
                low = partial(mean_loss, positive_logit, self.denominator, log_partition)
                report["global_loss_low"].append(low)
            report["effective_negatives"].append(partial(effective_negatives, estimate.weights))
            learned.append(learn)
        if self.training:
            self._remember(batch, sides, requests)
            for learn in learned:
                learn(batch)
            if self._counts_steps:
                self.step += 1
        return self._finish(values, report, batch.faults)
