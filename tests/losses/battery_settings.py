"""The whole constructor space of the losses: how to draw from it, and what is promised where.

`refused` says which settings no loss accepts. `is_exact` says of which others the long-run mean
gradient is the exact one; of all others it is that of `oracles.simulated`. Nothing is allowed for.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from battery_world import Order, World, make_world
from hypothesis import strategies as st
from torch import nn

import negchain
import oracles
from negchain import ISIR, MH, Given, InBatch, Informed, Uniform
from negchain.losses.settings import num_proposals
from oracles import Exact

SIZE, KEYS, DIM = 48, 40, 5  # anchors of every world, keys of a corpus, embedding


@dataclass(frozen=True)
class Setting:
    """One way to build a loss, and the data and batches it meets."""

    loss: Literal["emc2", "large batch", "infonce", "dcl", "sogclr", "cache", "importance"] = "emc2"
    beta: float = 8.0
    learned: bool = False
    kernel: Any = "mh"
    proposals: Any = None
    carried: str = "encode"
    views: Literal["shared", "paired"] = "shared"
    symmetric: bool = True
    denominator: str = "negatives"
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
        return self.loss in ("emc2", "large batch")

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

    def exact(self) -> Exact:
        """The gradient of the global loss itself."""
        rows, kept = self.world.rows(self.both_ways, self.copies), self.denominator
        if self.loss == "infonce":  # saturates against the sum of its own columns
            kept, copies = "all", 2 if self.views == "shared" else 1
            columns = MANY + copies * (self.batch_size - 1)
            rows = [row._replace(count=columns / len(row.negatives)) for row in rows]
        return oracles.exact(rows, self.world.table.numpy(), self.beta, kept)

    @property
    def offered(self) -> int:
        """Copies of every other item that a row of a chain meets in the batch, of shared views."""
        if isinstance(self.proposals, InBatch):
            return self.proposals.copies
        isir = self.kernel == "isir" or isinstance(self.kernel, ISIR)
        plain = self.proposals in (None, "batch") and self.augmentations is None
        return 2 if isir and plain and (self.loss, self.views) == ("emc2", "shared") else 1

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
        if self.loss != "large batch" and self.corpus:
            given["num_keys"] = KEYS
        if self.key_counts:
            used = make_world("paired", self.size, num_keys=KEYS, popularity=1.0).pairs[:, 1]
            given["key_counts"] = torch.bincount(used, minlength=KEYS)
        if self.chains:
            given |= {"kernel": self.kernel, "carried": self.carried}
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
            "large batch": negchain.LargeBatchEMC2Loss,
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
        return "1 - p+ of a row without a proposal comes from its carried state alone"
    if isinstance(s.kernel, MH) and s.kernel.burn_in >= 1:
        proposals = s.proposals
        if proposals in (None, "batch"):
            proposals = Uniform() if s.corpus and proposals is None else InBatch()
        if s.kernel.burn_in >= num_proposals(proposals, s.batch_size, given=1):
            return "a burn-in of all steps, which the call refuses (test_walk.py)"
    return None


# ---------------------------------------------------------------- what is promised


def is_exact(s: Setting) -> bool:
    """Whether the mean gradient is that of the global loss itself; else it is the simulated one.

    Chains at stationarity, where an item's views are equal or have a chain each, carried states are
    encoded, the positive is left out, and proposals are independent or a set that i-SIR knows to be
    one. Negative Cache with nothing stale.
    """
    if not s.chains:
        return s.loss == "cache" and s.num_views == 1
    independent = s.order == "repeats" or (
        isinstance(s.proposals, (Uniform, Given)) and s.proposals.alone
    )
    isir = s.kernel == "isir" or isinstance(s.kernel, ISIR)
    return (
        (independent or (isir and not s.corpus))
        and not s.several
        and (s.proposals != InBatch(copies=2) or (isir and s.augmentations is None))
        and (s.denominator, s.carried) == ("negatives", "encode")
    )


# ---------------------------------------------------------------- how settings are drawn

MANY = 400  # draws, beside 48 items

KERNELS = (
    "mh",
    "isir",
    MH(burn_in=0.0),
    MH(burn_in=0.9),
    MH(burn_in=2),
    MH(burn_in=4),
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
    """Setting number so-and-so of EMC2Loss and LargeBatchEMC2Loss, legal or not."""
    pick = random.Random(number).choice
    loss = pick(("emc2", "emc2", "emc2", "large batch"))
    plain = loss == "large batch"  # no draws, no corpus, no stored augmentations to choose
    corpus = pick((False, False, True)) and not plain
    return Setting(
        loss=loss,
        beta=pick((2.0, 8.0, 14.28)),
        learned=pick((False, True)),
        kernel=pick(KERNELS),
        proposals=None if plain else pick(PROPOSALS),
        carried=pick(("encode", "encode", "encode", "cached")),
        views=pick(("shared", "paired") if not corpus else ("shared", "paired", "paired")),
        symmetric=pick((False, True)),
        denominator=pick(("negatives", "negatives", "all")),
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


def numbered_in(layout: str, num_known: int, number: int) -> Setting:
    """The same for i-SIR with views that differ, in one layout: `numbered` hardly meets them."""
    corpus = layout == "corpus"
    return dataclasses.replace(
        numbered(number),
        loss="emc2",
        kernel=random.Random(number).choice(("isir", ISIR(count_every=3))),
        views="paired" if corpus else layout,
        corpus=corpus,
        key_counts=corpus and number % 2 == 0,
        augmentations=None,
        num_views=2,
        num_known=num_known,
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
