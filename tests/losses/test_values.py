"""The returned scalar, `info`, rows with little to go by, stored augmentations, sizes of state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from losses_under_test import METHODS, battery, case_name, data, run, same_state, snapshot, towers
from torch import Tensor

from negchain import (
    ISIR,
    MH,
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    InBatch,
    InfoNCELoss,
    Informed,
    LargeBatchEMC2Loss,
    NegativeCacheLoss,
    SogCLRLoss,
    effective_negatives,
    global_loss,
)
from oracles import contrastive_loops, dot, unit

M = 30
INDEX = torch.tensor([4, 17, 9, 0, 22, 5])


def emc2_bracket(
    z_a: Tensor, z_b: Tensor, carried: Tensor, beta: float, denominator: str
) -> list[float]:
    """Low, high and middle by loops: without the carried state, with it, and between the two.

    log( m_neg / K sum exp(beta s) ), K = 2 (b - 1) columns; with the carried state as one more.
    """
    both, held = unit(torch.cat([z_a, z_b])), unit(carried).repeat(2, 1)
    size, totals = len(z_a), [0.0, 0.0, 0.0]
    for row in range(2 * size):
        columns = [j for j in range(2 * size) if j % size != row % size]
        summed = sum(math.exp(beta * dot(both[row], both[j])) for j in columns)
        with_held = summed + math.exp(beta * dot(both[row], held[row]))
        low = math.log(2 * (M - 1) / len(columns) * summed)
        high = math.log(2 * (M - 1) / (len(columns) + 1) * with_held)
        positive = beta * dot(both[row], both[(row + size) % (2 * size)])
        for number, value in enumerate((low, high, (low + high) / 2)):
            if denominator == "all":
                value = math.log(math.exp(value) + math.exp(positive))
            totals[number] += (value - positive) / (2 * size)
    return totals


@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize(
    "views, symmetric", [("shared", True), ("shared", False), ("paired", True)]
)
def test_sogclr_value_is_an_estimate_of_the_global_loss(
    pair, views, symmetric, denominator
) -> None:
    options = {"views": views, "symmetric": symmetric, "denominator": denominator}
    loss_fn = SogCLRLoss(M, 3.0, **options)
    negatives = (M - 1) * (2 if views == "shared" else 1)
    for _ in range(3):  # the value does not depend on the moving average
        value = loss_fn(*pair, INDEX)
        expected = contrastive_loops(*map(unit, pair), 3.0, num_negatives=negatives, **options)
        assert abs(value.item() - expected) < 1e-12
        assert loss_fn.info["global_loss_low"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_emc2_value_is_the_middle_of_a_bracket(pair, denominator, kernel) -> None:
    loss_fn = EMC2Loss(M, 3.0, kernel, denominator=denominator)
    carried = pair[0].flip(0).roll(2, 1)
    value = loss_fn(*pair, INDEX, loss_fn.request(INDEX).answer(carried))
    low, high, middle = emc2_bracket(*pair, carried, 3.0, denominator)
    info = loss_fn.info
    assert abs(value.item() - middle) < 1e-12
    got = [info[f"global_loss{end}"] for end in ("_low", "_high", "")]
    assert got == pytest.approx([low, high, middle], abs=1e-12)


def test_emc2_value_over_all_columns_walk_over_one_copy_each(pair, monkeypatch) -> None:
    import negchain.losses.emc2 as module

    seen = []
    original = module.walk_chains

    def spy(side, *rest):
        seen.append(side)
        return original(side, *rest)

    monkeypatch.setattr(module, "walk_chains", spy)
    loss_fn = EMC2Loss(M, 3.0)
    loss_fn(*pair, INDEX, loss_fn.request(INDEX).answer(pair[0]))
    (side,) = seen
    both = unit(torch.cat(pair)).view(2, 6, -1)
    total = 0.0
    for row in range(12):
        keys, item = side.keys[row // 6], row % 6
        columns = [j for j in range(6) if not side.excluded[row, j]]
        assert columns == [j for j in range(6) if j != item]  # K = b - 1: every other item once
        for j in columns:  # as one of its two copies
            assert min((keys[j] - both[v, j]).abs().max().item() for v in (0, 1)) < 1e-12
        x, y = both[row // 6, item], both[1 - row // 6, item]
        summed = sum(math.exp(3.0 * dot(x, both[v, j])) for j in columns for v in (0, 1))
        total += -3.0 * dot(x, y) + math.log(2 * (M - 1) / 10 * summed)
    assert (side.keys[0] - side.keys[1]).abs().amax(1).min() > 0  # two rows, different copies
    assert loss_fn.info["global_loss_low"] == pytest.approx(total / 12, abs=1e-12)


@pytest.mark.parametrize("views", ["shared", "paired"])
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_the_lower_end_is_exact_when_the_batch_is_the_data_set(pair, views, kernel) -> None:
    loss_fn = EMC2Loss(6, 3.0, kernel, views=views)
    loss_fn(*pair, torch.arange(6), encode=towers(loss_fn, lambda ids: pair[0][ids]))
    exact = global_loss(*pair, 3.0, views=views)
    assert loss_fn.info["global_loss_low"] == pytest.approx(exact.item(), abs=1e-12)


def test_in_batch_global_loss_in_info(pair) -> None:
    """The in-batch losses print the batch's loss and report the estimate of the global one."""
    loss_fn = DCLLoss(M, 3.0)
    value = loss_fn(*pair, INDEX)
    assert abs(value.item() - contrastive_loops(*map(unit, pair), 3.0)) < 1e-12
    expected = contrastive_loops(*map(unit, pair), 3.0, num_negatives=2 * (M - 1))
    assert loss_fn.info["global_loss_low"] == pytest.approx(expected, abs=1e-12)
    options = {"num_negatives": 2 * (M - 1), "denominator": "all"}
    for beta in (3.0, 40.0):  # most pairs unsolved, most solved
        loss_fn = InfoNCELoss(M, beta)
        loss_fn(*pair, INDEX)
        expected = contrastive_loops(*map(unit, pair), beta, **options)
        assert loss_fn.info["global_loss_low"] == pytest.approx(expected, abs=1e-9)


