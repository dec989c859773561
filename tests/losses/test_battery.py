"""Every legal setting of every loss is held to what is promised of it; every other is refused.

Settings are drawn from the whole constructor space (hypothesis, derandomised: the same ones every
time; `numbered` turns a number into a setting). False alarms: `battery_run.ALARM`, 1e-5 per
setting, so 2e-3 for the two hundred of the long part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from battery_in_batch import worst_difference
from battery_run import Verdict, directions, judge, plan_of, run, simulate, start_at_target
from battery_settings import (
    Setting,
    broken,
    is_exact,
    numbered,
    numbered_in,
    numbered_without_chains,
    refused,
    settings_of_chains,
    settings_without_chains,
)
from battery_world import World
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.strategies import integers
from torch import Tensor


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


def verdicts_of(setting: Setting, seeds: int, steps: int) -> dict[str, Verdict]:
    """Run a setting on independent seeds; how it compares with a simulation, and with exact."""
    world, exact = setting.world, setting.exact()
    found, twins = [], []
    for seed in range(seeds):
        loss_fn = setting.build(seed)
        if setting.chains:
            start_at_target(loss_fn, world, setting.beta, seed)
        loss_fn.fill((stored_of(world, "anchors"), stored_of(world, "keys")))
        plan = plan_of(world, setting.batch_size, setting.order, steps, seed)
        found.append(run(loss_fn, world, plan, seed))
        twins.append(simulate(setting, plan, seed))
    ours, theirs = (np.stack([gradient for gradient, _ in runs]) for runs in (found, twins))
    slopes, others = (np.array([slope for _, slope in runs]) for runs in (found, twins))
    along = directions(world, setting.beta, setting.both_ways, exact)

    def verdict(gradients: np.ndarray, betas: np.ndarray) -> Verdict:
        betas = betas if setting.learned else None
        return judge(gradients, exact, along, world.norm, betas=betas)

    return {
        "simulated": verdict(ours - theirs + exact.gradient, slopes - others + exact.beta),
        "exact": verdict(ours, slopes),
    }


def faults_of(setting: Setting, seeds: int, steps: int) -> dict[str, Verdict]:
    """Verdicts that do not hold, of those that should."""
    told = verdicts_of(setting, seeds, steps)
    asked = ["simulated", "exact"] if is_exact(setting) else ["simulated"]
    return {name: told[name] for name in asked if not told[name].passes}


def stored_of(world: World, tower: str) -> Callable[[Tensor], Tensor]:
    """The first view of every item, for stale tables to start with."""
    unit = torch.nn.functional.normalize(world.table, dim=1)
    return lambda ids: unit[world.address(tower, ids, 0 * ids)]


def check(setting: Setting, seeds: int, steps: int) -> None:
    if setting.deterministic:
        assert worst_difference(setting, 4) < 1e-5, setting
        return
    assert faults_of(setting, seeds, steps) == {}, setting


@pytest.mark.statistical
@examples(4)
@given(settings_of_chains)
def test_chains_keep_their_promise(setting) -> None:
    assume(not refused(setting) and not broken(setting))
    check(setting, seeds=12, steps=8)


@pytest.mark.statistical
@examples(7)
@given(settings_without_chains)
def test_other_losses_keep_their_promise(setting) -> None:
    check(setting, seeds=12, steps=6)


CELLS = [(layout, known) for layout in ("shared", "paired", "corpus") for known in (0, 3)]


@pytest.mark.statistical
@pytest.mark.parametrize(
    "layout, num_known",
    [pytest.param(*c, marks=() if c == ("corpus", 3) else pytest.mark.slow) for c in CELLS],
)
def test_isir_with_views_that_differ_keeps_its_promise(layout, num_known) -> None:
    """With `known` and two towers none of the settings drawn below is such a one."""

    @examples(2 if (layout, num_known) == ("corpus", 3) else 5)
    @given(integers(0, 10**6).map(functools.partial(numbered_in, layout, num_known)))
    def keep(setting: Setting) -> None:
        assume(not refused(setting) and not broken(setting))
        check(setting, seeds=12, steps=12)

    keep()


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("part", range(5))
def test_chains_keep_their_promise_at_length(part) -> None:
    @examples(24)
    @given(integers(part * 10**6, (part + 1) * 10**6 - 1).map(numbered))
    def keep(setting: Setting) -> None:
        assume(not refused(setting) and not broken(setting))
        check(setting, seeds=16, steps=24)

    keep()


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("part", range(2))
def test_other_losses_keep_their_promise_at_length(part) -> None:
    @examples(40)
    @given(integers(part * 10**6, (part + 1) * 10**6 - 1).map(numbered_without_chains))
    def keep(setting: Setting) -> None:
        check(setting, seeds=16, steps=16)

    keep()


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
