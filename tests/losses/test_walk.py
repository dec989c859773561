"""Steps that leave p as it is: several kinds of columns, repeated items, a q that changes.

Chains start at a draw from p, so a right step keeps them there and a wrong one does not. False
alarms: 1e-4 per test; seeds are fixed. Every planted bug below is a rule somebody would write.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import negchain.losses.emc2 as emc2
import negchain.losses.sweeps as sweeps
import negchain.losses.walk as walk
from negchain import Draw, EMC2Loss, Given, InBatch, Informed, LargeBatchEMC2Loss, Uniform
from negchain.losses.columns import PrivateSide
from negchain.losses.settings import ISIR, MH
from negchain.pool import Kind
from negchain.weights import isir_weights, mh_scan
from oracles import unit

ALARM = 1e-4

# ---------------------------------------------------------------- two kinds of columns

ROWS, BATCH, DRAWS = 40_000, 2, 3
LOGITS = torch.tensor([9.0, 0.0, 1.2, -1.0, 0.6], dtype=torch.float64)  # id 0: every row's positive
TARGET = torch.softmax(LOGITS[1:], 0)
Q = torch.tensor([0.1, 0.45, 0.05, 0.3, 0.1], dtype=torch.float64)  # of the draws, own included


def two_kinds(kernel) -> tuple[float, float]:
    """p-values of where chains end, and of their mean weights, after one visit begun at p."""
    generator = torch.Generator().manual_seed(5)

    def pick(p: Tensor, count: int) -> Tensor:
        return torch.multinomial(p.expand(ROWS, -1), count, replacement=True, generator=generator)

    start_ids = pick(TARGET, 1)[:, 0] + 1
    ids = torch.cat([pick(torch.ones(4), BATCH) + 1, pick(Q, DRAWS)], 1)
    similarity = LOGITS[ids]
    log_m = math.log(4)
    side = PrivateSide(
        queries=torch.zeros(ROWS, 1, dtype=torch.float64),
        positives=torch.zeros(ROWS, 1, dtype=torch.float64),
        anchor_ids=torch.arange(ROWS),
        positive_ids=torch.zeros(ROWS, dtype=torch.int64),
        known=None,
        keys=torch.zeros(1, 0, 1, dtype=torch.float64),
        key_ids=torch.zeros(1, 0, dtype=torch.int64),
        excluded=torch.zeros(ROWS, 0, dtype=torch.bool),
        multiplicity=1,
        ids_per_item=1,
        num_keys=5,
        private_keys=torch.zeros(ROWS, BATCH + DRAWS, 1, dtype=torch.float64),
        private_ids=ids,
        kinds=(
            Kind(0, BATCH, torch.full((ROWS,), BATCH), None),  # uniform over the negatives
            Kind(BATCH, BATCH + DRAWS, torch.full((ROWS,), DRAWS), lambda i: Q.log()[i] + log_m),
        ),
    )
    logits = similarity - side.correction(ids)
    logits = logits.masked_fill(side.all_excluded(), -math.inf)
    start = walk.Start(start_ids, LOGITS[start_ids], LOGITS[start_ids])
    rows = torch.arange(ROWS)
    sampler = walk.Sampler(kernel, "torch", 0, torch.tensor(3), rows)
    done = walk.walk_chains(side, similarity, start, 1.0, logits, rows, sampler)
    ended = torch.where(done.arrival.moved, done.arrival.ids, start_ids)
    counts = torch.bincount(ended, minlength=5)
    assert counts[0] == 0 and (done.weights[ids == 0] == 0).all()
    ending = stats.chisquare(counts[1:].numpy(), (TARGET * ROWS).numpy()).pvalue
    weights = torch.zeros(ROWS, 5, dtype=torch.float64).scatter_add_(1, ids, done.weights)
    weights.scatter_add_(1, start_ids[:, None], done.carried_weight[:, None])
    assert torch.allclose(weights.sum(1), torch.ones(ROWS, dtype=torch.float64))
    z = (weights[:, 1:].mean(0) - TARGET) / (weights[:, 1:].std(0) / math.sqrt(ROWS))
    return float(ending), float(4 * 2 * stats.norm.sf(z.abs().max()))


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", [MH(), MH(burn_in=0.0), ISIR()])
def test_two_kinds_leave_p_invariant(kernel) -> None:
    ending, weights = two_kinds(kernel)
    assert ending > ALARM and weights > ALARM


def one_scan_over_both(side, similarity, start, beta, sampler):
    """Each column with its own q, the carried state with that of the first kind: no MH step."""
    ids = side.column_ids()
    correction = torch.zeros_like(similarity)
    for kind in side.kinds:
        if kind.log_q is not None:
            columns = slice(kind.first, kind.last)
            correction[:, columns] = kind.log_q(ids[:, columns])
    logits = (similarity - correction).masked_fill(side.all_excluded(), -math.inf)
    steps = (logits > -math.inf).sum(1)
    generator = torch.Generator().manual_seed(1)
    log_u = torch.rand(logits.shape, generator=generator, dtype=logits.dtype).log()
    return mh_scan(logits, start.logit, log_u, sampler.skipped(steps)), steps


def carried_with_the_next_kinds_q(start, kind):
    """The state held is weighed by the mixture, the proposals by their kind."""
    mixture = (Q * 4 * DRAWS + BATCH).log() - math.log(BATCH + DRAWS)
    return start.logit - mixture[start.ids]


def one_softmax_over_both(side, similarity, start, beta, sampler):
    """All columns with the mixture's q, the carried state beside them as one slot more."""
    ids = side.column_ids()
    logits = (similarity - side.correction(ids)).masked_fill(side.all_excluded(), -math.inf)
    held = start.logit - side.correction(start.ids[:, None])[:, 0]
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(len(ids), ids.shape[1] + 1, generator=generator, dtype=logits.dtype)
    return isir_weights(logits, held, -(-u.log()).log()), torch.ones_like(sampler.rows)


