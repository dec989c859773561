"""LargeBatchEMC2Loss on any device: panels of rows give what the whole batch gives, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from losses_under_test import same_state, snapshot, towers
from torch import Tensor, nn

from negchain import ISIR, MH, EMC2Loss, InBatch, LargeBatchEMC2Loss, rng
from negchain.losses import emc2, large_batch

M, B, DIM, BETA = 17, 11, 5, 6.0
KERNELS = [MH(0.29, count_every=3), MH(), ISIR(), ISIR(count_every=4)]
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=["mh-3", "mh", "isir", "isir-4"])


@pytest.fixture
def small_panels(monkeypatch) -> list[slice]:
    """Panels of three items; the list names the items of every visit."""
    monkeypatch.setattr(large_batch, "PANEL_ELEMENTS", 3 * 2 * B)
    visit, seen = EMC2Loss.visit, []

    def watched(self, call, requests, items=slice(None)):
        seen.append(items)
        return visit(self, call, requests, items)

    monkeypatch.setattr(EMC2Loss, "visit", watched)
    return seen


def build(large: bool, kernel=KERNELS[1], learned: bool = True, **options) -> EMC2Loss:
    beta = nn.Parameter(torch.tensor(BETA, dtype=torch.float64)) if learned else BETA
    return (LargeBatchEMC2Loss if large else EMC2Loss)(M, beta, kernel, seed=5, **options)


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
        inputs = [leaf(B, DIM), leaf(B, DIM)]
        request = loss_fn.request(index)
        answers = [table[want.ids].detach().clone().requires_grad_() for want in request.wants]
        more = torch.stack([(index + 1) % M, torch.full((B,), -1)], 1) if known else None
        value = loss_fn(inputs[0], inputs[1], index, request.answer(answers), known=more)
        inputs += answers
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
        assert info.keys() == other_info.keys()
        for name in info:
            assert info[name] == pytest.approx(other_info[name], abs=1e-10), name


@pytest.mark.parametrize("denominator, known", [("negatives", True), ("all", False)])
@pytest.mark.parametrize("carried", ["encode", "cached"])
@every_kernel
def test_panels_equal_the_whole(small_panels, kernel, carried, denominator, known) -> None:
    options = {"views": "paired", "carried": carried, "denominator": denominator}
    whole = steps(build(False, kernel, **options), known=known)
    assert small_panels == [slice(None)] * 3
    small_panels.clear()
    parts = steps(build(True, kernel, **options), known=known)
    assert small_panels == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)] * 3
    assert_equal_steps(whole, parts)


@every_kernel
def test_panels_of_one_direction(small_panels, kernel) -> None:
    options = {"views": "paired", "symmetric": False, "normalize": False}
    whole, parts = (steps(build(large, kernel, **options)) for large in (False, True))
    assert_equal_steps(whole, parts)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_takes_a_scaled_gradient(small_panels, kind) -> None:
    """A gradient is rounded once, after GradScaler's 65,536 (float16 ends at 65,504)."""
    generator = torch.Generator().manual_seed(3)
    table, z = torch.randn(M, DIM, generator=generator), torch.randn(2, B, DIM, generator=generator)
    index, grads = torch.arange(B), []
    for large in (False, True):
        z_a, z_b = (one.to(kind).requires_grad_() for one in z)
        loss_fn = build(large, ISIR(), learned=False, views="paired")
        value = loss_fn(z_a, z_b, index, encode=towers(loss_fn, lambda ids: table[ids].to(kind)))
        grads += torch.autograd.grad(65536 * value, [z_a, z_b])
    for whole, panels in zip(grads[:2], grads[2:], strict=True):
        assert panels.isfinite().all()
        torch.testing.assert_close(panels, whole, rtol=2 * torch.finfo(kind).eps, atol=1e-2)


