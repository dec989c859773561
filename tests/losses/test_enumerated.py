"""Where EMC² is biased, its mean gradient is the enumerated one: exactly, with no bound allowed.

The battery (`test_battery.py`) allows a setting whose bias depends on too many things a bound. Here
such settings meet five items, and `oracles.small` lists all that a visit can draw. False alarms:
`battery_run.ALARM`, 1e-5 per setting.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from battery_run import Verdict, directions, judge, plan_of, run
from battery_settings import Setting
from test_battery import stored_of

import negchain.losses.columns as columns
import negchain.losses.emc2 as emc2
import negchain.losses.sweeps as sweeps
import oracles
from negchain import MH, Draw, EMC2Loss, Given, InBatch, Informed, Uniform
from oracles.simulated import Simulated
from oracles.small import Small, mean_gradient

FIVE = Setting(size=5, batch_size=3, order="fresh", beta=4.0)
TWO = dataclasses.replace(FIVE, num_views=2)
ISIR = dataclasses.replace(TWO, kernel="isir")
INFORMED = dataclasses.replace(
    FIVE, kernel="isir", batch_size=2, proposals=Informed(1, share=0.9, refresh=0.0)
)
ALONE = dataclasses.replace(
    INFORMED, beta=2.0, proposals=Informed(1, share=0.9, refresh=0.0, alone=True)
)
SATURATED = dataclasses.replace(FIVE, kernel="isir", denominator="all")
WHOLE = dataclasses.replace(FIVE, kernel="isir", batch_size=5)  # every held item is in the batch
ENUMERATED = [
    ISIR,
    SATURATED,
    WHOLE,
    TWO,
    dataclasses.replace(ISIR, proposals=InBatch(copies=1)),
    dataclasses.replace(TWO, proposals=InBatch(copies=2)),
    dataclasses.replace(ISIR, proposals=Uniform(1)),
    dataclasses.replace(TWO, proposals=Uniform(1)),
    INFORMED,
    ALONE,
    dataclasses.replace(INFORMED, kernel="mh"),
    dataclasses.replace(TWO, denominator="all", learned=True),
    dataclasses.replace(SATURATED, proposals=Uniform(1)),
    dataclasses.replace(ISIR, carried="cached"),
    dataclasses.replace(TWO, carried="cached"),
    dataclasses.replace(
        ISIR, views="paired", symmetric=False, denominator="all", num_known=1, batch_size=4
    ),
]
QUICK = ENUMERATED[:3]


def small(s: Setting) -> Small:
    """A setting of the battery as the oracle knows it."""
    world, proposals = s.world, s.proposals
    known = None
    if world.known is not None:
        known = tuple(frozenset(row) - {-1} for row in world.known.tolist())
    return Small(
        world.table.numpy(),
        s.size,
        s.batch_size,
        s.beta,
        num_views=s.num_views,
        paired=s.views == "paired",
        isir=s.kernel == "isir",
        copies=s.offered,
        use_batch=not getattr(proposals, "alone", False),
        uniform=proposals.num if isinstance(proposals, Uniform) else 0,
        informed=(
            (proposals.share, proposals.sharpness) if isinstance(proposals, Informed) else None
        ),
        cached=s.carried == "cached",
        all=s.denominator == "all",
        known=known,
    )


@functools.cache
def enumerated(s: Setting):
    return mean_gradient(small(s))


def verdict_of(s: Setting, seeds: int, steps: int) -> Verdict:
    """Chains start at their law and stay there; nothing is allowed for."""
    world, (expected, laws) = s.world, enumerated(s)
    unit, gradients, betas = torch.nn.functional.normalize(world.table, dim=1), [], []
    for seed in range(seeds):
        loss_fn, rng = s.build(seed), np.random.default_rng(seed)
        loss_fn.fill((stored_of(world, "anchors"), stored_of(world, "keys")))
        for chain, (held, law) in laws.items():
            at = int(rng.choice(held, p=law.clip(0) / law.clip(0).sum()))
            item = at // s.num_views - (s.size if s.views == "paired" else 0)
            loss_fn.chains.states[0, chain] = item
            if s.carried == "cached":
                loss_fn.chains.keys[0, chain] = unit[at]
        gradient, slope = run(
            loss_fn, world, plan_of(world, s.batch_size, "fresh", steps, seed), seed
        )
        gradients.append(gradient)
        betas.append(slope)
    return judge(
        np.stack(gradients),
        expected,
        directions(world, s.beta, s.both_ways, expected),
        world.norm,
        betas=np.array(betas) if s.learned else None,
    )


@pytest.mark.statistical
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in ENUMERATED],
    ids=str,
)
def test_the_mean_gradient_is_the_enumerated_one(setting) -> None:
    verdict = verdict_of(setting, 16, 24 if setting in QUICK else 60)
    assert verdict.passes, verdict


@pytest.mark.statistical
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in ENUMERATED],
    ids=str,
)
def test_the_simulation_is_the_enumerated_one(setting) -> None:
    """`oracles.simulated`, which the random battery is held to, started at the law."""
    world, (expected, laws) = setting.world, enumerated(setting)
    gradients, betas = [], []
    for seed in range(16):
        twin, rng = Simulated(setting, world, seed), np.random.default_rng(seed)
        for chain, (held, law) in laws.items():
            at = int(rng.choice(held, p=law.clip(0) / law.clip(0).sum()))
            twin.held[0, chain] = (
                at // setting.num_views - (5 if world.views == "paired" else 0),
                at,
            )
        steps = 24 if setting in QUICK else 60
        plan = plan_of(world, setting.batch_size, "fresh", steps, seed)
        for pick, first, second in plan:
            twin.play(pick.tolist(), list(zip(first.tolist(), second.tolist(), strict=True)))
        gradients.append(twin.gradient / len(plan))
        betas.append(twin.slope / len(plan))
    along = directions(world, setting.beta, setting.both_ways, expected)
    verdict = judge(np.stack(gradients), expected, along, world.norm, betas=np.array(betas))
    assert verdict.passes, verdict


# ---------------------------------------------------------------- the oracle itself


@pytest.mark.parametrize("isir", [True, False])
def test_the_oracle_knows_where_chains_are_exact(isir) -> None:
    """One view, and independent draws or i-SIR over a batch: the gradient of the global loss."""
    world = FIVE.world
    table, right = world.table.numpy(), oracles.exact(world.rows(True, 2.0), world.table, 4.0)
    sets = [Small(table, 5, 2, 4.0, isir=isir), Small(table, 5, 2, 4.0, isir=isir, uniform=1)]
    sets.append(Small(table, 5, 2, 4.0, isir=isir, informed=(0.9, 1.0)))
    sets.append(Small(table, 5, 3, 4.0, isir=isir, use_batch=False, uniform=2))
    if isir:
        sets.append(Small(table, 5, 3, 4.0, isir=True, copies=2))
    for s in sets:
        assert np.allclose(mean_gradient(s)[0].gradient, right.gradient, atol=1e-12), s


def test_both_copies_leave_isir_a_smaller_bias_where_views_differ() -> None:
    world, biases = TWO.world, []
    right = oracles.exact(world.rows(True, 1.0), world.table, 4.0).negative
    for copies in (1, 2):
        s = Small(world.table.numpy(), 5, 3, 4.0, num_views=2, isir=True, copies=copies)
        biases.append(np.linalg.norm(mean_gradient(s)[0].negative - right))
    assert np.allclose(np.array(biases) / np.linalg.norm(right), [0.049, 0.017], atol=1e-3)


# ---------------------------------------------------------------- planted


def held_item_is_counted_beside_itself(patch) -> None:
    patch.setattr(sweeps, "as_set", lambda side, kind, ids, start, logits: (start, logits))


def informed_draws_pass_for_uniform(patch) -> None:
    patch.setattr(columns, "_log_q", lambda side, draw: None)


def partition_counts_the_carried_state(patch) -> None:
    right = emc2.bracket
    patch.setattr(emc2, "bracket", lambda *a: (right(*a)[1], *right(*a)[1:]))


PLANTED = [
    (held_item_is_counted_beside_itself, WHOLE),
    (informed_draws_pass_for_uniform, ALONE),
    (partition_counts_the_carried_state, SATURATED),
]


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("plant, setting", PLANTED, ids=lambda c: getattr(c, "__name__", str(c)))
def test_planted_bug_is_flagged(monkeypatch, plant, setting) -> None:
    plant(monkeypatch)
    verdict = verdict_of(setting, 24, 120)
    assert not verdict.passes, verdict


@pytest.mark.parametrize("kernel", [MH(burn_in=0.0), "isir"])
def test_the_batch_comes_after_draws(kernel) -> None:
    """Whose probabilities may depend on who is in the batch; see `negchain.losses.walk`.

    Chains stand at their worst negative, the draw is better, the batch's other item the best: one
    that meets the draw first spends half of its time there, else none.
    """
    angle = torch.tensor([0.0, 0.1, 1.0, 2.0], dtype=torch.float64)
    keys, index = torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([0, 1])
    given = Given(alone=False)
    loss_fn = EMC2Loss(4, 200.0, kernel, views="paired", symmetric=False, proposals=given)
    loss_fn.chains.states[0, :2] = 3
    drawn = keys[2:3].clone().requires_grad_()
    call = {"draw": Draw(torch.tensor([2])), "drawn": drawn, "encode": lambda ids: keys[ids]}
    loss_fn(keys[index], keys[index], index, **call).backward()
    assert loss_fn.held(index)[0].tolist() == [1, 0]
    weight = drawn.grad.norm() / (200 * torch.sin(angle[2] - angle[:2]).mean())
    assert float(weight) == pytest.approx(0.5)
