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
from dataclasses import replace
from typing import Any, Literal, Never

import torch
import torch.distributed as dist
from torch import Tensor

from negchain.losses import columns, distributed, settings
from negchain.losses.batch import (
    Batch,
    Call,
    Drawn,
    Draws,
    Ids,
    Views,
    as_ids,
    asked_positions,
    check_batch,
    is_traced,
    lay_out,
    uncompiled,
    without_autocast,
)  # fmt: skip
from negchain.losses.distributed import Ranks
from negchain.losses.request import (
    Encodes,
    Part,
    Request,
    check_answers,
    check_held,
    check_requests,
)
from negchain.losses.settings import (
    Gather,
    InBatch,
    Informed,
    Proposals,
    Uniform,
    checked_proposals,
)
from negchain.losses.state import Reporting, Rows
from negchain.losses.table import StaleTable, Tables
from negchain.objective import Denominator, Estimate, contrastive_objective
from negchain.pool import Side
from negchain.rng import fit_for_numpy


class ContrastiveLoss(Reporting):
    """Abstract base of the losses; a method of your own is easier on `negchain.WeightedLoss`.

    Example:
        >>> import negchain
        >>> isinstance(negchain.EMC2Loss(10), ContrastiveLoss)
        True

    A method implements `_loss(call, requests)`: the loss of a batch, []. What it wants encoded
    beyond draws from `proposals` it adds in `_parts` (before the batch is encoded) or draws
    from a stale table in `_drawn` (after).
    """

    __call__: Callable[..., Tensor]
    step: Tensor  # [] calls in training mode
    key_counts: Tensor  # [num_keys + 1] how often each key was a positive, and the sum
    num_sides: int  # directions of comparison, each with a table of state of its own
    num_positions: int | None  # M, the size of the set the negatives come from
    multiplicity: int  # negatives of the target that share one position: the two views of an item

    def __init__(
        self,
        num_samples: int | None,
        beta: float | Tensor,
        *,
        views: Views = "shared",
        symmetric: bool = True,
        denominator: Denominator = "negatives",
        proposals: Proposals | Literal["batch"] | None = None,
        num_keys: int | None = None,
        key_counts: Tensor | None = None,
        normalize: bool = True,
        seed: int = 0,
        dim: int | None = None,
        ids_per_item: int = 1,
        gather: Gather = True,
        shard_state: bool = False,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            settings.refuse_unknown(type(self), unknown)
        settings.one_of("views", views, ("shared", "paired"))
        settings.one_of("denominator", denominator, ("negatives", "all"))
        settings.check_sizes(num_samples, num_keys, views)
        self.beta = settings.as_beta(beta)  # a Parameter is registered by nn.Module
        self.views: Views = views
        # A corpus of keys has no anchors of its own to run the other direction from.
        self.symmetric = symmetric and num_keys is None
        self.num_sides = 2 if views == "paired" and self.symmetric else 1
        self.num_positions = num_samples if num_keys is None else num_keys
        self.multiplicity = 2 if views == "shared" else 1
        self.denominator: Denominator = denominator
        self.proposals: Proposals = InBatch()
        if proposals is not None and proposals != "batch":
            self.proposals = checked_proposals(proposals, num_samples, views)
        self.num_samples = num_samples
        self.num_keys = num_keys
        self.normalize = normalize
        self.seed = settings.as_seed(seed)
        self.ids_per_item = ids_per_item
        self._turn = 0
        settings.check_gather(gather, shard_state)
        self.gather: Gather = gather
        self.bytes_sent = 0  # to other ranks, so far
        self.rows = Rows.of(num_samples or 0, self.ranks() if shard_state else None)
        self.add_state("step", torch.zeros((), dtype=torch.int64))
        sizes = [num_samples or 0, num_keys or 0, ids_per_item]
        self.add_state("sizes", torch.tensor(sizes, dtype=torch.int64))
        self._counts_keys = num_keys is not None and key_counts is None  # on the way
        if num_keys is None and key_counts is not None:
            raise ValueError(
                "key_counts= (of a corpus of keys) goes with num_keys=, got num_keys=None; pass "
                "num_keys= and views='paired' too, or leave key_counts out"
            )
        if num_keys is not None:
            counts = columns.first_counts(key_counts, num_keys)
            self.add_state("key_counts", counts, given=key_counts is not None)
        self.tables: Tables | tuple[()] = ()
        if isinstance(self.proposals, Informed):
            self.tables = Tables(self.num_sides, self.num_ids or 0, dim, self.rows.ranks)

    # ------------------------------------------------------------------ sizes

    @property
    def num_ids(self) -> int | None:
        """Ids a negative can have: one per position, or per stored augmentation of it."""
        return None if self.num_positions is None else self.num_positions * self.ids_per_item

    def ranks(self) -> Ranks | None:
        """The processes this loss works with; None where it is alone."""
        grouped = dist.is_available() and dist.is_initialized()
        return distributed.ranks_of(self) if grouped else None

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.ranks = settings.refuse_replica  # what every request and call begins with
        return replica

    # ------------------------------------------------------------------ what to encode

    @uncompiled
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
                encoded. With them: what depends on them. z_a alone, where only its rows are anchors
                (symmetric=False, or a corpus).
            key_index, known, augmentation: as in the call.
            ahead: calls that come before the one this is for (a loader that prefetches).
        """
        index = asked_positions(self, index)
        ranks, step = self.ranks(), self.step + ahead if ahead else self.step
        if ranks is not None:
            step = ranks.step(ahead)
        with torch.no_grad():
            if z_a is not None:
                parts = self._parts_of(z_a, z_b, (index, key_index, known, augmentation), step)
            else:
                parts = self._parts(index, augmentation, step)
                if self.tables and isinstance(self.proposals, Informed):
                    parts += self.tables.due(self.proposals.refresh, ahead)
        if ranks is not None:
            parts = [distributed.share_out(part, ranks) for part in parts]
        return Request(self, index, self._turn + ahead, parts, augmentation, ahead)

    def _parts_of(
        self, z_a: Tensor, z_b: Tensor | None, where: tuple[Any, ...], step: Tensor
    ) -> list[Part]:
        """What depends on the embeddings of a batch, of which z_b may be missing."""
        if z_b is None and self.symmetric and self.tables:
            raise ValueError(
                "z_b's rows are anchors as well, and draw by it: pass z_b too, or build "
                "the loss with symmetric=False"
            )
        call, ranks = Call(z_a, z_a if z_b is None else z_b, *where), self.ranks()
        if ranks is not None and len(self.tables):
            call = distributed.asked_together(ranks, call)
        with without_autocast(z_a):
            sides = columns.rows_alone(self, check_batch(self, call)) if self.tables else []
            pairs = enumerate(zip(sides, self.tables, strict=True))
            return [self._drawn(*pair, (self.seed, step, number)) for number, pair in pairs]

    def _parts(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None, step: Tensor
    ) -> list[Part]:
        """Before the batch is encoded: uniform draws."""
        drawn = isinstance(self.proposals, Uniform)
        return columns.uniform_parts(self, index, step) if drawn else []

    def _drawn(self, side: Side, table: StaleTable, key: columns.Key) -> Part:
        """Once the batch is encoded: what the rows of a side want from its stale table."""
        proposals = self.proposals
        assert isinstance(proposals, Informed)
        draw = table.informed_rows if proposals.per_row else table.informed
        count = proposals.num or (1 if proposals.per_row else side.num_rows // side.views)
        return Part("draw", key[2], *draw(count, side, self._beta(side.queries), proposals, key))

    def held(
        self, index: Ids, augmentation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Ids of the negatives chains hold for a batch; nothing for a loss without chains."""
        return ()

    @torch.no_grad()
    def fill(self, encode: Encodes, chunk: int = 256) -> None:
        """Encode every key once into the stale tables; nothing to do for a loss without one."""
        if self.tables:
            self.tables.fill(self, encode, chunk)

    # ------------------------------------------------------------------ the call

    @uncompiled
    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Ids | None = None,
        *requests: Request,
        encode: Encodes | None = None,
        key_index: Ids | None = None,
        known: Ids | None = None,
        augmentation: tuple[Tensor, Tensor] | None = None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
        one_way: bool = False,
    ) -> Tensor:
        """The loss of a batch, for `.backward()`. In training mode the state of the loss changes.

        Args:
            z_a: [B, D] embeddings of one view (or of the anchors).
            z_b: [B, D] embeddings of the other view (or of the keys).
            index: [B] data set positions; equal ids are never negatives of each other. None (for
                losses built without num_samples): all different.
            requests: what `request` handed out, answered.
            encode: instead of requests: a function from positions [R] to embeddings [R, D] under
                the current encoder; a pair (anchors', keys') for paired views in both directions:
                position i is another item for each.
            key_index: [B] positions of z_b among the keys, with `num_keys`.
            known: [B, L] further positives of each row, padded with -1: never its negatives. A
                relation that holds both ways is given from both sides.
            augmentation: with stored augmentations, which ones the two views are ([B] each).
            draw, drawn: with proposals=Given(): the caller's draws and their embeddings.
            one_way: z_a's rows alone are anchors of this call; for losses without num_samples.

        Returns:
            [] scalar with the value of an estimate of the global loss, and the method's gradient.
        """
        call = Call(z_a, z_b, index, key_index, known, augmentation, draw, drawn, one_way)
        turn = self._turn
        if encode is not None:
            if requests:
                raise ValueError("encode= stands instead of requests; pass one or the other")
            call = call.kept()  # `encode` may fill the caller's buffers for the next batch
            requests = self._answered(encode, call)  # under the caller's autocast, as the batch
            if requests:  # whose ids are on the device: not moved there again, nor compared
                first = requests[0]
                call = replace(call, index=first.index, augmentation=first.augmentation)
        with without_autocast(z_a):
            ranks = self.ranks()
            if ranks is not None:
                with distributed.over_ranks(ranks, call, requests) as (whole, answers):
                    total = self._loss(whole, answers)
            else:
                if encode is None or self._turn != turn:  # or `encode` has called this loss
                    check_requests(self, call, requests)
                    check_held(self, call, requests)
                check_answers(requests, z_a)
                total = self._loss(call, requests)
        if z_a.device.type == "cpu" and not is_traced(z_a) and self.faults[2]:
            self._warn(self.faults[2].item())
        if self.training:
            self._turn += 1
        return total

    def _answered(self, encode: Encodes, call: Call) -> tuple[Request, ...]:
        """All that a call wants encoded, encoded."""
        if isinstance(encode, tuple) and self.views == "shared":
            raise ValueError(
                "views='shared' has one encoder, and encode= is a pair; pass one function, or "
                "construct the loss with views='paired' if z_a and z_b come from two encoders"
            )
        if call.index is None:
            return ()
        more: dict[str, Any] = {"augmentation": call.augmentation}
        first, others = self.request(call.index, **more), []
        if self.tables:
            more |= {"key_index": call.key_index, "known": call.known}
            others = [self.request(call.index, call.z_a, call.z_b, **more)]
        return first.encode(encode, *others), *others

    def check_batch_size(self, size: int, given: int = 0) -> None:
        """Refuse a batch of so many samples, and draws of the caller, as too small; no waiting."""
        return None

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        raise NotImplementedError

    def _begin(
        self, batch: Batch, call: Call, requests: Sequence[Request], **layout: Any
    ) -> list[Side]:
        """The sides of a batch: its own columns, or others beside or instead of them."""
        sides = lay_out(self, batch, one_way=call.one_way, **layout)
        if self.num_keys is None and isinstance(self.proposals, InBatch):
            return sides
        return columns.with_proposals(self, sides, batch, call, requests, layout.get("items"))

    def _remember(self, batch: Batch, sides: Sequence[Side], requests: Sequence[Request]) -> None:
        """Change what any loss may keep: stale tables, and which keys were positives."""
        if self.tables:
            self.tables.remember(sides, requests, batch, self.normalize)
        if self._counts_keys:
            columns.count_keys(self.key_counts, batch.key_index, batch.valid)

    def give_key_counts(self, key_counts: Tensor) -> None:  # [num_keys]
        """Say how many pairs of a pass have each key, where calls would have to count them.

        Fractions are means: an anchor that takes one of k keys at random gives each 1/k.
        """
        if self._counts_keys:
            self._counts_keys = False
            self._kept_as["key_counts"] = self._kept_as["key_counts"]._replace(given=True)
            self.key_counts.copy_(columns.first_counts(key_counts, len(self.key_counts) - 1))

    def _touched(
        self, call: Call, index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """State by rows [M, ...], and the rows this call may have changed; for other ranks."""
        keys = index if call.key_index is None else call.key_index
        keys = as_ids("key_index", keys, len(index), index.device)
        return self.tables.touched(index, keys, requests) if self.tables else iter(())

    # ------------------------------------------------------------------ value and report

    def _beta(self, like: Tensor) -> float | Tensor:
        return self.beta.to(like.dtype) if isinstance(self.beta, Tensor) else self.beta

    def _value(self, side: Side, similarity: Tensor, estimate: Estimate) -> Tensor:
        """The loss of a side, []; notes its rows without any negative, for `info`."""
        beta, lonely = self._beta(similarity), estimate.log_partition == -math.inf
        if not is_traced(lonely) and (not fit_for_numpy(lonely) or lonely.numpy().any()):
            self.faults[2] += lonely.sum()
        positive = side.to_positives
        return contrastive_objective(positive, similarity, estimate, beta, self.denominator)

    def extra_repr(self) -> str:
        """The settings, for `print(loss)`."""
        beta = f"{self.beta.item():g} (learned)" if isinstance(self.beta, Tensor) else self.beta
        return f"beta={beta}, views={self.views!r}, denominator={self.denominator!r}"
