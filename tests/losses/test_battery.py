"""Every legal setting of every loss is held to what is promised of it; every other is refused.

Settings are drawn from the whole constructor space (hypothesis, derandomised: the same ones every
time; `numbered` turns a number into a setting). False alarms: `battery_run.ALARM`, 1e-5 per
setting, so 2e-3 for the two hundred of the long part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from battery_in_batch import worst_difference
from battery_run import Verdict, directions, judge, run, start_at_target
from battery_settings import (
    Setting,
    broken,
    promise,
    refused,
    settings_of_chains,
    settings_without_chains,
)
from battery_world import World
from hypothesis import HealthCheck, Phase, assume, given, settings
from torch import Tensor

from oracles import Exact


def examples(count: int) -> settings:
    """The same examples every time; none is shrunk, each being a run of its own."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def verdict_of(setting: Setting, seeds: int, steps: int, exact: Exact | None = None) -> Verdict:
    """Run a setting on independent seeds and judge it by its promise (or another reference)."""
    world, beta, held = setting.world, setting.beta, promise(setting)
    exact = exact or setting.exact()
    gradients, betas = [], []
    for seed in range(seeds):
        loss_fn = setting.build(seed)
        if setting.chains:
            start_at_target(loss_fn, world, beta, seed)
        if setting.enumerated:
            start_at_law(loss_fn, setting, seed)
        loss_fn.fill((stored_of(world, "anchors"), stored_of(world, "keys")))
        gradient, slope = run(
            loss_fn,
            world,
            batch_size=setting.batch_size,
            order=setting.order,
            steps=steps,
            seed=seed,
        )
        gradients.append(gradient)
        betas.append(slope)
    return judge(
        np.stack(gradients),
        exact,
        directions(world, beta, setting.both_ways, exact),
        world.norm,
        bound=held.bound,
        never_longer=held.never_longer,
        betas=np.array(betas) if setting.learned else None,
        only=slice(0, world.num_anchors * world.num_views if held.anchors_only else None),
    )


def start_at_law(loss_fn: torch.nn.Module, setting: Setting, seed: int) -> None:
    """Chains of several views where the oracle says they settle."""
    rng = np.random.default_rng(seed + 2_000_003)
    stored = stored_of(setting.world, "keys"), stored_of(setting.world, "anchors")
    for side, chain, _, law in setting.chains_by_enumeration():
        held = int(rng.choice(law.items, p=law.law / law.law.sum()))
        loss_fn.chains.states[side, chain] = held
        if setting.carried == "cached":
            loss_fn.chains.keys[side, chain] = stored[side](torch.tensor([held]))[0]


def stored_of(world: World, tower: str) -> Callable[[Tensor], Tensor]:
    """The first view of every item, for stale tables to start with."""
    unit = torch.nn.functional.normalize(world.table, dim=1)
    return lambda ids: unit[world.address(tower, ids, 0 * ids)]


def check(setting: Setting, seeds: int, steps: int) -> None:
    if setting.deterministic:
        assert worst_difference(setting, 4) < 1e-5, setting
        return
    verdict = verdict_of(setting, seeds, steps)
    assert verdict.passes, f"{setting}\npromised: {promise(setting)}\n{verdict}"


@pytest.mark.statistical
@examples(6)
@given(settings_of_chains)
def test_chains_keep_their_promise(setting) -> None:
    assume(not refused(setting) and not broken(setting))
    check(setting, seeds=16, steps=8)


@pytest.mark.statistical
@examples(10)
@given(settings_without_chains)
def test_other_losses_keep_their_promise(setting) -> None:
    check(setting, seeds=12, steps=6)


@pytest.mark.slow
@pytest.mark.statistical
@examples(120)
@given(settings_of_chains)
def test_chains_keep_their_promise_at_length(setting) -> None:
    assume(not refused(setting) and not broken(setting))
    check(setting, seeds=24, steps=40)


@pytest.mark.slow
@pytest.mark.statistical
@examples(80)
@given(settings_without_chains)
def test_other_losses_keep_their_promise_at_length(setting) -> None:
    check(setting, seeds=24, steps=24)


# ---------------------------------------------------------------- what is refused


@examples(300)
@given(settings_of_chains)
def test_impossible_settings_are_refused_and_no_others(setting) -> None:
    rules = refused(setting)
    if not rules:
        setting.build(0)
        return
    with pytest.raises(ValueError, match="|".join(rules)):
        setting.build(0)
