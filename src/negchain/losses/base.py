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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from negchain import draws
from negchain.losses.batch import (
    Batch,
    Drawn,
    Draws,
    Ids,
    Views,
    as_ids,
    check_answer,
    check_batch,
    is_traced,
    lay_out,
    per_side,
)
from negchain.losses.columns import popularity, with_draw
from negchain.losses.reporting import Reporting
from negchain.losses.request import Encode, Part, Request, Want, answered, check_requests
from negchain.losses.settings import Given, InBatch, Informed, Proposals, Uniform
from negchain.losses.table import Tables
from negchain.objective import Denominator, Estimate, contrastive_objective
from negchain.pool import Draw, Side


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a loss."""

    z_a: Tensor
    z_b: Tensor
    index: Ids | None
    key_index: Ids | None = None
    known: Ids | None = None
    augmentation: tuple[Tensor, Tensor] | None = None
    draw: Draws | None = None
    drawn: Drawn | None = None


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
    ) -> None:
        super().__init__()
        one_of("views", views, ("shared", "paired"))
        one_of("denominator", denominator, ("negatives", "all"))
        if isinstance(beta, Tensor) and not beta.requires_grad:
            beta = float(beta)
        if not isinstance(beta, Tensor) and not 0 < beta < math.inf:
            raise ValueError(f"beta (1 / temperature) must be positive and finite, got {beta}")
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
        self.proposals: Proposals = proposals or InBatch()
        self.num_samples = num_samples
        self.num_keys = num_keys
        self.normalize = normalize
        self.seed = seed
        self.ids_per_item = ids_per_item
        if num_samples is None and not isinstance(self.proposals, (InBatch, Given)):
            raise ValueError(
                f"proposals={self.proposals} draws from the data set; give its size, num_samples="
            )
        if isinstance(self.proposals, InBatch) and self.proposals.copies == 2 and views != "shared":
            raise ValueError(
                "InBatch(copies=2) is for the two views of views='shared', got views='paired'; "
                "use InBatch()"
            )
        self._turn = 0
        self.add_state("step", torch.zeros((), dtype=torch.int64))
        sizes = [num_samples or 0, num_keys or 0, ids_per_item]
        self.add_state("sizes", torch.tensor(sizes, dtype=torch.int64))
        self._counts_keys = num_keys is not None and key_counts is None
        if num_keys is not None:
            self.add_state("key_counts", _first_counts(key_counts, num_keys))
        informed = isinstance(self.proposals, Informed)
        self.tables = Tables(self.num_sides if informed else 0, self.num_ids or 0, dim)

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
        device = self.step.device
        if not isinstance(index, Tensor):
            index = torch.as_tensor(index)
        index = as_ids("index", index, len(index), device)
        with torch.no_grad():
            if z_a is None:
                parts = self._parts(index, augmentation, self.step + ahead)
            else:
                call = Call(z_a, z_a if z_b is None else z_b, index, key_index, known, augmentation)
                with torch.autocast(z_a.device.type, enabled=False):
                    parts = self._parts_given(call)
        return Request(self, index, self._turn + ahead, parts, given=z_a is not None)

    def _parts(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None, step: Tensor
    ) -> list[Part]:
        """Before the batch is encoded: uniform draws, and the share of the tables that is due."""
        parts = []
        if isinstance(self.proposals, Uniform):
            count = self.proposals.num or len(index)
            for side in range(self.num_sides):
                row = torch.full((1,), side, device=step.device)
                u = draws.uniform(self.seed, step, draws.STREAM_PROPOSE, row, count, torch.float64)
                assert self.num_ids is not None
                bound = torch.full_like(u[0], self.num_ids, dtype=torch.int64)
                ids = draws.integers_below(bound, u[0])
                parts.append(Part("draw", side, Want(ids, _tower(side)), Draw(ids)))
        for side, table in enumerate(self.tables):
            ids = table.next_ids(self._refreshed())
            if len(ids):
                parts.append(Part("refresh", side, Want(ids, _tower(side), gradient=False)))
        return parts

    def _refreshed(self) -> int:
        """Keys of a table that are encoded anew per step."""
        share = self.proposals.refresh if isinstance(self.proposals, Informed) else 0.0
        return math.ceil(share * (self.num_ids or 0))

    def _parts_given(self, call: Call) -> list[Part]:
        """Once the batch is encoded: informed draws."""
        if not isinstance(self.proposals, Informed):
            return []
        parts = []
        for number, side in enumerate(self._bare_sides(call)):
            table, beta = self.tables[number], self._beta(side.queries)
            draw = table.informed_rows if self.proposals.per_row else table.informed
            count = self.proposals.num or (1 if self.proposals.per_row else len(call.z_a))
            key = (self.seed, self.step, number)
            ids, log_q = draw(count, side, beta, self.proposals, key)
            wanted = Want(ids.flatten(), _tower(number))
            parts.append(Part("draw", number, wanted, Draw(ids, log_q)))
        return parts

    def _bare_sides(self, call: Call) -> list[Side]:
        """The rows of a batch without columns, to draw for."""
        batch = self._checked(call)
        return self._sides(batch, use_batch=False)

    def held(
        self, index: Ids, augmentation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Ids of the negatives chains hold for a batch; nothing for a loss without chains."""
        return ()

    @torch.no_grad()
    def fill(self, encode: Encode | tuple[Encode, Encode], chunk: int = 256) -> None:
        """Encode every key once into the stale tables; nothing to do for a loss without one."""
        of_anchors, of_keys = encode if isinstance(encode, tuple) else (encode, encode)
        for number, table in enumerate(self.tables):
            for ids in torch.split(torch.arange(table.size, device=self.step.device), chunk):
                z = (of_keys if number == 0 else of_anchors)(ids)
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
        with torch.autocast(z_a.device.type, enabled=False):
            if call.draw is not None and not isinstance(self.proposals, Given):
                raise ValueError("draw= goes with proposals=Given() at construction; leave it out")
            check_requests(self, self._turn, call.index, requests)
            total = self._loss(call, requests)
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
            call.z_a,
            call.z_b,
            call.index,
            call.key_index,
            call.known,
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
            draws_of = self._draws(call, requests)
            sides = [
                with_draw(side, *pair, self.num_ids, self.normalize)
                for side, pair in zip(sides, draws_of, strict=True)
            ]
        if not quiet and not is_traced(batch.z_a):
            self.faults[:2] += batch.faults
        return batch, sides

    def _count_lonely(self, log_partition: Tensor) -> None:  # [N]
        """Note the rows without any negative (-inf), for `info`."""
        if not is_traced(log_partition):
            self.faults[2] += (log_partition == -math.inf).sum()

    def _draws(self, call: Call, requests: Sequence[Request]) -> list[tuple[Draw, Tensor]]:
        """What was drawn for each side, and its embeddings."""
        if isinstance(self.proposals, Given):
            if call.draw is None or call.drawn is None:
                raise ValueError(
                    "proposals=Given() needs draw= (ids and their probabilities) and drawn= (their "
                    "embeddings) in every call; pass both"
                )
            pair = (
                per_side(name, value, self.num_sides)
                for name, value in (("draw", call.draw), ("drawn", call.drawn))
            )
            return list(zip(*pair, strict=True))  # type: ignore[arg-type]
        found = []
        for side in range(self.num_sides):
            part = answered(requests, "draw", side)
            assert part.draw is not None and part.embeddings is not None
            found.append((part.draw, part.embeddings))
        return found

    def _count_keys(self, batch: Batch) -> None:
        """Remember which keys were positives; part of changing state."""
        if self.num_keys is not None and self._counts_keys:
            self.key_counts.index_add_(0, batch.key_index, batch.valid.to(self.key_counts.dtype))
            self.key_counts[-1] += batch.valid.sum()

    def _remember(self, batch: Batch, sides: Sequence[Side], requests: Sequence[Request]) -> None:
        """Whatever this step encoded is the freshest the stale tables can hold."""
        for number, table in enumerate(self.tables):
            side = sides[number]
            table.write(side.positive_ids, side.positives)  # they may be no columns
            table.write(side.key_ids.flatten(), side.keys.flatten(0, 1))
            if side.private_ids is not None and side.private_keys is not None:
                table.write(side.private_ids.flatten(), side.private_keys.flatten(0, 1))
            for request in requests:
                for part in request.parts:
                    if part.side != number or part.embeddings is None:
                        continue
                    if part.purpose == "refresh":
                        table.refresh(part.want.ids, part.embeddings, normalize=self.normalize)
                    elif part.purpose == "carried":
                        z = check_answer(part.embeddings.detach(), batch.z_a, self.normalize)
                        table.write(part.want.ids, z)

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
        learned = isinstance(self.beta, Tensor)
        beta = f"{float(self.beta):g} (learned)" if learned else f"{self.beta}"
        return f"beta={beta}, views={self.views!r}, denominator={self.denominator!r}"


def _tower(side: int) -> Any:
    return "keys" if side == 0 else "anchors"


def _first_counts(counts: Tensor | None, num_keys: int) -> Tensor:
    """How often each key is a positive, and the sum; zeros: they are counted as it goes."""
    if counts is None:
        return torch.zeros(num_keys + 1, dtype=torch.int64)
    counts = torch.as_tensor(counts)
    if counts.shape != (num_keys,) or counts.is_floating_point() or bool((counts < 0).any()):
        raise ValueError(
            f"key_counts must hold a count per key, [{num_keys}] integers of at least 0, "
            f"got {counts.dtype} {tuple(counts.shape)}"
        )
    return torch.cat([counts, counts.sum()[None]]).long()


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
