"""The whole constructor space of the losses: how to draw from it, and what is promised where.

`refused` says which settings no loss accepts. `promise` says for each of the others what must hold
of its long-run mean gradient: that it is the exact one, or how far it may be from it and why. A
setting without a promise does not exist.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from battery_world import Order, World, make_world
from hypothesis import strategies as st
from torch import nn

import negchain
import oracles
from negchain import ISIR, MH, Given, InBatch, Informed, Uniform
from oracles import Exact, Row
from oracles.exact import normalised, weighted
from oracles.visit import SharedChain, shared_chain

SIZE, KEYS, DIM = 48, 40, 5  # anchors of every world, keys of a corpus, embedding


@dataclass(frozen=True)
class Setting:
    """One way to build a loss, and the data and batches it meets."""

    loss: Literal["emc2", "streaming", "infonce", "dcl", "sogclr", "cache", "importance"] = "emc2"
    beta: float = 8.0
    learned: bool = False
    kernel: Any = "mh"
    proposals: Any = None
    carried: str = "encode"
    views: Literal["shared", "paired"] = "shared"
    symmetric: bool = True
    denominator: str = "negatives"
    partition_rate: float = 1.0
    corpus: bool = False
    key_counts: bool = False
    augmentations: int | None = None
    normalize: bool = True
    chain_file: bool = False
    gamma: float = 0.9
    refresh: float = 0.01
    # the data
    size: int = SIZE
    num_views: int = 1
    num_known: int = 0
    batch_size: int = 8
    order: Order = "epochs"

    def __str__(self) -> str:
        """What differs from the default."""
        plain = Setting()
        fields = (f.name for f in dataclasses.fields(self))
        told = {n: getattr(self, n) for n in fields if getattr(self, n) != getattr(plain, n)}
        return ", ".join(f"{n}={v!r}" for n, v in told.items()) or "default"

    @property
    def chains(self) -> bool:
        return self.loss in ("emc2", "streaming")

    @property
    def both_ways(self) -> bool:
        """Whether keys are anchors too."""
        return self.symmetric and not self.corpus

    @property
    def world(self) -> World:
        if self.views == "shared":
            views = self.augmentations or self.num_views
            return make_world("shared", self.size, num_views=views, num_known=self.num_known)
        return make_world(
            "paired",
            self.size,
            num_keys=KEYS if self.corpus else None,
            num_views=self.num_views,
            num_known=self.num_known,
            popularity=1.0,
        )

    @property
    def copies(self) -> float:
        """Negatives of eq. (1) that an item stands for."""
        if self.loss == "cache" or self.views == "paired":
            return 1.0
        return float(self.augmentations or 2)

    @property
    def several(self) -> bool:
        """Whether views that differ share a chain."""
        return self.num_views > 1 and self.augmentations is None

    @property
    def enumerated(self) -> bool:
        """Whether the law of the chains is known where they do not settle at p, or lose gradient.

        Metropolis-Hastings with uniform proposals, whose kernel is a matrix. An i-SIR step depends
        on the whole set it is offered, and there are too many sets; draws beside a batch sweep
        twice: `test_enumerated.py` has them with five items. A moving partition depends on the
        whole past.
        """
        alone = isinstance(self.proposals, Uniform) and self.proposals.alone
        return (
            self.loss == "emc2"
            and (self.kernel == "mh" or (isinstance(self.kernel, MH) and self.kernel.burn_in < 1))
            and getattr(self.kernel, "count_every", 1) == 1
            and (alone or (self.proposals in (None, "batch") and self.order != "repeats"))
            and self.several != (self.carried == "cached")
            and (self.denominator, self.corpus, self.augmentations) == ("negatives", False, None)
        )

    @functools.lru_cache(maxsize=2)  # noqa: B019 of a setting, for all its seeds
    def chains_by_enumeration(self) -> list[tuple[int, int, list[Row], SharedChain]]:
        """Per chain: its side, its number, its rows and the oracle's word on it."""
        world, rows = self.world, {}
        offset = world.num_anchors * world.num_views
        for row in world.rows(self.both_ways, self.copies):
            second = int(world.views == "paired" and row.anchor >= offset)
            chain = (row.anchor - offset * second) // world.num_views
            rows.setdefault((second, chain), []).append(row)
        burn_in = self.kernel.burn_in if isinstance(self.kernel, MH) else 0.5
        drawn = self.proposals.num if isinstance(self.proposals, Uniform) else None
        found = []
        for (side, chain), own in rows.items():
            first = offset if world.views == "paired" and side == 0 else 0
            others = len({z // world.num_views for z in own[0].negatives})
            usable = others / (self.size if drawn else self.size - 1)
            steps = self.num_steps(drawn, usable)
            law = shared_chain(
                own,
                lambda z, first=first: (z - first) // world.num_views,
                world.table.numpy(),
                self.beta,
                steps,
                burn_in,
            )
            found.append((side, chain, own, law))
        return found

    def num_steps(self, drawn: int | None, usable: float) -> dict[int, float]:
        """Numbers of proposals of a visit, with their probabilities."""
        sizes = {self.batch_size: 1.0}
        if drawn:
            sizes = {drawn + 1: 1.0}
        elif self.order == "epochs":  # the odd last batch
            last = self.size % self.batch_size
            sizes = {self.batch_size: 1 - last / self.size, last: last / self.size}
        steps: dict[int, float] = {}
        for size, share in sizes.items():
            for count in range(size if share else 0):
                chance = math.comb(size - 1, count) * usable**count
                chance *= (1 - usable) ** (size - 1 - count)
                steps[count] = steps.get(count, 0.0) + share * chance
        return {count: share for count, share in steps.items() if share > 1e-12}

    def exact(self) -> Exact:
        """What the mean gradient is measured against."""
        return self._exact_of_shared_chains() if self.enumerated else self.exact_at_p()

    def exact_at_p(self) -> Exact:
        """The gradient of the global loss itself."""
        rows, kept = self.world.rows(self.both_ways, self.copies), self.denominator
        if self.loss == "infonce":  # saturates against the sum of its own columns
            kept, copies = "all", 2 if self.views == "shared" else 1
            columns = MANY + copies * (self.batch_size - 1)
            rows = [row._replace(count=columns / len(row.negatives)) for row in rows]
        return oracles.exact(rows, self.world.table.numpy(), self.beta, kept)

    def _exact_of_shared_chains(self) -> Exact:
        table = self.world.table.numpy()
        unit, norm = normalised(table)
        rows, weights, lost, slope = [], [], np.zeros_like(table), 0.0
        for _, _, own, law in self.chains_by_enumeration():
            rows += own
            weights += law.weights
            for row, w, still in zip(own, law.weights, law.carried, strict=True):
                s = unit[row.negatives] @ unit[row.anchor]
                slope += row.share * (w @ s - unit[row.positive] @ unit[row.anchor])
                if self.carried == "cached":  # no gradient for the carried negative
                    back = (unit[row.anchor] - s[:, None] * unit[row.negatives]).T
                    back = (row.share * self.beta * still * back / norm[row.negatives]).T
                    np.add.at(lost, row.negatives, back)
        none, ones = [0.0 * w for w in weights], [1.0] * len(rows)
        positive = weighted(rows, table, self.beta, none, ones)
        negative = weighted(rows, table, self.beta, weights, ones) - positive - lost
        return Exact(0.0, positive, negative, float(slope))

    @property
    def deterministic(self) -> bool:
        """Whether the gradient of every batch is known without drawing anything."""
        return not self.chains and self.loss != "cache" and self.proposals is None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the constructor, but for the seed."""
        beta = nn.Parameter(torch.tensor(self.beta, dtype=torch.float64)) if self.learned else None
        given: dict[str, Any] = {
            "num_samples": self.size,
            "beta": self.beta if beta is None else beta,
            "views": self.views,
            "symmetric": self.symmetric,
            "normalize": self.normalize,
            "dim": DIM,
        }
        if self.loss not in ("infonce", "dcl"):
            given["denominator"] = self.denominator
        if self.loss != "streaming" and self.corpus:
            given["num_keys"] = KEYS
        if self.key_counts:
            used = make_world("paired", self.size, num_keys=KEYS, popularity=1.0).pairs[:, 1]
            given["key_counts"] = torch.bincount(used, minlength=KEYS)
        if self.chains:
            given |= {"kernel": self.kernel, "carried": self.carried}
            given["partition_rate"] = self.partition_rate
            if self.chain_file:
                given["chain_file"] = Path(tempfile.mkdtemp()) / "chains.bin"
        if self.proposals is not None:
            given["proposals"] = self.proposals
        if self.augmentations is not None:
            given["augmentations"] = self.augmentations
        if self.loss == "sogclr":
            given["gamma"] = self.gamma
        if self.loss == "cache":
            given["refresh"] = self.refresh
        return given

    def build(self, seed: int) -> nn.Module:
        kinds = {
            "emc2": negchain.EMC2Loss,
            "streaming": negchain.StreamingEMC2Loss,
            "infonce": negchain.InfoNCELoss,
            "dcl": negchain.DCLLoss,
            "sogclr": negchain.SogCLRLoss,
            "cache": negchain.NegativeCacheLoss,
            "importance": negchain.ImportanceLoss,
        }
        return kinds[self.loss](**self.arguments(), seed=seed)


# ---------------------------------------------------------------- what is refused


def refused(s: Setting) -> list[str]:
    """Rules a setting breaks, each by a word of the message that says so; none: it is legal."""
    proposals = InBatch() if s.proposals == "batch" else s.proposals
    in_batch = isinstance(proposals, InBatch)
    broken = {
        "num_keys": s.corpus and s.views != "paired",
        "copies": in_batch and proposals.copies == 2 and s.views == "paired",
        # keys of the last quarter are nobody's
        "somebody's positive": s.chains and s.corpus and in_batch,
        "augmentations": s.augmentations is not None
        and (s.views != "shared" or isinstance(proposals, Informed)),
    }
    return [word for word, is_broken in broken.items() if is_broken]


def broken(s: Setting) -> str | None:
    """Settings whose gradient is known to be wrong by an amount nobody promises."""
    if s.denominator == "all" and s.batch_size == 1 and s.proposals in (None, "batch", InBatch(2)):
        return "1 - p+ of a row that never had a proposal comes from its carried state alone"
    return None


# ---------------------------------------------------------------- what is promised


@dataclass(frozen=True)
class Promise:
    """What must hold of the mean gradient."""

    bound: float = 0.0  # how far it may be from the exact one along any direction, as a share
    why: str = "exact"
    anchors_only: bool = False  # only the gradient of the anchors' tower
    never_longer: bool = False  # the bias makes the gradient of the negatives shorter


def promise(s: Setting) -> Promise:
    """For settings whose mean gradient is an estimate of the exact one."""
    made = Promise()

    def allow(bound: float, why: str) -> None:
        nonlocal made
        told = why if made.why == "exact" else f"{made.why}; {why}"
        made = dataclasses.replace(made, bound=min(0.9, made.bound + bound), why=told)

    proposals = s.proposals
    alone = isinstance(proposals, (Uniform, Given)) and proposals.alone
    mh = isinstance(s.kernel, MH) or s.kernel == "mh"
    several = s.several
    if s.loss == "cache":
        if several:
            allow(0.6, "the table holds one view of every item")
        return made
    if not s.chains:
        allow(0.15, "hundreds of draws: what is left of the bias of a ratio")
        if s.loss == "sogclr":
            allow(0.1 / s.gamma, "a moving average of few visits")
        return made
    if s.enumerated:
        if not alone:
            allow(0.06, "batches without replacement against independent proposals, R/m = 1/6")
        return made
    if several:
        allow(0.6, "views that differ share one chain")
    if (mh or s.corpus) and not alone and s.order != "repeats":
        allow(0.06, "a batch without replacement taken for independent draws, R/m = 1/6")
    if isinstance(proposals, InBatch) and proposals.copies == 2:
        allow(0.3, "both copies of an item are offered")
    if s.denominator == "all":
        allow(0.1 + 0.9 * s.partition_rate, "1 - p+ of a noisy partition is too small (Jensen)")
        made = dataclasses.replace(made, never_longer=True)
    if s.carried == "cached":
        if s.views == "paired" and not s.both_ways and not several:
            allow(0.0, "cached: gradient reaches the anchor only")
            made = dataclasses.replace(made, anchors_only=True)
        else:
            allow(0.6, "cached: no gradient for the carried negative")
            made = dataclasses.replace(made, never_longer=True)
    return made


# ---------------------------------------------------------------- how settings are drawn

MANY = 400  # draws, beside 48 items

KERNELS = (
    "mh",
    "isir",
    MH(burn_in=0.0),
    MH(burn_in=0.9),
    MH(burn_in=2),
    MH(burn_in=100),
    MH(burn_in=0.25, count_every=3),
    ISIR(count_every=3),
)
PROPOSALS = (
    None,
    "batch",
    InBatch(copies=2),
    Uniform(),
    Uniform(num=5),
    Uniform(num=6, alone=True),
    Informed(),
    Informed(num=5, share=0.9, sharpness=0.5, refresh=0.2),
    Informed(num=3, per_row=True),
    Given(),
    Given(alone=False),
)


def numbered(number: int) -> Setting:
    """Setting number so-and-so of EMC2Loss and StreamingEMC2Loss, legal or not."""
    pick = random.Random(number).choice
    loss = pick(("emc2", "emc2", "emc2", "streaming"))
    plain = loss == "streaming"  # no draws, no corpus, no stored augmentations to choose
    corpus = pick((False, False, True)) and not plain
    denominator = pick(("negatives", "negatives", "all"))
    return Setting(
        loss=loss,
        beta=pick((2.0, 8.0, 14.28)),
        learned=pick((False, True)),
        kernel=pick(KERNELS),
        proposals=None if plain else pick(PROPOSALS),
        carried=pick(("encode", "encode", "encode", "cached")),
        views=pick(("shared", "paired") if not corpus else ("shared", "paired", "paired")),
        symmetric=pick((False, True)),
        denominator=denominator,
        partition_rate=pick((0.05, 0.2, 1.0)) if denominator == "all" else 1.0,
        corpus=corpus,
        key_counts=corpus and pick((False, True)),
        augmentations=None if plain else pick((None, None, None, 2, 3)),
        normalize=pick((False, True, True)),
        chain_file=pick((False, False, False, True)),
        num_views=pick((1, 1, 1, 2)),
        num_known=pick((0, 0, 3)),
        batch_size=pick((1, 2, 5, 7, 8)),
        order=pick(("epochs", "fresh", "repeats")),
    )


def numbered_without_chains(number: int) -> Setting:
    """Setting number so-and-so of the other losses; a few draws, or so many that bias is gone."""
    pick = random.Random(number).choice
    loss = pick(("infonce", "dcl", "sogclr", "cache", "importance"))
    views, corpus = pick((("shared", False), ("paired", False), ("paired", True)))
    many = pick((None, None, Uniform(num=MANY), Informed(num=MANY)))
    if loss == "importance":
        many = pick((many or Informed(MANY, alone=True), Informed(MANY, alone=True, per_row=True)))
    elif loss == "cache":
        many = None
    elif loss == "sogclr" and corpus and many is None:
        many = Uniform(num=MANY)
    return Setting(
        loss=loss,
        beta=pick((2.0, 8.0)),
        learned=pick((False, True)) and (many is not None or loss == "cache"),
        proposals=many,
        views=views,
        symmetric=pick((False, True)),
        denominator="negatives" if loss in ("infonce", "dcl") else pick(("negatives", "all")),
        corpus=corpus,
        normalize=pick((False, True)),
        gamma=pick((0.1, 0.9, 1.0)) if loss == "sogclr" else 0.9,
        refresh=pick((0.0, 0.1, 1.0)) if loss == "cache" else 0.01,
        num_views=pick((1, 1, 2)),
        num_known=pick((0, 3)),
        batch_size=pick((1, 2, 5, 8)),
        order=pick(("epochs", "fresh", "repeats")),
    )


settings_of_chains = st.integers(0, 10**9).map(numbered)
settings_without_chains = st.integers(0, 10**9).map(numbered_without_chains)