def test_negative_cache_value_comes_from_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    table = unit(torch.randn(M, 5, generator=generator, dtype=torch.float64)).float().double()
    loss_fn = NegativeCacheLoss(M, 3.0)
    loss_fn.fill(lambda ids: table[ids], chunk=7)
    z = table[INDEX]
    request = loss_fn.request(INDEX, z, z)
    assert not (request.ids == INDEX.repeat(2)).any()
    value = loss_fn(z, z, INDEX, encode=lambda ids: table[ids])
    total = 0.0
    for i in INDEX.tolist():
        negatives = [dot(unit(table[i]), table[j]) for j in range(M) if j != i]
        total += -3.0 + math.log(sum(math.exp(3.0 * s) for s in negatives))
    assert abs(value.item() - total / len(INDEX)) < 1e-6  # the table is in float32
    assert loss_fn.info["global_loss"] == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("loss_class", [DCLLoss, EMC2Loss])
def test_info_is_of_the_beta_of_the_call(pair, loss_class) -> None:
    """It was computed with the one of the optimizer's step in between."""
    beta = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))  # as the embeddings
    loss_fn = loss_class(M, beta)
    loss_fn(*pair, INDEX, encode=lambda ids: pair[0][ids % 6])
    before = loss_fn.info
    beta.data.mul_(2)
    assert loss_fn.info == before


# ---------------------------------------------------------------- info and sizes

COMMON = {"effective_negatives", "nonfinite_rows", "rows_without_negatives"}
CHAIN = {"acceptance_rate", "carried_mass", "chain_age", "global_loss"}
BRACKET = {"global_loss_low", "global_loss_high"}


