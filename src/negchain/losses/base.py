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

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from negchain import draws
from negchain.losses.batch import (
    Batch,
    Drawn,
    Draws,
    Ids,
    Popularity,
    Views,
    as_ids,
    check_answer,
    check_batch,
    is_traced,
    lay_out,
    per_side,
)
from negchain.losses.request import Encode, Part, Request, Want
from negchain.losses.settings import Given, InBatch, Informed, Proposals, Uniform
from negchain.losses.state import Stateful
from negchain.losses.table import Tables
from negchain.objective import Denominator, Estimate, contrastive_objective
from negchain.pool import Draw, Kind, Side, matches

Report = dict[str, list[Tensor]]


class Call(NamedTuple):
    """The arguments of one call of a loss."""

    z_a: Tensor
    z_b: Tensor
    index: Ids | None
    key_index: Ids | None = None
    known: Ids | None = None
    augmentation: tuple[Tensor, Tensor] | None = None
    draw: Draws | None = None
    drawn: Drawn | None = None


class ContrastiveLoss(Stateful):
    """Abstract base of the losses; see `negchain.EMC2Loss` and its siblings, and docs/own_method.md.

    A method implements `_loss(call, requests)`: the loss of a batch, []. What it wants encoded
    beyond draws from `proposals` it adds in `_parts` (before the batch is encoded) or
    `_parts_given` (after).
    """

    __call__: Callable[..., Tensor]
    step: Tensor  # [] calls in training mode
    faults: Tensor  # [3] samples not finite, samples out of range, rows without negatives
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
            raise ValueError("InBatch(copies=2) is for the two views of views='shared'")
        self._turn = 0
        self._info: Mapping[str, Tensor | Callable[[], Tensor]] = {}
        self.add_state("step", torch.zeros((), dtype=torch.int64))
        sizes = [num_samples or 0, num_keys or 0, ids_per_item]
        self.add_state("sizes", torch.tensor(sizes, dtype=torch.int64))
        self.add_state("faults", torch.zeros(3, dtype=torch.int64), saved=False)
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
        count = self.proposals.num or len(call.z_a)
        parts = []
        for number, side in enumerate(self._bare_sides(call)):
            table, beta = self.tables[number], self._beta(side.queries)
            ids, log_q = table.informed(
                count, side, beta, self.proposals, (self.seed, self.step, number)
            )
            parts.append(Part("draw", number, Want(ids, _tower(number)), Draw(ids, log_q)))
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
            for ids in torch.arange(table.size, device=self.step.device).split(chunk):
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
        with torch.autocast(z_a.device.type, enabled=False):
            if encode is not None:
                requests = self._encoded(call, encode)
            self._check(call, requests)
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

    def _check(self, call: Call, requests: Sequence[Request]) -> None:
        """Refuse draws nobody asked for, and requests that are not this call's."""
        if call.draw is not None and not isinstance(self.proposals, Given):
            raise ValueError("draw= goes with proposals=Given() at construction; leave it out")
        for request in requests:
            if request.owner is not self:
                raise ValueError("this request was made by another loss; ask this one")
            if call.index is None or not _same(request.index, call.index, self.step.device):
                raise ValueError(
                    "this request was made for another batch: its index is not the index of this "
                    "call; ask again with the positions you pass here"
                )
            if any(part.embeddings is None for part in request.parts):
                raise ValueError(
                    "this request was not answered: call request.answer(encoder(items[request.ids]))"
                )
            stale = [part for part in request.parts if part.purpose == "draw"]
            if stale and request.turn != self._turn:
                raise ValueError(
                    f"this request was made for call {request.turn} of the loss and this is call "
                    f"{self._turn}: its draws are of another step; ask anew before every call"
                )

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
            popularity=None if self.num_keys is None else self._popularity(batch),
            **layout,
        )

    def _begin(
        self, call: Call, requests: Sequence[Request], quiet: bool = False, **layout: Any
    ) -> tuple[Batch, list[Side]]:
        """The batch and its sides, with drawn columns appended."""
        batch = self._checked(call)
        alone = isinstance(self.proposals, (Uniform, Given)) and self.proposals.alone
        sides = self._sides(batch, use_batch=not alone, **layout)
        if not isinstance(self.proposals, InBatch):
            draws_of = self._draws(call, requests)
            sides = [
                self._with_draw(side, *pair) for side, pair in zip(sides, draws_of, strict=True)
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
            part = self._part(requests, "draw", side)
            assert part.draw is not None and part.embeddings is not None
            found.append((part.draw, part.embeddings))
        return found

    def _part(self, requests: Sequence[Request], purpose: Any, side: int) -> Part:
        """An answered part of the call's requests; its absence is explained."""
        for request in requests:
            part = request.part(purpose, side)
            if part is not None:
                return part
        raise ValueError(
            f"this loss needs its {purpose} negatives encoded: call it with "
            "encode=lambda ids: encoder(items[ids]), or pass loss_fn.request(index) and "
            "loss_fn.request(index, z_a, z_b), answered"
        )

    def _with_draw(self, side: Side, draw: Draw, drawn: Tensor) -> Side:
        """Append a draw's columns, shared ([R]) or private to each row ([N, C])."""
        ids, shape = draw.ids.to(side.keys.device), tuple(draw.ids.shape)
        if ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ValueError(f"draw.ids must be integers [R] or [N, C], got {ids.dtype} {shape}")
        if ids.dim() == 2 and shape[0] not in (side.num_rows, side.num_rows // 2):
            raise ValueError(f"draw.ids [N, C] must have {side.num_rows} rows, got {shape}")
        dim, groups = side.keys.shape[2], side.keys.shape[0]
        if tuple(drawn.shape) not in ((*shape, dim), (ids.numel(), dim)):
            raise ValueError(
                f"drawn must be the embeddings of draw.ids, [{ids.numel()}, {dim}], "
                f"got {tuple(drawn.shape)}"
            )
        self._check_draw(draw, ids)
        drawn = check_answer(drawn.reshape(-1, dim), side.queries, self.normalize)
        width = side.keys.shape[1]
        columns = shape[-1]
        count = torch.full_like(side.positive_ids, columns)
        kind = Kind(width, width + columns, count, self._log_q(side, draw))
        if ids.dim() == 2:
            repeat = side.num_rows // shape[0]
            return dataclasses.replace(
                side,
                private_ids=ids.repeat(repeat, 1),
                private_keys=drawn.view(*shape, -1).repeat(repeat, 1, 1),
                kinds=(*side.kinds, kind),
            )
        items = ids // side.ids_per_item
        excluded = matches(items, side.positive_ids, side.known)
        excluded = excluded | ~torch.isfinite(drawn).all(1)[None, :]
        return dataclasses.replace(
            side,
            keys=torch.cat([side.keys, drawn.expand(groups, -1, -1)], 1),
            key_ids=torch.cat([side.key_ids, ids.expand(groups, -1)], 1),
            excluded=torch.cat([side.excluded, excluded], 1),
            kinds=(*side.kinds, kind),
        )

    def _check_draw(self, draw: Draw, ids: Tensor) -> None:
        size = self.num_ids
        if draw.log_q is not None and size is None:
            raise ValueError(
                "a draw with probabilities needs the size of the data set to compare them with the "
                "batch's; give num_samples= (or num_keys=) when the loss is constructed"
            )
        if isinstance(draw.log_q, Tensor) and draw.log_q.shape != (size,):
            raise ValueError(
                f"draw.log_q must hold one log-probability per id, [{size}], "
                f"got {tuple(draw.log_q.shape)}"
            )
        if ids.device.type == "cpu" and size is not None and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= size:
                raise ValueError(
                    f"draw.ids must hold data set positions in [0, {size}), "
                    f"got {low if low < 0 else high}"
                )

    def _log_q(self, side: Side, draw: Draw) -> Callable[[Tensor], Tensor] | None:
        """ids -> log(q m_neg) of a draw over all ids, own positive included."""
        log_m, num_ids = side.log_num_negatives(), self.num_ids
        if log_m is None or num_ids is None:
            return None
        scale = log_m - math.log(side.multiplicity / side.ids_per_item)

        def log_q(ids: Tensor) -> Tensor:
            base = scale.view(-1, *[1] * (ids.dim() - 1))
            log = draw.log_q_of(ids)
            if log is None:
                return (base - math.log(num_ids)).expand(ids.shape)
            return log.to(scale.dtype) + base

        return log_q

    def _popularity(self, batch: Batch) -> Popularity:
        """key ids -> log-probability that another sample of a batch has this key.

        Pairs seen so far, with this batch's; before all samples were seen, each counts for one.
        """
        counts, kind = self.key_counts, batch.z_a.dtype
        if not self._counts_keys:
            log_q = (counts[:-1] / counts[-1]).log().to(kind)
            return lambda ids: log_q[ids]
        mine = torch.where(batch.valid, batch.key_index, -1).sort().values
        total = (counts[-1] + batch.valid.sum()).clamp(min=self.num_samples)

        def of(ids: Tensor) -> Tensor:
            left = torch.searchsorted(mine, ids.contiguous())
            here = torch.searchsorted(mine, ids.contiguous(), right=True) - left
            return ((counts[ids] + here) / total).log().to(kind)

        return of

    def _count_keys(self, batch: Batch) -> None:
        """Remember which keys were positives; part of changing state."""
        if self.num_keys is not None and self._counts_keys:
            self.key_counts.index_add_(0, batch.key_index, batch.valid.to(self.key_counts.dtype))
            self.key_counts[-1] += batch.valid.sum()

    def _remember(self, batch: Batch, sides: Sequence[Side], requests: Sequence[Request]) -> None:
        """Whatever this step encoded is the freshest the stale tables can hold."""
        for number, table in enumerate(self.tables):
            side = sides[number]
            table.write(side.key_ids.flatten(), side.keys.flatten(0, 1))
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

    def _finish(self, total: list[Tensor], report: Report) -> Tensor:
        """The mean loss over sides; the other numbers stay on the device for `info`."""
        if not is_traced(total[0]):
            self._info = {name: torch.stack(v).mean() for name, v in report.items() if v}
        return sum(total[1:], total[0]) / len(total)

    @property
    def info(self) -> dict[str, float]:
        """Numbers about the last call as Python floats; reading them waits for the device.

        Every loss reports `effective_negatives` (mean over rows of 1 / sum of squared weights) and,
        since it was built, `nonfinite_rows` and `rows_without_negatives` (these train nothing).
        Where the size of the data set is known also an estimate of the global loss, eq. (1):
        `global_loss_low` lies below it on average (the logarithm of a noisy mean); see each loss.

        Raises:
            ValueError: samples had an index out of range. (On a CPU such a batch is refused at
                once; on a GPU its rows change no state and are reported here.)
        """
        names, values = self.take_info()
        return self.read_info(names, values.tolist())

    def take_info(self) -> tuple[list[str], Tensor]:
        """What `info` will say, still on the device: names, and values for `read_info`."""
        values = [v() if callable(v) else v for v in self._info.values()]
        kind = values[0].dtype if values else torch.float32
        return list(self._info), torch.stack([*self.faults.to(kind), *(v.detach() for v in values)])

    def read_info(self, names: list[str], values: list[float]) -> dict[str, float]:
        """`info` from what `take_info` gave."""
        nonfinite, out_of_range, lonely = map(float, values[:3])
        if out_of_range:
            raise ValueError(
                f"index must hold data set positions below {self.num_samples}, but "
                f"{out_of_range:.0f} did not; was the loss built for another data set?"
            )
        return {
            **dict(zip(names, values[3:], strict=True)),
            "nonfinite_rows": nonfinite,
            "rows_without_negatives": lonely,
        }

    def extra_repr(self) -> str:
        """The settings, for `print(loss)`."""
        learned = isinstance(self.beta, Tensor)
        beta = f"{float(self.beta):g} (learned)" if learned else f"{self.beta}"
        return f"beta={beta}, views={self.views!r}, denominator={self.denominator!r}"


def _tower(side: int) -> Any:
    return "keys" if side == 0 else "anchors"


def _same(mine: Tensor, given: Ids, device: torch.device) -> bool:
    """Whether two batches are one; nobody is waited for while a CUDA graph is recorded."""
    if mine is given:
        return True
    given = as_ids("index", given, len(mine), device) if len(given) == len(mine) else mine[:0]
    if len(given) != len(mine):
        return False
    if mine.is_cuda and (
        mine.data_ptr() == given.data_ptr() or torch.cuda.is_current_stream_capturing()
    ):
        return True
    return torch.equal(mine, given)


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


def detached_logits(side: Side, similarity: Tensor, beta: float | Tensor) -> Tensor:
    """Corrected logits beta * s - log(q m_neg), [N, K+C]; -inf where excluded or not finite."""
    beta = beta.detach() if isinstance(beta, Tensor) else beta
    logits = similarity.detach() * beta
    correction = None if len(side.kinds) == 0 else side.correction(side.column_ids())
    if correction is not None:
        logits = logits - correction
    return logits.masked_fill(side.all_excluded() | ~torch.isfinite(logits), -math.inf)


def global_log_partition(
    side: Side, logits: Tensor, beta: float | Tensor = 1.0
) -> Tensor | None:  # [N,K+C] -> [N]
    """log( m_neg / n sum_j exp(l_ij) ) over all columns at hand; None if m_neg is unknown.

    Columns at hand include the copies of the batch's items that rows are not offered as proposals
    (`Side.hidden_keys`): a partition may count an item twice, a walk must not meet it twice.
    """
    log_num_negatives = side.log_num_negatives()
    if log_num_negatives is None:
        return None
    log_sum, counts = log_sum_and_count(side, logits, beta)
    return log_sum + log_num_negatives - counts.clamp(min=1).to(log_sum.dtype).log()


def log_sum_and_count(
    side: Side, logits: Tensor, beta: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:  # [N,K+C] -> [N], [N]
    """log sum_j exp(l_ij) over all columns at hand, and how many draws they stand for."""
    log_sum, counts = torch.logsumexp(logits, 1), side.counts()
    if side.hidden_keys is not None and len(side.kinds) == 1:
        hidden = dataclasses.replace(side, keys=side.hidden_keys.detach())
        beta = beta.detach() if isinstance(beta, Tensor) else beta
        others = hidden.similarities().detach() * beta
        others = others.masked_fill(side.excluded | ~torch.isfinite(others), -math.inf)
        log_sum, counts = torch.logaddexp(log_sum, torch.logsumexp(others, 1)), 2 * counts
    return log_sum, counts


def effective_negatives(weights: Tensor, private: Tensor | None = None) -> Tensor:
    """Mean over rows of (sum W)^2 / sum W^2: how many negatives share a row's weight; -> [].

    Example:
        >>> effective_negatives(torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
        tensor(2.)
    """
    total, squares = weights.sum(1), torch.linalg.vecdot(weights, weights)
    if private is not None:
        total, squares = total + private, squares + private * private
    tiny = torch.finfo(weights.dtype).tiny
    mean: Tensor = (total * total / squares.clamp(min=tiny)).mean()
    return mean


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