@pytest.mark.statistical
@pytest.mark.parametrize(
    "kernel, name, bug",
    [
        (MH(), "sweep_kinds", one_scan_over_both),
        (MH(), "corrected", carried_with_the_next_kinds_q),
        (ISIR(), "sweep_kinds", one_softmax_over_both),
        (ISIR(), "corrected", carried_with_the_next_kinds_q),
    ],
)
def test_a_planted_bug_of_two_kinds_is_caught(monkeypatch, kernel, name, bug) -> None:
    monkeypatch.setattr(walk.Start if name == "corrected" else walk, name, bug)
    ending, weights = two_kinds(kernel)
    assert min(ending, weights) < ALARM / 100


# ---------------------------------------------------------------- repeated items, exactly


def isir_kernel(size: int, batch: int, views: str) -> tuple[Tensor, Tensor]:
    """T[z, z'] of item 0's chain, averaged over all batches drawn with replacement; and p."""
    z = unit(torch.randn(size, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    beta, kernel = 3.0, torch.zeros(size, size, dtype=torch.float64)
    p = torch.softmax(beta * z @ z[0] - 1e9 * (torch.arange(size) == 0), 0)
    loss_fn = EMC2Loss(size, beta, "isir", views=views, symmetric=False).eval()
    seen = []
    original = emc2.walk_chains
    emc2.walk_chains = lambda side, *rest: seen.append((side, original(side, *rest))) or seen[-1][1]
    others = list(itertools.product(range(size), repeat=batch - 1))
    others = [o for o in others if any(o)]
    try:
        for held, rest in itertools.product(range(1, size), others):
            index = torch.tensor([0, *rest])
            loss_fn.chains.states[0, 0] = held
            loss_fn(z[index], z[index], index, encode=lambda ids: z[ids])
            side, done = seen.pop()
            kernel[held].index_add_(0, side.column_ids()[0], done.weights[0])
            kernel[held, held] += done.carried_weight[0]
    finally:
        emc2.walk_chains = original
    return kernel / len(others), p


@pytest.mark.parametrize("views", ["shared", "paired"])
def test_isir_with_repeated_items_leaves_p_invariant(views) -> None:
    """README's `randint`: an item twice in the batch, or held and in the batch, counts once."""
    kernel, p = isir_kernel(4, 4, views)
    assert torch.allclose(kernel[1:].sum(1), torch.ones(3, dtype=torch.float64), atol=1e-12)
    assert (p @ kernel - p).abs().max() < 1e-12


def test_repeats_counted_twice_are_caught(monkeypatch) -> None:
    monkeypatch.setattr(
        sweeps, "repeated_items", lambda side, kind: torch.zeros_like(side.all_excluded())
    )
    kernel, p = isir_kernel(4, 4, "paired")
    assert (p @ kernel - p).abs().max() > 1e-3


# ---------------------------------------------------------------- a proposal that changes

ANCHORS, VISITS = 8000, 6


def share_of_the_first_key(kernel: str, given: bool = True) -> float:
    """z-score of chains at key 0 of two after visits whose q alternates; begun at p."""
    generator = torch.Generator().manual_seed(4)
    anchor = unit(torch.randn(4, generator=generator, dtype=torch.float64))
    other = unit(torch.randn(4, generator=generator, dtype=torch.float64))
    keys = unit(torch.stack([anchor + 0.3 * other, anchor - other]))
    beta, size = 0.8, ANCHORS + 2
    p = torch.softmax(beta * keys @ anchor, 0)
    loss_fn = EMC2Loss(size, beta, kernel, proposals=Given(), views="paired", symmetric=False)
    start = torch.multinomial(p, ANCHORS, replacement=True, generator=generator)
    loss_fn.chains.states[0, 2:] = start.int()
    index, z = torch.arange(2, size), anchor.expand(ANCHORS, -1)
    for visit in range(VISITS):
        q = torch.tensor([0.9, 0.1] if visit % 2 else [0.15, 0.85], dtype=torch.float64)
        ids = torch.multinomial(q.expand(ANCHORS, -1), 2, replacement=True, generator=generator)
        log_q = torch.cat([q, torch.full((ANCHORS,), 1e-9)]).log()
        request = loss_fn.request(index)
        request.answer(keys[request.ids])
        with torch.no_grad():
            loss_fn(z, z, index, request, draw=Draw(ids, log_q), drawn=keys[ids])
    share = float((loss_fn.held(index)[0] == 0).double().mean())
    return (share - float(p[0])) / math.sqrt(float(p[0] * p[1]) / ANCHORS)


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_a_changing_proposal_leaves_p_invariant(kernel) -> None:
    assert abs(share_of_the_first_key(kernel)) < 3.9  # two-sided 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_the_q_a_state_was_once_proposed_with_is_the_wrong_one(monkeypatch, kernel) -> None:
    before: list[Tensor] = []
    corrected = walk.Start.corrected

    def with_yesterdays_q(start, kind):
        mine = kind.log_q(start.ids[:, None])[:, 0]
        before.append(kind.log_q(torch.tensor([[0], [1]]).expand(2, ANCHORS).T[:, :])[0])
        if len(before) < 2:
            return corrected(start, kind)
        return start.logit - before[-2][start.ids] + 0 * mine

    monkeypatch.setattr(walk.Start, "corrected", with_yesterdays_q)
    assert abs(share_of_the_first_key(kernel)) > 6


def walked(monkeypatch, loss_fn: EMC2Loss, *given, **more) -> walk.Walk:
    """What the chains of a call's one side did."""
    found: list[walk.Walk] = []

    def noted(*where) -> walk.Walk:
        found.append(walk.walk_chains(*where))
        return found[-1]

    monkeypatch.setattr(emc2, "walk_chains", noted)
    loss_fn(*given, **more)
    return found[0]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_weights_sum_to_one_where_chains_hold_nothing_yet(monkeypatch, every) -> None:
    """A class-ordered batch: many excluded columns before the first proposal, and states count.

    What was counted at a state that is none was lost: 7 % of the weight with every second state.
    """
    z = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4])
    for seed in range(20):
        kernel = MH(burn_in=0.0, count_every=every)
        loss_fn = EMC2Loss(50, 3.0, kernel, carried="cached", seed=seed)
        moved = walked(monkeypatch, loss_fn, *z, index)
        assert (moved.carried_weight == 0).all()
        assert torch.allclose(moved.weights.sum(1), torch.ones(16))


