"""Every strategy of `accelerate` gives the numbers of "plain"; "blocks" on a CPU to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from negchain.encoders import build_encoder
from negchain.fast import beside, streams
from negchain.fast.encoder import PlainEncoder, accelerate, choose
from negchain.fast.layers import residual
from negchain.optim import build_optimizer

BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of(z: Tensor) -> Tensor:
    return (z.float() * normal(*z.shape, seed=9).to(z.device)).sum() / len(z)


def one_step(fast: PlainEncoder, optimizer: torch.optim.Optimizer, pixels: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    fast.begin()
    z = fast(pixels)
    loss_of(z).backward()
    optimizer.step()
    return z.detach()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        assert actual[name].equal(expected[name]), name


ENCODERS = [
    pytest.param("resnet18", "none", 66, "sgd", marks=pytest.mark.slow),
    ("vit_tiny_patch16_224", "none", 32, "sgd"),
    ("test_nfnet", "none", 32, "sgd"),  # standardises its weights before it convolves
    ("small-cnn", "none", 8, "sgd"),
    ("small-cnn", "none", 8, "adam"),
    ("small-cnn", "none", 8, "lars"),
]


@pytest.mark.parametrize("name, norm, size, optimizer", ENCODERS)
def test_steps_of_an_encoder_to_the_bit(name, norm, size, optimizer) -> None:
    found = []
    for strategy in ("plain", "blocks"):
        encoder = build_encoder(name, image_size=size, norm=norm)
        stepped = build_optimizer(encoder, optimizer, lr=1e-2)
        fast = accelerate(encoder, BF16, strategy)
        z = [one_step(fast, stepped, normal(3, 3, size, size, seed=step)) for step in range(2)]
        found.append(
            {"first": z[0], "second": z[1], **weights_of(encoder), **dict(encoder.named_buffers())}
        )
        assert not any(p.grad is None for p in encoder.parameters())
    assert_equal(found[1], found[0])
    assert not found[0]["first"].equal(found[0]["second"])


@pytest.mark.parametrize("strategy", ["blocks", "compiled"])
def test_several_calls_in_a_step(strategy) -> None:
    """Each has copies of its own: autograd never adds gradients another stream may be computing."""
    found = []
    for kind in ("plain", strategy):
        net = Net()
        fast = accelerate(net, BF16, kind)
        for seed in range(2):  # the second step does not find what the first left
            net.zero_grad()
            fast.begin()
            parts = [fast(normal(3, 3, 8, 8, seed=10 * seed + call)) for call in range(3)]
            loss_of(torch.cat(parts)).backward()
        assert len(getattr(fast, "calls", parts)) == 3
        found.append({name: p.grad for name, p in net.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=0.03, atol=2e-3)


def test_blocks_are_fused(monkeypatch) -> None:
    """The layers see the copies of the weights, not the weights."""
    calls, apply = [], residual.Residuals.apply
    monkeypatch.setattr(
        residual.Residuals, "apply", lambda *given: (calls.append(len(given[1])), apply(*given))[1]
    )
    encoder = build_encoder("resnet18", image_size=16)
    optimizer = build_optimizer(encoder, "sgd", lr=0.1)
    one_step(accelerate(encoder, BF16, "blocks"), optimizer, normal(2, 3, 16, 16))
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


def same_layer_twice() -> nn.Module:
    net = Net()
    net.out = nn.Sequential(net.hidden, net.hidden, net.out)
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


class Scaled(nn.Module):
    """Autocast casts none of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).mean((2, 3))


def nothing_cast() -> nn.Module:
    return Scaled()


NETS: list[Callable[[], nn.Module]] = [
    plain_net, biased, tied, torchs_own, tied_to_torchs_own, frozen, with_unused_parameters,
    nothing_cast,
]  # fmt: skip
all_nets = pytest.mark.parametrize("make", NETS)


@all_nets
def test_gradients_of_networks(make) -> None:
    """With lr 1 an SGD step is the gradient; two parts of one are added in bf16, not float32."""
    found = []
    for strategy in ("plain", "blocks"):
        net = make()
        before = weights_of(net)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)
        z = one_step(accelerate(net, BF16, strategy), optimizer, normal(3, 3, 8, 8))
        found.append({"z": z.float(), **{n: before[n] - w for n, w in weights_of(net).items()}})
    for name, expected in found[0].items():
        rounding = 2**-8 if "weight" in name and "tied" in make.__name__ else 0.0
        assert (found[1][name] - expected).norm() <= rounding * expected.norm(), name
        unmoved = "unused" in name or name == "alone" or make is frozen and name in (
            "first.weight", "hidden.bias")  # fmt: skip
        assert (expected.norm() == 0) == unmoved, name


