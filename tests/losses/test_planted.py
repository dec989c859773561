"""The bugs the battery is for: each is planted, and its statistic must flag it.

What an independent check once found in the losses (issue "The core under attack"), and the older
list of mistakes one makes with a sampler. Every plant is judged by the same promise as the correct
code, which must pass with the same seeds: nothing here is about sensitivity alone.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from battery_run import judge, start_at_target
from battery_settings import Setting
from battery_world import make_world
from test_battery import verdict_of

import negchain.losses.base as base
import negchain.losses.batch as batch
import negchain.losses.emc2 as emc2
import negchain.losses.walk as walk
from negchain import ISIR, MH, Draw, EMC2Loss, Given, StreamingEMC2Loss, Uniform
from oracles.exact import Exact, weighted
from oracles.visit import expected_weights

SEEDS, STEPS = 16, 18
CORPUS = Setting(views="paired", corpus=True)
# ---------------------------------------------------------------- what an independent check found


def keys_counted_as_uniform(patch) -> None:
    """Issue 1: the batch's columns pass for uniform draws from the corpus."""

    def uniform(self, _batch):
        return lambda ids: torch.full(ids.shape, -math.log(self.num_keys), dtype=torch.float64)

    patch.setattr(base.ContrastiveLoss, "_popularity", uniform)


def held_state_keeps_its_old_q(patch) -> None:
    """Issue 2: the carried state is scored with the q of another visit than the proposals'."""
    right, last = walk._corrected, {}

    def stale(start, kind):
        old = last.get("q", kind.log_q)
        last["q"] = kind.log_q
        return right(start, dataclasses.replace(kind, log_q=old))

    patch.setattr(walk, "_corrected", stale)


def panels_count_shared_graphs_twice(patch) -> None:
    """Issue 3: embeddings of one graph are not cut apart, and each gets the gradient of both."""
    right = StreamingEMC2Loss._visit_all

    def twice(self, *args):
        visit = right(self, *args)
        visit.total[0] = 2 * visit.total[0] - visit.total[0].detach()
        return visit

    patch.setattr(StreamingEMC2Loss, "_visit_all", twice)


def lonely_rows_are_dropped(patch) -> None:
    """Issue 4: a row without a proposal loses its positive and its carried state too."""
    right = base.ContrastiveLoss._value

    def dropped(self, side, similarity, estimate, carried_similarity=None):
        lonely = side.all_excluded().all(1)
        log_partition = estimate.log_partition.masked_fill(lonely, -math.inf)
        return right(
            self, side, similarity, estimate._replace(log_partition=log_partition), carried_similarity
        )

    patch.setattr(base.ContrastiveLoss, "_value", dropped)


def repeats_are_counted_but_held_state_is_not(patch) -> None:
    """Issue 6: i-SIR drops the carried state where its item is in the batch, once or twice."""
    right = walk._repeated
    patch.setattr(walk, "_repeated", lambda side: torch.zeros_like(right(side)))


def labels_hold_both_ways_in_the_batch(patch) -> None:
    """Issue 7: `known` given for one side is mutual in the batch, not for carried states."""
    right = batch.matches

    def mutual(ids, own, known):
        mask = right(ids, own, known)
        if known is None or len(ids) != len(known):
            return mask
        return mask | (known[None, :, :] == own[:, None, None]).any(-1)

    patch.setattr(batch, "matches", mutual)


def answers_of_an_earlier_visit(patch) -> None:
    """Issue 7: embeddings of the states that chains held one visit ago."""
    right, last = EMC2Loss._start, {}

    def stale(self, number, side, slots, *rest):
        start = right(self, number, side, slots, *rest)
        key = (id(self), number)
        old = last.setdefault(key, torch.full((self.num_samples,), math.nan, dtype=torch.float64))
        logit, similarity = start.logit.clone(), start.similarity
        for row, slot in enumerate(torch.cat(slots).tolist()):
            if math.isfinite(old[slot]) and logit[row] > -math.inf:
                logit[row] = old[slot]
        old[torch.cat(slots)] = start.logit
        return dataclasses.replace(start, logit=logit, similarity=similarity)

    patch.setattr(EMC2Loss, "_start", stale)


