"""What the battery found once: each failure with the smallest call that showed it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import negchain.losses.emc2 as emc2
from negchain import (
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    ImportanceLoss,
    InBatch,
    InfoNCELoss,
    Informed,
    LargeBatchEMC2Loss,
    NegativeCacheLoss,
)
from negchain.weights import mh_scan
from oracles import unit


def test_stored_augmentations_with_one_view_as_anchors() -> None:
    """The request holds a carried state for both views; only the first view's is used."""
    z = torch.randn(20, 3)
    which = (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    loss_fn = EMC2Loss(10, augmentations=2, symmetric=False)
    index = torch.arange(4)
    loss_fn(z[:4], z[4:8], index, augmentation=which, encode=lambda ids: z[ids])


def test_isir_with_a_held_key_the_batch_never_proposes() -> None:
    """A key counted 0 times has a corrected logit of inf: MH stays there, i-SIR is NaN."""
    queries, keys = torch.randn(4, 3).requires_grad_(), torch.randn(6, 3)
    counts = torch.tensor([1, 1, 1, 1, 0, 0])
    loss_fn = EMC2Loss(4, 5.0, "isir", views="paired", num_keys=6, key_counts=counts)
    loss_fn.chains.states.fill_(5)
    index = torch.arange(4)
    loss_fn(queries, keys[:4], index, key_index=index, encode=lambda ids: keys[ids]).backward()
    assert torch.isfinite(queries.grad).all()


@pytest.mark.parametrize("index, held", [([3, 5, 2], 2), ([3, 5, 26], 19), ([3, 5, -2], 0)])
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_what_a_marked_sample_is_taken_for_is_still_held(views, index, held, monkeypatch) -> None:
    """As on a GPU: i-SIR dropped the held state of rows beside a bad sample of its id."""
    monkeypatch.setattr("negchain.losses.batch.fit_for_numpy", lambda z: False)
    z = unit(torch.randn(3, 5, generator=torch.manual_seed(0)))
    loss_fn = EMC2Loss(20, 100.0, "isir", views=views, symmetric=False)
    loss_fn.chains.states[0, [3, 5]] = held  # as near as can be: the chains stay there
    bad = z.clone()
    bad[2] = torch.nan if held == 2 else bad[2]
    loss_fn(bad, z, torch.tensor(index), encode=lambda ids: z)
    assert loss_fn.chains.states[0, [3, 5]].tolist() == [held, held]


@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_the_value_where_chains_hold_what_no_column_could_be(kernel) -> None:
    """Draws leave out what the chains hold: the value was inf, and with it every step skipped."""
    z, log_q = torch.randn(6, 3), torch.tensor([-torch.inf] * 4 + [0.5, 0.5]).log_softmax(0)
    loss_fn = EMC2Loss(6, 5.0, kernel, proposals=Given())
    loss_fn.chains.states.fill_(3)
    draw = Draw(torch.tensor([4, 5, 4]), log_q)
    given = {"encode": lambda ids: z[ids], "draw": draw, "drawn": z[draw.ids]}
    assert loss_fn(z[:2], z[:2] + 0.1, torch.arange(2), **given).isfinite()


def test_no_draws_where_embeddings_are_kept() -> None:
    """A step whose caller drew nothing leaves the chains where they are; once an AssertionError."""
    z, loss_fn = torch.randn(8, 3), EMC2Loss(8, 5.0, proposals=Given(), carried="cached")
    for ids in ([5, 6, 7], []):
        draw = Draw(torch.tensor(ids, dtype=torch.int64))
        loss_fn(z[:4], z[4:], torch.arange(4), draw=draw, drawn=z[draw.ids])
        held = loss_fn.held(torch.arange(4))[0]
    assert (held >= 5).all() and int(loss_fn.step) == 2


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_an_item_that_stands_twice_in_a_batch_leaves_p_as_it_is(kernel) -> None:
    """Its first row says where the chain goes on, moved or not.

    The first that moved once did: p = 0.756 of the likeliest key became 0.699. 1,000 anchors look
    the same, and each starts at p; false alarms: 2e-6 (4.8 deviations).
    """
    angle = torch.tensor([0.2, 1.6, 2.2, 3.0], dtype=torch.float64)
    keys, count = torch.stack([angle.cos(), angle.sin()], 1), 1000
    p, index = (1.5 * keys[:3, 0]).softmax(0), torch.arange(count).repeat(2)
    loss_fn = EMC2Loss(count, 1.5, kernel, views="paired", num_keys=4, proposals=Given())
    generator, seen = torch.Generator().manual_seed(1), []
    loss_fn.chains.states[0] = torch.multinomial(p, count, True, generator=generator)
    anchors, positive = keys.new_tensor([[1.0, 0.0]]).expand(2 * count, -1), 0 * index + 3
    log_q = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1e-9], dtype=torch.float64).log()
    for _ in range(12):
        ids = torch.randint(3, (2 * count, 1), generator=generator)
        call = {"draw": Draw(ids, log_q), "drawn": keys[ids], "encode": lambda ids: keys[ids]}
        loss_fn(anchors, keys[positive], index, key_index=positive, **call)
        seen.append((loss_fn.held(index[:count])[0] == 0).double())
    share = torch.stack(seen[4:]).mean(0)
    assert abs(share.mean() - p[0]) < 4.8 * share.std() / count**0.5


