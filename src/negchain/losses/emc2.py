"""EMC² as a module: one persistent Markov chain per sample supplies its negatives.

Estimates   p_i by the visits of a Metropolis-Hastings chain (or the softmax of an i-SIR step) that
            starts at the state carried over from the sample's last visit and moves over the batch.
State       one integer per sample.
Cost        B^2 D for the similarities, one scan; with `carried="encode"` B more encodes.
Bias        zero at stationarity; see `carried` and the docs for what each option costs.

Shapes: `B` batch, `N` rows (2B for shared views), `K` columns, `D` embedding.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Literal

import torch
from torch import Tensor, nn

from negchain.fast import fused
from negchain.losses.base import (
    ContrastiveLoss,
    detached_logits,
    full_precision,
    global_log_partition,
    one_of,
)
from negchain.losses.batch import Batch, Drawn, Draws, Views, as_ids, check_carried
from negchain.losses.chains import Carried, ChainTable, stored_slots
from negchain.losses.emc2_settings import check_call, check_large, check_settings
from negchain.losses.panels import Call, Visit, in_panels
from negchain.losses.table import StaleTable, propose_from
from negchain.losses.walk import Kernel, Sampler, WalkOrder, walk_chains
from negchain.objective import Denominator, Estimate
from negchain.pool import Draw, Side, write_view_mean
from negchain.weights.metropolis import Backend
from negchain.weights.sogclr import moving_log_mean


class EMC2Loss(ContrastiveLoss):
    r"""EMC²: the global contrastive loss with negatives from one Markov chain per sample.

    $$ \nabla \approx \tfrac{\beta}{B} \sum_i \Big[ -\nabla s(x_i,y_i)
       + \tfrac{1}{R-P} \sum_{r \ge P} \nabla s(x_i, Z_i^{(r)}) \Big] $$

    Args:
        num_samples: m, the size of the data set (of anchors); one chain each.
        beta: inverse temperature; a `nn.Parameter` to learn it.
        burn_in: share of a visit's proposals that are not counted (the paper's P = b - 1 is 0.5).
        kernel: "mh" (the paper: Metropolis-Hastings) or "isir" (softmax over carried state and
            batch; no burn-in).
        carried: how the state carried over from the last visit is scored and trained:
            "encode" (the paper): the caller encodes `carried(index)` and passes it; B more encodes
            per step, no bias. "cached": its embedding is kept from the last visit; D floats per
            sample, gradient reaches the anchor only. "score": only its similarity is kept, one
            float per sample; weight still on it is dropped and reported (`dropped_mass`).
            Measured relative error of the mean negative gradient on frozen embeddings (300 points,
            b = 8, beta = 14.28, 8,000 steps, records/2026-11-15_estimator-bias_cpu.md): encode 0.16
            and falling with the number of visits (0.08 at 32,000), cached 0.44, score 0.84, DCL
            0.68. At this setting "score" is worse than no chain at all: it is for large batches.
        views: "shared" (two views through one encoder, one chain per item) or "paired" (two
            encoders, a chain table per direction).
        denominator: "negatives" (eq. (1)) or "all": gradients are multiplied by 1 - p+, with p+
            against a running estimate of the partition over all negatives.
        proposal: "batch" (the paper; plus whatever `draw=` adds), "draw" (only `draw=`: Algorithm 1
            with explicit draws) or "cache" (batch plus informed draws from a stale table).
        seed: of every random draw; step t of two runs with one seed draws the same.
        symmetric: both views (directions) are anchors.
        num_keys: size of a corpus of keys that is not one-to-one with the anchors.
        augmentations: k stored augmentations per item: a chain per (item, augmentation), whose
            state names both. Ids are then `item * k + augmentation`.
        num_draws: informed draws per step (`proposal="cache"`); None: as many as the batch has
            samples.
        dim: dimension of the embeddings, for tables that hold some; None waits for the first batch.
        partition_rate: floor of the rate at which the running partition (`denominator="all"`)
            follows new values; before it, visits are averaged equally.
        walk: how the two rows of an item share its chain: "parallel" (both start at the carried
            state, each offered one copy of every other item; unbiased) or "sequential" (the second
            row goes on where the first ended, both offered both copies; biased towards the
            in-batch softmax, most at small beta).
        normalize: bring embeddings to unit length first.
        count_every: 1 counts the state after every step past the burn-in (the paper). c > 1 counts
            every c-th state only: at most B / c columns per row have weight, for large batches.
            kernel="isir": one column of every c has weight, drawn from the softmax of the c, with
            the weight of all of them. For both kernels a larger c adds variance and no bias.
        stream: for large batches: never store the B x B similarities. On a GPU in tiles, if
            count_every is a multiple of 128 (or 1 with kernel="isir"); else in panels of rows. With
            shared views the value (and 1 - p+ of denominator="all") then counts one copy of every
            item, where it otherwise counts two.
        chain_file: keep the chains in this memory-mapped file (docs/large_tables.md).
        backend: "fused": the whole loss in a dozen GPU kernels. "reference", "torch", "triton": the
            readable path, with this backend of `mh_scan`. "auto": fused on a GPU where it applies
            (float32 or half precision, negatives from the batch only, walk="parallel"; unless
            streaming at most 1,024 columns, and count_every=1 for kernel="isir"), else readable.

    Example:
        >>> items, encoder = torch.randn(100, 5), torch.nn.Linear(5, 8)
        >>> loss_fn = EMC2Loss(num_samples=100, beta=10.0)
        >>> index = torch.tensor([3, 14, 15, 92])
        >>> z_a = encoder(items[index] + 0.1 * torch.randn(4, 5))
        >>> z_b = encoder(items[index] + 0.1 * torch.randn(4, 5))
        >>> ids = loss_fn.carried(index)
        >>> loss_fn(z_a, z_b, index, carried=encoder(items[ids])).backward()
        >>> sorted(loss_fn.info)[:3]
        ['acceptance_rate', 'carried_mass', 'chain_age']
    """

    log_partition: Tensor

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        burn_in: float = 0.5,
        kernel: Kernel = "mh",
        carried: Carried = "encode",
        views: Views = "shared",
        denominator: Denominator = "negatives",
        proposal: Literal["batch", "draw", "cache"] = "batch",
        seed: int = 0,
        *,
        symmetric: bool = True,
        num_keys: int | None = None,
        augmentations: int | None = None,
        num_draws: int | None = None,
        dim: int | None = None,
        partition_rate: float = 0.05,
        walk: WalkOrder = "parallel",
        normalize: bool = True,
        count_every: int = 1,
        stream: bool = False,
        chain_file: str | os.PathLike[str] | None = None,
        backend: Backend | Literal["fused"] = "auto",
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
        one_of("kernel", kernel, ("mh", "isir"))
        one_of("carried", carried, ("encode", "cached", "score"))
        one_of("proposal", proposal, ("batch", "draw", "cache"))
        one_of("walk", walk, ("parallel", "sequential"))
        one_of("backend", backend, ("auto", "reference", "torch", "triton", "fused"))
        if walk == "sequential" and kernel == "isir":
            raise ValueError(
                "walk='sequential' goes with kernel='mh': i-SIR has no order to walk in"
            )
        check_settings(burn_in, partition_rate, augmentations, num_draws, views, proposal)
        check_large(count_every, stream, walk, proposal)
        self._num_anchors = num_samples
        self.burn_in = burn_in
        self.kernel: Kernel = kernel
        self.walk: WalkOrder = walk
        self.carried_mode: Carried = carried
        self.proposal = proposal
        self.augmentations = augmentations
        self.num_draws = num_draws
        self.partition_rate = partition_rate
        self.count_every = count_every
        self.stream = stream
        self.backend = backend
        size = num_samples if num_keys is None else num_keys
        self.chains = ChainTable(
            self.num_sides,
            num_samples * (augmentations or 1),
            num_states=size * (augmentations or 1),
            ids_per_item=augmentations or 1,
            own=num_keys is None,
            keep=carried,
            dim=dim,
            seed=seed,
            file=chain_file,
        )
        if denominator == "all":
            shape = (self.num_sides, num_samples)
            self.register_buffer("log_partition", torch.full(shape, -math.inf))
        self.tables = nn.ModuleList(
            StaleTable(size, dim) for _ in range(self.num_sides if proposal == "cache" else 0)
        )

    @property
    def multiplicity(self) -> int:
        """Negatives of the target per item: its stored augmentations, or its two views."""
        return self.augmentations or (2 if self.views == "shared" else 1)

    def carried(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Data set positions of the negatives the chains of a batch hold; encode these.

        Args:
            index: [B] data set positions of the batch.
            augmentation: with stored augmentations, which ones the two views are ([B] each).

        Returns:
            [B] positions; a pair of them for paired views in both directions (keys for the anchors
            z_a, then anchors for z_b), and for stored augmentations (one per view; ids are
            `item * k + augmentation`). Changes nothing.
        """
        index = as_ids("index", index, index.shape[0], self.step.device)
        if augmentation is None and fused.applies(self, index):
            ids = [fused.carried_ids(self, side, index) for side in range(self.num_sides)]
            return (ids[0], ids[1]) if len(ids) == 2 else ids[0]
        slots = self._slots(index, augmentation)
        if self.num_sides == 2:
            return self.chains.ids(0, slots[0]), self.chains.ids(1, slots[0])
        if self.augmentations:
            return self.chains.ids(0, slots[0]), self.chains.ids(0, slots[1])
        return self.chains.ids(0, slots[0])

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
        """Informed draws for this step from the stale table; changes nothing.

        Returns:
            A `Draw` with ids [R] shared by all rows and `log_q_all` [M]; a pair for paired views
            in both directions (then `z_b` is required).
        """
        if self.proposal != "cache":
            raise ValueError(f"propose needs proposal='cache', got proposal={self.proposal!r}")
        count = self.num_draws or len(index)
        return propose_from(
            self,
            self.tables,
            z_a,
            index,
            z_b,
            key_index,
            known,
            lambda table, *of: table.informed(count, *of),
        )

    @full_precision
    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Tensor,
        *,
        carried: Tensor | tuple[Tensor, Tensor] | None = None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
        key_index: Tensor | None = None,
        known: Tensor | None = None,
        augmentation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The loss of a batch; call `.backward()` on it. In training mode the chains move.

        Args:
            z_a: [B, D] embeddings of one view (or of the anchors).
            z_b: [B, D] embeddings of the other view (or of the keys).
            index: [B] data set positions; equal ids are never negatives of each other.
            carried: with carried="encode": [B, D] embeddings of `self.carried(index)` under the
                current encoder (a pair where `carried` returned a pair).
            draw: negatives from beyond the batch: the caller's own, or from `propose`.
            drawn: their embeddings.
            key_index: [B] positions of z_b among the keys, with `num_keys`.
            known: [B, L] further positives of each anchor, padded with -1; never negatives.
            augmentation: with stored augmentations, which ones the two views are ([B] each).

        Returns:
            [] scalar with the value of an estimate of the global loss, and EMC²'s gradient.
        """
        check_call(self.carried_mode, self.proposal, self.stream, carried, draw)
        index = as_ids("index", index, z_a.shape[0], z_a.device)
        only_batch = draw is None and known is None and augmentation is None
        if only_batch and fused.applies(self, z_a):
            total, self._info = fused.emc2(self, z_a, z_b, index, key_index, carried)
            return total
        if self.backend == "fused":
            raise fused.not_applicable(z_a)
        call = Call(z_a, z_b, index, key_index, known, augmentation, carried, draw, drawn)
        visit = in_panels(self, call) if self.stream else self.visit(call)
        if self.training:
            self._store(visit)
            self.step += 1
        return self._finish(visit.total, visit.report)

    def visit(self, call: Call, items: slice = slice(None)) -> Visit:
        """Loss and arrivals of the rows of some items against all columns; changes no chain."""
        slots = self._slots(call.positions, call.augmentation)
        sampler = self._sampler()
        batch, sides = self._begin(
            call.z_a,
            call.z_b,
            call.positions,
            call.key_index,
            call.known,
            call.draw,
            call.drawn,
            key_ids=slots if self.augmentations else None,
            coin=sampler.coin(len(call.z_a)) if self.views == "shared" else None,
            ids_per_item=self.augmentations or 1,
            use_batch=self.proposal != "draw",
            quiet=items.start not in (None, 0),
            items=items,
        )
        encoded = self._encoded(call.carried, batch)
        visit = Visit(batch, sides, encoded)
        numbers = torch.arange(len(batch.index), device=batch.index.device)[items]
        for number, side in enumerate(sides):
            if self.stream:
                side = dataclasses.replace(side, hidden_keys=None)
            copies = side.num_rows // len(numbers)
            held = encoded[number]
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            walk = walk_chains(
                side,
                logits,
                self.chains,
                number,
                tuple(slot[items] for slot in slots[: self._views_per_item]),
                None if held is None else tuple(z[items] for z in held),
                self._beta(logits),
                sampler,
                torch.cat([numbers + view * len(batch.index) for view in range(copies)]),
            )
            log_partition = global_log_partition(side, logits, self._beta(logits))
            assert log_partition is not None
            running = self._running_partition(number, batch, side, log_partition)
            estimate = Estimate(walk.weights, log_partition, running, walk.carried_weight)
            value = self._value(side, similarity, estimate, walk.carried_similarity)
            visit.add(number, value, walk.arrivals(side, similarity), running)
            visit.note({**walk.report(batch.valid[items]), "global_loss": value.detach()})
        return visit

    def _store(self, visit: Visit) -> None:
        """Where the chains ended, and what else the next visit needs."""
        batch = visit.batch
        # first: it asks the chains what they held
        self._remember_keys(batch, visit.sides, visit.encoded)
        for number, chain, arrival in visit.arrivals:
            self.chains.commit(number, chain, arrival, batch.valid)
        for number, running in visit.runnings:
            write_view_mean(self.log_partition[number], batch.index, running, batch.valid)

    # ------------------------------------------------------------------ parts of a step

    def _sampler(self) -> Sampler:
        backend: Backend = "auto" if self.backend == "fused" else self.backend
        order, every = self.walk, self.count_every
        return Sampler(self.kernel, order, self.burn_in, backend, self.seed, self.step, every)

    @property
    def _views_per_item(self) -> int:
        return 2 if self.views == "shared" and self.symmetric else 1

    def _slots(
        self, index: Tensor, augmentation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Chains of each view's rows: one per item, or one per (item, augmentation)."""
        index = index.clamp(0, self._num_anchors - 1)  # out of range: refused or reported
        if (augmentation is None) != (self.augmentations is None):
            raise ValueError(
                "augmentation= (which stored augmentation each view is) goes with augmentations=k "
                f"at construction, got augmentations={self.augmentations}"
            )
        if augmentation is None or self.augmentations is None:
            return (index,) * self._views_per_item
        return stored_slots(index, augmentation, self.augmentations)

    def _encoded(
        self, carried: Tensor | tuple[Tensor, Tensor] | None, batch: Batch
    ) -> list[tuple[Tensor, ...] | None]:
        """Embeddings of the carried states, per side and view, checked and normalised."""
        if carried is None:
            return [None] * self.num_sides
        parts = 2 if self.augmentations else self.num_sides
        ready = check_carried(carried, batch, parts, self.normalize)
        if self.num_sides == 2:
            return [(ready[0],), (ready[1],)]
        if self.augmentations:
            return [tuple(ready[: self._views_per_item])]
        return [(ready[0],) * self._views_per_item]

    def _running_partition(
        self, number: int, batch: Batch, side: Side, log_partition: Tensor
    ) -> Tensor | None:
        """The partition 1 - p+ is computed against: a moving average over visits, [N]."""
        if self.denominator != "all":
            return None
        table = self.log_partition[number]
        visits = self.step * len(batch.index) // self._num_anchors
        rate = torch.clamp(1.0 / (1.0 + visits), min=self.partition_rate)
        old = table[side.anchor_ids].to(log_partition.dtype)
        return moving_log_mean(old, log_partition, rate.to(log_partition.dtype))

    def _remember_keys(
        self, batch: Batch, sides: list[Side], encoded: list[tuple[Tensor, ...] | None]
    ) -> None:
        """Whatever this step encoded is the freshest the stale table can hold."""
        for number, (side, table) in enumerate(zip(sides, self.tables, strict=False)):
            assert isinstance(table, StaleTable)
            table.write(side.key_ids.flatten(), side.keys.flatten(0, 1))
            carried = encoded[number]
            if carried is not None:
                table.write(self.chains.ids(number, batch.index), carried[0])
