"""Chains under views that differ: can a fixed ("canonical") target per item mend the bias?

Data     200 unit vectors in 25 clusters, d = 32, 8 views of each at a given mean cosine; frozen.
Asks     the mean estimate of sum_z p(z) z for every anchor view, against the exact one over all
         views of all other items: relative error of the average over an item's views, and in
         brackets view by view. Noise is taken out by two independent groups of chains.
Methods  dcl: softmax over the batch. mh, isir: as the library. canonical: the chain moves by the
         similarity of clean items, and what it visits is reweighted to the view at hand by
         exp(l_view - l_canonical), self-normalised. informed n: n draws from a stale table (one
         old view per item), corrected by log q, alone. isir+informed n: carried state and n draws.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/differing_views.py --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.reproduce.common import Options, append, provenance
from negchain.reproduce.pages import markdown
from negchain.weights import mh_scan

M, VIEWS, DIM, CLUSTERS, GROUPS = 200, 8, 32, 25, 4  # GROUPS replicas of all chains in each half


def data(noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clean items [M,D] and their views [M,V,D]."""
    centres = normalize(torch.randn(CLUSTERS, DIM, generator=generator), dim=-1)
    spread = 0.6 / math.sqrt(DIM) * torch.randn(M, DIM, generator=generator)
    items = normalize(centres.repeat(M // CLUSTERS, 1) + spread, dim=-1)
    views = items[:, None] + noise / math.sqrt(DIM) * torch.randn(
        M, VIEWS, DIM, generator=generator
    )
    return items, normalize(views, dim=-1)


def exact(views: Tensor, beta: float) -> Tensor:  # [M,V,D] -> [M,V,D]
    flat = views.flatten(0, 1)
    item = torch.arange(M).repeat_interleave(VIEWS)
    logits = (beta * flat @ flat.T).masked_fill(item[:, None] == item, -math.inf)
    return (logits.softmax(1) @ flat).view_as(views)


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -(-torch.rand(shape, generator=generator).clamp(1e-20, 1 - 1e-7).log()).log()


class World:
    """All chains visited once per sweep, each with a batch of its own; N = replicas x M chains."""

    def __init__(self, items: Tensor, views: Tensor, beta: float, batch: int, seed: int) -> None:
        self.items, self.views, self.beta, self.batch = items, views, beta, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.owner = torch.arange(M).repeat(2 * GROUPS)
        self.states: dict[str, Tensor] = {}
        self.stale = views[torch.arange(M), self.randint(VIEWS, M)]  # one old view of each item

    def randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def sweep(self) -> None:
        """Draw everybody's batch: anchors' two views, the others and their two views."""
        count, g = len(self.owner), self.generator
        first = self.randint(VIEWS, count)
        self.anchor = torch.stack([first, (first + 1 + self.randint(VIEWS - 1, count)) % VIEWS], 1)
        self.x = self.views[self.owner[:, None], self.anchor]  # [N,2,D]
        rank = torch.rand(count, M - 1, generator=g).topk(self.batch - 1, dim=1).indices
        self.others = rank + (rank >= self.owner[:, None])  # [N,b-1]
        first = self.randint(VIEWS, *self.others.shape)
        hop = 1 + self.randint(VIEWS - 1, *self.others.shape)
        seen = torch.stack([first, (first + hop) % VIEWS], 2)
        self.z = self.views[self.others[..., None], seen]  # [N,b-1,2,D]
        both = self.z.transpose(1, 2)  # row r is offered copy r; views are in random order
        self.logits = self.beta * torch.einsum("nrd,nrkd->nrk", self.x, both)  # [N,2,b-1]
        self.keys = both

    def held(self, name: str) -> tuple[Tensor, Tensor]:
        """The carried items of a method's chains, and their embeddings in a fresh view."""
        if name not in self.states:
            hop = 1 + self.randint(M - 1, len(self.owner))
            self.states[name] = (self.owner + hop) % M
        state = self.states[name]
        return state, self.views[state, self.randint(VIEWS, len(state))]

    def store(self, name: str, ended: Tensor) -> None:
        """One of two rows' ends, by a coin: [N,2] -> [N]."""
        coin = self.randint(2, len(ended))
        self.states[name] = ended.gather(1, coin[:, None])[:, 0]

    # Every estimate: [N,2,D] for the two views of every chain's item.

    def dcl(self) -> Tensor:
        z = self.z.flatten(1, 2)
        weights = (self.beta * torch.einsum("nrd,nkd->nrk", self.x, z)).softmax(2)
        return torch.einsum("nrk,nkd->nrd", weights, z)

    def _scan(self, logits: Tensor, start: Tensor, burn_in: int):  # type: ignore[no-untyped-def]
        log_u = torch.rand(logits.shape, generator=self.generator).clamp(min=1e-30).log()
        return mh_scan(logits, start, log_u, burn_in)

    def mh(self) -> Tensor:
        state, z = self.held("mh")
        start = self.beta * torch.einsum("nrd,nd->nr", self.x, z)
        scan = self._scan(self.logits.flatten(0, 1), start.flatten(), (self.batch - 1) // 2)
        weights, last = scan.weights.view_as(self.logits), scan.last.view_as(start)
        found = torch.einsum("nrk,nrkd->nrd", weights, self.keys)
        moved = self.others.gather(1, last.clamp(min=0))
        self.store("mh", torch.where(last >= 0, moved, state[:, None]))
        return found + scan.start_weight.view_as(start)[..., None] * z[:, None]

    def _pool(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, keys and items of {carried} and the row's copies of the batch."""
        state, z = self.held(name)
        start = self.beta * torch.einsum("nrd,nd->nr", self.x, z)
        inside = (self.others == state[:, None]).any(1)  # then it is counted once
        start = start.masked_fill(inside[:, None], -math.inf)
        keys = torch.cat([z[:, None, None].expand(-1, 2, 1, -1), self.keys], 2)
        ids = torch.cat([state[:, None], self.others], 1)
        return torch.cat([start[..., None], self.logits], 2), keys, ids

    def isir(self) -> Tensor:
        logits, keys, ids = self._pool("isir")
        pick = (logits + gumbel(tuple(logits.shape), self.generator)).argmax(2)
        self.store("isir", ids.gather(1, pick))
        return torch.einsum("nrk,nrkd->nrd", logits.softmax(2), keys)

    def _canonical(self, ids: Tensor) -> Tensor:  # [N,K] -> [N,K]
        return self.beta * torch.einsum("nd,nkd->nk", self.items[self.owner], self.items[ids])

    def canonical_isir(self) -> Tensor:
        logits, keys, ids = self._pool("canonical isir")
        fixed = self._canonical(ids).masked_fill(logits[:, 0] == -math.inf, -math.inf)
        pick = (fixed + gumbel(tuple(fixed.shape), self.generator)).argmax(1)
        self.states["canonical isir"] = ids.gather(1, pick[:, None])[:, 0]
        # softmax(l_canonical) exp(l_view - l_canonical), normalised, is the softmax of l_view
        return torch.einsum("nrk,nrkd->nrd", logits.softmax(2), keys)

    def canonical_mh(self) -> Tensor:
        state, z = self.held("canonical mh")
        ids = torch.cat([state[:, None], self.others], 1)
        fixed = self._canonical(ids)
        scan = self._scan(fixed[:, 1:], fixed[:, 0], (self.batch - 1) // 2)
        counts = torch.cat([scan.start_weight[:, None], scan.weights], 1)  # [N,b]
        start = self.beta * torch.einsum("nrd,nd->nr", self.x, z)
        logits = torch.cat([start[..., None], self.logits], 2)
        weights = (counts.log()[:, None] + logits - fixed[:, None]).softmax(2)
        keys = torch.cat([z[:, None, None].expand(-1, 2, 1, -1), self.keys], 2)
        last = scan.last
        moved = self.others.gather(1, last.clamp(min=0)[:, None])[:, 0]
        self.states["canonical mh"] = torch.where(last >= 0, moved, state)
        return torch.einsum("nrk,nrkd->nrd", weights, keys)

    def _draws(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Shared draws of a batch from half uniform, half its rows' stale softmaxes; log q."""
        rows = torch.cat([self.x[:, None], self.z], 1).flatten(1, 2)  # [N,2b,D]
        items = torch.cat([self.owner[:, None], self.others], 1).repeat_interleave(2, 1)
        stale = self.beta * rows @ self.stale.T
        stale = stale.scatter(2, items[..., None], -math.inf).softmax(2).mean(1)
        q = 0.5 / M + 0.5 * stale  # [N,M]
        ids = torch.multinomial(q, count, replacement=True, generator=self.generator)
        z = self.views[ids, self.randint(VIEWS, *ids.shape)]
        logits = (
            self.beta * torch.einsum("nrd,nkd->nrk", self.x, z) - q.gather(1, ids).log()[:, None]
        )
        return logits.masked_fill((ids == self.owner[:, None])[:, None], -math.inf), z, ids

    def informed(self, count: int) -> Tensor:
        logits, z, _ = self._draws(count)
        weights = logits.softmax(2).nan_to_num()  # all draws may be the item itself
        return torch.einsum("nrk,nkd->nrd", weights, z)

    def isir_informed(self, count: int) -> Tensor:
        name = f"isir+informed {count}"
        state, z = self.held(name)
        logits, drawn, ids = self._draws(count)
        rows = torch.cat([self.x[:, None], self.z], 1).flatten(1, 2)
        items = torch.cat([self.owner[:, None], self.others], 1).repeat_interleave(2, 1)
        stale = (self.beta * rows @ self.stale.T).scatter(2, items[..., None], -math.inf)
        q = (0.5 / M + 0.5 * stale.softmax(2).mean(1)).gather(1, state[:, None])[:, 0]
        start = self.beta * torch.einsum("nrd,nd->nr", self.x, z) - q.log()[:, None]
        logits = torch.cat([start[..., None], logits], 2)
        ids, drawn = torch.cat([state[:, None], ids], 1), torch.cat([z[:, None], drawn], 1)
        pick = (logits + gumbel(tuple(logits.shape), self.generator)).argmax(2)
        self.store(name, ids.gather(1, pick))
        return torch.einsum("nrk,nkd->nrd", logits.softmax(2), drawn)


def measure(noise: float, beta: float, batch: int, sweeps: int, warm_up: int, seed: int) -> dict:  # type: ignore[type-arg]
    """Errors of every method at one distance of views."""
    items, views = data(noise, torch.Generator().manual_seed(seed))
    target, world = exact(views, beta), World(items, views, beta, batch, seed + 1)
    methods = {
        "dcl": world.dcl,
        "mh": world.mh,
        "isir": world.isir,
        "canonical mh": world.canonical_mh,
        "canonical isir": world.canonical_isir,
        **{f"informed {n}": (lambda n=n: world.informed(n)) for n in (8, 16, 32)},
        "isir+informed 8": lambda: world.isir_informed(8),
    }
    half = torch.arange(2 * GROUPS).repeat_interleave(M) % 2  # [N]
    sums = {name: torch.zeros(2, M, VIEWS, DIM) for name in methods}
    counts = torch.zeros(2, M, VIEWS)
    for step in range(warm_up + sweeps):
        world.sweep()
        at = (half[:, None].expand(-1, 2), world.owner[:, None].expand(-1, 2), world.anchor)
        if step >= warm_up:
            counts.index_put_(at, torch.ones(at[0].shape), accumulate=True)
        for name, estimate in methods.items():
            found = estimate()
            if step >= warm_up:
                sums[name].index_put_(at, found, accumulate=True)
    errors = {}
    for name, total in sums.items():
        first, second = total / counts[..., None] - target

        def relative(a: Tensor, b: Tensor, exact: Tensor) -> float:
            return math.sqrt(max(0.0, float((a * b).sum())) / float(exact.square().sum()))

        by_item = relative(first.mean(1), second.mean(1), target.mean(1))
        errors[name] = {"by_item": by_item, "by_view": relative(first, second, target)}
    off = ~torch.eye(VIEWS, dtype=torch.bool)
    cosine = float((views @ views.transpose(1, 2))[:, off].mean())
    return {"cosine": cosine, "errors": errors}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.56, 1.13])
    parser.add_argument("--beta", type=float, default=14.28)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sweeps", type=int, default=600)
    parser.add_argument("--warm-up", type=int, default=150)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[list[object]] = []
    names: list[str] = []
    if given.out:
        append(given.out, {"record": "differing-views", **provenance(Options(device="cpu"))})
    for noise in given.noise:
        found = measure(noise, given.beta, given.batch_size, given.sweeps, given.warm_up, 0)
        job = {"noise": noise, "beta": given.beta, "b": given.batch_size, "sweeps": given.sweeps}
        if given.out:
            append(given.out, {"job": job, **found})
        print(json.dumps(found), flush=True)
        names = list(found["errors"])
        cells = [f"{e['by_item']:.2f} ({e['by_view']:.2f})" for e in found["errors"].values()]
        lines.append([f"{found['cosine']:.2f}", *cells])
    print(markdown(["cosine of two views", *names], lines))


if __name__ == "__main__":
    main()
