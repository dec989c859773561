"""The exact loss against loops and plain autograd (taxonomy 1 and 2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from negchain import Chunked, DCLLoss, InfoNCELoss, global_loss
from oracles import contrastive_dense, contrastive_loops, unit

SETTINGS = [
    (views, symmetric, denominator)
    for views in ("shared", "paired")
    for symmetric in (True, False)
    for denominator in ("negatives", "all")
]
IDS = [3, 0, 3, 5, 1, 2]
KNOWN = [[5, -1], [-1, -1], [-1, -1], [-1, -1], [2, 0], [-1, -1]]


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
@pytest.mark.parametrize("views, symmetric, denominator", SETTINGS)
def test_value_equals_nested_loops(pair, views, symmetric, denominator, chunk) -> None:
    z_a, z_b = pair
    options = {"views": views, "symmetric": symmetric, "denominator": denominator}
    for ids, known in ((None, None), (IDS, None), (IDS, KNOWN)):
        expected = contrastive_loops(unit(z_a), unit(z_b), 3.7, ids=ids, known=known, **options)
        got = global_loss(
            z_a,
            z_b,
            3.7,
            chunk,
            index=None if ids is None else torch.tensor(ids),
            known=None if known is None else torch.tensor(known),
            **options,
        )
        assert abs(float(got) - expected) < 1e-12


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
@pytest.mark.parametrize("views, symmetric, denominator", SETTINGS)
def test_gradient_equals_autograd(pair, views, symmetric, denominator, chunk) -> None:
    options = {"views": views, "symmetric": symmetric, "denominator": denominator}
    inputs = [*pair, torch.tensor(4.2, dtype=torch.float64)]
    ours = [t.clone().requires_grad_() for t in inputs]
    dense = [t.clone().requires_grad_() for t in inputs]
    got = global_loss(
        ours[0],
        ours[1],
        ours[2],
        chunk,
        index=torch.tensor(IDS),
        known=torch.tensor(KNOWN),
        **options,
    )
    (2.5 * got).backward()
    (2.5 * contrastive_dense(*dense, ids=IDS, known=KNOWN, **options)).backward()
    for a, b in zip(ours, dense, strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-10


@pytest.mark.parametrize("views, symmetric, denominator", SETTINGS)
def test_an_anchor_without_negatives_contributes_nothing(
    pair, views, symmetric, denominator
) -> None:
    """As in a batch of the whole data set: there eq. (1) is the in-batch loss itself."""
    known = torch.tensor([[1, 2, 3, 4, 5], *[[-1] * 5] * 5])
    ours, dense = (pair[0].clone().requires_grad_() for _ in range(2))
    options = {"views": views, "symmetric": symmetric}
    loss_fn = (DCLLoss if denominator == "negatives" else InfoNCELoss)(6, 3.7, **options)
    got = global_loss(ours, pair[1], 3.7, 4, known=known, denominator=denominator, **options)
    with pytest.warns(UserWarning, match="no negatives"):
        expected = loss_fn(dense, pair[1], torch.arange(6), known=known)
    assert torch.isclose(got, expected)
    got.backward()
    expected.backward()
    assert torch.allclose(ours.grad, dense.grad, atol=1e-12)


@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_gradcheck(pair, denominator) -> None:
    beta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    inputs = (pair[0].clone().requires_grad_(), pair[1].clone().requires_grad_(), beta)
    assert torch.autograd.gradcheck(
        lambda a, b, c: global_loss(a, b, c, 4, denominator=denominator), inputs
    )


def test_unnormalised_and_large_beta(pair) -> None:
    z_a, z_b = pair
    plain = global_loss(unit(z_a), unit(z_b), 5.0, normalize=False)
    assert torch.allclose(plain, global_loss(z_a, z_b, 5.0), atol=1e-13)
    assert torch.isfinite(global_loss(z_a.float(), z_b.float(), 100.0))


def test_solved_pairs_stay_precise() -> None:
    """Where a loss is 1e-5, float32 still has five digits of it, and of its gradient."""
    generator, found = torch.Generator().manual_seed(4), []
    z = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    z_b = z + 0.4 * torch.randn(40, 16, generator=generator, dtype=torch.float64)
    for kind in (torch.float64, torch.float32):
        a, b = (one.to(kind).requires_grad_() for one in (z, z_b))
        value = global_loss(a, b, 60.0, denominator="all")
        grads = torch.autograd.grad(value, [a, b])
        found.append([one.detach().double() for one in (value, *grads)])
    assert found[0][0] < 2e-5
    for exact, single in zip(*found, strict=True):
        assert float((single - exact).norm() / exact.norm()) < 1e-4


def _items() -> Tensor:
    return torch.randn(11, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _net(dropout: float) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4)).double()


def test_autocast_changes_nothing(pair) -> None:
    """Products of the encoder's kind would be off by beta / 256: it is the exact loss."""
    z_a, z_b = (z.float().requires_grad_() for z in pair)
    beta, found = torch.tensor(100.0, requires_grad=True), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = global_loss(z_a, z_b, beta)
        found.append([value, *torch.autograd.grad(value, [z_a, z_b, beta])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_backward_through_an_encoder_in_chunks(dropout) -> None:
    data, chunked, at_once = _items(), _net(dropout), _net(dropout)
    torch.manual_seed(5)
    global_loss(*(Chunked(chunked, 4)(x) for x in data.unbind(1)), 3.0, chunk=5).backward()
    torch.manual_seed(5)
    pair = [torch.cat([at_once(part) for part in x.split(4)]) for x in data.unbind(1)]
    contrastive_dense(*pair, 3.0).backward()
    for a, b in zip(chunked.parameters(), at_once.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-10


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"z_b": torch.randn(5, 5)}, "one shape"),
        ({"z_a": torch.randn(1, 5), "z_b": torch.randn(1, 5)}, "M >= 2"),
        ({"z_a": torch.randn(6), "z_b": torch.randn(6)}, "one shape"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.5}, "chunk.*2.5"),
        ({"views": "share"}, "views.*share"),  # one mistyped gave another loss
        ({"denominator": "al"}, "denominator.*al"),
        ({"index": torch.arange(5)}, "index"),
        ({"index": torch.rand(6)}, "index"),
        ({"known": torch.arange(6)}, "known"),
    ],
)
def test_errors(pair, arguments, words) -> None:
    call = {"z_a": pair[0], "z_b": pair[1], "beta": 3.0, **arguments}
    with pytest.raises(ValueError, match=words):
        global_loss(**call)


def test_second_derivatives_are_refused() -> None:
    """They would lack all but the part of the normalisation, silently."""
    z = torch.randn(2, 5, 3, requires_grad=True)
    value = global_loss(z[0], z[1], 5.0)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(value, z, create_graph=True)
    assert torch.autograd.grad(value, z, retain_graph=True)[0].any()