@every_kernel
@pytest.mark.parametrize("symmetric", [True, False])
def test_shared_views_have_the_same_gradient(small_panels, kernel, symmetric) -> None:
    """The value counts one copy of every item, the whole batch's counts two: nothing else does."""
    whole = steps(build(False, kernel, symmetric=symmetric, proposals=InBatch()))
    parts = steps(build(True, kernel, symmetric=symmetric))
    for (value, grads, state, _), (other, others, other_state, _) in zip(whole, parts, strict=True):
        for a, b in zip(grads, others, strict=True):
            assert (a - b).abs().max() < 1e-12
        assert same_state(state, other_state)
        assert value != other


# ---------------------------------------------------------------- inputs that share a graph


def gradient_of(large: bool, make, **options) -> Tensor:
    """Gradient with respect to one leaf that everything the loss is given was made from."""
    leaf = torch.randn(M, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    leaf.requires_grad_()
    z_a, z_b, encode = make(leaf)
    loss_fn = build(large, learned=False, **options)
    index = torch.arange(B)
    loss_fn(z_a[index], z_b[index], index, encode=towers(loss_fn, encode(leaf))).backward()
    return leaf.grad


def detached(leaf):
    return lambda ids: leaf.detach()[ids]


def the_same(leaf):
    return lambda ids: leaf[ids]


SHARED = {
    "one tensor twice": lambda x: (x, x, detached),
    "one made from the other": lambda x: (x, torch.tanh(x), detached),
    "one encoder": lambda x: (torch.sin(x), torch.cos(torch.sin(x)), the_same),
    "answers too": lambda x: (x, x.roll(1, 1), the_same),
}


@pytest.mark.parametrize("views", ["shared", "paired"])
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_embeddings_that_share_a_graph(small_panels, make, views) -> None:
    """Neither counted twice nor a graph that was already freed."""
    whole, parts = (gradient_of(large, make, views=views) for large in (False, True))
    assert whole.abs().max() > 0 and (whole - parts).abs().max() < 1e-12


def test_one_tensor_answers_both_directions(small_panels) -> None:
    grads = []
    for large in (False, True):
        loss_fn = build(large, learned=False, views="paired")
        z = torch.randn(3, B, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        z.requires_grad_()
        request = loss_fn.request(torch.arange(B))
        loss_fn(z[0], z[1], torch.arange(B), request.answer([z[2], z[2]])).backward()
        assert request.parts[0].embeddings is not None
        assert request.parts[0].embeddings.grad_fn is not None  # the caller's tensors come back
        grads.append(z.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-12


def test_panels_reach_an_encoder(small_panels) -> None:
    """Gradients flow on through the graph before the loss, twice if asked to."""
    grads = []
    for large in (False, True):
        torch.manual_seed(1)
        net, x = nn.Linear(7, DIM).double(), torch.randn(2, B, 7, dtype=torch.float64)
        items = torch.randn(M, 7, dtype=torch.float64)
        loss_fn = build(large, learned=False, views="paired")
        index = torch.arange(B)
        encode = towers(loss_fn, lambda i, n=net, t=items: n(t[i]))
        value = loss_fn(net(x[0]), net(x[1]), index, encode=encode)
        value.backward(retain_graph=True)
        value.backward()
        grads.append(net.weight.grad)
    assert grads[0].abs().max() > 0 and (grads[0] - grads[1]).abs().max() < 1e-12


# ---------------------------------------------------------------- value and state


@pytest.mark.parametrize("denominator", ["negatives", "all"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_value_with_shared_views(small_panels, symmetric, denominator) -> None:
    """One copy of every other item, scaled up to all negatives; by loops."""
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(2, B, DIM, generator=generator, dtype=torch.float64)
    z = torch.nn.functional.normalize(z, dim=2)
    index = torch.arange(B) + 3
    loss_fn = build(True, carried="cached", symmetric=symmetric, denominator=denominator)
    row = torch.zeros(1, dtype=torch.int64)
    coin = rng.bits(5, torch.tensor(0), rng.FOR_COPY, row, B)[0] % 2 == 0
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
    loss_fn(z[0], z[1], index)
    assert loss_fn.info["global_loss_low"] == pytest.approx(float(torch.stack(values).mean()))


def test_without_gradients(small_panels) -> None:
    loss_fn = build(True, carried="cached", views="paired")
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(2, B, DIM, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        assert not loss_fn(z[0], z[1], torch.arange(B)).requires_grad
    loss_fn.eval()
    before = snapshot(loss_fn)
    values = [loss_fn(z[0], z[1], torch.arange(B)).item() for _ in range(2)]
    assert values[0] == values[1] and same_state(before, snapshot(loss_fn))
    assert len(small_panels) == 12


def test_rows_without_negatives_are_counted_in_every_panel(small_panels) -> None:
    loss_fn = build(True, carried="cached", views="paired")
    z = torch.randn(2, B, DIM, dtype=torch.float64)
    loss_fn(z[0], z[1], torch.full((B,), 4))
    assert loss_fn.info["rows_without_negatives"] == 2 * B


def test_a_refused_batch_changes_nothing(small_panels) -> None:
    loss_fn = build(True, carried="cached")
    before = snapshot(loss_fn)
    z = torch.randn(2, B, DIM, dtype=torch.float64)
    z[0, B - 1, 2] = math.nan  # in the last panel
    with pytest.raises(ValueError, match="finite"):
        loss_fn(z[0], z[1], torch.arange(B))
    with pytest.raises(ValueError, match="index must"):
        loss_fn(z[1], z[1], torch.arange(B) + M - B + 1)
    assert same_state(before, snapshot(loss_fn))


# ---------------------------------------------------------------- planted bugs


def panels_count_the_same(monkeypatch) -> None:
    """Whatever their size."""
    joined = large_batch._joined

    def alike(panels):
        for panel in panels:
            scale = B / len(panels) / len(panel.arrivals[0].slots)
            panel.total = [value * scale for value in panel.total]
        return joined(panels)

    monkeypatch.setattr(large_batch, "_joined", alike)


def only_the_first_panel_is_stored(monkeypatch) -> None:
    joined = large_batch._joined

    def cut(panels):
        whole = joined(panels)
        first = torch.arange(B) < 3
        whole.arrivals = [
            arrival._replace(moved=arrival.moved & first) for arrival in whole.arrivals
        ]
        return whole

    monkeypatch.setattr(large_batch, "_joined", cut)


def every_panel_draws_the_same_numbers(monkeypatch) -> None:
    sampler = emc2.Sampler
    monkeypatch.setattr(
        emc2,
        "Sampler",
        lambda kernel, backend, seed, step, rows, keep: sampler(
            kernel, backend, seed, step, rows - rows[0], keep
        ),
    )


def the_graph_is_not_cut(monkeypatch) -> None:
    """The answers' own graph is differentiated panel by panel."""
    monkeypatch.setattr(large_batch, "_cut_answers", lambda requests, cut: requests)


PLANTED = [
    panels_count_the_same,
    only_the_first_panel_is_stored,
    every_panel_draws_the_same_numbers,
    the_graph_is_not_cut,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(small_panels, monkeypatch, plant) -> None:
    options = {"views": "paired", "denominator": "all"}
    whole = steps(build(False, **options))
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal_steps(whole, steps(build(True, **options)))


def test_a_learned_beta_may_be_frozen_for_a_while() -> None:
    beta = torch.nn.Parameter(torch.tensor(5.0))
    loss_fn, items = LargeBatchEMC2Loss(20, beta), torch.randn(20, 4)
    z = torch.randn(2, 6, 4).requires_grad_()
    for learns in (False, True):
        beta.requires_grad_(learns)
        loss_fn(z[0], z[1], torch.arange(6), encode=lambda ids: items[ids]).backward()
        assert (beta.grad is not None) == learns
    assert torch.isfinite(z.grad).all()