def test_isir_over_two_equal_copies_weighs_as_over_one() -> None:
    """The carried item counts twice, as all others do; counted once, it was left too easily."""
    z = unit(torch.randn(12, 4, dtype=torch.float64))
    index, grads = torch.tensor([0, 5, 7, 9]), []
    for copies in (1, 2):
        leaf = z.clone().requires_grad_()
        loss_fn = EMC2Loss(12, 3.0, "isir", proposals=InBatch(copies=copies))
        loss_fn.chains.states[0, index] = torch.tensor([5, 2, 3, 0], dtype=torch.int32)
        loss_fn(leaf[index], leaf[index], index, encode=lambda ids, z=leaf: z[ids]).backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, atol=1e-12)


def after_a_visit(monkeypatch, copies: int) -> tuple[Tensor, Tensor]:
    """p, and the mean weights of a visit from p: all batches, in all views, from all states."""
    generator = torch.Generator().manual_seed(3)
    stored = unit(torch.randn(8, 3, dtype=torch.float64, generator=generator))
    proposals = InBatch(copies=copies)
    loss_fn = EMC2Loss(4, 4.0, "isir", augmentations=2, proposals=proposals).eval()
    walks = []

    def spy(side, *rest):
        walks.append((side, original(side, *rest)))
        return walks[-1][1]

    original = emc2.walk_chains
    monkeypatch.setattr(emc2, "walk_chains", spy)
    logits = 4.0 * stored @ stored[0]
    logits[:2] = -torch.inf  # the anchor is view 0 of item 0
    p, mean = logits.softmax(0), torch.zeros(8, dtype=torch.float64)
    views = list(itertools.product((0, 1), repeat=2))
    batches = list(itertools.product(itertools.combinations((1, 2, 3), 2), views))
    for (items, shown), state in itertools.product(batches, range(2, 8)):
        index, first = torch.tensor([0, *items]), torch.tensor([0, *shown])
        loss_fn.chains.states[0, 0] = state
        pair = stored[2 * index + first], stored[2 * index + 1 - first]
        loss_fn(*pair, index, augmentation=(first, 1 - first), encode=lambda ids: stored[ids])
        side, walk = walks[-1]
        weights = torch.zeros(8, dtype=torch.float64)
        weights.index_add_(0, side.column_ids()[0], walk.weights[0])
        weights[state] += walk.carried_weight[0]
        mean += p[state] * weights / len(batches)
    return p, mean


def test_isir_over_stored_augmentations_leaves_p_as_it_is(monkeypatch) -> None:
    """The mean weights of a visit are p where one copy of every item is offered.

    A batch then has one view of an item, so a set that holds two of them (the held one and the
    batch's) can be met from one of its members only. Counting both was off by 0.024.
    """
    p, mean = after_a_visit(monkeypatch, copies=1)
    assert torch.allclose(mean, p, atol=1e-12)


def test_isir_over_both_of_two_stored_augmentations_is_biased(monkeypatch) -> None:
    """A set of two views of every other item and one of the held: the register offers one copy."""
    p, mean = after_a_visit(monkeypatch, copies=2)
    assert 0.08 < float((mean - p).abs().sum() / 2) < 0.1


@pytest.mark.statistical
@pytest.mark.parametrize("copies", [1, 2])
def test_a_chain_that_meets_both_stored_views_of_an_item_leaves_p(copies) -> None:
    """Seven items in two stored views, batches of two. False alarms: 1e-5 for one copy."""
    rows, generator = 100_000, torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(14, generator=generator)  # item * 2 + view
    p = logits.softmax(0)
    start = torch.multinomial(p, rows, True, generator=generator)
    first = torch.randint(14, (rows,), generator=generator)
    met = torch.stack([first, first ^ 1], 1)[:, :copies]
    log_u = torch.rand(rows, copies, generator=generator).log()
    last = mh_scan(logits[met], logits[start], log_u, burn_in=0).last
    ends = torch.where(last < 0, start, met.gather(1, last.clamp(min=0)[:, None])[:, 0])
    share = torch.bincount(ends, minlength=14) / rows
    chi_square = float((rows * (share - p) ** 2 / p).sum())
    assert (chi_square < 48) == (copies == 1), chi_square  # 13 degrees of freedom


