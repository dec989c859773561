"""What every loss must do, over all methods, views and denominators (taxonomy 8)."""

from __future__ import annotations

import copy

import pytest
import torch
from losses_under_test import (
    DIM,
    METHODS,
    M,
    arguments,
    battery,
    case_name,
    data,
    run,
    same_state,
    snapshot,
)
from torch import nn

from negchain import EMC2Loss

INDEX = torch.tensor([3, 14, 20, 7, 0])
every_case = pytest.mark.parametrize("case", battery(), ids=case_name)


def build(case, beta=5.0, **more):
    return METHODS[case[0]].build(beta, **case[1], **more)


@every_case
def test_trains_and_moves_its_state(case) -> None:
    net, items = data()
    loss_fn = build(case)
    before = snapshot(loss_fn)
    for shift in range(3):
        net.zero_grad()
        value = run(loss_fn, net, items, (INDEX + shift) % M)
        value.backward()
        assert value.dim() == 0 and torch.isfinite(value)
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())
        assert any(p.grad.abs().max() > 0 for p in net.parameters())
    stateless = case[0] in ("infonce", "dcl")
    assert same_state(before, snapshot(loss_fn)) == stateless
    assert "effective_negatives" in loss_fn.info


@every_case
def test_evaluation_mode_changes_nothing(case) -> None:
    net, items = data()
    loss_fn = build(case)
    run(loss_fn, net, items, INDEX)
    loss_fn.eval()
    before = snapshot(loss_fn)
    values = [run(loss_fn, net, items, INDEX).item() for _ in range(2)]
    assert values[0] == values[1]
    assert same_state(before, snapshot(loss_fn))


@every_case
@pytest.mark.parametrize("beta, size", [(100.0, 5), (100.0, 2)])
def test_extremes_are_finite(case, beta, size) -> None:
    net, items = data()
    loss_fn = build(case, beta)
    for _ in range(2):
        net.zero_grad()
        value = run(loss_fn, net, items, INDEX[:size])
        value.backward()
        assert torch.isfinite(value)
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@every_case
def test_precision(case) -> None:
    """Half precision is brought to float32, float64 is kept, under autocast or not."""
    net, items = data()
    plain = run(build(case), net, items, INDEX)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert net(items[INDEX]).dtype == dtype
            value = run(build(case), net, items, INDEX)
        assert value.dtype == torch.float32
        value.backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())
        if "mh" not in case[0] and "cache" not in case[0]:  # no draw that rounding could flip
            assert abs(value.item() - plain.item()) < 0.2
    assert run(build(case), net.double(), items.double(), INDEX).dtype == torch.float64


@every_case
def test_beta_is_learnable(case) -> None:
    net, items = data()
    beta = nn.Parameter(torch.tensor(5.0))
    loss_fn = build(case, beta)
    assert any(p is beta for p in loss_fn.parameters())
    run(loss_fn, net, items, INDEX)
    value = run(loss_fn, net, items, INDEX)
    value.backward()
    assert torch.isfinite(beta.grad) and beta.grad != 0
    fixed = build(case, 5.0)
    run(fixed, net, items, INDEX)
    assert value.item() == pytest.approx(run(fixed, net, items, INDEX).item(), rel=1e-5)


@every_case
def test_gradients_accumulate(case) -> None:
    net, items = data()
    parts = []
    loss_fn = build(case)
    for index in (INDEX, (INDEX + 1) % M):
        net.zero_grad()
        run(loss_fn, net, items, index).backward()
        parts.append([p.grad.clone() for p in net.parameters()])
    net.zero_grad()
    loss_fn = build(case)
    for index in (INDEX, (INDEX + 1) % M):
        run(loss_fn, net, items, index).backward()
    for p, first, second in zip(net.parameters(), *parts, strict=True):
        assert torch.allclose(p.grad, first + second, atol=1e-6)


@every_case
def test_works_with_a_compiled_model(case) -> None:
    net, items = data()
    compiled = torch.compile(copy.deepcopy(net), backend="eager")
    loss_fn, other = build(case), build(case)
    value, plain = run(loss_fn, compiled, items, INDEX), run(other, net, items, INDEX)
    value.backward()
    assert value.item() == plain.item()


# ---------------------------------------------------------------- who is never a negative


def column_gradients(case, index, known=None, prepare=None):
    """Gradient with respect to every embedding the call is given, row i the only pulling anchor."""
    generator = torch.Generator().manual_seed(2)
    table = torch.nn.functional.normalize(
        torch.randn(2 * M, DIM, generator=generator, dtype=torch.float64), dim=1
    )
    loss_fn = build(case, normalize=False).double()
    if prepare is not None:
        prepare(loss_fn, table)
    per_item = getattr(loss_fn, "augmentations", None) or 1
    z_a = table[index * per_item].clone().requires_grad_()
    z_b = table[index * per_item].roll(1, 1).clone().requires_grad_()
    leaves = {}

    def encode(ids):
        leaf = table[ids].clone().requires_grad_()
        leaves[len(leaves)] = (ids, leaf)
        return leaf

    call = arguments(loss_fn, encode, z_a, z_b, index, known)
    loss_fn(z_a, z_b, index, **call).backward()
    return loss_fn, z_a, z_b, leaves


