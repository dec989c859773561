"""Losses played by the book: a row at a time, in numpy, with draws of its own.

Where the long-run mean gradient is not the exact one (views that differ share a chain, a batch is
drawn without replacement, carried states are cached, 1 - p+ comes from a noisy partition, a table
is stale) there is no formula for it, and `oracles.small` can list what happens to five items only.
So a setting is played twice, by the package and by this file, and the means are compared: nothing
has to be allowed for. Accepting and refusing are integrated out here: given where it starts and
what it is offered, a row's weights are expectations. Only its next state is drawn.

A negative is an *id* (what chains remember) at an *address* (its row in the table of embeddings).
Settings are read by their names alone; nothing comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracles.exact import add_similarity, log_sum_exp, normalised
from oracles.moves import Column, Kind, move


@dataclass
class Row:
    """An anchor with its positive and what it is offered."""

    anchor: int
    positive: int
    own: int  # position of its positive
    known: set[int]
    item: int  # position of the anchor
    slot: int  # its chain
    place: int  # in the batch
    kinds: list[Kind] = field(default_factory=list)
    hidden: list[Column] = field(default_factory=list)  # copies that are seen and not offered


class Simulated:
    """A loss of `setting` on `world` (see `battery_settings` and `battery_world`)."""

    def __init__(self, setting: Any, world: Any, seed: int) -> None:
        self.s, self.w, self.rng = setting, world, np.random.default_rng(seed + 4_000_037)
        self.unit, self.norm = normalised(world.table.numpy())
        self.per_item = setting.augmentations or 1
        self.num_items = world.num_keys or world.num_anchors
        self.num_ids = self.num_items * self.per_item
        self.shared = world.views == "shared"
        self.num_sides = 1 if self.shared or not setting.both_ways else 2
        self.multiplicity = self.per_item if setting.augmentations else 1 + self.shared
        if setting.loss == "cache":
            self.multiplicity = 1
        self.proposals = type(setting.proposals).__name__
        if setting.proposals in (None, "batch"):
            uniform = setting.chains and setting.corpus
            self.proposals = "Uniform" if uniform else "InBatch"
        self.step = 0
        self.gradient, self.slope = np.zeros_like(self.unit), 0.0
        self.held: dict[tuple[int, int], Column] = {}
        self.log_u: dict[tuple[int, int], float] = {}  # SogCLR
        self.stale = [
            {j: self.w.address(self.tower(side), j, 0) for j in range(self.num_items)}
            for side in range(self.num_sides)
        ]
        self.cursor, self.counts = [0, 0], np.zeros(self.num_items)
        if world.num_keys is not None:
            pairs = world.pairs[:, 1].numpy()
            self.counts = 1000.0 * np.bincount(pairs, minlength=world.num_keys)
        if setting.chains:
            self._start(np.random.default_rng(seed + 1_000_003))

    def _start(self, rng: np.random.Generator) -> None:
        """Chains at draws from p (the package's chains at the same), partitions at the exact."""
        per_view = self.s.augmentations is not None
        for side, chain, ids, p, row in self.w.targets(self.s.beta, self.s.both_ways, per_view):
            at = int(rng.choice(len(ids), p=p))
            self.held[side, chain] = (int(ids[at]), row.negatives[at])

    # ------------------------------------------------------------------ who is where

    def tower(self, side: int) -> str:
        return "keys" if side == 0 else "anchors"

    def somewhere(self, side: int, name: int) -> int:
        """The address of an id, in a view drawn for this visit."""
        if self.s.augmentations:
            return name
        view = int(self.rng.integers(self.w.num_views))
        return self.w.address(self.tower(side), name, view)

    def excluded(self, row: Row, name: int) -> bool:
        item = name // self.per_item
        return item == row.own or item in row.known

    def log_m(self, row: Row) -> float:
        """log of the number of the row's negatives, in items."""
        return math.log(max(1, self.num_items - 1 - len(row.known - {row.own, -1})))

    def sides(self, pick: list[int], views: list[tuple[int, int]]) -> list[list[Row]]:
        """The rows of a batch and its columns; draws from beyond it come later."""
        w, both = self.w, []
        for pair, (first, second) in zip(pick, views, strict=True):
            i, k = (int(x) for x in w.pairs[pair])
            both.append((i, k, w.address("anchors", i, first), w.address("keys", k, second)))
        known = [set() if w.known is None else set(w.known[i].tolist()) for i, *_ in both]
        # every batch has two copies of its items: names and addresses
        copies = [
            [(a if self.s.augmentations else i, a) for i, _, a, _ in both],
            [(b if self.s.augmentations else k, b) for _, k, _, b in both],
        ]
        coin = self.rng.random(len(both)) < 0.5
        sides: list[list[Row]] = []
        for side in range(self.num_sides):
            rows = []
            for view in range(2 if self.shared and self.s.symmetric else 1):
                for n, (i, k, a, b) in enumerate(both):
                    anchor, positive = (b, a) if view or side else (a, b)
                    slot = anchor if self.s.augmentations else i
                    own, item = (k, i) if side == 0 else (i, k)
                    row = Row(anchor, positive, own, known[n], item, slot, n)
                    self._offer(row, side, copies, coin == (view == 0))
                    rows.append(row)
            sides.append(rows)
        return sides

    def _offer(self, row: Row, side: int, copies: list[list[Column]], first: np.ndarray) -> None:
        """The batch's columns of a row."""
        s = self.s
        if getattr(s.proposals, "alone", False) or s.loss == "cache":
            return
        if not self.shared:
            columns, hidden, count = copies[1 - side], [], 1
        elif not s.chains or s.offered == 2:
            columns, hidden, count = copies[0] + copies[1], [], 2
        else:
            columns, hidden = (
                [x if c else y for x, y, c in zip(*copies, first, strict=True)],
                [y if c else x for x, y, c in zip(*copies, first, strict=True)],
            )
            count = 1
        if s.loss == "large batch":
            hidden = []
        usable = [z for z in columns if not self.excluded(row, z[0])]
        if self.w.num_keys is None:
            twice = 0.0 if s.augmentations else math.log(count)
            row.kinds.append(Kind(columns, len(usable), None, True, count, twice))
            row.hidden = [z for z in hidden if not self.excluded(row, z[0])]
        else:  # a corpus: columns are as likely as their keys are somebody's
            counts, m = self.counts.copy(), self.w.num_anchors
            passes = counts.sum() / m  # through all pairs
            for name, _ in columns if not s.key_counts else []:
                counts[name] += passes % 1
            with np.errstate(divide="ignore"):
                log_q = np.log(counts / (passes * (m - 1)))
            row.kinds.append(Kind(columns, len(columns) - 1, log_q + self.log_m(row)))

    def draw(self, side: int, rows: list[Row], size: int) -> None:
        """Draws from beyond the batch, appended to the rows' kinds."""
        s, made = self.s.proposals, self.proposals
        if made == "InBatch":
            return
        number = getattr(s, "num", None)
        if made == "Given":
            tilt = np.linspace(0, 3.0 * (self.step % 5) - 6.0, self.num_ids)
            q, number = np.exp(tilt - log_sum_exp(tilt)), 1
        elif made == "Uniform":
            q, number = np.full(self.num_ids, 1 / self.num_ids), number or size
        else:
            each = np.stack([self.informed(side, row) for row in rows])
            number = number or (1 if s.per_row else size)
            if s.per_row:
                for row, own in zip(rows, each, strict=True):
                    self._append([row], side, own, number)
                return
            q = each.mean(0)
        self._append(rows, side, q, number)

    def _append(self, rows: list[Row], side: int, q: np.ndarray, number: int) -> None:
        """Draws from q over all ids, the same for these rows."""
        ids = [int(name) for name in self.rng.choice(self.num_ids, number, p=q)]
        columns = [(name, self.somewhere(side, name)) for name in ids]
        for row in rows:
            log_q = np.log(q) + self.log_m(row) + math.log(self.per_item)
            row.kinds.append(Kind(columns, number, log_q))

    def informed(self, side: int, row: Row) -> np.ndarray:
        s = self.s.proposals
        p = self.stale_softmax(side, row, s.sharpness * self.s.beta)[0]
        return (1 - s.share) / self.num_items + s.share * p

    def stale_softmax(self, side: int, row: Row, beta: float) -> tuple[np.ndarray, float]:
        table = self.unit[[self.stale[side][j] for j in range(self.num_items)]]
        logits = beta * table @ self.unit[row.anchor]
        logits[[j for j in range(self.num_items) if self.excluded(row, j)]] = -math.inf
        log_sum = log_sum_exp(logits)
        return np.exp(logits - log_sum), log_sum

    # ------------------------------------------------------------------ a row

    def logit(self, row: Row, address: int) -> float:
        return float(self.s.beta * (self.unit[row.anchor] @ self.unit[address]))

    def walk(self, row: Row, start: Column) -> tuple[dict[int, float], float, Column]:
        """Weights by address, that of the carried state, and where the chain goes on."""
        plain = {z: self.logit(row, z[1]) for kind in row.kinds for z in kind.columns}
        plain = {z: s for z, s in plain.items() if not self.excluded(row, z[0])}
        held = -math.inf if self.excluded(row, start[0]) else self.logit(row, start[1])
        total, at = move(row.kinds, plain, start, held, self.s.kernel, self.rng)
        carried = total.pop(None, 0.0) if held > -math.inf else 0.0
        found: dict[int, float] = {}
        for z, weight in total.items():
            assert z is not None
            found[z[1]] = found.get(z[1], 0.0) + weight
        return found, carried, at or start

    def mixture(self, row: Row) -> np.ndarray:  # [ids]
        """log(q m) under the mixture of all kinds."""
        if all(kind.log_q is None for kind in row.kinds):
            return np.zeros(self.num_ids)
        total, mixed = sum(kind.count for kind in row.kinds), np.full(self.num_ids, -math.inf)
        for kind in row.kinds:
            if kind.count:
                share = math.log(kind.count / total)
                mixed = np.logaddexp(mixed, share + (0.0 if kind.log_q is None else kind.log_q))
        return mixed

    def corrected(self, row: Row, more: Sequence[Column] = ()) -> tuple[list[int], np.ndarray]:
        """Addresses and corrected logits of the columns a row may use, and of `more`."""
        columns = [z for kind in row.kinds for z in kind.columns]
        columns = [z for z in columns if not self.excluded(row, z[0])] + list(more)
        names, at = [z[0] for z in columns], [z[1] for z in columns]
        return at, self.s.beta * self.unit[at] @ self.unit[row.anchor] - self.mixture(row)[names]

    def partitions(self, row: Row, start: Column) -> tuple[float, float]:
        """Estimates of the log partition without and with the carried state."""
        hidden = row.hidden if len(row.kinds) == 1 else []
        count = sum(kind.count for kind in row.kinds) * (2 if hidden else 1)
        levels = self.corrected(row, hidden)[1]
        log_m = self.log_m(row) + math.log(self.multiplicity)
        log_sum = log_sum_exp(levels) if len(levels) else -math.inf
        low = high = log_sum + log_m - math.log(max(count, 1))
        if not self.excluded(row, start[0]):
            held = self.logit(row, start[1]) - self.mixture(row)[start[0]]
            high = float(np.logaddexp(log_sum, held)) + log_m - math.log(count + 1)
        return low, high

    def add(
        self,
        row: Row,
        share: float,
        pull: float,
        weights: dict[int, float],
        held: float = 0.0,
        at: int = 0,
    ) -> None:
        """Gradient of a row: its positive, its columns, and its carried state at `at`."""
        unit, scale, own = self.unit, share * pull * self.s.beta, np.array([-share * pull])
        add_similarity(
            self.gradient, unit, self.norm, row.anchor, [row.positive], own * self.s.beta
        )
        mean = -float(unit[row.anchor] @ unit[row.positive])
        if weights:
            found, w = list(weights), np.array(list(weights.values()))
            add_similarity(self.gradient, unit, self.norm, row.anchor, found, scale * w)
            mean += float(w @ (unit[found] @ unit[row.anchor]))
        if held:
            before = self.gradient[at].copy()
            add_similarity(
                self.gradient, unit, self.norm, row.anchor, [at], np.array([scale * held])
            )
            if self.s.carried == "cached":
                self.gradient[at] = before
            mean += held * float(unit[row.anchor] @ unit[at])
        self.slope += share * pull * mean

    # ------------------------------------------------------------------ a call

    def play(self, pick: list[int], views: list[tuple[int, int]]) -> None:
        """One step: its gradient is added, and the state moves on."""
        sides = self.sides(pick, views)
        for side, rows in enumerate(sides):
            share = 1 / (len(rows) * len(sides))
            self.draw(side, rows, len(pick))
            kinds = {"cache": self._cached, "emc2": self._chains, "large batch": self._chains}
            kinds.get(self.s.loss, self._weighted)(side, rows, share)
        if self.w.num_keys is not None and not self.s.key_counts:
            np.add.at(self.counts, self.w.pairs[pick, 1].numpy(), 1.0)
        self.step += 1

    def _chains(self, side: int, rows: list[Row], share: float) -> None:
        asked: dict[tuple[int, int], Column] = {}  # carried states of a batch's places
        ends: dict[tuple[int, int], Column] = {}
        for n, row in enumerate(rows):
            name, at = self.held[side, row.slot]
            key = (row.place, n if self.s.augmentations else 0)
            if self.s.carried == "encode" and key not in asked:
                asked[key] = (name, self.somewhere(side, name))
            start = asked.get(key, (name, at))
            weights, carried, ends[row.place, n] = self.walk(row, start)
            low, high = self.partitions(row, start)
            pull = self.pull(row, low if low > -math.inf else high)
            if high > -math.inf:
                self.add(row, share, pull, weights, carried, start[1])
        stored: set[int] = set()
        size = len(rows) // (2 if self.shared and self.s.symmetric else 1)
        for n, row in enumerate(rows):
            if row.slot in stored:
                continue
            stored.add(row.slot)
            if self.shared and self.s.symmetric and not self.s.augmentations:
                n = n % size + (size if self.rng.random() < 0.5 else 0)  # one of both views
            self.held[side, row.slot] = ends[row.place, n]
        if self.proposals == "Informed":
            self.remember(side, rows, list(asked.values()))

    def pull(self, row: Row, log_z: float) -> float:
        """1 - p+ where the positive is in the denominator."""
        if self.s.denominator == "negatives" and self.s.loss != "infonce":
            return 1.0
        return 1 / (1 + math.exp(self.logit(row, row.positive) - log_z))

    def moving(self, old: float, new: float, rate: float) -> float:
        if new == -math.inf or old == -math.inf or rate == 1:
            return old if new == -math.inf else new
        return float(np.logaddexp(old + math.log1p(-rate), new + math.log(rate)))

    def remember(self, side: int, rows: list[Row], asked: list[Column]) -> None:
        """What a step encoded goes into the stale table: of one write the first, then the next."""
        self.write(side, [(row.own, row.positive) for row in rows])
        columns: list[Column] = []
        half = len(rows) // 2
        for row in [rows[0], rows[half]] if self.shared and self.s.symmetric else rows[:1]:
            for kind in row.kinds if not self.s.proposals.per_row else row.kinds[:-1]:
                columns += kind.columns
        self.write(side, columns)
        if self.s.proposals.per_row:
            self.write(side, [z for row in rows for z in row.kinds[-1].columns])
        self.write(side, asked)
        self.refresh(side, self.s.proposals.refresh)

    def write(self, side: int, columns: list[Column]) -> None:
        for name, at in reversed(columns):
            self.stale[side][name] = at

    def refresh(self, side: int, share: float) -> None:
        due = math.ceil(share * self.num_ids)
        ids = [(self.cursor[side] + n) % self.num_ids for n in range(due)]
        self.write(side, [(name, self.somewhere(side, name)) for name in ids])
        self.cursor[side] = (self.cursor[side] + due) % self.num_ids

    def _cached(self, side: int, rows: list[Row], share: float) -> None:
        """Negative Cache: one draw from the stale softmax of each row, encoded anew."""
        winners = []
        for row in rows:
            p, log_z = self.stale_softmax(side, row, self.s.beta)
            name = int(self.rng.choice(self.num_ids, p=p))
            winners.append((name, self.somewhere(side, name)))
            self.add(row, share, self.pull(row, log_z), {winners[-1][1]: 1.0})
        size = len(rows) // (2 if self.shared and self.s.symmetric else 1)
        self.write(side, [(row.own, row.positive) for row in rows[:size]])
        self.write(side, winners)
        self.refresh(side, self.s.refresh)

    def _weighted(self, side: int, rows: list[Row], share: float) -> None:
        """InfoNCE, DCL, importance weights, SogCLR: weights of the columns at hand."""
        averages: dict[int, list[float]] = {}
        for row in rows:
            at, levels = self.corrected(row)
            if not at:
                continue
            count = sum(kind.count for kind in row.kinds)
            log_sum = log_z = log_sum_exp(levels)
            if self.s.loss not in ("infonce", "dcl"):
                log_m = self.log_m(row) + math.log(self.multiplicity)
                log_z = log_sum + log_m - math.log(count)
            if self.s.loss == "sogclr":
                old = self.log_u.get((side, row.item), -math.inf)
                log_u = self.moving(old, log_sum - math.log(count), self.s.gamma)
                averages.setdefault(row.item, []).append(log_u)
                log_sum, log_z = log_u + math.log(count), log_u + log_m
            weights: dict[int, float] = {}
            for address, w in zip(at, np.exp(levels - log_sum), strict=True):
                weights[address] = weights.get(address, 0.0) + float(w)
            self.add(row, share, self.pull(row, log_z), weights)
        for item, values in averages.items():  # of an item that stands there twice all are the same
            self.log_u[side, item] = log_sum_exp(np.array(values)) - math.log(len(values))
        if self.proposals == "Informed":
            self.remember(side, rows, [])