@pytest.mark.parametrize("as_function", [False, True])
def test_no_gradient_goes_through_the_probabilities_of_draws(as_function) -> None:
    """They may come from the embeddings; weights are never differentiated."""
    keys, ids, index = torch.randn(20, 4), torch.arange(0, 20, 2), torch.arange(6)
    grads = []
    for learned in (False, True):
        queries = keys[:6].clone().requires_grad_()
        log_q = (queries.mean(0) @ keys.T).log_softmax(0)
        log_q = log_q if learned else log_q.detach()
        draw = Draw(ids, (lambda i, q=log_q: q[i]) if as_function else log_q)
        loss_fn = DCLLoss(20, 5.0, proposals=Given())
        loss_fn(queries, keys[:6] + 0.1, index, draw=draw, drawn=keys[ids]).backward()
        grads.append(queries.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("per_row", [False, True])
def test_a_row_without_negatives_leaves_informed_draws_to_the_others(per_row) -> None:
    """Its stale softmax is 0 / 0, and the mean of the rows' once was NaN: nobody trained."""
    keys, index = torch.randn(20, 4, dtype=torch.float64), torch.arange(6)
    loss_fn = ImportanceLoss(20, 2.0, Informed(8, alone=True, per_row=per_row))
    loss_fn.fill(lambda ids: keys[ids])
    known = torch.full((6, 20), -1)
    known[2] = torch.arange(20)
    (part,) = loss_fn.request(index, keys[:6], keys[:6], known=known).parts
    if not per_row:
        assert float(part.log_q.exp().sum()) == pytest.approx(1.0, abs=1e-9)
    with pytest.warns(UserWarning, match="no negatives"):
        loss_fn(keys[:6], keys[:6] + 0.1, index, known=known, encode=lambda ids: keys[ids])
    assert loss_fn.info["rows_without_negatives"] == 2  # two views of one item


def test_a_row_of_negative_cache_without_negatives_is_counted() -> None:
    """All keys are its positives. It trained nothing, and nobody was told."""
    keys, index = torch.randn(6, 4), torch.arange(3)
    known = torch.tensor([[-1] * 6, [*range(6)], [-1] * 6])
    loss_fn = NegativeCacheLoss(6, 2.0, views="paired", symmetric=False)
    loss_fn.fill(lambda ids: keys[ids])
    with pytest.warns(UserWarning, match="1 row had no negatives"):
        loss_fn(keys[:3], keys[:3], index, known=known, encode=lambda ids: keys[ids])
    assert loss_fn.info["rows_without_negatives"] == 1


def test_another_key_of_an_anchor_in_the_batch_is_no_negative_of_it() -> None:
    """Of a corpus: equal ids are never negatives of each other, whatever their keys are."""
    queries, keys = torch.eye(3, 4), torch.randn(3, 4, requires_grad=True)
    loss_fn = DCLLoss(10, 5.0, views="paired", num_keys=20, normalize=False)
    index, key_index = torch.tensor([4, 4, 5]), torch.tensor([0, 1, 2])
    loss_fn(queries, keys, index, key_index=key_index).backward()
    assert keys.grad[0, 1] == 0 == keys.grad[1, 0]  # neither is pushed from the other's anchor
    assert keys.grad[2, 0] > 0 and keys.grad[2, 1] > 0


@pytest.mark.parametrize("loss_class", [InfoNCELoss, EMC2Loss, LargeBatchEMC2Loss])
def test_a_frozen_beta_is_learned_once_it_is_thawed(loss_class) -> None:
    """It was read as a number when the loss was built, and stayed that number."""
    beta = torch.nn.Parameter(torch.tensor(5.0), requires_grad=False)
    loss_fn, z = loss_class(8, beta), torch.randn(2, 8, 4, requires_grad=True)
    fixed = loss_class(8, 5.0)
    call = {"index": torch.arange(8), "encode": lambda ids: z[0][ids]}
    assert torch.equal(loss_fn(*z, **call), fixed(*z, **call))
    assert "beta" in loss_fn.state_dict()
    beta.requires_grad_()
    loss_fn(*z, **call).backward()
    assert beta.grad is not None and beta.grad != 0