def test_info_keys(pair) -> None:
    for loss_class in (InfoNCELoss, DCLLoss):
        loss_fn = loss_class(beta=3.0)
        loss_fn(*pair)
        assert set(loss_fn.info) == COMMON
    sogclr = SogCLRLoss(M, 3.0)
    sogclr(*pair, INDEX)
    assert set(sogclr.info) == COMMON | {"global_loss_low"}
    for kernel in ("mh", "isir"):
        loss_fn = EMC2Loss(M, 3.0, kernel)
        loss_fn(*pair, INDEX, encode=lambda ids: pair[0][ids % 6])
        info = loss_fn.info
        assert set(info) == COMMON | CHAIN | BRACKET
        assert all(isinstance(v, float) and math.isfinite(v) for v in info.values())
        assert 0 <= info["acceptance_rate"] <= 1 and 0 <= info["carried_mass"] <= 1
        assert info["nonfinite_rows"] == 0 == info["rows_without_negatives"]
        assert 1 <= info["effective_negatives"] <= 2 * len(INDEX)


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_reading_info_changes_nothing(case) -> None:
    net, items = data()
    loss_fn = METHODS[case[0]].build(**case[1])
    run(loss_fn, net, items, torch.tensor([5, 5]))  # some rows have no negative
    before = snapshot(loss_fn)
    first = loss_fn.info
    assert loss_fn.info == first and same_state(before, snapshot(loss_fn))
    loss_fn.info.clear()
    assert loss_fn.info == first


def test_effective_negatives() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert effective_negatives(weights).item() == pytest.approx(2.5)
    assert effective_negatives(weights * 1e-25).item() == pytest.approx(2.5)  # as SogCLR's may be
    assert effective_negatives(weights[1:] * 0.5, torch.tensor([0.5])).item() == pytest.approx(2.0)


def test_state_is_at_most_8_bytes_per_sample() -> None:
    for kernel in ("mh", "isir"):
        table = EMC2Loss(10_000, kernel=kernel).state_dict()
        assert sum(t.numel() * t.element_size() for t in table.values()) <= 8 * 10_000


# ---------------------------------------------------------------- chains per (item, augmentation)


