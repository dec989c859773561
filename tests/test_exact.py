"""The exact loss against loops and plain autograd (taxonomy 1 and 2)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from negchain import global_backward, global_loss
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


def _items() -> Tensor:
    return torch.randn(11, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _net(dropout: float) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4)).double()


@pytest.mark.parametrize("views, symmetric, denominator", SETTINGS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_backward_through_an_encoder(views, symmetric, denominator, dropout) -> None:
    data, two_pass, at_once = _items(), _net(dropout), _net(dropout)
    options = {"views": views, "symmetric": symmetric, "denominator": denominator}

    def batches():
        for part in data.split(4):
            yield part[:, 0], part[:, 1]

    torch.manual_seed(5)
    loss = global_backward(two_pass, batches, 3.0, chunk=5, **options)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    outputs = [(at_once(a), at_once(b)) for a, b in batches()]
    assert torch.equal(after, torch.get_rng_state()), "the second pass must not draw on the RNG"
    z_a, z_b = (torch.cat(z) for z in zip(*outputs, strict=True))
    whole = contrastive_dense(z_a, z_b, 3.0, **options)
    whole.backward()
    assert not loss.requires_grad
    assert abs(float(loss) - whole.item()) < 1e-12
    for a, b in zip(two_pass.parameters(), at_once.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-10


def test_backward_with_two_encoders_and_accumulation() -> None:
    data, first, second = _items(), _net(0.0), _net(0.0)
    for p in second.parameters():
        p.data.add_(0.1)

    def batches():
        return iter([(data[:, 0], data[:, 1])])

    z_a, z_b = first(data[:, 0]), second(data[:, 1])
    contrastive_dense(z_a, z_b, 3.0, views="paired").backward()
    expected = [2 * p.grad.clone() for net in (first, second) for p in net.parameters()]
    for net in (first, second):
        net.zero_grad()
    for _ in range(2):
        global_backward(first, batches, 3.0, views="paired", key_encoder=second)
    got = [p.grad for net in (first, second) for p in net.parameters()]
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"z_b": torch.randn(5, 5)}, "one shape"),
        ({"z_a": torch.randn(1, 5), "z_b": torch.randn(1, 5)}, "M >= 2"),
        ({"z_a": torch.randn(6), "z_b": torch.randn(6)}, "one shape"),
        ({"chunk": 0}, "chunk"),
        ({"index": torch.arange(5)}, "index"),
        ({"index": torch.rand(6)}, "index"),
        ({"known": torch.arange(6)}, "known"),
    ],
)
def test_errors(pair, arguments, words) -> None:
    call = {"z_a": pair[0], "z_b": pair[1], "beta": 3.0, **arguments}
    with pytest.raises(ValueError, match=words):
        global_loss(**call)


def test_backward_refuses_an_empty_iterator() -> None:
    with pytest.raises(ValueError, match="batches"):
        global_backward(_net(0.0), lambda: iter([]), 3.0)
