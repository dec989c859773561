"""What every loss must do, over all methods, views and denominators (taxonomy 8)."""

from __future__ import annotations

import copy
import gc
import math
import threading
import warnings
import weakref

import pytest
import torch
from losses_under_test import (
    DIM,
    METHODS,
    M,
    battery,
    case_name,
    data,
    extras,
    has_chains,
    run,
    same_state,
    snapshot,
    towers,
)
from torch import nn

from negchain import DCLLoss, EMC2Loss, InfoNCELoss, SogCLRLoss

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
    stateless = case[0] in ("infonce", "dcl")  # nothing to carry from step to step
    assert same_state(before, snapshot(loss_fn)) == stateless
    assert "effective_negatives" in loss_fn.info


@every_case
def test_the_default_device_is_not_asked(case) -> None:
    """Tensors are made where the batch is; none is kept for later on another device."""

    def values(device: str) -> list[float]:
        net, items = data()
        loss_fn, found = build(case, seed=91), []  # a seed whose draws nobody has kept yet
        for shift in range(3):
            index = (INDEX + shift) % M
            more = extras(loss_fn, lambda ids: net(items[ids]), index)
            encode = lambda ids: net(items[ids])  # noqa: E731
            with torch.device(device):
                z_a, z_b = net(items[index]), net(items[index + M])
                value = loss_fn(z_a, z_b, index, encode=towers(loss_fn, encode), **more)
                found.append(value.item())
                assert all(map(math.isfinite, loss_fn.info.values()))
        return found

    assert values("meta") == values("cpu")


@every_case
def test_nothing_keeps_the_graph(case) -> None:
    """What `info` needs must not hold a step's activations until the next one."""
    loss_fn = build(case)
    net, items = data()
    watched = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.token = threading.Lock()  # lives as long as the node of the graph
            watched.append(weakref.ref(ctx.token))
            return z.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    net.register_forward_hook(lambda module, given, z: Watched.apply(z))
    run(loss_fn, net, items, INDEX).backward()
    gc.collect()
    assert watched and not any(token() is not None for token in watched)
    assert loss_fn.info


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
def test_extremes_are_finite(case) -> None:
    """A large beta, and batches down to a single sample."""
    net, items = data()
    loss_fn = build(case, 100.0)
    for size in (5, 2, 1):
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
        if case[0] in ("infonce", "dcl", "sogclr"):  # no draw that rounding could flip
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


@pytest.mark.parametrize("name", ["dcl", "mh", "isir-informed"])
def test_works_with_a_compiled_model(name) -> None:
    net, items = data()
    case = (name, {"views": "paired"})
    compiled = torch.compile(copy.deepcopy(net), backend="eager")
    loss_fn, other = build(case), build(case)
    value, plain = run(loss_fn, compiled, items, INDEX), run(other, net, items, INDEX)
    value.backward()
    assert value.item() == plain.item()


# ---------------------------------------------------------------- who is never a negative


def table_of() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2 * M, DIM, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(z, dim=1)


def gradients(case, index, known=None, prepare=None):
    """Gradients of the batch, and of everything the loss asked for: (ids, leaf) each."""
    table = table_of()
    loss_fn = build(case, normalize=False)
    if prepare is not None:
        prepare(loss_fn, table)
    per_item = loss_fn.ids_per_item
    z_a = table[index * per_item].clone().requires_grad_()
    z_b = table[index * per_item].roll(1, 1).clone().requires_grad_()
    leaves = []

    def encode(ids):
        leaf = table[ids].clone().requires_grad_()
        leaves.append((ids, leaf))
        return leaf

    more = extras(loss_fn, encode, index)
    loss_fn(z_a, z_b, index, encode=towers(loss_fn, encode), known=known, **more).backward()
    return loss_fn, z_a, z_b, [(ids, leaf) for ids, leaf in leaves if leaf.grad is not None]


