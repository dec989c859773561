"""Chains and draws under views that differ: what biases them, and what mends it?

Data     200 unit vectors in 25 clusters, d = 32, 8 views of each at a given mean cosine; frozen.
Asks     the mean estimate of sum_z p(z) z for every anchor view, against the exact one over all
         views of all other items: relative error of the average over an item's views (by item) and
         view by view; and the root mean square error of a single estimate (rms). Noise is taken out
         of the first two by two independent groups of chains.
Methods  dcl                    softmax over the batch
         mh, isir               as the library
         4 chains of isir       mean over four chains per item
         isir and dcl           three quarters of isir's estimate and a quarter of dcl's
                               (--shares: of every quarter, to choose by bias and variance)
         isir, view kept        the state names the view too and is encoded in it again; both
                                copies of the batch are offered
         canonical mh, isir     the chain moves by the similarity of clean items, and what it visits
                                is reweighted to the view at hand by exp(l_view - l_canonical)
         canonical, view kept   the same over (item, view), with the item's mean embedding as the
                                canonical anchor; + 8: with eight draws, as in batch+8
         informed n             n draws from a stale table (one old view per item), half of them
                                uniform, corrected by log q, alone
         isir+informed 8        carried state and 8 such draws
         batch+8                the batch and 8 draws from the rows' stale softmaxes over *mean*
                                embeddings, weighed as one sample (multiple importance sampling);
                                at β/2: proposed at half of beta
         isir+batch+8           the same and the carried state
         table's partition      batch+8, divided by the table's partition of the view times a
                                running ratio per item, instead of by its own sum
Bounds   (--bounds) what no method here can have, to see how far one could come:
         perfect n              batch+n with the best q over items: the mean of the rows' exact
                                softmaxes, which nobody knows
         whole table            the exact softmax over a stale table, of all items' mean embeddings
                                or of four old views of each; nothing is sampled

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/differing_views.py --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.reproduce.common import Options, append, provenance
from negchain.reproduce.pages import markdown
from negchain.weights import mh_scan

M, VIEWS, DIM, CLUSTERS, GROUPS = 200, 8, 32, 25, 2  # GROUPS replicas of all chains in each half
ENCODES = {"dcl": 0, "informed 16": 16, "informed 32": 32, "isir+informed 8": 16}  # others b
ENCODES |= {"canonical mh": 16, "canonical isir": 16, "isir+batch+8": 16, "4 chains of isir": 32}
ENCODES |= {"canonical, view kept + 8": 16}  # beyond the batch, b = 8
ENCODES |= {f"perfect {n}": n for n in (16, 32, 64)}
ENCODES |= {"whole table of means": 0, "whole table of four views": 0}


def data(noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clean items [M,D] and their views [M,V,D]."""
    centres = normalize(torch.randn(CLUSTERS, DIM, generator=generator), dim=-1)
    spread = 0.6 / math.sqrt(DIM) * torch.randn(M, DIM, generator=generator)
    items = normalize(centres.repeat(M // CLUSTERS, 1) + spread, dim=-1)
    moved = noise / math.sqrt(DIM) * torch.randn(M, VIEWS, DIM, generator=generator)
    return items, normalize(items[:, None] + moved, dim=-1)


def softmaxes(views: Tensor, beta: float) -> Tensor:  # [M,V,D] -> [M V,M V]
    """Exact softmax of every view over all views of other items."""
    flat, item = views.flatten(0, 1), torch.arange(len(views)).repeat_interleave(views.shape[1])
    logits = (beta * flat @ flat.T).masked_fill(item[:, None] == item, -math.inf)
    return logits.softmax(1)


def exact(views: Tensor, beta: float) -> Tensor:  # [M,V,D] -> [M,V,D]
    return (softmaxes(views, beta) @ views.flatten(0, 1)).view_as(views)


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -(-torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7).log()).log()


class World:
    """All chains visited once per sweep, each with a batch of its own; N = replicas x M chains."""

    def __init__(
        self, items: Tensor, views: Tensor, beta: float, batch: int, seed: int, groups: int = GROUPS
    ) -> None:
        self.items, self.views, self.beta, self.batch = items, views, beta, batch
        self.size, self.num_views = views.shape[:2]
        self.generator = torch.Generator().manual_seed(seed)
        self.owner = torch.arange(self.size).repeat(2 * groups)
        self.states: dict[str, Tensor] = {}
        self.begin: dict[str, Callable[[], Tensor]] = {}  # where chains begin every sweep, if told
        self.ratio = torch.zeros(len(self.owner))
        self.visits = 0
        old = views[torch.arange(self.size), self.randint(self.num_views, self.size)]
        self.tables = {"one view": old, "mean": views.mean(1)}
        soft = softmaxes(views, beta)
        self.by_item = soft.view(len(soft), self.size, -1).sum(2)  # [M V,M]

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def sweep(self) -> None:
        """Draw everybody's batch: anchors' two views, the others and their two views."""
        count, views = len(self.owner), self.num_views
        first = self.randint(views, count)
        self.anchor = torch.stack([first, (first + 1 + self.randint(views - 1, count)) % views], 1)
        self.x = self.views[self.owner[:, None], self.anchor]  # [N,2,D]
        rank = torch.rand(count, self.size - 1, generator=self.generator)
        rank = rank.topk(self.batch - 1, dim=1).indices
        self.others = rank + (rank >= self.owner[:, None])  # [N,b-1]
        first = self.randint(views, *self.others.shape)
        hop = 1 + self.randint(views - 1, *self.others.shape)
        seen = torch.stack([first, (first + hop) % views], 2)
        self.pairs = (self.others[..., None] * views + seen).flatten(1)  # [N,2b-2] (item, view)
        self.z = self.views[self.others[..., None], seen]  # [N,b-1,2,D]
        self.keys = self.z.transpose(1, 2)  # row r is offered copy r; views are in random order
        self.logits = self.beta * torch.einsum("nrd,nrkd->nrk", self.x, self.keys)  # [N,2,b-1]
        self.visits += 1
        self.known: dict[tuple[str, float], tuple[Tensor, Tensor, Tensor]] = {}  # of this sweep

    def stale(self, table: str, sharpness: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Of a table: the two rows' log partitions [N,2] and softmaxes, the batch's mean [N,M]."""
        if (table, sharpness) in self.known:
            return self.known[table, sharpness]
        if table == "exact":
            pairs = torch.cat([self.owner[:, None] * self.num_views + self.anchor, self.pairs], 1)
            soft = self.by_item[pairs]  # [N,2b,M]
            return torch.zeros(len(soft), 2), soft[:, :2], soft.mean(1)
        rows = torch.cat([self.x[:, None], self.z], 1).flatten(1, 2)  # [N,2b,D]
        items = torch.cat([self.owner[:, None], self.others], 1).repeat_interleave(2, 1)
        logits = self.beta * rows @ self.tables[table].T
        logits = logits.scatter(2, items[..., None], -math.inf)
        soft = (sharpness * logits).softmax(2)
        found = logits[:, :2].logsumexp(2), soft[:, :2], soft.mean(1)
        self.known[table, sharpness] = found
        return found

    def held(self, name: str) -> tuple[Tensor, Tensor]:
        """The carried items of a method's chains, and their embeddings in a fresh view."""
        if name not in self.states:
            hop = 1 + self.randint(self.size - 1, len(self.owner))
            self.states[name] = (self.owner + hop) % self.size
        if name in self.begin:
            self.states[name] = self.begin[name]()
        state = self.states[name]
        return state, self.views[state, self.randint(self.num_views, len(state))]

    def store(self, name: str, ended: Tensor) -> None:
        """One of two rows' ends, by a coin: [N,2] -> [N]."""
        coin = self.randint(2, len(ended))
        self.states[name] = ended.gather(1, coin[:, None])[:, 0]

    def score(self, z: Tensor) -> Tensor:  # [N,K,D] -> [N,2,K]
        return self.beta * torch.einsum("nrd,nkd->nrk", self.x, z)

    # Every estimate: [N,2,D] for the two views of every chain's item.

    def dcl(self) -> Tensor:
        z = self.z.flatten(1, 2)
        return self.score(z).softmax(2) @ z

    def _scan(self, logits: Tensor, start: Tensor) -> Any:
        log_u = torch.rand(logits.shape, generator=self.generator).clamp(min=1e-30).log()
        return mh_scan(logits, start, log_u, (self.batch - 1) // 2)

    def mh(self) -> Tensor:
        state, z = self.held("mh")
        start = self.score(z[:, None])[..., 0]
        scan = self._scan(self.logits.flatten(0, 1), start.flatten())
        weights, last = scan.weights.view_as(self.logits), scan.last.view_as(start)
        found = torch.einsum("nrk,nrkd->nrd", weights, self.keys)
        moved = self.others.gather(1, last.clamp(min=0))
        self.store("mh", torch.where(last >= 0, moved, state[:, None]))
        return found + scan.start_weight.view_as(start)[..., None] * z[:, None]

    def _pool(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, keys and items of {carried} and the row's copies of the batch."""
        state, z = self.held(name)
        start = self.score(z[:, None])
        inside = (self.others == state[:, None]).any(1)  # then it is counted once
        start = start.masked_fill(inside[:, None, None], -math.inf)
        keys = torch.cat([z[:, None, None].expand(-1, 2, 1, -1), self.keys], 2)
        ids = torch.cat([state[:, None], self.others], 1)
        return torch.cat([start, self.logits], 2), keys, ids

    def isir(self, name: str = "isir") -> Tensor:
        logits, keys, ids = self._pool(name)
        pick = (logits + gumbel(tuple(logits.shape), self.generator)).argmax(2)
        self.store(name, ids.gather(1, pick))
        return torch.einsum("nrk,nrkd->nrd", logits.softmax(2), keys)

    def several(self, count: int) -> Tensor:
        return torch.stack([self.isir(f"chain {n}") for n in range(count)]).mean(0)

    def mixed(self, share: float) -> Tensor:
        return share * self.isir(f"mixed {share}") + (1 - share) * self.dcl()

    def isir_kept(self) -> Tensor:
        """i-SIR over (item, view): what is carried is encoded again in the view it was met in."""
        views, z = self.num_views, self.z.flatten(1, 2)
        pair = self.states.get("kept", self.owner * views)
        held = self.views[pair // views, pair % views][:, None]
        own = (pair // views == self.owner)[:, None, None]  # the start
        keys = torch.cat([held, z], 1)
        logits = torch.cat([self.score(held).masked_fill(own, -math.inf), self.score(z)], 2)
        pick = (logits + gumbel(tuple(logits.shape), self.generator)).argmax(2)
        self.store("kept", torch.cat([pair[:, None], self.pairs], 1).gather(1, pick))
        return logits.softmax(2) @ keys

    def _canonical(self, ids: Tensor) -> Tensor:  # [N,K] -> [N,K]
        return self.beta * torch.einsum("nd,nkd->nk", self.items[self.owner], self.items[ids])

    def canonical_isir(self) -> Tensor:
        logits, keys, ids = self._pool("canonical isir")
        fixed = self._canonical(ids).masked_fill(logits[:, 0] == -math.inf, -math.inf)
        pick = (fixed + gumbel(tuple(fixed.shape), self.generator)).argmax(1)
        self.states["canonical isir"] = ids.gather(1, pick[:, None])[:, 0]
        # softmax(l_canonical) exp(l_view - l_canonical), normalised, is the softmax of l_view
        return torch.einsum("nrk,nrkd->nrd", logits.softmax(2), keys)

    def canonical_kept(self, count: int = 0) -> Tensor:
        """i-SIR over (item, view) with a target that stays: the anchor is the item's mean."""
        name, views = f"canonical kept {count}", self.num_views
        centre, keys = self.tables["mean"][self.owner], self.z.flatten(1, 2)
        pairs = torch.cat([self.states.get(name, self.owner * views)[:, None], self.pairs], 1)
        held = self.views[pairs[:, :1] // views, pairs[:, :1] % views]
        keys, log_mass = torch.cat([held, keys], 1), torch.zeros(pairs.shape)
        if count:
            q, often = self.stale("mean")[2], self.pairs.shape[1] / (self.size - 1)
            own = (self.beta * centre @ self.tables["mean"].T).scatter(
                1, self.owner[:, None], -math.inf
            )
            own = own.softmax(1) + (self.batch - 1) / (self.size - 1)
            ids = torch.multinomial(q, count, replacement=True, generator=self.generator)
            seen = self.randint(views, *ids.shape)
            drawn = count / self.batch * own.gather(1, ids)  # expected, a function of the item
            there = count / self.batch * own.gather(1, pairs // views)
            mass = torch.cat(
                [1 / (often + there), drawn / (often + drawn) / (count * q.gather(1, ids))], 1
            )
            log_mass, keys = mass.log(), torch.cat([keys, self.views[ids, seen]], 1)
            pairs = torch.cat([pairs, ids * views + seen], 1)
        log_mass = log_mass.masked_fill(pairs // views == self.owner[:, None], -math.inf)
        fixed = self.beta * torch.einsum("nd,nkd->nk", centre, keys) + log_mass
        pick = (fixed + gumbel(tuple(fixed.shape), self.generator)).argmax(1)
        self.states[name] = pairs.gather(1, pick[:, None])[:, 0]
        return (self.score(keys) + log_mass[:, None]).softmax(2) @ keys

    def canonical_mh(self) -> Tensor:
        state, z = self.held("canonical mh")
        ids = torch.cat([state[:, None], self.others], 1)
        fixed = self._canonical(ids)
        scan = self._scan(fixed[:, 1:], fixed[:, 0])
        counts = torch.cat([scan.start_weight[:, None], scan.weights], 1)  # [N,b]
        logits = torch.cat([self.score(z[:, None]), self.logits], 2)
        weights = (counts.log()[:, None] + logits - fixed[:, None]).softmax(2)
        keys = torch.cat([z[:, None, None].expand(-1, 2, 1, -1), self.keys], 2)
        moved = self.others.gather(1, scan.last.clamp(min=0)[:, None])[:, 0]
        self.states["canonical mh"] = torch.where(scan.last >= 0, moved, state)
        return torch.einsum("nrk,nrkd->nrd", weights, keys)

    def _drawn(self, q: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws from q [N,M] shared by both rows: ids, fresh views of them, logits."""
        ids = torch.multinomial(q, count, replacement=True, generator=self.generator)
        z = self.views[ids, self.randint(self.num_views, *ids.shape)]
        own = (ids == self.owner[:, None])[:, None]
        return ids, z, self.score(z).masked_fill(own, -math.inf)

    def informed(self, count: int) -> Tensor:
        q = 0.5 / self.size + 0.5 * self.stale("one view")[2]
        ids, z, logits = self._drawn(q, count)
        weights = (logits - q.gather(1, ids).log()[:, None]).softmax(2)
        return weights.nan_to_num() @ z  # all draws may be the item itself

    def isir_informed(self, count: int) -> Tensor:
        q = 0.5 / self.size + 0.5 * self.stale("one view")[2]
        state, held = self.held("isir+informed")
        ids, z, logits = self._drawn(q, count)
        ids, z = torch.cat([state[:, None], ids], 1), torch.cat([held[:, None], z], 1)
        logits = torch.cat([self.score(held[:, None]), logits], 2) - q.gather(1, ids).log()[:, None]
        pick = (logits + gumbel(tuple(logits.shape), self.generator)).argmax(2)
        self.store("isir+informed", ids.gather(1, pick))
        return logits.softmax(2) @ z

    def multiple(
        self,
        count: int,
        sharpness: float = 1.0,
        carried: bool = False,
        fixed: bool = False,
        table: str = "mean",
    ) -> Tensor:
        """The batch and informed draws as one sample.

        With w = a / (a + h), a the expected number of times an item is in the batch and h (a
        function of the row alone) about that of being drawn, batch columns weigh w e^l / a and
        draws (1 - w) e^l / (n q): unbiased for the partition whatever the rows' q is.
        """
        log_table, own, q = self.stale(table, sharpness)
        ids, z, logits = self._drawn(q, count)
        both, there = self.z.flatten(1, 2), self.others.repeat_interleave(2, 1)
        often = there.shape[1] / (self.size - 1)

        def expected(at: Tensor) -> Tensor:  # [N,K] -> [N,2,K]
            rows = own.gather(2, at[:, None].expand(-1, 2, -1))
            return count * (rows + (self.batch - 1) / (self.size - 1)) / self.batch

        batch_weight = self.score(both) - (often + expected(there)).log()
        share = expected(ids) / (often + expected(ids))
        draw_weight = logits + share.log() - (count * q.gather(1, ids)).log()[:, None]
        weights, keys = torch.cat([batch_weight, draw_weight], 2), torch.cat([both, z], 1)
        if carried:
            state, held = self.held("isir+batch")
            start = self.score(held[:, None]) - (often + expected(state[:, None])).log()
            weights, keys = torch.cat([start, weights], 2), torch.cat([held[:, None], keys], 1)
            pick = (weights + gumbel(tuple(weights.shape), self.generator)).argmax(2)
            self.store("isir+batch", torch.cat([state[:, None], there, ids], 1).gather(1, pick))
        if not fixed:
            return weights.softmax(2) @ keys
        found = (weights.logsumexp(2) - log_table).exp().mean(1)  # unbiased for Z / Z_table
        ratio = self.ratio if self.visits > 1 else found
        self.ratio = ratio + max(0.02, 1 / self.visits) * (found - ratio)
        return (weights - log_table[..., None] - ratio.log()[:, None, None]).exp() @ keys

    def whole(self, table: Tensor) -> Tensor:  # [M,T,D], T embeddings of every item
        """The exact softmax over a table."""
        logits = self.beta * torch.einsum("nrd,mtd->nrmt", self.x, table)
        own = self.owner[:, None] == torch.arange(self.size)
        logits = logits.masked_fill(own[:, None, :, None], -math.inf)
        return logits.flatten(2).softmax(2) @ table.flatten(0, 1)

    def bounds(self) -> dict[str, Callable[[], Tensor]]:
        found: dict[str, Callable[[], Tensor]] = {
            f"perfect {n}": partial(self.multiple, n, table="exact") for n in (8, 16, 32, 64)
        }
        found["whole table of means"] = lambda: self.whole(self.tables["mean"][:, None])
        found["whole table of four views"] = lambda: self.whole(self.views[:, :4])
        return found

    def shares(self) -> dict[str, Callable[[], Tensor]]:
        return {f"isir {n / 8:g}": partial(self.mixed, n / 8) for n in range(9)}

    def methods(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "dcl": self.dcl,
            "mh": self.mh,
            "isir": self.isir,
            "4 chains of isir": lambda: self.several(4),
            "isir and dcl": lambda: self.mixed(0.75),
            "isir, view kept": self.isir_kept,
            "canonical mh": self.canonical_mh,
            "canonical isir": self.canonical_isir,
            "canonical, view kept": self.canonical_kept,
            "canonical, view kept + 8": lambda: self.canonical_kept(8),
            "informed 16": lambda: self.informed(16),
            "informed 32": lambda: self.informed(32),
            "isir+informed 8": lambda: self.isir_informed(8),
            "batch+8": lambda: self.multiple(8),
            "batch+8 at β/2": lambda: self.multiple(8, 0.5),
            "isir+batch+8": lambda: self.multiple(8, carried=True),
            "table's partition": lambda: self.multiple(8, fixed=True),
        }


def errors(
    world: World,
    methods: dict[str, Callable[[], Tensor]],
    target: Tensor,
    sweeps: int,
    warm_up: int = 0,
) -> dict[str, dict[str, float]]:
    """Relative errors of every method."""
    half = torch.arange(len(world.owner)) // world.size % 2  # [N]
    sums = {name: torch.zeros(2, *target.shape) for name in methods}
    squares, counts = dict.fromkeys(methods, 0.0), torch.zeros(2, *target.shape[:2])
    for step in range(warm_up + sweeps):
        world.sweep()
        at = (half[:, None].expand(-1, 2), world.owner[:, None].expand(-1, 2), world.anchor)
        if step >= warm_up:
            counts.index_put_(at, torch.ones(at[0].shape), accumulate=True)
        for name, estimate in methods.items():
            found = estimate()
            if step >= warm_up:
                sums[name].index_put_(at, found, accumulate=True)
                wrong = found - target[at[1], at[2]]
                squares[name] += float(wrong.square().sum(2).mean()) / sweeps

    def relative(a: Tensor, b: Tensor, exact: Tensor) -> float:
        return math.sqrt(max(0.0, float((a * b).sum())) / float(exact.square().sum()))

    result, norm = {}, float(target.square().sum(2).mean())
    for name, total in sums.items():
        seen = (counts > 0).all(0)[..., None]
        first, second = (total / counts.clamp(min=1)[..., None] - target) * seen
        by_item = relative(first.mean(1), second.mean(1), target.mean(1))
        by_view, rms = relative(first, second, target * seen), math.sqrt(squares[name] / norm)
        result[name] = {"by_item": by_item, "by_view": by_view, "rms": rms}
    return result


def cosine(views: Tensor) -> float:
    """Mean cosine of two different views of an item."""
    off = ~torch.eye(views.shape[1], dtype=torch.bool)
    return float((views @ views.transpose(1, 2))[:, off].mean())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.56, 1.13])
    parser.add_argument("--beta", type=float, default=14.28)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sweeps", type=int, default=120)
    parser.add_argument("--warm-up", type=int, default=60)
    parser.add_argument("--bounds", action="store_true", help="only what no method can have")
    parser.add_argument("--shares", action="store_true", help="only mixtures of isir and dcl")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found, asked = [], "bounds" if given.bounds else "shares" if given.shares else "methods"
    if given.out:
        append(given.out, {"record": "differing-views", **provenance(Options(device="cpu"))})
    for noise in given.noise:
        items, views = data(noise, torch.Generator().manual_seed(0))
        world, target = (
            World(items, views, given.beta, given.batch_size, 1),
            exact(views, given.beta),
        )
        result = errors(world, getattr(world, asked)(), target, given.sweeps, given.warm_up)
        job = {"noise": noise, "beta": given.beta, "b": given.batch_size, "sweeps": given.sweeps}
        job |= {} if asked == "methods" else {asked: True}
        row = {"job": job, "cosine": cosine(views), "errors": result}
        if given.out:
            append(given.out, row)
        print(json.dumps(row), flush=True)
        found.append(row)
    lines = []
    for name in found[0]["errors"]:
        cells = [
            "{by_item:.2f} ({by_view:.2f}) {rms:.1f}".format(**row["errors"][name]) for row in found
        ]
        lines.append([name, ENCODES.get(name, given.batch_size), *cells])
    heads = [f"cosine {row['cosine']:.2f}: by item (by view) rms" for row in found]
    print(markdown(["method", "encodes beyond the batch", *heads], lines))


if __name__ == "__main__":
    main()
