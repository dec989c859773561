"""Bugs to plant: each function takes pytest's monkeypatch and breaks the losses in one way."""

from __future__ import annotations

import dataclasses
import math

import torch

import negchain.losses.batch as batch
import negchain.losses.columns as columns
import negchain.losses.emc2 as emc2
import negchain.losses.sweeps as sweeps
import negchain.losses.walk as walk
from negchain import EMC2Loss, LargeBatchEMC2Loss
from negchain.losses.chains import ChainTable

# ---------------------------------------------------------------- what an independent check found


def keys_counted_as_uniform(patch) -> None:
    """Issue 1: the batch's columns pass for uniform draws from the corpus."""

    def uniform(counts, *_):
        return lambda ids: torch.full(ids.shape, -math.log(len(counts) - 1), dtype=torch.float64)

    patch.setattr(columns, "popularity", uniform)


def held_state_keeps_its_old_q(patch) -> None:
    """Issue 2: the carried state is scored with the q it was once proposed with."""
    right, now, memory = EMC2Loss._start, {}, {}

    def start(self, number, side, slots, *rest):
        if now.get("loss") is not self:
            memory.clear()
            now.clear()
        now["loss"], now["chains"] = self, slots.tolist()
        return right(self, number, side, slots, *rest)

    def corrected(start, kind):
        ids = start.ids[:, None]
        before = now.get("q", kind.log_q)(ids)[:, 0].tolist()
        for chain, held, log_q in zip(now["chains"], start.ids.tolist(), before, strict=True):
            if memory.get(chain, (None,))[0] != held:
                memory[chain] = (held, log_q)
        now["q"] = kind.log_q
        used = torch.tensor([memory[chain][1] for chain in now["chains"]], dtype=torch.float64)
        return start.logit - used

    patch.setattr(EMC2Loss, "_start", start)
    patch.setattr(walk.Start, "corrected", corrected)


def panels_count_shared_graphs_twice(patch) -> None:
    """Issue 3: embeddings of one graph are not cut apart, and each gets the gradient of both."""
    right = LargeBatchEMC2Loss.visit

    def twice(self, *args):
        visit = right(self, *args)
        visit.total[0] = 2 * visit.total[0] - visit.total[0].detach()
        return visit

    patch.setattr(LargeBatchEMC2Loss, "visit", twice)


def lonely_rows_are_dropped(patch) -> None:
    """Issue 4: a row without a proposal loses its positive and its carried state too."""
    right = emc2.bracket

    def dropped(side, *given):
        low, high, middle = right(side, *given)
        return low, high, middle.masked_fill(side.all_excluded().all(1), -math.inf)

    patch.setattr(emc2, "bracket", dropped)


def labels_hold_both_ways_in_the_batch(patch) -> None:
    """Issue 7: `known` given for one side is mutual in the batch, not for carried states."""
    right = batch.matches

    def mutual(ids, own, known):
        mask = right(ids, own, known)
        if known is None or len(ids) != len(known):
            return mask
        return mask | (known[None, :, :] == own[:, None, None]).any(-1)

    patch.setattr(batch, "matches", mutual)


def labels_are_ignored_in_the_batch(patch) -> None:
    """A known positive that is another pair's is a negative."""
    right = batch.matches
    patch.setattr(batch, "matches", lambda ids, own, known: right(ids, own, None))


def labels_are_ignored_among_draws(patch) -> None:
    """A known positive that is drawn is a negative."""
    right = columns.matches
    patch.setattr(columns, "matches", lambda ids, own, known: right(ids, own, None))


def answers_of_an_earlier_visit(patch) -> None:
    """Issue 7: embeddings of the states that chains held one visit ago."""
    right, last = EMC2Loss._start, {}

    def stale(self, number, side, slots, *rest):
        start = right(self, number, side, slots, *rest)
        key = (id(self), number)
        old = last.setdefault(key, torch.full((self.num_samples,), math.nan, dtype=torch.float64))
        logit, similarity = start.logit.clone(), start.similarity
        chains = slots.repeat(side.num_rows // len(slots))
        for row, chain in enumerate(chains.tolist()):
            if math.isfinite(old[chain]) and logit[row] > -math.inf:
                logit[row] = old[chain]
        old[chains] = start.logit
        return dataclasses.replace(start, logit=logit, similarity=similarity)

    patch.setattr(EMC2Loss, "_start", stale)


def held_state_is_dropped_and_repeats_count(patch) -> None:
    """Issue 6: i-SIR drops a held item that is in the batch, which holds some of them twice."""
    right = sweeps.as_set

    def once(side, kind, ids, start, logits):
        return right(side, kind, ids, start, logits)[0], logits

    patch.setattr(sweeps, "as_set", once)


def first_that_moved_is_stored(patch) -> None:
    """Found with issue 6: of an item that stands twice in a batch the first *moved* row counts."""
    right = ChainTable.commit

    def moved_only(self, side, arrival, valid):
        valid = valid.repeat(len(arrival.slots) // len(valid)) & arrival.moved
        return right(self, side, arrival, valid)

    patch.setattr(ChainTable, "commit", moved_only)


# ---------------------------------------------------------------- what one gets wrong in a sampler


def ratio_upside_down(patch) -> None:
    right = walk.mh_scan

    def inverted(logits, start, log_u, *rest):
        flipped = torch.where(logits > -math.inf, -logits, -math.inf)
        return right(flipped, torch.where(start > -math.inf, -start, -math.inf), log_u, *rest)

    patch.setattr(walk, "mh_scan", inverted)


def counts_burn_in(by: int):
    def plant(patch) -> None:
        right = walk.Sampler.skipped
        patch.setattr(walk.Sampler, "skipped", lambda sampler, steps: right(sampler, steps) + by)

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
