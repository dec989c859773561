"""Negative Cache as a module: one negative per anchor, drawn exactly from yesterday's softmax.

Estimates   p_i by one Gumbel-max draw over a stale table of all keys, re-encoded with gradient.
State       the table: M x D floats, and a refresh cursor.
Cost        M D per anchor for the draw, one encode per anchor, refresh * M encodes per step.
Bias        staleness of the table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from negchain.losses.base import ContrastiveLoss, effective_negatives, full_precision
from negchain.losses.batch import Drawn, Draws, Views
from negchain.losses.table import StaleTable, propose_from
from negchain.objective import Denominator, Estimate
from negchain.pool import Draw


class NegativeCacheLoss(ContrastiveLoss):
    r"""Negative Cache: propose from a stale table, encode the winners, call.

    $$ z_i = \arg\max_z \big[ \beta\, \phi(x_i)^\top \psi_{old}(z) + \text{Gumbel} \big], \qquad
       \nabla \approx \tfrac{\beta}{B} \sum_i \big[ -\nabla s(x_i,y_i) + \nabla s(x_i,z_i) \big] $$

    Negatives are whole items (the paper uses images without augmentation): m_neg = M - 1.

    Args:
        num_samples: number of anchors; also of keys unless `num_keys` is given.
        dim: dimension of the embeddings.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        refresh: share of the table `refresh_ids` names per step (rho in the paper).
        views, symmetric, num_keys, normalize: as for `InfoNCELoss`.
        denominator: "negatives" (eq. (1)) or "all"; the partition comes from the stale table.
        seed: of the Gumbel noise.

    Example:
        >>> encoder, items = torch.nn.Linear(5, 8), torch.randn(50, 5)
        >>> loss_fn = NegativeCacheLoss(50, 8, beta=10.0, refresh=0.1)
        >>> index = torch.arange(4)
        >>> z_a, z_b = encoder(items[index]), encoder(items[index])
        >>> draw = loss_fn.propose(z_a, index)
        >>> loss_fn(z_a, z_b, index, draw=draw, drawn=encoder(items[draw.ids])).backward()
        >>> ids = loss_fn.refresh_ids()
        >>> loss_fn.refresh(ids, encoder(items[ids]))
    """

    def __init__(
        self,
        num_samples: int,
        dim: int,
        beta: float | Tensor = 14.28,
        refresh: float = 0.01,
        *,
        views: Views = "shared",
        symmetric: bool = True,
        denominator: Denominator = "negatives",
        num_keys: int | None = None,
        normalize: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            beta,
            views=views,
            symmetric=symmetric,
            denominator=denominator,
            num_samples=num_samples,
            num_keys=num_keys,
            normalize=normalize,
            seed=seed,
        )
        if not 0 <= refresh <= 1:
            raise ValueError(
                f"refresh (share of the table per step) must be in [0, 1], got {refresh}"
            )
        self.refresh_fraction = refresh
        size = num_samples if num_keys is None else num_keys
        self.tables = nn.ModuleList(StaleTable(size, dim) for _ in range(self.num_sides))

    @property
    def multiplicity(self) -> int:
        """Every item is one negative."""
        return 1

    @torch.no_grad()
    def propose(
        self,
        z_a: Tensor,
        index: Tensor,
        z_b: Tensor | None = None,
        *,
        key_index: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Draw | tuple[Draw, Draw]:
        """Draw one negative per anchor from the stale softmax; changes nothing.

        Args:
            z_a: [B, D] embeddings of the anchors.
            index: [B] their data set positions.
            z_b: [B, D]; given, both views (or both directions) are anchors with draws of their own.
                Without it `z_a` alone is: with shared views both rows of a pair then use its draw.
            key_index, known: as in the call.

        Returns:
            A private `Draw` with ids [N]; for paired views in both directions a pair of them.
        """
        rows = len(index) if z_b is None else None
        return propose_from(
            self,
            self.tables,
            z_a,
            index,
            z_b,
            key_index,
            known,
            lambda table, *of: table.winners(rows, *of),
        )

    @full_precision
    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Tensor,
        *,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
        key_index: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch; `draw` from `propose`, `drawn` the embeddings of its ids.

        In training mode the batch's and the drawn embeddings are written into the table.
        """
        if draw is None:
            raise ValueError(
                "NegativeCacheLoss needs draw= and drawn=: call draw = loss_fn.propose(z_a, index) "
                "and pass draw=draw, drawn=encoder(items[draw.ids])"
            )
        batch, sides = self._begin(z_a, z_b, index, key_index, known, draw, drawn, use_batch=False)
        total: list[Tensor] = []
        report: dict[str, list[Tensor]] = {"global_loss": [], "effective_negatives": []}
        for number, (side, module) in enumerate(zip(sides, self.tables, strict=True)):
            table = module
            assert isinstance(table, StaleTable)
            if side.private_ids is None or side.private_keys is None or side.draw is None:
                raise ValueError(
                    "NegativeCacheLoss needs a private draw per anchor, as propose gives it"
                )
            similarity = side.similarities()
            weights = (~side.excludes(side.private_ids)).to(similarity.dtype)
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
            log_partition = side.draw.log_partition
            if log_partition is None:
                log_partition = torch.logsumexp(table.logits(side, self._beta(similarity)), 1)
            log_partition = log_partition.repeat(side.num_rows // len(log_partition))
            total.append(self._value(side, similarity, Estimate(weights, log_partition)))
            report["global_loss"].append(total[-1].detach())
            report["effective_negatives"].append(effective_negatives(weights))
            if self.training:
                keys = batch.z_b if number == 0 else batch.z_a
                ids = batch.key_index if number == 0 else batch.index
                table.write(ids, keys)
                table.write(side.private_ids.flatten(), side.private_keys.flatten(0, 1))
        if self.training:
            self.step += 1
        return self._finish(total, report)

    def refresh_ids(self) -> Tensor:
        """The data set positions whose embeddings are due, [ceil(refresh * M)]; changes nothing."""
        table = self.tables[0]
        assert isinstance(table, StaleTable)
        return table.next_ids(math.ceil(self.refresh_fraction * table.embeddings.shape[0]))

    def refresh(self, ids: Tensor, embeddings: Tensor, side: int = 0) -> None:
        """Write re-encoded embeddings ([R, D]) of `ids` ([R]) and move on to the next share.

        With paired views in both directions `side=1` refreshes the table of the anchors.
        """
        table = self.tables[side]
        assert isinstance(table, StaleTable)
        table.refresh(ids, embeddings, normalize=self.normalize)
