"""The returned scalar, `info`, stored augmentations, sizes of state, the estimator report."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from negchain import (
    DCLLoss,
    Draw,
    EMC2Loss,
    InfoNCELoss,
    NegativeCacheLoss,
    SogCLRLoss,
    effective_negatives,
    estimator_report,
    global_loss,
)
from oracles import contrastive_loops, dot, unit

M = 30
INDEX = torch.tensor([4, 17, 9, 0, 22, 5])


def emc2_value(z_a: Tensor, z_b: Tensor, beta: float, denominator: str, offered: Tensor) -> float:
    """-beta s + log( m_neg / K sum exp(beta s) ) by loops; `offered` [2B, 2B]: columns of a row."""
    both = unit(torch.cat([z_a, z_b]))
    size, total = len(z_a), 0.0
    for row in range(2 * size):
        columns = [j for j in range(2 * size) if offered[row, j]]
        summed = sum(math.exp(beta * dot(both[row], both[j])) for j in columns)
        value = math.log(2 * (M - 1) / len(columns) * summed)
        positive = beta * dot(both[row], both[(row + size) % (2 * size)])
        if denominator == "all":
            value = math.log(math.exp(value) + math.exp(positive))
        total += value - positive
    return total / (2 * size)


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
        assert loss_fn.info["global_loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_emc2_value_with_every_copy_offered_alike(pair, denominator) -> None:
    """Both views equal: it does not matter which copy of an item a row is offered."""
    z = pair[0]
    same = torch.arange(6).repeat(2)
    offered = same[:, None] != same[None, :]
    for kernel in ("mh", "isir"):
        for walk in ("parallel", "sequential")[: 2 if kernel == "mh" else 1]:
            loss_fn = EMC2Loss(M, 3.0, kernel=kernel, walk=walk, denominator=denominator)
            value = loss_fn(z, z, INDEX, carried=z.flip(0))
            assert abs(value.item() - emc2_value(z, z, 3.0, denominator, offered)) < 1e-12


def test_emc2_value_over_all_columns_walk_over_one_copy_each(pair, monkeypatch) -> None:
    import negchain.losses.emc2 as module

    seen = []
    original = module.walk_chains

    def spy(side, *rest):
        seen.append(side)
        return original(side, *rest)

    monkeypatch.setattr(module, "walk_chains", spy)
    value = EMC2Loss(M, 3.0)(*pair, INDEX, carried=pair[0])
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
    assert abs(value.item() - total / 12) < 1e-12


@pytest.mark.parametrize("views", ["shared", "paired"])
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_value_is_the_exact_global_loss_when_the_batch_is_the_data_set(pair, views, kernel) -> None:
    loss_fn = EMC2Loss(6, 3.0, views=views, kernel=kernel)
    carried = pair[0] if views == "shared" else pair
    value = loss_fn(*pair, torch.arange(6), carried=carried)
    exact = global_loss(*pair, 3.0, views=views)
    assert abs(value.item() - exact.item()) < 1e-12


def test_in_batch_global_loss_in_info(pair) -> None:
    """The in-batch losses print the batch's loss and report the estimate of the global one."""
    loss_fn = DCLLoss(3.0, num_samples=M)
    value = loss_fn(*pair, INDEX)
    assert abs(value.item() - contrastive_loops(*map(unit, pair), 3.0)) < 1e-12
    expected = contrastive_loops(*map(unit, pair), 3.0, num_negatives=2 * (M - 1))
    assert loss_fn.info["global_loss"] == pytest.approx(expected, abs=1e-12)


def test_negative_cache_value_comes_from_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    table = unit(torch.randn(M, 5, generator=generator, dtype=torch.float64))
    loss_fn = NegativeCacheLoss(M, 5, 3.0).double()
    loss_fn.refresh(torch.arange(M), table)
    z = table[INDEX]
    draw = loss_fn.propose(z, INDEX, z)
    value = loss_fn(z, z, INDEX, draw=draw, drawn=table[draw.ids])
    total = 0.0
    for i in INDEX.tolist():
        negatives = [dot(table[i], table[j]) for j in range(M) if j != i]
        total += -3.0 * dot(table[i], table[i]) + math.log(
            sum(math.exp(3.0 * s) for s in negatives)
        )
    assert abs(value.item() - total / len(INDEX)) < 1e-12
    assert draw.private and not (draw.ids == INDEX.repeat(2)).any()


# ---------------------------------------------------------------- info and sizes

COMMON = {"effective_negatives", "nonfinite_rows"}
CHAIN = {"acceptance_rate", "carried_mass", "dropped_mass", "chain_age", "global_loss"}


def test_info_keys(pair) -> None:
    for loss_class in (InfoNCELoss, DCLLoss):
        loss_fn = loss_class(3.0)
        loss_fn(*pair)
        assert set(loss_fn.info) == COMMON
    sogclr = SogCLRLoss(M, 3.0)
    sogclr(*pair, INDEX)
    assert set(sogclr.info) == COMMON | {"global_loss"}
    for kernel in ("mh", "isir"):
        loss_fn = EMC2Loss(M, 3.0, kernel=kernel)
        loss_fn(*pair, INDEX, carried=pair[0])
        info = loss_fn.info
        assert set(info) >= COMMON | CHAIN
        assert all(isinstance(v, float) and math.isfinite(v) for v in info.values())
        assert 0 <= info["acceptance_rate"] <= 1 and 0 <= info["carried_mass"] <= 1
        assert info["dropped_mass"] == 0 and info["nonfinite_rows"] == 0
        assert 1 <= info["effective_negatives"] <= 2 * len(INDEX)


