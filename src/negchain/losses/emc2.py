"""EMC² as a module: one persistent Markov chain per sample supplies its negatives.

A chain starts at the state carried over from the sample's last visit and moves over the batch. No
bias at stationarity where an item's views are equal, or have a chain each, and proposals are i.i.d.
(tests/losses/test_battery.py). Views that differ share one chain: then it is biased, less than the
batch alone (docs/methods/emc2.md has the numbers).

Shapes: `B` batch, `N` rows (2B for shared views), `K` columns, `D` embedding.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from negchain import rng
from negchain.losses import fused
from negchain.losses.base import ContrastiveLoss
from negchain.losses.batch import Batch, Call, Ids, asked_positions, check_answer, check_batch
from negchain.losses.chains import Carried, ChainTable, check_stored, stored_ids
from negchain.losses.request import Part, Request, answered
from negchain.losses.settings import (
    ISIR,
    MH,
    InBatch,
    Kernel,
    Proposals,
    Shared,
    as_kernel,
    corpus_proposals,
    num_proposals,
    one_of,
    require_samples,
)
from negchain.losses.walk import Sampler, Start, Visit, Walk, walk_chains
from negchain.objective import Estimate, bracket, constant, detached_logits, mean_loss
from negchain.pool import Side, usable
from negchain.weights.metropolis import Backend


class EMC2Loss(ContrastiveLoss):
    r"""EMC²: the global contrastive loss with negatives from one Markov chain per sample.

    $$ \nabla \approx \tfrac{\beta}{B} \sum_i \Big[ -\nabla s(x_i,y_i)
       + \tfrac{1}{R-P} \sum_{r \ge P} \nabla s(x_i, Z_i^{(r)}) \Big] $$

    Args:
        num_samples: m, the size of the data set (of anchors); one chain each.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        kernel: how chains move: "mh" (the paper: Metropolis-Hastings), "isir" (softmax over
            carried state and proposals), or `MH(burn_in=..., count_every=...)`, `ISIR(...)`.
        proposals: what they may move to: "batch", `InBatch(copies=...)` (the paper's R = 2b - 2 is
            `InBatch(copies=2)`), `Uniform(...)`, `Informed(...)`, `Given()`. None: the batch; for a
            corpus `Uniform()`, which reaches keys that are nobody's positive. With shared views
            "batch" offers a row one view of every other item to "mh" (R = b - 1), which is the less
            biased form for equal views, and both to "isir": no bias for equal views, less for
            others (docs/methods/isir.md).
        carried: the state carried over from the last visit is scored and trained by "encode"
            (Algorithm 1: B more encodes per step) or "cached" (its embedding is kept from the last
            visit: D floats per sample, biased, gradient reaches the anchor only).
        views: "shared" (two views through one encoder, one chain per item) or "paired" (two
            encoders, a chain table per direction).
        symmetric: both views (directions) are anchors.
        denominator: "negatives" (eq. (1)) or "all": gradients are multiplied by 1 - p+, with p+
            against an estimate of the partition over all negatives, made afresh at every visit.
        num_keys: size of a corpus of keys that is not one-to-one with the anchors.
        key_counts: [num_keys] how many anchors each key is the positive of; None: counted on the
            way.
        augmentations: k stored augmentations per item: a chain per (item, augmentation), whose
            state names both. Ids are then `item * k + augmentation`.
        dim: dimension of the embeddings, for tables that hold some; None waits for the first batch.
        normalize: bring embeddings to unit length first.
        seed: of every random draw; step t of two runs with one seed draws the same.
        gather, shard_state: with a process group; as for `InfoNCELoss`.
        chain_file: keep the chains in this memory-mapped file (docs/large_tables.md).
        backend: "fused": the whole loss in a dozen GPU kernels. "reference", "torch", "triton": the
            readable path, with this backend of `mh_scan`. "auto": fused where it applies (a GPU,
            float32 or half precision, negatives from the batch, at most 1,024 of them, every state
            counted), else readable.

    `info` holds, beside what every loss reports: `acceptance_rate`, `carried_mass` (weight on
    carried states), `chain_age`, and a bracket of the global loss: `global_loss_low` and
    `global_loss_high` lie below and above it on average (the latter at stationarity, with equal
    views: tests/losses/test_long_run.py), `global_loss` between them is also the returned value.
    Fresh views and small batches put all three far below.

    Example:
        >>> items, encoder = torch.randn(100, 5), torch.nn.Linear(5, 8)
        >>> loss_fn = EMC2Loss(num_samples=100, beta=10.0)
        >>> index = torch.tensor([3, 14, 15, 92])
        >>> z_a = encoder(items[index] + 0.1 * torch.randn(4, 5))
        >>> z_b = encoder(items[index] + 0.1 * torch.randn(4, 5))
        >>> loss_fn(z_a, z_b, index, encode=lambda ids: encoder(items[ids])).backward()
        >>> sorted(loss_fn.info)[:3]
        ['acceptance_rate', 'carried_mass', 'chain_age']
    """

    large_batch = False  # whether similarities are forgotten at once; see `LargeBatchEMC2Loss`

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        kernel: Kernel | Literal["mh", "isir"] = "mh",
        *,
        proposals: Proposals | Literal["batch"] | None = None,
        carried: Carried = "encode",
        key_counts: Tensor | None = None,
        augmentations: int | None = None,
        chain_file: str | os.PathLike[str] | None = None,
        backend: Backend | Literal["fused"] = "auto",
        **shared: Unpack[Shared],
    ) -> None:
        require_samples(num_samples)
        kernel, views = as_kernel(kernel), shared.get("views", "shared")
        if shared.get("num_keys") is not None:
            proposals = corpus_proposals(proposals, key_counts)
        if augmentations is not None:
            check_stored(augmentations, views, proposals)
        elif proposals in (None, "batch") and views == "shared" and isinstance(kernel, ISIR):
            # It weighs a set in which the carried item counts as often as the others, so both views
            # leave p as it is where they are equal. A Metropolis-Hastings chain would meet an item
            # twice; a stored view is a state of its own (records/2026-11-18_both-copies_cpu.md).
            proposals = InBatch(copies=2)
        super().__init__(
            num_samples,
            beta,
            proposals=proposals,
            key_counts=key_counts,
            ids_per_item=augmentations or 1,
            **shared,
        )
        one_of("carried", carried, ("encode", "cached"))
        one_of("backend", backend, ("auto", "reference", "torch", "triton", "fused"))
        self.kernel = kernel
        self.carried = carried
        self.augmentations = augmentations
        self.multiplicity = augmentations or self.multiplicity
        self._views_per_item = 2 if views == "shared" and self.symmetric else 1
        self.backend = backend
        self.chains = ChainTable(
            self.num_sides,
            num_samples * self.ids_per_item,
            num_states=self.num_ids or 0,
            ids_per_item=self.ids_per_item,
            own=self.num_keys is None,
            keep=carried,
            dim=shared.get("dim"),
            seed=self.seed,
            file=chain_file,
            ranks=self.rows.ranks,
        )

    def held(
        self, index: Ids, augmentation: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Ids of the negatives the chains of a batch hold now; changes nothing.

        Returns:
            One [B] per table of chains (two for paired views in both directions), or with stored
            augmentations one per view.
        """
        held = self._asked(asked_positions(self, index), augmentation)
        if augmentation is None:
            return held
        return held[0].view(self._views_per_item, len(index)).unbind()

    def _parts(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None, step: Tensor
    ) -> list[Part]:
        parts = super()._parts(index, augmentation, step)
        if self.carried == "encode":
            per_row = self._views_per_item if self.augmentations else 1
            parts[:0] = [
                Part("carried", side, ids, per_row=per_row)
                for side, ids in enumerate(self._asked(index, augmentation))
            ]
        return parts

    def _asked(self, index: Tensor, augmentation: Any) -> tuple[Tensor, ...]:
        """Carried states, a tensor per side; with stored augmentations both views' in one."""
        if augmentation is None and self._fuses(index):
            return tuple(fused.carried_ids(self, side, index) for side in range(self.num_sides))
        slots = self._slots(index, augmentation)
        return tuple(self.chains.ids(side, slots) for side in range(self.num_sides))

    def check_batch_size(self, size: int, given: int = 0) -> None:
        """Refuse a burn-in of all steps or more, P >= R: Algorithm 1 has P < R."""
        burn_in = self.kernel.burn_in if isinstance(self.kernel, MH) else 0
        offered = num_proposals(self.proposals, size, given)
        if burn_in >= max(offered, 1):
            raise ValueError(
                f"burn_in (P) must be less than the proposals of a visit (R), got {burn_in:g} "
                f"steps, and {self.proposals} offers {offered} at batch size {size}; lower "
                "burn_in, give a share below 1, or offer more (a larger batch; "
                "InBatch(copies=2) has R = 2b - 2)"
            )

    def _loss(self, call: Call, requests: Sequence[Request]) -> Tensor:
        plain = call.known is None and call.augmentation is None and not call.one_way
        if plain and self._fuses(call.z_a):
            return self._finish(*fused.emc2(self, call, requests))
        if self.backend == "fused":
            raise fused.not_applicable(call.z_a)
        visit = self.visit(call, requests)
        if self.training:
            if self.tables or self._counts_keys:
                self._remember(visit.batch, visit.sides, requests)
            for number, arrival in enumerate(visit.arrivals):
                self.chains.commit(number, arrival, visit.batch.valid)
            self.step += 1
        return self._finish(visit.total, visit.report | visit.rates(), visit.batch.faults)

    def visit(self, call: Call, requests: Sequence[Request], items: slice = slice(None)) -> Visit:
        """Loss and arrivals of the rows of some items against all columns; changes no chain."""
        batch = check_batch(self, call)
        slots = self._slots(batch.index, call.augmentation)[items]
        copies, size = self._views_per_item, len(batch.index)
        rows = torch.arange(copies * size, device=slots.device).view(copies, size)[:, items]
        cached, backend = self.carried == "cached", self.backend
        assert backend != "fused"  # which was refused
        sampler = Sampler(self.kernel, backend, self.seed, self.step, rows.flatten(), cached)
        key_ids, coin = None, None
        if call.augmentation is not None:
            key_ids = stored_ids(batch.index, call.augmentation, self.ids_per_item)
        if self.views == "shared" and self.proposals != InBatch(copies=2):
            # [B] whether rows of the first view are offered z_a's copy of each item, or z_b's
            coin = sampler.draw(rng.coins, rng.FOR_COPY, slots.new_zeros(1), size)[0]
        sides = self._begin(batch, call, requests, key_ids=key_ids, coin=coin, items=items)
        last = [side.kinds[-1] for side in sides]  # the caller's draws, if there are any
        self.check_batch_size(size, min(kind.last - kind.first for kind in last))
        visit = Visit(batch, sides)
        for number, side in enumerate(sides):
            similarity = side.similarities()
            beta = self._beta(similarity)
            logits = detached_logits(side, similarity, beta)
            start = self._start(number, side, slots, batch, requests, items)
            mover = sampler if number == 0 else dataclasses.replace(sampler, direction=number)
            walk = walk_chains(side, similarity, start, beta, logits, slots, mover)
            self._weigh(visit, side, similarity, logits, start, walk)
            visit.arrivals.append(walk.arrival)
            visit.note(walk.report())
        return visit

    def _weigh(
        self, visit: Visit, side: Side, similarity: Tensor, logits: Tensor, start: Start, walk: Walk
    ) -> None:
        """The value of a side, with the bracket of the global loss its columns allow."""
        beta = self._beta(similarity)
        low, high, middle = bracket(side, logits, beta, start.ids, start.logit)
        saturation = torch.where(low > -math.inf, low, high) if self.denominator == "all" else None
        carried = walk.carried_weight, start.similarity
        estimate = Estimate(walk.weights, middle, saturation, carried)
        visit.total.append(self._value(side, similarity, estimate))
        positive_logit = side.to_positives.detach() * constant(beta)
        mean = partial(mean_loss, positive_logit, self.denominator)
        ends = {"global_loss_low": low, "global_loss_high": high, "global_loss": middle}
        visit.note({name: partial(mean, log_partition) for name, log_partition in ends.items()})

    def _start(
        self,
        number: int,
        side: Side,
        slots: Tensor,
        batch: Batch,
        requests: Sequence[Request],
        items: slice,
    ) -> Start:
        """Where the chains of a side's rows stand."""
        if self.carried == "cached":
            ids, keys, excluded = self._cached(number, side, slots)
        else:
            (part, answer), shape = answered(requests, "carried", number), batch.both.shape[1:]
            keys = check_answer(answer, part.ids, batch.both, self.normalize)
            keys = keys.view(-1, *shape)[:, items]
            # what was asked for, not the table again: on all ranks the state of the one that asked
            ids = part.ids.view(-1, shape[0])[:, items].expand(side.views, -1).flatten()
            excluded = side.excludes(ids)
        rows = side.queries.view(side.views, *keys.shape[1:])
        similarity = torch.linalg.vecdot(rows, keys).flatten()
        logit = similarity.detach() * constant(self._beta(similarity))
        return Start(ids, usable(logit, excluded), similarity)

    def _cached(self, number: int, side: Side, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, embeddings as of the last visit, and whether they are no negatives, or new."""
        slots = slots.repeat(side.num_rows // len(slots))
        ids = self.chains.ids(number, slots)
        table = self.chains.wide("keys", side.queries.shape[1], math.nan)[number]
        keys = self.chains.rows.read(table, slots).to(side.queries.dtype)
        unseen = ~torch.isfinite(keys).all(1)
        keys = keys.masked_fill(unseen[:, None], 0.0)  # 0 * NaN would spread
        return ids, keys.view(side.views, -1, keys.shape[1]), side.excludes(ids) | unseen

    def _touched(
        self, call: Call, index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super()._touched(call, index, requests)
        slots = self._slots(index, call.augmentation)
        for side in range(self.num_sides):
            yield from ((table[side], slots) for table in self.chains.tables)

    # ------------------------------------------------------------------ parts of a step

    def _fuses(self, like: Tensor) -> bool:
        """Whether the kernels of `fused` take such a batch; on a CPU only where asked for."""
        return (like.is_cuda or self.backend == "fused") and fused.applies(self, like)

    def _slots(self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Chains of a batch: [B], one per item; or view after view, of (item, augmentation)."""
        assert self.num_samples is not None
        index = index.clamp(0, self.num_samples - 1)  # out of range: refused or reported
        if (augmentation is None) != (self.augmentations is None):
            raise ValueError(
                "augmentation= (which stored augmentation each view is) goes with augmentations=k "
                f"at construction, got augmentations={self.augmentations}"
            )
        if augmentation is None:
            return index
        return stored_ids(index, augmentation, self.ids_per_item)[: self._views_per_item].flatten()