@pytest.mark.parametrize("strategy", ["blocks", "compiled"])
@pytest.mark.parametrize("make", [tied, same_layer_twice])
def test_the_encoder_keeps_its_weights(make, strategy) -> None:
    net = make()
    before = dict(net.named_parameters())
    fast = accelerate(net, BF16, strategy)
    fast.begin()
    loss_of(fast(normal(3, 3, 8, 8))).backward()
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is weight and weight.grad is not None for name, weight in before.items())


@pytest.mark.slow
def test_compiled_networks(monkeypatch, tmp_path) -> None:
    """Within bf16's rounding of "plain": embeddings, gradients, running statistics."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    moved, move = [], beside.move
    monkeypatch.setattr(beside, "move", lambda *given: moved.append(move(*given)) or moved[-1])
    found = []
    for chosen in ("plain", "compiled"):
        net = biased()
        net.norm = nn.BatchNorm2d(6)
        fast = accelerate(net, BF16, chosen)
        fast.begin()
        z = fast(normal(3, 3, 8, 8))
        loss_of(z).backward()
        gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
        found.append({"z": z.detach().float(), **gradients, **dict(net.named_buffers())})
    assert list(found[1]) == list(found[0])
    for name, expected in found[0].items():
        apart = (found[1][name].double() - expected).norm()
        assert apart <= 0.03 * expected.double().norm(), name
    assert moved == [0, 4]  # of the backward pass four weights, no bias


def test_results_of_a_forward_pass_are_not_moved() -> None:
    """The last product leaves the graph as well, but the loss reads it at once."""
    graph = torch.fx.symbolic_trace(lambda primals_1, w: torch.ops.aten.mm.default(primals_1, w))
    assert beside.move(graph.graph) == 0
    graph = torch.fx.symbolic_trace(lambda tangents_1, x: torch.ops.aten.mm.default(tangents_1, x))
    assert beside.move(graph.graph) == 1


def test_gradients_are_there_before_the_optimizer_steps() -> None:
    """So that an all-reduce can come between."""
    net = plain_net()
    fast = accelerate(net, BF16, "blocks")
    fast.begin()
    loss_of(fast(normal(3, 3, 8, 8))).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_gradients_are_widened_beside(monkeypatch) -> None:
    """The same numbers if some are made float32 as they come, of a weight in two layers as well."""
    for make in (plain_net, tied):
        found = []
        for at_once in (1, 10**9):
            monkeypatch.setattr(streams, "WIDENED_AT_ONCE", at_once)
            net = make()
            fast = accelerate(net, BF16, "blocks")
            fast.begin()
            (loss_of(fast(normal(3, 3, 8, 8))) + loss_of(fast(normal(2, 3, 8, 8)))).backward()
            found.append({name: p.grad for name, p in net.named_parameters()})
        assert_equal(*found)


def test_the_second_backward_pass_of_a_step_adds() -> None:
    found = []
    for times in (1, 2):
        net = plain_net()
        fast = accelerate(net, BF16, "blocks")
        fast.begin()
        for _ in range(times):
            loss_of(fast(normal(3, 3, 8, 8))).backward()
        found.append(net.first.weight.grad)
    torch.testing.assert_close(found[1], 2 * found[0])


def test_a_cpu_takes_the_plain_path() -> None:
    assert choose(build_encoder("resnet18", image_size=32), BF16) == "plain"
    with pytest.raises(ValueError, match="strategy must be one of plain, compile"):
        accelerate(plain_net(), BF16, "fastest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give autocast"):
        accelerate(plain_net(), None, "blocks")


@pytest.mark.parametrize("norm, strategy", [("none", "blocks"), ("batch", "compiled")])
def test_which_strategy_a_gpu_takes(norm, strategy, monkeypatch) -> None:
    monkeypatch.setattr("negchain.fast.encoder.applies", lambda *given: True)
    assert choose(build_encoder("resnet18", image_size=32, norm=norm), BF16) == strategy