def test_a_score_that_is_only_remembered_drops_its_mass(pair) -> None:
    loss_fn = EMC2Loss(M, 14.28, carried="score", burn_in=0.0)
    for _ in range(5):
        loss_fn(*pair, INDEX)
    assert loss_fn.info["dropped_mass"] == pytest.approx(loss_fn.info["carried_mass"])
    assert loss_fn.info["dropped_mass"] > 0


def test_effective_negatives() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert effective_negatives(weights).item() == pytest.approx(2.5)
    assert effective_negatives(weights[1:] * 0.5, torch.tensor([0.5])).item() == pytest.approx(2.0)


def test_state_is_at_most_8_bytes_per_sample() -> None:
    for kernel in ("mh", "isir"):
        table = EMC2Loss(10_000, kernel=kernel).state_dict()
        assert sum(t.numel() * t.element_size() for t in table.values()) <= 8 * 10_000


def test_estimator_report_rows() -> None:
    z = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    methods = ("infonce", "dcl", "sogclr", "negcache", "emc2", "emc2-cached", "emc2-score", "isir")
    seen: list[str] = []
    report = estimator_report(
        z, batch_size=6, beta=4.0, steps=20, warm_up=5, methods=methods, progress=seen.append
    )
    assert tuple(row.method for row in report.rows) == methods == tuple(seen)
    for row in report.as_dicts():
        assert all(math.isfinite(v) for k, v in row.items() if k != "method")
        assert row["method"] in str(report)
    assert {row.method: row.state_bytes_per_sample for row in report.rows}["emc2"] <= 8
    with pytest.raises(ValueError, match="methods"):
        estimator_report(z, batch_size=6, beta=4.0, methods=["emc3"])
    with pytest.raises(ValueError, match="batch_size"):
        estimator_report(z, batch_size=41, beta=4.0)


def test_estimator_report_finds_no_bias_in_whole_batches() -> None:
    """A batch of the whole data set: DCL's gradient *is* the exact one."""
    z = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = estimator_report(
        z[0], z[1], batch_size=12, beta=4.0, steps=3, warm_up=0, methods=["dcl", "infonce"]
    )
    for row in report.rows:
        assert row.relative_bias < 1e-10 and abs(row.norm_ratio - 1) < 1e-10


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
        held = loss_fn.carried(index, (first, second))
        assert isinstance(held, tuple) and len(held) == 2
        for ids, slots in zip(held, chosen, strict=True):
            assert torch.equal(ids, loss_fn.chains.ids(0, slots))
        before = loss_fn.chains.states.clone()
        loss_fn(
            table[chosen[0]],
            table[chosen[1]],
            index,
            carried=(table[held[0]], table[held[1]]),
            augmentation=(first, second),
        )
        changed = (loss_fn.chains.states != before)[0]
        assert not changed[~torch.isin(torch.arange(M * k), torch.cat(chosen))].any()
        moved = loss_fn.chains.states[0][changed].long()
        assert torch.isin(moved, torch.cat(chosen)).all()  # the state names item and augmentation
        names |= set((moved % k).tolist())
    assert names == {0, 1, 2}
    assert (loss_fn.chains.ids(0, torch.arange(M * k)) // k != own).all()


def test_paired_views_have_a_table_per_direction(pair) -> None:
    loss_fn = EMC2Loss(M, 3.0, views="paired")
    held = loss_fn.carried(INDEX)
    assert isinstance(held, tuple) and not torch.equal(*held)
    loss_fn(*pair, INDEX, carried=(pair[1], pair[0]))
    one = EMC2Loss(M, 3.0, views="paired", symmetric=False)
    assert isinstance(one.carried(INDEX), Tensor) and one.chains.states.shape == (1, M)


def test_a_corpus_of_keys(pair) -> None:
    loss_fn = EMC2Loss(M, 3.0, views="paired", num_keys=100)
    keys = torch.tensor([70, 3, 99, 41, 12, 55])
    assert loss_fn.chains.ids(0, torch.arange(M)).max() >= M  # states are keys
    draw = Draw(torch.tensor([80, 70, 2]), torch.full((3,), -math.log(100)).double())
    z_b = pair[1].clone().requires_grad_()
    drawn = pair[0][:3].clone().requires_grad_()
    known = torch.tensor([[3, -1]] + [[-1, -1]] * 5)
    call = {"key_index": keys, "known": known, "draw": draw, "drawn": drawn, "carried": pair[0]}
    loss_fn(pair[0], z_b, INDEX, **call)
    with pytest.raises(ValueError, match="key_index"):
        loss_fn(pair[0], z_b, INDEX, carried=pair[0])
    with pytest.raises(ValueError, match="key_index"):
        loss_fn(pair[0], z_b, INDEX, **{**call, "key_index": keys + 60})


def test_beta_may_be_a_number_of_numpy() -> None:
    z = torch.randn(2, 6, 4)
    losses = [InfoNCELoss(beta)(z[0], z[1]) for beta in (np.float32(5), 5, 5.0)]
    assert losses[0] == losses[1] == losses[2]
    assert type(InfoNCELoss(np.float32(5)).beta) is float  # kernels take it as it is
