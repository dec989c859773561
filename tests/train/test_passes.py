"""`OverlappedPass` gives the numbers of `PlainPass`, on a CPU to the bit where sums are alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from negchain.encoders import build_encoder
from negchain.fast.layers import residual
from negchain.optim import build_optimizer, load_optimizer
from negchain.train.adam import AdamUpdate
from negchain.train.passes import OverlappedPass, PlainPass

BF16 = torch.bfloat16
KINDS = {"plain": PlainPass, "overlapped": OverlappedPass}
BETAS = tuple(float(np.float32(beta)) for beta in (0.9, 0.999))  # as `AdamUpdate` takes them


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of(z: Tensor) -> Tensor:
    return (z.float() * normal(*z.shape, seed=9).to(z.device)).sum() / len(z)


def one_step(passes: PlainPass, pixels: Tensor) -> Tensor:
    passes.begin()
    z = passes.embed(pixels)
    passes.backward(loss_of(z))
    passes.finish()
    return z.detach()


def captured_adam(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """An Adam whose tensors `OverlappedPass` steps one by one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr = torch.tensor(1e-3, device=parameters[0].device)
    given = {"betas": BETAS, "capturable": True, "fused": True, **settings}
    return torch.optim.Adam(parameters, lr=lr, **given)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        assert actual[name].equal(expected[name]), name


ENCODERS = [
    ("resnet18", "none", 32, "sgd"),
    ("resnet18", "none", 66, "sgd"),
    ("resnet18", "group", 32, "sgd"),
    ("resnet18", "batch", 32, "sgd"),
    ("vit_tiny_patch16_224", "none", 32, "sgd"),
    ("test_nfnet", "none", 32, "sgd"),  # standardises its weights before it convolves
    ("small-cnn", "none", 8, "sgd"),
    ("small-cnn", "none", 8, "adam"),
    ("small-cnn", "none", 8, "lars"),
]


@pytest.mark.parametrize("name, norm, size, optimizer", ENCODERS)
def test_steps_of_an_encoder_to_the_bit(name, norm, size, optimizer) -> None:
    found = []
    for kind in KINDS.values():
        encoder = build_encoder(name, image_size=size, norm=norm)
        stepped = build_optimizer(encoder, optimizer, lr=1e-2)
        passes = kind(encoder, stepped, BF16)
        z = [one_step(passes, normal(3, 3, size, size, seed=step)) for step in range(2)]
        found.append(
            {"first": z[0], "second": z[1], **weights_of(encoder), **dict(encoder.named_buffers())}
        )
        assert not any(p.grad is None for p in encoder.parameters())
    assert_equal(found[1], found[0])
    assert not found[0]["first"].equal(found[0]["second"])


def test_blocks_are_fused_in_the_overlapped_pass(monkeypatch) -> None:
    """The layers see the copies of the weights, not the weights."""
    calls, apply = [], residual.Residuals.apply
    monkeypatch.setattr(
        residual.Residuals, "apply", lambda *given: (calls.append(len(given[1])), apply(*given))[1]
    )
    encoder = build_encoder("resnet18", image_size=32)
    passes = OverlappedPass(encoder, build_optimizer(encoder, "sgd", lr=0.1), BF16)
    one_step(passes, normal(2, 3, 32, 32))
    assert calls == [8]


# ------------------------------------------------------------------------- networks of every kind


class Net(nn.Module):
    """A network of two convolutions and two linear layers; see the functions below."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 6)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.second(torch.relu(self.first(x)))))
        return self.out(torch.relu(self.hidden(x.mean((2, 3)))))


def plain_net() -> nn.Module:
    return Net()


def biased() -> nn.Module:
    net = Net()
    net.second = nn.Conv2d(6, 6, 3, padding=1)
    return net


def tied() -> nn.Module:
    net = Net()
    net.first = nn.Sequential(net.first, nn.Conv2d(6, 6, 3, padding=1, bias=False))
    net.first[1].weight = net.second.weight
    return net


def torchs_own() -> nn.Module:
    """A layer that stays torch's."""
    net = biased()
    net.second.padding = "same"
    return net


def tied_to_torchs_own() -> nn.Module:
    """One use of a weight is a layer of ours, the other torch's."""
    net = tied()
    net.second.padding = "same"
    return net


def frozen() -> nn.Module:
    net = Net()
    net.first.weight.requires_grad_(False)
    net.hidden.bias.requires_grad_(False)
    return net


def with_unused_parameters() -> nn.Module:
    net = Net()
    net.register_module("unused", nn.Linear(3, 3))
    net.register_parameter("alone", nn.Parameter(torch.ones(2)))
    return net


NETS: list[Callable[[], nn.Module]] = [
    plain_net, biased, tied, torchs_own, tied_to_torchs_own, frozen, with_unused_parameters,
]  # fmt: skip
all_nets = pytest.mark.parametrize("make", NETS)


