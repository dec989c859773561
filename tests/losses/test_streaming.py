"""A streaming loss on any device: panels of rows give what the whole batch gives, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from losses_under_test import same_state, snapshot
from torch import Tensor, nn

from negchain import EMC2Loss, draws
from negchain.losses import emc2, panels

M, B, DIM, BETA = 17, 11, 5, 6.0
MH = {"kernel": "mh", "count_every": 3, "burn_in": 0.29}
ISIR = {"kernel": "isir", "count_every": 4}
KERNELS = [MH, {"kernel": "mh"}, {"kernel": "isir"}, ISIR]
both_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=["mh-3", "mh", "isir", "isir-4"])


@pytest.fixture
def small_panels(monkeypatch) -> list[slice]:
    """Panels of three items; the list names the items of every visit."""
    monkeypatch.setattr(panels, "PANEL_ELEMENTS", 3 * 2 * B)
    visit, seen = EMC2Loss.visit, []

    def watched(self, call, items=slice(None)):
        seen.append(items)
        return visit(self, call, items)

    monkeypatch.setattr(EMC2Loss, "visit", watched)
    return seen


def build(stream: bool, learned: bool = True, **options) -> EMC2Loss:
    beta = nn.Parameter(torch.tensor(BETA, dtype=torch.float64)) if learned else BETA
    return EMC2Loss(M, beta, stream=stream, seed=5, **options).double()


def steps(
    loss_fn: EMC2Loss, *, known: bool = False, number: int = 3
) -> list[tuple[Tensor, list[Tensor], dict[str, Tensor], dict[str, float]]]:
    """Value, gradients, state and info of a few steps; some items come twice in a batch."""
    generator = torch.Generator().manual_seed(9)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    table, seen = leaf(60, DIM), []
    for _ in range(number):
        index = torch.randperm(M, generator=generator)[:B]
        index[7], index[8] = index[0], index[3]
        inputs, call = [leaf(B, DIM), leaf(B, DIM)], {}
        if loss_fn.num_keys is not None:
            call["key_index"] = (index * 5) % loss_fn.num_keys
        if known:
            call["known"] = torch.stack([(index + 1) % M, torch.full((B,), -1)], 1)
        if loss_fn.carried_mode == "encode":
            ids = loss_fn.carried(index)
            ids = ids if isinstance(ids, tuple) else (ids,)
            carried = [table[i].detach().clone().requires_grad_() for i in ids]
            call["carried"] = tuple(carried) if len(ids) == 2 else carried[0]
            inputs += carried
        value = loss_fn(inputs[0], inputs[1], index, **call)
        if isinstance(loss_fn.beta, Tensor):
            inputs.append(loss_fn.beta)
        grads = torch.autograd.grad(1.7 * value, inputs)
        seen.append((value.detach(), list(grads), snapshot(loss_fn), loss_fn.info))
    return seen


def assert_equal_steps(whole, parts) -> None:
    for (value, grads, state, info), (other, others, other_state, other_info) in zip(
        whole, parts, strict=True
    ):
        assert abs(value - other) < 1e-12
        for a, b in zip(grads, others, strict=True):
            assert (a - b).abs().max() < 1e-12
        assert state.keys() == other_state.keys()
        for name, tensor in state.items():
            if tensor.is_floating_point():
                assert torch.allclose(tensor, other_state[name], rtol=0, atol=1e-12, equal_nan=True)
            else:
                assert torch.equal(tensor, other_state[name]), name
        for name in ("global_loss", "carried_mass", "dropped_mass", "effective_negatives"):
            assert info[name] == pytest.approx(other_info[name], abs=1e-10), name


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize("carried", ["encode", "cached", "score"])
@both_kernels
def test_panels_equal_the_whole(small_panels, kernel, carried, denominator, known) -> None:
    options = {**kernel, "views": "paired", "carried": carried, "denominator": denominator}
    whole = steps(build(False, **options), known=known)
    assert small_panels == [slice(None)] * 3
    small_panels.clear()
    parts = steps(build(True, **options), known=known)
    assert small_panels == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)] * 3
    assert_equal_steps(whole, parts)


@both_kernels
@pytest.mark.parametrize("options", [{"num_keys": 60}, {"symmetric": False, "normalize": False}])
def test_panels_of_one_direction(small_panels, kernel, options) -> None:
    options = {**kernel, "views": "paired", **options}
    assert_equal_steps(steps(build(False, **options)), steps(build(True, **options)))


@both_kernels
@pytest.mark.parametrize("symmetric", [True, False])
def test_shared_views_have_the_same_gradient(small_panels, kernel, symmetric) -> None:
    """The value counts one copy of every item, the whole batch's counts two: nothing else does."""
    options = {**kernel, "symmetric": symmetric}
    whole, parts = (steps(build(stream, **options)) for stream in (False, True))
    for (value, grads, state, _), (other, others, other_state, _) in zip(whole, parts, strict=True):
        for a, b in zip(grads, others, strict=True):
            assert (a - b).abs().max() < 1e-12
        assert same_state(state, other_state)
        assert value != other


