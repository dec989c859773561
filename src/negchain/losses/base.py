"""What all losses share: settings, what they want encoded, laying out a batch, reporting.

A call of a loss always does the same things in the same order:

    requests   what it wants encoded is there, and belongs to this call
    batch      checked and laid out as sides; nothing has changed yet
    estimate   this method's pure functions of `negchain.weights`       `_weigh`, one per method
    value      the one equation, `negchain.objective`
    state      the only place where it changes

Shapes: `B` batch, `N` rows, `K` columns, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from negchain.draws import fit_for_numpy
from negchain.losses.batch import (
    Batch,
    Call,
    Drawn,
    Draws,
    Ids,
    Views,
    as_ids,
    check_batch,
    is_traced,
    lay_out,
    without_autocast,
)
from negchain.losses.columns import first_counts, given_draws, popularity, uniform_ids, with_draw
from negchain.losses.distributed import gathered, over_ranks, own_step, share_out, together
from negchain.losses.ranks import Gather, Ranks, check_gather
from negchain.losses.reporting import Reporting
from negchain.losses.request import Encode, Part, Request, Want, answered, tower_of
from negchain.losses.settings import (
    Given,
    InBatch,
    Informed,
    Proposals,
    Uniform,
    check_proposals,
    one_of,
)  # fmt: skip
from negchain.losses.shards import Rows
from negchain.losses.table import Tables
from negchain.objective import Denominator, Estimate, contrastive_objective
from negchain.pool import Draw, Side


class ContrastiveLoss(Reporting):
    """Abstract base of the losses; a method of your own is easier on `negchain.WeightedLoss`.

    Example:
        >>> import negchain
        >>> isinstance(negchain.EMC2Loss(10), ContrastiveLoss)
        True

    A method implements `_loss(call, requests)`: the loss of a batch, []. What it wants encoded
    beyond draws from `proposals` it adds in `_parts` (before the batch is encoded) or
    `_parts_given` (after).
    """

    __call__: Callable[..., Tensor]
    step: Tensor  # [] calls in training mode
    key_counts: Tensor  # [num_keys + 1] how often each key was a positive, and the sum

    def __init__(
        self,
        num_samples: int | None,
        beta: float | Tensor,
        *,
        views: Views = "shared",
        symmetric: bool = True,
        denominator: Denominator = "negatives",
        proposals: Proposals | None = None,
        num_keys: int | None = None,
        key_counts: Tensor | None = None,
        normalize: bool = True,
        seed: int = 0,
        dim: int | None = None,
        ids_per_item: int = 1,
        gather: Gather = True,
        shard_state: bool = False,
    ) -> None:
        super().__init__()
        one_of("views", views, ("shared", "paired"))
        one_of("denominator", denominator, ("negatives", "all"))
        if isinstance(beta, Tensor) and beta.numel() == 1 and not beta.requires_grad:
            beta = float(beta)
        if not (beta.numel() == 1 if isinstance(beta, Tensor) else 0 < beta < math.inf):
            raise ValueError(f"beta (1 / temperature) must be one positive number, got {beta}")
        if num_samples is not None and num_samples < (2 if num_keys is None else 1):
            raise ValueError(
                f"num_samples must be at least 2, got {num_samples}: one sample has no negative"
            )
        if num_keys is not None and (views != "paired" or num_keys < 2 or num_samples is None):
            raise ValueError(
                "num_keys (the size of a corpus of keys) needs num_samples, views='paired' and at "
                f"least 2 keys, got num_keys={num_keys}, num_samples={num_samples} and "
                f"views={views!r}"
            )
        # a Parameter is registered by nn.Module, and may be learned; a number may be numpy's
        self.beta = beta if isinstance(beta, Tensor) else float(beta)
        self.views: Views = views
        # A corpus of keys has no anchors of its own to run the other direction from.
        self.symmetric = symmetric and num_keys is None
        self.denominator: Denominator = denominator
        self.proposals = check_proposals(proposals or InBatch(), num_samples, views)
        self.num_samples = num_samples
        self.num_keys = num_keys
        self.normalize = normalize
        self.seed = seed
        self.ids_per_item = ids_per_item
        self._turn = 0
        self.gather = check_gather(gather, shard_state)
        self.bytes_sent = 0  # to other ranks, so far
        self.rows = Rows(num_samples or 0, Ranks.of(self) if shard_state else None)
        self.add_state("step", torch.zeros((), dtype=torch.int64))
        sizes = [num_samples or 0, num_keys or 0, ids_per_item]
        self.add_state("sizes", torch.tensor(sizes, dtype=torch.int64))
        self._counts_keys = num_keys is not None and key_counts is None
        if num_keys is not None:
            self.add_state("key_counts", first_counts(key_counts, num_keys))
        count = self.num_sides if isinstance(self.proposals, Informed) else 0
        self.tables = Tables(count, self.num_ids or 0, dim, self.rows.ranks)

    # ------------------------------------------------------------------ sizes

    @property
    def num_sides(self) -> int:
        """Directions of comparison, each with a table of state of its own."""
        return 2 if self.views == "paired" and self.symmetric else 1

    @property
    def num_positions(self) -> int | None:
        """M, the size of the set the negatives come from."""
        return self.num_samples if self.num_keys is None else self.num_keys

    @property
    def num_ids(self) -> int | None:
        """Ids a negative can have: one per position, or per stored augmentation of it."""
        return None if self.num_positions is None else self.num_positions * self.ids_per_item

    @property
    def multiplicity(self) -> int:
        """Negatives of the target that share one position: the two views of an item."""
        return 2 if self.views == "shared" else 1

    # ------------------------------------------------------------------ what to encode

    def request(
        self,
        index: Ids,
        z_a: Tensor | None = None,
        z_b: Tensor | None = None,
        *,
        key_index: Ids | None = None,
        known: Ids | None = None,
        augmentation: tuple[Tensor, Tensor] | None = None,
        ahead: int = 0,
    ) -> Request:
        """What this loss wants encoded for a batch; changes nothing. See `negchain.Request`.

        Args:
            index: [B] data set positions of the batch.
            z_a, z_b: [B, D] its embeddings. Without them: what is known before the batch is
                encoded. With them: what depends on them.
            key_index, known, augmentation: as in the call.
            ahead: calls that come before the one this is for (a loader that prefetches).
        """
        index = as_ids("index", index, len(index), self.step.device)
        ranks, step = Ranks.of(self), own_step(self, ahead)
        with torch.no_grad():
            if z_a is None:
                parts = self._parts(index, augmentation, step)
            else:
                call = Call(z_a, z_a if z_b is None else z_b, index, key_index, known, augmentation)
                if ranks is not None and ranks.join and len(self.tables):
                    call, _ = gathered(self, call, (), self._turn, ranks)
                with without_autocast(z_a):
                    parts = self._parts_given(call, step)
        if ranks is not None:
            parts = [share_out(part, ranks) for part in parts]
        return Request(self, index, self._turn + ahead, parts, z_a is not None, augmentation)

    def _parts(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None, step: Tensor
    ) -> list[Part]:
        """Before the batch is encoded: uniform draws, and the share of the tables that is due."""
        parts = []
        if isinstance(self.proposals, Uniform):
            per_row = int(self.proposals.num is None)
            for side in range(self.num_sides):
                key = (self.seed, step, side)
                ids = uniform_ids(index, self.proposals.num, self.num_ids or 0, key)
                want = Want(ids, tower_of(side))
                parts.append(Part("draw", side, want, Draw(ids), per_row=per_row))
        for side, table in enumerate(self.tables):
            ids = table.next_ids(self._refreshed())
            if len(ids):
                parts.append(Part("refresh", side, Want(ids, tower_of(side), gradient=False)))
        return parts

    def _refreshed(self) -> int:
        """Keys of a table that are encoded anew per step."""
        share = self.proposals.refresh if isinstance(self.proposals, Informed) else 0.0
        return math.ceil(share * (self.num_ids or 0))

    def _parts_given(self, call: Call, step: Tensor) -> list[Part]:
        """Once the batch is encoded: informed draws."""
        if not isinstance(self.proposals, Informed):
            return []
        parts = []
        for number, side in enumerate(self._sides(self._checked(call), use_batch=False)):
            table, beta = self.tables[number], self._beta(side.queries)
            draw = table.informed_rows if self.proposals.per_row else table.informed
            count = self.proposals.num or (1 if self.proposals.per_row else len(call.z_a))
            ids, log_q = draw(count, side, beta, self.proposals, (self.seed, step, number))
            wanted = Want(ids.flatten(), tower_of(number))
            parts.append(Part("draw", number, wanted, Draw(ids, log_q)))
        return parts

    def held(
        self, index: Ids, augmentation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Ids of the negatives chains hold for a batch; nothing for a loss without chains."""
        return ()

    @torch.no_grad()
    def fill(self, encode: Encode | tuple[Encode, Encode], chunk: int = 256) -> None:
        """Encode every key once into the stale tables; nothing to do for a loss without one."""
        ranks = Ranks.of(self)
        for number, table in enumerate(self.tables):
            whole = torch.arange(table.size, device=self.step.device)
            for ids in torch.split(whole, chunk * (1 if ranks is None else ranks.world)):
                part = Part("refresh", number, Want(ids, tower_of(number), gradient=False))
                request = Request(self, ids, 0, [part if ranks is None else share_out(part, ranks)])
                z = request.encode(encode).parts[0].embeddings
                assert z is not None
                z = z if ranks is None else together(z, len(ids), ranks)
                table.refresh(ids, z, normalize=self.normalize)

    # ------------------------------------------------------------------ the call

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Ids | None = None,
        *requests: Request,
        encode: Encode | tuple[Encode, Encode] | None = None,
        key_index: Ids | None = None,
        known: Ids | None = None,
        augmentation: tuple[Tensor, Tensor] | None = None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
    ) -> Tensor:
        """The loss of a batch; call `.backward()` on it. In training mode its state moves on.

        Args:
            z_a: [B, D] embeddings of one view (or of the anchors).
            z_b: [B, D] embeddings of the other view (or of the keys).
            index: [B] data set positions; equal ids are never negatives of each other. None (for
                losses built without num_samples): all different.
            requests: what `request` handed out, answered.
            encode: instead of requests: a function from positions [R] to embeddings [R, D] under
                the current encoder; a pair (anchors', keys') for paired views in both directions.
            key_index: [B] positions of z_b among the keys, with `num_keys`.
            known: [B, L] further positives of each row, padded with -1: never its negatives. A
                relation that holds both ways is given from both sides.
            augmentation: with stored augmentations, which ones the two views are ([B] each).
            draw, drawn: with proposals=Given(): the caller's draws and their embeddings.

        Returns:
            [] scalar with the value of an estimate of the global loss, and the method's gradient.
        """
        call = Call(z_a, z_b, index, key_index, known, augmentation, draw, drawn)
        if encode is not None:  # under the caller's autocast, as the batch was
            requests = self._encoded(call, encode)
        with without_autocast(z_a):
            if call.draw is not None and not isinstance(self.proposals, Given):
                raise ValueError("draw= goes with proposals=Given() at construction; leave it out")
            with over_ranks(self, call, requests, self._turn) as (whole, answers):
                total = self._loss(whole, answers)
        if z_a.device.type == "cpu" and not is_traced(z_a):
            self._warn(self.faults[2].item())
        if self.training:
            self._turn += 1
        return total

    def _encoded(self, call: Call, encode: Encode | tuple[Encode, Encode]) -> tuple[Request, ...]:
        """Both requests of a call, answered by `encode`."""
        if call.index is None:
            return ()
        named = {"known": call.known, "augmentation": call.augmentation}
        first = self.request(call.index, **named).encode(encode)  # type: ignore[arg-type]
        second = self.request(
            call.index,
            call.z_a,
            call.z_b,
            key_index=call.key_index,
            **named,  # type: ignore[arg-type]
        )
        return first, second.encode(encode)

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        raise NotImplementedError

    def _checked(self, call: Call) -> Batch:
        return check_batch(
            call,
            num_samples=self.num_samples,
            num_keys=self.num_keys,
            normalize=self.normalize,
        )

    def _sides(self, batch: Batch, **layout: Any) -> list[Side]:
        return lay_out(
            batch,
            views=self.views,
            symmetric=self.symmetric,
            num_positions=self.num_positions,
            multiplicity=self.multiplicity,
            ids_per_item=self.ids_per_item,
            popularity=None
            if self.num_keys is None
            else popularity(self.key_counts, batch, self.num_samples, self._counts_keys),
            **layout,
        )

    def _begin(
        self, call: Call, requests: Sequence[Request], quiet: bool = False, **layout: Any
    ) -> tuple[Batch, list[Side]]:
        """The batch and its sides, with drawn columns appended."""
        batch = self._checked(call)
        alone = not isinstance(self.proposals, InBatch) and self.proposals.alone
        sides = self._sides(batch, use_batch=not alone, **layout)
        if not isinstance(self.proposals, InBatch):
            if isinstance(self.proposals, Given):
                drawn = given_draws(call.draw, call.drawn, self.num_sides)
            else:
                parts = [answered(requests, "draw", side) for side in range(self.num_sides)]
                drawn = [(part.draw, part.embeddings) for part in parts]  # type: ignore[misc]
            sides = [
                with_draw(side, *pair, self.num_ids, self.normalize)
                for side, pair in zip(sides, drawn, strict=True)
            ]
        if batch.faults is not None and not quiet and not is_traced(batch.faults):
            self.faults[:2] += batch.faults
        return batch, sides

    def _count_lonely(self, log_partition: Tensor) -> None:  # [N]
        """Note the rows without any negative (-inf), for `info`."""
        if not is_traced(log_partition):
            lonely = log_partition == -math.inf
            if not fit_for_numpy(lonely) or lonely.numpy().any():
                self.faults[2] += lonely.sum()

    def _count(self, keys: Tensor, valid: Tensor | None = None) -> None:  # [B]
        """Remember which keys were positives; part of changing state."""
        if self.num_keys is not None and self._counts_keys:
            ones = torch.ones_like(keys) if valid is None else valid.to(keys.dtype)
            self.key_counts.index_add_(0, keys, ones)
            self.key_counts[-1] += ones.sum()

    def _touched(
        self, call: Call, index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """State by rows [M, ...], and the rows this call may have changed; for other ranks."""
        keys = index if call.key_index is None else call.key_index
        keys = as_ids("key_index", keys, len(index), index.device)
        return self.tables.touched(index, keys, requests)

    # ------------------------------------------------------------------ value and report

    def _beta(self, like: Tensor) -> float | Tensor:
        return self.beta.to(like.dtype) if isinstance(self.beta, Tensor) else self.beta

    def _value(
        self,
        side: Side,
        similarity: Tensor,
        estimate: Estimate,
        carried_similarity: Tensor | None = None,
    ) -> Tensor:
        positive = torch.linalg.vecdot(side.queries, side.positives)
        beta = self._beta(similarity)
        return contrastive_objective(
            positive, similarity, estimate, beta, self.denominator, carried_similarity
        )

    def extra_repr(self) -> str:
        """The settings, for `print(loss)`."""
        beta = self.beta if isinstance(self.beta, float) else f"{self.beta.item():g} (learned)"
        return f"beta={beta}, views={self.views!r}, denominator={self.denominator!r}"