@pytest.mark.parametrize("burn_in", [5, 0.42])
@pytest.mark.parametrize("every", [1, 2])
def test_burn_in_is_taken_of_all_proposals(monkeypatch, burn_in, every) -> None:
    """Four draws and eight items: of twelve columns five do not count, the draws and one more.

    With every second state each kind lost five columns of its own. All logits are equal, so every
    proposal is accepted and the columns that count are seen.
    """
    z, kernel = torch.ones(8, 3), MH(burn_in, count_every=every)
    loss_fn = EMC2Loss(50, 3.0, kernel, views="paired", symmetric=False, proposals=Uniform(4))
    given = (z, z, torch.arange(8))
    moved = walked(monkeypatch, loss_fn, *given, encode=lambda ids: torch.ones(len(ids), 3))
    assert (moved.weights[:, 8:] == 0).all()
    counted = (moved.weights[:, :8] > 0).sum(1)  # a row's own column is no proposal
    assert int(counted.max()) in ((6, 7) if every == 1 else (4,))


PAIRED = {"views": "paired", "symmetric": False}
CORPUS = {"views": "paired", "num_keys": 60}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("kind", "settings", "steps"),
    [
        (EMC2Loss, {}, 3),
        (EMC2Loss, {"backend": "reference"}, 3),
        (EMC2Loss, {"proposals": InBatch(copies=2)}, 6),
        (EMC2Loss, PAIRED, 3),
        (EMC2Loss, {"views": "paired"}, 3),
        (EMC2Loss, {"augmentations": 2}, 3),
        (EMC2Loss, {"augmentations": 2, "proposals": InBatch(copies=2)}, 6),
        (EMC2Loss, {"proposals": Uniform()}, 7),
        (EMC2Loss, {"proposals": Uniform(5)}, 8),
        (EMC2Loss, {"proposals": Uniform(5, alone=True)}, 5),
        (EMC2Loss, CORPUS, 7),
        (EMC2Loss, {"proposals": Informed()}, 7),
        (EMC2Loss, {"proposals": Informed(2)}, 5),
        (EMC2Loss, {"proposals": Informed(per_row=True)}, 4),
        (EMC2Loss, {"proposals": Informed(3, per_row=True, alone=True)}, 3),
        (EMC2Loss, {"proposals": Given()}, 2),
        (EMC2Loss, {"proposals": Given(alone=False)}, 5),
        (LargeBatchEMC2Loss, {}, 3),
    ],
)
def test_a_burn_in_of_all_steps_is_refused(
    monkeypatch, kind, settings, steps, every, train
) -> None:
    """Algorithm 1 has P < R. R is what rows walk; it is known before they do."""
    z, index = torch.randn(2, 4, 5), torch.arange(4)
    more = {"encode": lambda ids: torch.randn(len(ids), 5)}
    if "num_keys" in settings:
        more["key_index"] = index
    elif settings == {"views": "paired"}:
        more["encode"] = (more["encode"], more["encode"])
    if "augmentations" in settings:
        more["augmentation"] = (torch.zeros_like(index), torch.ones_like(index))
    if isinstance(settings.get("proposals"), Given):
        more |= {"draw": Draw(torch.tensor([20, 30])), "drawn": torch.randn(2, 5)}

    def built(burn_in: int) -> EMC2Loss:
        return kind(50, 5.0, MH(burn_in, count_every=every), **settings).train(train)

    moved = walked(monkeypatch, built(steps - 1), *z, index, **more)
    assert int(moved.arrival.num_steps.max()) == steps
    loss_fn = built(steps)
    before = {name: value.clone() for name, value in loss_fn.state_dict().items()}
    says = rf"\(P\) must be less .* \(R\), got {steps} steps, .* offers {steps} at batch size 4"
    with pytest.raises(ValueError, match=says):
        loss_fn(*z, index, **more)
    assert all(torch.equal(v, before[k]) for k, v in loss_fn.state_dict().items())


def test_the_papers_burn_in_goes_with_both_copies() -> None:
    """At b = 32, P = 31: of R = 62 steps, not of the 31 that one copy of each item gives."""
    z, index = torch.randn(2, 32, 5), torch.arange(32)
    given = {"encode": lambda ids: z[0][: len(ids)]}
    EMC2Loss(50, 5.0, MH(burn_in=31), proposals=InBatch(copies=2))(*z, index, **given)
    with pytest.raises(ValueError, match=r"offers 31 at batch size 32; .*copies=2"):
        EMC2Loss(50, 5.0, MH(burn_in=31))(*z, index, **given)
    EMC2Loss(50, 5.0, "isir")(*z, index, **given)  # has none


def test_steps_that_a_row_lacks_are_not_refused() -> None:
    """Repeated ids and known positives are the data's; a row then counts its final state."""
    z, index = torch.randn(2, 4, 5), torch.tensor([7, 7, 7, 8])
    loss_fn = EMC2Loss(50, 5.0, MH(burn_in=2))
    assert loss_fn(*z, index, encode=lambda i: z[0][: len(i)]).isfinite()