@all_nets
def test_gradients_of_networks(make) -> None:
    """With lr 1 an SGD step is the gradient; two parts of one are added in bf16, not float32."""
    found = []
    for kind in KINDS.values():
        net = make()
        before = weights_of(net)
        trained = [p for p in net.parameters() if p.requires_grad]
        z = one_step(kind(net, torch.optim.SGD(trained, lr=1.0), BF16), normal(3, 3, 8, 8))
        found.append({"z": z.float(), **{n: before[n] - w for n, w in weights_of(net).items()}})
    for name, expected in found[0].items():
        rounding = 2**-8 if "weight" in name and "tied" in make.__name__ else 0.0
        assert (found[1][name] - expected).norm() <= rounding * expected.norm(), name
        unmoved = "unused" in name or name == "alone" or make is frozen and name in (
            "first.weight", "hidden.bias")  # fmt: skip
        assert (expected.norm() == 0) == unmoved, name


class Recorder:
    """Gradients as they are given to an optimizer, early or in its step."""

    def __init__(self, patch: pytest.MonkeyPatch, optimizer: torch.optim.Optimizer) -> None:
        self.given: dict[Tensor, Tensor] = {}
        self.early = 0
        update, step = AdamUpdate.update, optimizer.step

        def updated(adam: AdamUpdate, weight: Tensor, grad: Tensor) -> None:
            assert weight not in self.given and weight.grad is None  # once
            self.given[weight] = grad.float().clone()
            self.early += 1
            update(adam, weight, grad)

        def stepped() -> None:
            for weight in optimizer.param_groups[0]["params"]:
                if weight.grad is not None:
                    assert weight not in self.given
                    self.given[weight] = weight.grad.clone()
            step()

        patch.setattr(AdamUpdate, "update", updated)
        optimizer.step = stepped  # type: ignore[method-assign]


@all_nets
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}], ids=["", "decay"])
def test_early_steps_are_torchs_adam(make, settings, monkeypatch) -> None:
    """Over five steps, fed with the same gradients: weights, moments and counters."""
    net = make()
    optimizer, twin = captured_adam(net, **settings), make()
    others = dict(zip(net.parameters(), twin.parameters(), strict=True))
    reference = captured_adam(twin, foreach=False, fused=False, capturable=False, **settings)
    recorder = Recorder(monkeypatch, optimizer)
    passes = OverlappedPass(net, optimizer, BF16)
    for step in range(5):
        recorder.given.clear()
        recorder.early = 0
        one_step(passes, normal(3, 3, 8, 8, seed=step))
        assert (recorder.early > 0) == (step > 0)
        reference.zero_grad(set_to_none=True)
        for weight, grad in recorder.given.items():
            others[weight].grad = grad
        reference.step()
    for name, weight in net.named_parameters():
        other = others[weight]
        state, expected = optimizer.state[weight], reference.state[other]
        assert list(state) == list(expected), name
        if not expected:
            continue
        assert state["step"] == expected["step"] == 5, name
        assert state["exp_avg"].norm() > 0
        for mine, theirs in ((weight, other), *((state[k], expected[k]) for k in expected)):
            assert (mine - theirs).norm() <= 1e-6 * theirs.norm(), name


@all_nets
def test_an_early_step_changes_what_a_late_one_would(make) -> None:
    """The second step of an Adam that is stepped early against torch's, one step's rounding."""
    nets = {}
    for kind in KINDS:
        net = make()
        passes = KINDS[kind](net, captured_adam(net), BF16)
        for step in range(2):
            one_step(passes, normal(3, 3, 8, 8, seed=step))
        nets[kind] = weights_of(net)
    begun = weights_of(make())
    for name, expected in nets["plain"].items():
        moved = (expected - begun[name]).norm()
        assert (nets["overlapped"][name] - expected).norm() <= 0.02 * moved, name


def test_an_embedding_nobody_uses() -> None:
    """A layer that expected a gradient and got none: its weights still step once per step."""
    net = Net()
    optimizer = captured_adam(net)
    passes = OverlappedPass(net, optimizer, BF16)
    for step in range(3):
        passes.begin()
        z = passes.embed(normal(3, 3, 8, 8, seed=step))
        passes.embed(normal(3, 3, 8, 8))
        passes.backward(loss_of(z))
        passes.finish()
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_the_state_is_torchs() -> None:
    found = []
    for kind in KINDS.values():
        net = with_unused_parameters()
        optimizer = captured_adam(net)
        passes = kind(net, optimizer, BF16)
        for step in range(3):
            one_step(passes, normal(3, 3, 8, 8, seed=step))
        found.append((optimizer.state_dict(), net, passes, optimizer))
    plain, early = found[0][0], found[1][0]
    assert early["param_groups"] == plain["param_groups"]
    assert early["state"].keys() == plain["state"].keys()
    for key, state in plain["state"].items():
        assert {n: (t.dtype, t.shape) for n, t in early["state"][key].items()} == {
            n: (t.dtype, t.shape) for n, t in state.items()
        }
    # a state loaded between two steps is the one that is used
    _, net, passes, optimizer = found[1]
    saved = copy.deepcopy((early, net.state_dict()))
    one_step(passes, normal(3, 3, 8, 8, seed=7))
    once = weights_of(net)
    load_optimizer(optimizer, saved[0])
    net.load_state_dict(saved[1])
    one_step(passes, normal(3, 3, 8, 8, seed=7))
    assert_equal(weights_of(net), once)