@every_case
def test_equal_ids_are_never_negatives(case) -> None:
    """A batch of one item twice and nothing else: no negative at all in the batch."""
    index = torch.tensor([5, 5])
    loss_fn, z_a, z_b, leaves = gradients(case, index)
    own = 5 if loss_fn.num_keys is None else 16
    for ids, leaf in leaves:
        assert (leaf.grad[ids // loss_fn.ids_per_item == own] == 0).all()
    if not leaves and loss_fn.num_sides == 1:
        assert (z_a.grad == 0).all() and (z_b.grad == 0).all()
    asks = len(leaves) > 0 or case[0] == "negcache"
    assert (loss_fn.info["rows_without_negatives"] == 0) == asks
    assert loss_fn._warned != asks


@pytest.mark.parametrize("loss_class", [InfoNCELoss, DCLLoss, SogCLRLoss])
def test_a_batch_that_trains_nothing_is_said_once(loss_class) -> None:
    loss_fn, z = loss_class(M), torch.randn(2, 3, 4)
    with pytest.warns(UserWarning, match="6 rows had no negatives.*different ids") as told:
        assert loss_fn(z[0], z[1], [2, 2, 2]) == 0
    assert told[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(z[0], z[1], [2, 2, 2])
        assert loss_fn.info["rows_without_negatives"] == 12


def test_a_device_that_is_not_waited_for_is_asked_by_info() -> None:
    """As on a GPU, where the call looks at no value."""
    loss_fn = InfoNCELoss(M)
    loss_fn.faults[2] = 6
    with pytest.warns(UserWarning, match="6 rows had no negatives"):
        assert loss_fn.info["rows_without_negatives"] == 6


@pytest.mark.parametrize(
    "case", [c for c in battery() if c[0] in ("infonce", "dcl", "sogclr")], ids=case_name
)
def test_duplicates_do_not_push_each_other(case) -> None:
    """The gradient of a duplicate is made of its own positive and the third item, nothing else."""
    index = torch.tensor([5, 5, 9])
    _, z_a, _, _ = gradients(case, index)
    z = table_of()[index]
    span = torch.stack([z[0].roll(1), z[2], z[2].roll(1)])
    solution = torch.linalg.lstsq(span.T, z_a.grad[0][:, None]).solution
    assert (span.T @ solution - z_a.grad[0][:, None]).abs().max() < 1e-12


CHAINS = pytest.mark.parametrize("case", list(filter(has_chains, battery())), ids=case_name)


def hold(item: int):
    """Every chain holds `item`."""

    def prepare(loss_fn, table) -> None:
        loss_fn.chains.states.fill_(item * loss_fn.ids_per_item)
        if loss_fn.carried == "cached":
            shape = (*loss_fn.chains.states.shape, -1)
            loss_fn.chains.keys = table[item].float().expand(*shape).clone()

    return prepare


@CHAINS
def test_a_known_positive_in_the_chain_has_no_weight(case) -> None:
    """The chains hold a known positive: no gradient reaches it, and it never comes back."""
    index = torch.tensor([5, 11])
    known = torch.tensor([[8, 11], [8, 5]])  # nor may the two anchors be each other's
    loss_fn, z_a, z_b, leaves = gradients(case, index, known, hold(8))
    if loss_fn.num_keys is not None:
        return  # a corpus has other positions; test_corpus.py
    forbidden = torch.tensor([5, 8, 11])
    allowed = False
    for ids, leaf in leaves:
        mine = torch.isin(ids // loss_fn.ids_per_item, forbidden)
        assert (leaf.grad[mine] == 0).all()
        allowed |= not mine.all()
    if not allowed:
        assert (z_a.grad == 0).all() and (z_b.grad == 0).all()


@pytest.mark.parametrize("kernel", ["mh", "isir"])
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_known_holds_for_its_row_alone(kernel, views) -> None:
    """Both chains hold 8, which only row 0 knows: row 1 trains on it (MH, if it stays: it does)."""
    index, known = torch.tensor([5, 11]), torch.tensor([[8], [-1]])
    case = (kernel, {"views": views})

    def prepare(loss_fn, table) -> None:
        table[8] = table[11]  # a chain of 11 would not leave it
        hold(8)(loss_fn, table)

    _, _, _, leaves = gradients(case, index, known, prepare)
    assert len(leaves) == (2 if views == "paired" else 1)  # a pass through each encoder
    ids, leaf = leaves[0]
    assert ids.tolist() == [8, 8]
    assert (leaf.grad[0] == 0).all() and (leaf.grad[1] != 0).any()


@pytest.mark.parametrize("loss_class", [InfoNCELoss, DCLLoss, SogCLRLoss])
def test_known_in_the_batch_is_not_mutual(loss_class) -> None:
    """Row 0 names 11, row 1 names nobody: row 0 has no negative left, row 1 has row 0."""
    z = table_of()[[5, 11]]
    z_a, z_b = z.clone().requires_grad_(), z.roll(1, 1).clone()
    loss_fn = loss_class(M, 5.0, views="paired", symmetric=False)
    loss_fn(z_a, z_b, [5, 11], known=[[11], [-1]]).backward()
    assert (z_a.grad[0] == 0).all() and (z_a.grad[1] != 0).any()
    assert loss_fn.info["rows_without_negatives"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "negcache",
        "mh-informed",
        "isir-informed",
        "sogclr-informed",
        "importance",
        "importance-rows",
        "topk",
    ],
)
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_known_positives_are_never_proposed_with_weight(name, views) -> None:
    """The stale table is all but certain about a known positive; it still gets no gradient."""
    index, known = torch.tensor([5, 11]), torch.tensor([[8], [8]])

    def table_loves_8(loss_fn, table):
        for stale in loss_fn.tables:
            stale.embeddings = torch.full((M, DIM), -0.1)
            stale.embeddings[8] = 50.0 * table[5].float()

    _, _, _, leaves = gradients((name, {"views": views}), index, known, table_loves_8)
    for ids, leaf in leaves:
        assert (leaf.grad[ids == 8] == 0).all()
        assert name != "negcache" or not (ids == 8).any()


def test_chain_states_are_negatives_from_the_start() -> None:
    for views in ("shared", "paired"):
        chains = EMC2Loss(1000, views=views).chains
        states = torch.stack([chains.ids(s, torch.arange(1000)) for s in range(len(chains.states))])
        assert (states != torch.arange(1000)).all() and states.min() >= 0 and states.max() < 1000
        counts = torch.bincount(states[0].long() // 100, minlength=10)
        assert counts.min() > 60 and counts.max() < 140