def test_stored_augmentations_have_chains_of_their_own() -> None:
    k = 3
    loss_fn = EMC2Loss(M, 3.0, augmentations=k)
    assert loss_fn.chains.states.shape == (1, M * k)
    own = torch.arange(M * k) // k
    assert (loss_fn.chains.ids(0, torch.arange(M * k)) // k != own).all()
    table = unit(torch.randn(M * k, 5, generator=torch.Generator().manual_seed(0)))
    generator = torch.Generator().manual_seed(1)
    names: set[int] = set()
    for _ in range(20):
        index = torch.randperm(M, generator=generator)[:6]
        first = torch.randint(0, k, (6,), generator=generator)
        second = (first + 1) % k
        chosen = (index * k + first, index * k + second)
        held = loss_fn.held(index, (first, second))
        assert isinstance(held, tuple) and len(held) == 2
        for ids, slots in zip(held, chosen, strict=True):
            assert torch.equal(ids, loss_fn.chains.ids(0, slots))
        before = loss_fn.chains.states.clone()
        loss_fn(
            table[chosen[0]],
            table[chosen[1]],
            index,
            encode=lambda ids: table[ids],
            augmentation=(first, second),
        )
        changed = (loss_fn.chains.states != before)[0]
        assert not changed[~torch.isin(torch.arange(M * k), torch.cat(chosen))].any()
        moved = loss_fn.chains.states[0][changed].long()
        assert torch.isin(moved, torch.cat(chosen)).all()  # the state names item and augmentation
        names |= set((moved % k).tolist())
    assert names == {0, 1, 2}
    assert (loss_fn.chains.ids(0, torch.arange(M * k)) // k != own).all()


def test_stored_augmentations_with_probabilities_of_draws() -> None:
    """One log-probability per (item, augmentation); a uniform one changes nothing."""
    k, generator = 2, torch.Generator().manual_seed(0)
    table = unit(torch.randn(M * k, 5, generator=generator, dtype=torch.float64))
    ids = torch.randint(0, M * k, (7,), generator=generator)
    zero = torch.zeros(6, dtype=torch.int64)
    for kernel in ("mh", "isir"):
        values = []
        for log_q in (None, torch.full((M * k,), -math.log(M * k), dtype=torch.float64)):
            loss_fn = EMC2Loss(M, 3.0, kernel, augmentations=k, proposals=Given(alone=False))
            drawn = table[ids].clone().requires_grad_()
            value = loss_fn(
                table[INDEX * k],
                table[INDEX * k + 1],
                INDEX,
                encode=lambda i: table[i],
                augmentation=(zero, zero + 1),
                draw=Draw(ids, log_q),
                drawn=drawn,
            )
            value.backward()
            values.append((value.item(), drawn.grad))
        assert values[0][0] == pytest.approx(values[1][0], abs=1e-12)
        assert (values[0][1] - values[1][1]).abs().max() < 1e-12 and values[0][1].abs().max() > 0


def test_paired_views_have_a_table_per_direction() -> None:
    loss_fn = EMC2Loss(M, 3.0, views="paired")
    held = loss_fn.held(INDEX)
    assert len(held) == 2 and not torch.equal(*held)
    one = EMC2Loss(M, 3.0, views="paired", symmetric=False)
    assert len(one.held(INDEX)) == 1 and one.chains.states.shape == (1, M)
    assert DCLLoss(M).held(INDEX) == ()


def test_beta_may_be_any_number() -> None:
    z = torch.randn(2, 6, 4)
    betas = (np.float32(5), 5, 5.0, torch.tensor(5.0), torch.tensor([5.0]).double()[0])
    losses = [InfoNCELoss(beta=beta)(z[0], z[1]) for beta in betas]
    assert all(loss == losses[0] for loss in losses)
    for beta in betas:
        loss_fn = EMC2Loss(M, beta)
        assert type(loss_fn.beta) is float  # kernels take it as it is
        assert not list(loss_fn.parameters())


# ---------------------------------------------------------------- rows with little to go by


@pytest.mark.parametrize("kernel", ["mh", "isir"])
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_a_batch_of_one_trains_on_its_carried_state(kernel, views) -> None:
    """The last batch of an epoch: -grad s(x, y) + grad s(x, held), nothing else."""
    generator = torch.Generator().manual_seed(0)
    z = unit(torch.randn(2, 1, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    held = unit(torch.randn(1, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    loss_fn = EMC2Loss(M, 3.0, kernel, views=views, symmetric=False, normalize=False)
    value = loss_fn(z[0], z[1], [4], loss_fn.request([4]).answer(held))
    (gradient, of_held) = torch.autograd.grad(value, (z, held))
    assert (gradient[0] - 3.0 * (held - z[1])).abs().max() < 1e-12
    assert (gradient[1] + 3.0 * z[0]).abs().max() < 1e-12
    assert (of_held - 3.0 * z[0]).abs().max() < 1e-12
    assert loss_fn.info["carried_mass"] == 1 and loss_fn.info["rows_without_negatives"] == 0


@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_a_row_without_a_usable_proposal_trains_on_its_carried_state(kernel) -> None:
    """All it is offered is its own positive, but the chain holds a negative."""
    generator = torch.Generator().manual_seed(0)
    z = unit(torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    held = unit(torch.randn(3, 5, generator=generator, dtype=torch.float64))
    index = torch.tensor([4, 4, 4])
    loss_fn = EMC2Loss(M, 3.0, kernel, views="paired", symmetric=False, proposals=Given())
    draw = Draw(index[:, None], torch.full((M,), -math.log(M)))
    request = loss_fn.request(index).answer(held)
    value = loss_fn(z[0], z[1], index, request, draw=draw, drawn=z[1].detach()[:, None])
    (gradient,) = torch.autograd.grad(value, z)
    x, y = z.detach()
    push = 3.0 / 3 * (held - y)
    push = push - (push * x).sum(1, keepdim=True) * x  # of a vector brought to unit length
    assert (gradient[0] - push).abs().max() < 1e-12


@pytest.mark.parametrize("loss_class", [InfoNCELoss, DCLLoss, SogCLRLoss])
def test_a_batch_of_one_without_chains(loss_class) -> None:
    loss_fn = loss_class(M)
    z = torch.randn(2, 1, 5, requires_grad=True)
    value = loss_fn(z[0], z[1], [3])
    value.backward()
    assert value.item() == 0 and (z.grad == 0).all()
    assert loss_fn.info["rows_without_negatives"] == 2  # both views
    loss_fn(*torch.randn(2, 4, 5), [1, 2, 3, 4])
    assert loss_fn.info["rows_without_negatives"] == 2  # counted since it was built


# ---------------------------------------------------------------- the partition of "all"


@pytest.mark.parametrize("proposals", [None, Informed()])
def test_no_partition_is_remembered(proposals) -> None:
    """1 - p+ belongs to the encoder of today: it is estimated afresh, and there is no state of it.

    tests/losses/test_long_run.py shows that the estimate is right on average.
    """
    kept, left_out = (EMC2Loss(M, proposals=proposals, denominator=d) for d in ("all", "negatives"))
    assert kept.state_dict().keys() == left_out.state_dict().keys()


def test_without_a_proposal_the_carried_state_says_how_far_a_pair_is_solved() -> None:
    """A batch of one: 1 - p+ against m_neg times what the chain holds."""
    z, held = unit(torch.randn(3, 1, 5, dtype=torch.float64)).tensor_split([2])
    z.requires_grad_()
    options = {"views": "paired", "symmetric": False, "normalize": False}
    grads = []
    for denominator in ("all", "negatives"):
        loss_fn = EMC2Loss(M, 3.0, denominator=denominator, **options)
        value = loss_fn(z[0], z[1], [4], loss_fn.request([4]).answer(held[0]))
        grads.append(torch.autograd.grad(value, z)[0])
    x, y = z.detach()[:, 0]
    negatives = (M - 1) * torch.exp(3.0 * x @ held[0, 0])
    share = negatives / (negatives + torch.exp(3.0 * x @ y))
    assert torch.allclose(grads[0], share * grads[1], atol=1e-12)


@pytest.mark.parametrize("burn_in, counted", [(0.5, 3), (0.0, 5), (3, 2), (4, 1)])
def test_burn_in_as_a_share_or_a_number(burn_in, counted) -> None:
    """Weights of five proposals are multiples of 1 / (steps that count)."""
    loss_fn = EMC2Loss(M, 3.0, MH(burn_in), views="paired", symmetric=False, normalize=False)
    z = unit(torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    keys = z.clone().requires_grad_()
    held = torch.zeros(6, 8, dtype=torch.float64)
    request = loss_fn.request(torch.arange(6)).answer(held)
    loss_fn(torch.eye(6, 8, dtype=torch.float64), keys, torch.arange(6), request).backward()
    weights = keys.grad[:, :6].T / (3.0 / 6)  # [row, column], the positive with -1
    weights = weights + torch.eye(6, dtype=torch.float64)
    assert (weights * counted - (weights * counted).round()).abs().max() < 1e-9
    assert weights.max() > 0


def test_an_isir_step_is_a_softmax() -> None:
    loss_fn = EMC2Loss(M, 3.0, ISIR(), views="paired", symmetric=False, normalize=False)
    z = unit(torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    loss_fn.chains.states.fill_(M - 1)
    keys = z[1].clone().requires_grad_()
    held = z[2].clone().requires_grad_()
    request = loss_fn.request(torch.arange(6)).answer(held)
    loss_fn(z[0], keys, torch.arange(6), request).backward()
    logits = 3.0 * torch.cat([z[0] @ z[1].T, (z[0] * z[2]).sum(1, keepdim=True)], 1)
    logits[torch.arange(6), torch.arange(6)] = -math.inf
    p = logits.softmax(1)
    expected = 3.0 / 6 * (p[:, :6].T @ z[0] - z[0])
    assert (keys.grad - expected).abs().max() < 1e-12
    assert (held.grad - 3.0 / 6 * p[:, 6:] * z[0]).abs().max() < 1e-12


def test_the_views_a_row_is_offered_by_default() -> None:
    """Both for i-SIR where they are two fresh ones; else one. InBatch(...) says it."""
    both = EMC2Loss(9, kernel="isir")
    assert both.proposals == EMC2Loss(9, kernel="isir", proposals="batch").proposals == InBatch(2)
    for other in (
        EMC2Loss(9),
        EMC2Loss(9, kernel="isir", views="paired"),
        EMC2Loss(9, kernel="isir", augmentations=3),
        EMC2Loss(9, kernel="isir", proposals=InBatch()),
        LargeBatchEMC2Loss(9, kernel="isir"),
    ):
        assert other.proposals == InBatch(1)