@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_value_with_shared_views(small_panels, symmetric, denominator) -> None:
    """One copy of every other item, scaled up to all negatives; by loops."""
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, B, DIM, generator=generator, dtype=torch.float64)
    z = torch.nn.functional.normalize(z, dim=2)
    index = torch.arange(B) + 3
    loss_fn = build(True, carried="score", symmetric=symmetric, denominator=denominator)
    row = torch.zeros(1, dtype=torch.int64)
    coin = draws.bits(5, torch.tensor(0), draws.STREAM_COPY, row, B)[0] % 2 == 0
    values = []
    for view in range(1 + symmetric):
        for i in range(B):
            similarities = [
                z[(0 if coin[j] else 1) if view == 0 else (1 if coin[j] else 0), j] @ z[view, i]
                for j in range(B)
                if j != i
            ]
            logits = BETA * torch.stack(similarities)
            estimate = torch.logsumexp(logits, 0) + math.log(2 * (M - 1) / (B - 1))
            positive = BETA * z[0, i] @ z[1, i]
            if denominator == "all":
                estimate = torch.logaddexp(estimate, positive)
            values.append(estimate - positive)
    assert abs(loss_fn(z[0], z[1], index) - torch.stack(values).mean()) < 1e-12


def test_panels_reach_an_encoder(small_panels) -> None:
    """Gradients flow on through the graph before the loss, twice if asked to."""
    grads = []
    for stream in (False, True):
        torch.manual_seed(1)
        net, x = nn.Linear(7, DIM).double(), torch.randn(2, B, 7, dtype=torch.float64)
        loss_fn = build(stream, False, views="paired", carried="score")
        value = loss_fn(net(x[0]), net(x[1]), torch.arange(B))
        value.backward(retain_graph=True)
        value.backward()
        grads.append(net.weight.grad)
    assert grads[0].abs().max() > 0 and (grads[0] - grads[1]).abs().max() < 1e-12


def test_without_gradients(small_panels) -> None:
    loss_fn = build(True, carried="cached", views="paired")
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(2, B, DIM, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        first = loss_fn(z[0], z[1], torch.arange(B))
    assert not first.requires_grad
    loss_fn.eval()
    before = snapshot(loss_fn)
    second = loss_fn(z[0], z[1], torch.arange(B))
    assert same_state(before, snapshot(loss_fn))
    assert abs(first - second) < 1e-12  # the value does not depend on the walk
    assert len(small_panels) == 8


def test_a_refused_batch_changes_nothing(small_panels) -> None:
    loss_fn = build(True, carried="score")
    before = snapshot(loss_fn)
    z = torch.randn(2, B, DIM, dtype=torch.float64)
    z[0, B - 1, 2] = math.nan  # in the last panel
    with pytest.raises(ValueError, match="finite"):
        loss_fn(z[0], z[1], torch.arange(B))
    with pytest.raises(ValueError, match="index must"):
        loss_fn(z[1], z[1], torch.arange(B) + M - B + 1)
    assert same_state(before, snapshot(loss_fn))


@pytest.mark.parametrize("options", [{"walk": "sequential"}, {"proposal": "draw"}])
def test_errors(options) -> None:
    with pytest.raises(ValueError, match="stream=True"):
        EMC2Loss(M, BETA, stream=True, **options)


# ---------------------------------------------------------------- planted bugs


def panels_count_the_same(monkeypatch) -> None:
    """Whatever their size."""
    monkeypatch.setattr(panels, "_mean", lambda values, shares: sum(values) / len(values))


def only_the_first_panel_is_stored(monkeypatch) -> None:
    joined = panels._joined

    def cut(parts, shares):
        whole = joined(parts, shares)
        first = torch.arange(B) < 3
        whole.arrivals = [
            (side, chain, arrival._replace(moved=arrival.moved & first))
            for side, chain, arrival in whole.arrivals
        ]
        return whole

    monkeypatch.setattr(panels, "_joined", cut)


def views_of_the_partition_are_mixed_up(monkeypatch) -> None:
    joined = panels._joined

    def mixed(parts, shares):
        whole = joined(parts, shares)
        whole.runnings = [(side, running.flip(0)) for side, running in whole.runnings]
        return whole

    monkeypatch.setattr(panels, "_joined", mixed)


def every_panel_draws_the_same_numbers(monkeypatch) -> None:
    walk_chains = emc2.walk_chains
    monkeypatch.setattr(
        emc2, "walk_chains", lambda *args: walk_chains(*args[:-1], args[-1] - args[-1][0])
    )


PLANTED = [
    panels_count_the_same,
    only_the_first_panel_is_stored,
    views_of_the_partition_are_mixed_up,
    every_panel_draws_the_same_numbers,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(small_panels, monkeypatch, plant) -> None:
    options = {"views": "paired", "denominator": "all"}
    whole = steps(build(False, **options))
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal_steps(whole, steps(build(True, **options)))