@every_case
def test_equal_ids_are_never_negatives(case) -> None:
    """A batch of one item twice and nothing else: no negative at all in the batch."""
    index = torch.tensor([5, 5])
    loss_fn, z_a, z_b, leaves = column_gradients(case, index)
    for ids, leaf in leaves.values():
        own = ids // (getattr(loss_fn, "augmentations", None) or 1) == 5
        if leaf.grad is not None:
            assert (leaf.grad[own] == 0).all()
    if not leaves:
        assert (z_a.grad == 0).all() and (z_b.grad == 0).all()


@pytest.mark.parametrize(
    "case", [c for c in battery() if c[0] in ("infonce", "dcl", "sogclr")], ids=case_name
)
def test_duplicates_do_not_push_each_other(case) -> None:
    """The gradient of a duplicate is made of its own positive and the third item, nothing else."""
    index = torch.tensor([5, 5, 9])
    _, z_a, _, _ = column_gradients(case, index)
    assert z_a.grad is not None
    generator = torch.Generator().manual_seed(2)
    table = torch.nn.functional.normalize(
        torch.randn(2 * M, DIM, generator=generator, dtype=torch.float64), dim=1
    )
    z = table[index]
    span = torch.stack([z[0].roll(1), z[2], z[2].roll(1)])
    solution = torch.linalg.lstsq(span.T, z_a.grad[0][:, None]).solution
    assert (span.T @ solution - z_a.grad[0][:, None]).abs().max() < 1e-12


EMC2_CASES = [c for c in battery() if METHODS[c[0]].name == "emc2"]


@pytest.mark.parametrize("case", EMC2_CASES, ids=case_name)
def test_a_known_positive_in_the_chain_has_no_weight(case) -> None:
    """The chains hold a known positive: no gradient reaches it, and it never comes back."""
    index = torch.tensor([5, 11])
    known = torch.tensor([[8, 11], [8, 5]])  # nor may the two anchors be each other's

    def hold_8(loss_fn, table):
        per_item = loss_fn.augmentations or 1
        loss_fn.chains.states.fill_(8 * per_item)
        if loss_fn.carried_mode == "cached":
            loss_fn.chains.keys = table[8].float().expand(*loss_fn.chains.states.shape, -1).clone()
        if loss_fn.carried_mode == "score":
            loss_fn.chains.scores.fill_(0.9)

    loss_fn, z_a, z_b, leaves = column_gradients(case, index, known, hold_8)
    per_item = loss_fn.augmentations or 1
    forbidden = torch.tensor([5, 8, 11])
    for ids, leaf in leaves.values():
        mine = torch.isin(ids // per_item, forbidden)
        if leaf.grad is not None:
            assert (leaf.grad[mine] == 0).all()
    if not any(~torch.isin(ids // per_item, forbidden).all() for ids, _ in leaves.values()):
        assert (z_a.grad == 0).all() and (z_b.grad == 0).all()


@pytest.mark.parametrize("case", [c for c in battery() if "cache" == c[0][-5:]], ids=case_name)
def test_known_positives_are_never_proposed_with_weight(case) -> None:
    """The stale table is all but certain about a known positive; it still gets no gradient."""
    index = torch.tensor([5, 11])
    known = torch.tensor([[8], [8]])

    def table_loves_8(loss_fn, table):
        for stale in loss_fn.tables:
            stale.embeddings = torch.full((M, DIM), -0.1, dtype=torch.float64)
            stale.embeddings[8] = 50.0 * table[5]

    for _ in range(3):
        loss_fn, *_, leaves = column_gradients(case, index, known, table_loves_8)
        for ids, leaf in leaves.values():
            if leaf.grad is not None:
                assert (leaf.grad[ids == 8] == 0).all()
        if METHODS[case[0]].name == "negcache":
            assert not any((ids == 8).any() for ids, _ in leaves.values())


@every_case
def test_known_positives_of_the_batch(case) -> None:
    """Known pairs are excluded mutually: naming it once is enough."""
    index = torch.tensor([5, 11])
    known = torch.tensor([[11], [-1]])
    loss_fn, z_a, z_b, leaves = column_gradients(case, index, known)
    if not leaves:
        assert (z_a.grad == 0).all() and (z_b.grad == 0).all()


def test_chain_states_are_negatives_from_the_start() -> None:
    for views in ("shared", "paired"):
        chains = EMC2Loss(1000, views=views).chains
        states = torch.stack([chains.ids(s, torch.arange(1000)) for s in range(len(chains.states))])
        assert (states != torch.arange(1000)).all() and states.min() >= 0 and states.max() < 1000
        counts = torch.bincount(states[0].long() // 100, minlength=10)
        assert counts.min() > 60 and counts.max() < 140