# ---------------------------------------------------------------- what one gets wrong in a sampler


def ratio_upside_down(patch) -> None:
    right = walk.mh_scan

    def inverted(logits, start, log_u, *rest):
        flipped = torch.where(logits > -math.inf, -logits, -math.inf)
        return right(flipped, torch.where(start > -math.inf, -start, -math.inf), log_u, *rest)

    patch.setattr(walk, "mh_scan", inverted)


def counts_burn_in(by: int):
    def plant(patch) -> None:
        right = walk._skipped
        patch.setattr(walk, "_skipped", lambda sampler, steps: right(sampler, steps) + by)

    plant.__name__ = f"burn_in_{by:+d}"
    return plant


def carried_state_is_dropped(patch) -> None:
    right = EMC2Loss._start

    def dropped(self, *args):
        start = right(self, *args)
        return dataclasses.replace(start, logit=torch.full_like(start.logit, -math.inf))

    patch.setattr(EMC2Loss, "_start", dropped)


def own_item_is_a_negative(patch) -> None:
    right = batch.matches

    def lenient(ids, own, known):
        mask = right(ids, own, known)
        return torch.zeros_like(mask) if len(ids) == len(own) else mask

    patch.setattr(batch, "matches", lenient)


def divided_by_all_steps(patch) -> None:
    right = walk.mh_scan

    def longer(logits, start, log_u, burn_in, *rest):
        done = right(logits, start, log_u, burn_in, *rest)
        steps = (logits > -math.inf).sum(1).clamp(min=1)
        share = (steps - burn_in) / steps
        return done._replace(
            weights=done.weights * share[:, None], start_weight=done.start_weight * share
        )

    patch.setattr(walk, "mh_scan", longer)


PLANTED = [
    (keys_counted_as_uniform, CORPUS),
    (keys_counted_as_uniform, dataclasses.replace(CORPUS, kernel="isir", key_counts=True)),
    (held_state_keeps_its_old_q, Setting(proposals=Given())),
    (held_state_keeps_its_old_q, Setting(proposals=Given(), kernel="isir")),
    (panels_count_shared_graphs_twice, Setting(loss="streaming", kernel="mh")),
    (lonely_rows_are_dropped, Setting(batch_size=2, order="repeats", proposals=Uniform(1, True))),
    (lonely_rows_are_dropped, Setting(batch_size=1, kernel="isir")),
    (labels_hold_both_ways_in_the_batch, Setting(kernel="isir", num_known=3)),
    (answers_of_an_earlier_visit, Setting(order="repeats")),
    (ratio_upside_down, Setting()),
    (carried_state_is_dropped, Setting()),
    (carried_state_is_dropped, Setting(kernel="isir", views="paired")),
    (own_item_is_a_negative, Setting()),
    (divided_by_all_steps, Setting()),
]
QUICK = (ratio_upside_down, panels_count_shared_graphs_twice, keys_counted_as_uniform)


def name(case) -> str:
    return case.__name__ if callable(case) else str(case)


@pytest.mark.statistical
@pytest.mark.parametrize(
    "plant, setting",
    [
        pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow)
        for case in PLANTED
    ],
    ids=lambda case: name(case),
)
def test_planted_bug_is_flagged(monkeypatch, plant, setting) -> None:
    plant(monkeypatch)
    verdict = verdict_of(setting, SEEDS, STEPS)
    assert not verdict.passes, verdict


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("setting", dict.fromkeys(case[1] for case in PLANTED), ids=str)
def test_without_the_plant_nothing_is_flagged(setting) -> None:
    verdict = verdict_of(setting, SEEDS, STEPS)
    assert verdict.passes, verdict
