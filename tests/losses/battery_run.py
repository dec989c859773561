"""Long runs of a loss on a frozen world, and a test of their mean gradient.

Every seed is a run of its own: chains, batches, views. So the mean gradients of the seeds are
independent, their scatter measures the noise whatever the correlation within a run, and
(mean over seeds - exact) / (standard error) along a fixed direction has Student's distribution.

Directions: the exact gradient (of the negatives, of the positives, on each tower); what a softmax
that is too flat, too sharp or favours late ids, popular keys or ignored labels would change; three
random ones; and the bias of the other half of the seeds, which finds what nobody thought of. False
alarms: `ALARM` per verdict, shared among the directions (Bonferroni).

Chains start at a draw from their exact target (`World.targets`). A correct kernel keeps them
there, so no run is too short; a wrong one leaves, however it is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from battery_world import Order, World, batches
from scipy import stats
from torch import Tensor, nn

import oracles
from negchain import Draw, Given
from oracles import Exact
from oracles.simulated import Simulated

ALARM = 1e-5  # of a verdict; a hundred of them make 1e-3


@dataclass(frozen=True)
class Verdict:
    """How the long-run mean gradient compares with the exact one."""

    t: dict[str, float]  # per direction: (mean - exact) / standard error, as a normal deviate
    along: dict[str, float]  # per direction: the difference, as a share of the exact negative one
    rel: float  # length of the bias over that of the exact negative gradient, noise removed
    noise: float  # what is left of the noise in the mean over seeds, as a share
    length: float  # projection on the exact gradient of the negatives, as a share of its own
    critical: float

    @property
    def worst(self) -> float:
        return max(abs(t) for t in self.t.values())

    @property
    def passes(self) -> bool:
        return self.worst < self.critical

    def __str__(self) -> str:
        shown = "  ".join(f"{k} {t:+.1f} ({self.along[k]:+.3f})" for k, t in self.t.items())
        return (
            f"rel {self.rel:.3f} (noise {self.noise:.3f}), length {self.length:.3f}, "
            f"critical {self.critical:.1f}; t (bias): {shown}"
        )


# ---------------------------------------------------------------- one step, one run


Step = tuple[Tensor, Tensor, Tensor]  # pairs of a batch, and the views of anchors and keys


def play(
    loss_fn: nn.Module, world: World, leaf: Tensor, step: Step, generator: torch.Generator
) -> Tensor:
    """The loss of one batch of pairs; what else is encoded is seen in views drawn for it."""
    pick, first, second = step
    anchors, keys = world.pairs[pick].unbind(1)
    call: dict[str, Any] = {}
    if world.num_keys is not None:
        call["key_index"] = keys
    if world.known is not None:
        call["known"] = world.known[anchors]
    stored = getattr(loss_fn, "augmentations", None)
    if stored:
        call["augmentation"] = (first, second)
    embed = (
        (lambda z: nn.functional.normalize(z, dim=-1)) if not loss_fn.normalize else (lambda z: z)
    )

    def encoder(tower: str) -> Callable[[Tensor], Tensor]:
        def encode(ids: Tensor) -> Tensor:
            if stored:
                return embed(leaf[ids])
            view = torch.randint(world.num_views, ids.shape, generator=generator)
            return embed(leaf[world.address(tower, ids, view)])

        return encode

    towers = ("keys", "anchors")[: loss_fn.num_sides]
    if isinstance(loss_fn.proposals, Given):
        made = [given_draw(loss_fn, generator) for _ in towers]
        drawn = [encoder(t)(d.ids) for t, d in zip(towers, made, strict=True)]
        call["draw"], call["drawn"] = (made[0], drawn[0]) if len(towers) == 1 else (made, drawn)
    z_a = embed(leaf[world.address("anchors", anchors, first)])
    z_b = embed(leaf[world.address("keys", keys, second)])
    pair = encoder("anchors"), encoder("keys")
    encode = pair if loss_fn.views == "paired" else pair[1]
    return loss_fn(z_a, z_b, anchors, encode=encode, **call)


def plan_of(world: World, batch_size: int, order: Order, steps: int, seed: int) -> list[Step]:
    """The batches of a run, and in which views each item is seen: two different ones if shared."""
    generator, plan, per_item = torch.Generator().manual_seed(seed), [], world.num_views
    for pick in batches(len(world.pairs), batch_size, order, steps, generator):
        shape = (len(pick),)
        first, second = (torch.randint(per_item, shape, generator=generator) for _ in range(2))
        if world.views == "shared" and per_item > 1:
            second = (first + torch.randint(1, per_item, shape, generator=generator)) % per_item
        plan.append((pick, first, second))
    return plan


def given_draw(loss_fn: nn.Module, generator: torch.Generator) -> Draw:
    """Draws that favour early ids, then late ones, then early ones at once: a saw.

    Not a new random q per visit, nor two in turn: with these, old and new are as good as exchanged,
    and a chain that mistakes one for the other errs both ways. One draw: what is held weighs most.
    """
    slope = 3.0 * (int(loss_fn.step) % 5) - 6.0
    log_q = torch.linspace(0, slope, loss_fn.num_ids, dtype=torch.float64).log_softmax(0)
    ids = torch.multinomial(log_q.exp(), 1, replacement=True, generator=generator)
    return Draw(ids, log_q)


def run(loss_fn: nn.Module, world: World, plan: list[Step], seed: int) -> tuple[np.ndarray, float]:
    """Mean gradient over the steps, [T,D], and that of beta (0 if fixed)."""
    generator = torch.Generator().manual_seed(seed + 3_000_017)
    leaf = world.table.clone().requires_grad_()
    beta = loss_fn.beta if isinstance(loss_fn.beta, nn.Parameter) else None
    for step in plan:
        play(loss_fn, world, leaf, step, generator).backward()
    assert leaf.grad is not None
    slope = 0.0 if beta is None or beta.grad is None else float(beta.grad) / len(plan)
    return leaf.grad.numpy() / len(plan), slope


def simulate(setting: Any, plan: list[Step], seed: int) -> tuple[np.ndarray, float]:
    """The same by `oracles.simulated`: the same batches and views, everything else drawn anew."""
    twin = Simulated(setting, setting.world, seed)
    for pick, first, second in plan:
        twin.play(pick.tolist(), list(zip(first.tolist(), second.tolist(), strict=True)))
    return twin.gradient / len(plan), twin.slope / len(plan)


# ---------------------------------------------------------------- the statistic


def directions(world: World, beta: float, symmetric: bool, exact: Exact) -> dict[str, np.ndarray]:
    """Vectors to look along, [T,D] each."""
    rows, table = world.rows(symmetric), world.table.numpy()
    right = oracles.exact(rows, table, beta).negative

    def wrong(at: float = 1.0, tilt: np.ndarray | None = None) -> np.ndarray:
        """How the negative gradient changes if p is replaced by another softmax."""
        return oracles.exact(rows, table, at * beta, tilt=tilt).negative / at - right

    rng = np.random.default_rng(7)
    found = {
        "negatives": exact.negative,
        "positives": exact.positive,
        "too flat": wrong(0.5),
        "too sharp": wrong(1.5),
        "late ids": wrong(tilt=np.linspace(0, 2, len(table))),
        **{f"random {n}": rng.normal(size=table.shape) for n in range(3)},
    }
    split = world.num_anchors * world.num_views
    if world.views == "paired":
        found["anchors"], found["keys"] = exact.negative.copy(), exact.negative.copy()
        found["anchors"][split:], found["keys"][:split] = 0, 0
    if world.num_keys is not None:
        popular = np.log1p(np.bincount(world.pairs[:, 1], minlength=world.num_keys))
        tilt = np.concatenate([np.zeros(split), np.repeat(popular, world.num_views)])
        found["popular"] = wrong(tilt=tilt)
    if world.known is not None:
        for name, known in (("ignored labels", None), ("mutual labels", mutual(world.known))):
            other = dataclasses.replace(world, known=known).rows(symmetric)
            found[name] = oracles.exact(other, table, beta).negative - right
    return found


def judge(
    gradients: np.ndarray,  # [S,T,D] mean gradient of each seed
    exact: Exact,
    along: dict[str, np.ndarray],
    norm: np.ndarray,  # [T,1]
    *,
    betas: np.ndarray | None = None,  # [S] mean gradient of beta of each seed
) -> Verdict:
    """Test the seeds' mean gradients.

    Gradients are first multiplied by the length of their embedding, so that short embeddings,
    whose gradients are long, do not drown the others.
    """
    seeds = len(gradients)
    size = length(exact.negative * norm)
    error = ((gradients - exact.gradient) * norm).reshape(seeds, -1) / size
    projected = {name: (d * norm).ravel() for name, d in along.items()}
    samples = {n: error @ d / length(d) for n, d in projected.items() if d.any()}
    for name, half in (("odd seeds", slice(0, None, 2)), ("even seeds", slice(1, None, 2))):
        other = slice(1 - half.start, None, 2)
        found = error[half].mean(0)
        samples[name] = error[other] @ found / length(found)
    if betas is not None:
        samples["beta"] = (betas - exact.beta) / abs(exact.beta)
    t, shift, alarm = {}, {}, ALARM / (2 * len(samples))
    for name, values in samples.items():
        shift[name] = float(values.mean())
        spread = max(float(values.std(ddof=1)) / math.sqrt(len(values)), 1e-9)
        t[name] = math.copysign(as_normal(abs(shift[name]) / spread, len(values) - 1), shift[name])
    mean, left = error.mean(0), float(error.var(0, ddof=1).sum()) / seeds
    return Verdict(
        t,
        shift,
        rel=math.sqrt(max(0.0, float(mean @ mean) - left)),
        noise=math.sqrt(left),
        length=1 + shift["negatives"],
        critical=float(stats.norm.isf(alarm)),
    )


def mutual(known: Tensor) -> Tensor:
    """Labels made to hold both ways: what `known` does not mean."""
    sets = [{j for j in row if j >= 0} for row in known.tolist()]
    both = [s | {j for j, other in enumerate(sets) if i in other} for i, s in enumerate(sets)]
    width = max(map(len, both))
    return torch.tensor([sorted(s) + [-1] * (width - len(s)) for s in both])


def length(d: np.ndarray) -> float:
    return math.sqrt(float((d * d).sum()))


def as_normal(t: float, freedom: int) -> float:
    """The normal deviate as unlikely as a value of Student's t; 38 where that underflows."""
    return min(38.0, float(stats.norm.isf(max(stats.t.sf(t, freedom), 1e-300))))


def start_at_target(loss_fn: nn.Module, world: World, beta: float, seed: int) -> None:
    """Put the state of a loss with chains where it would be after endless visits.

    Chains at draws from their exact targets, cached embeddings those of the states, keys
    counted for many epochs.
    """
    rng = np.random.default_rng(seed + 1_000_003)
    per_view, unit = bool(loss_fn.augmentations), nn.functional.normalize(world.table, dim=1)
    for side, chain, ids, p, row in world.targets(beta, loss_fn.symmetric, per_view):
        at = int(rng.choice(len(ids), p=p))
        loss_fn.chains.states[side, chain] = int(ids[at])
        if loss_fn.carried == "cached":
            loss_fn.chains.keys[side, chain] = unit[row.negatives[at]]
    if world.num_keys is not None and loss_fn._counts_keys:
        counts = torch.bincount(world.pairs[:, 1], minlength=world.num_keys) * 1000
        loss_fn.key_counts.copy_(torch.cat([counts, counts.sum()[None]]))
