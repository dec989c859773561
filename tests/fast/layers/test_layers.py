"""Inside `faster_layers` an encoder gives the embeddings and gradients it gives outside.

Without a GPU the kernels run under Triton's interpreter, in one process of its own; see
`layer_cases` for the cases.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from interpreter import interpreted
from negchain.encoders import build_encoder
from negchain.fast.layers import WeightGradients, faster_layers, residual

ENCODERS = [
    ("resnet18", "none", 32),
    ("resnet18", "none", 65),
    ("resnet50", "none", 16),
    ("small-cnn", "none", 8),
    ("convnext_atto", "none", 32),
    ("vit_tiny_patch16_224", "none", 32),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(
    encoder: nn.Module,
    x: Tensor,
    fast: bool,
    weights: Iterable[Tensor] | None = None,
    stream: torch.cuda.Stream | None = None,
) -> dict[str, Tensor]:
    """Embeddings and all gradients; those of `weights` (None: all) come another way if `fast`."""
    gradients, x = WeightGradients(stream), x.clone().requires_grad_(not x.is_cuda)
    encoder.zero_grad(set_to_none=True)
    named = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    taken = set(named.values() if weights is None else weights)
    with faster_layers(encoder, taken, gradients) if fast else contextlib.nullcontext():
        z = encoder(x)
    z.backward(normal(*z.shape, seed=1).to(z))
    found = gradients.join()
    assert not any(weight in found and weight.grad is not None for weight in named.values())
    given = {name: found.get(weight, weight.grad) for name, weight in named.items()}
    images = {} if x.grad is None else {"x": x.grad}
    return {"z": z.detach(), **images, **given}  # type: ignore[dict-item]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, reference in expected.items():
        # mostly to the bit; a sum's order may depend on where a tensor lies in memory
        far = (actual[name] - reference).norm() / reference.norm().clamp(min=1e-12)
        assert far < 1e-6, (name, float(far))


def assert_alike(make: nn.Module, x: Tensor, weights: Iterable[Tensor] | None = None) -> None:
    """The module inside the context and a copy of it outside give the same."""
    assert_same(results(make, x, True, weights), results(copy.deepcopy(make), x, False))


def assert_untouched(encoder: nn.Module) -> None:
    assert not any("forward" in vars(module) for module in encoder.modules())


@pytest.mark.parametrize("name, norm, size", ENCODERS)
def test_encoders(name: str, norm: str, size: int) -> None:
    encoder = build_encoder(name, image_size=size, norm=norm)
    twin, x = copy.deepcopy(encoder), normal(3, 3, size, size)
    assert_same(results(encoder, x, True), results(twin, x, False))
    for mine, theirs in zip(encoder.buffers(), twin.buffers(), strict=True):
        assert mine.equal(theirs)  # running statistics
    assert_untouched(encoder)
    with torch.no_grad():
        assert encoder.eval()(x).equal(twin.eval()(x))


def test_which_gradients_take_the_other_way() -> None:
    encoder = build_encoder("resnet18", image_size=32, norm="group")
    results(encoder, normal(2, 3, 32, 32), True)
    for name, module in encoder.named_modules():
        for weight in module.parameters(recurse=False):
            assert isinstance(module, nn.Linear) == (weight.grad is None), name


# ------------------------------------------------------------------------- which blocks are fused


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, bool]]]:
    """Of each fused network the blocks: number of layers, and whether one of them downsamples."""
    calls, apply = [], residual.Residuals.apply

    def counted(x, blocks, gradients, *weights):
        calls.append([(len(block.layers), block.down is not None) for block in blocks])
        return apply(x, blocks, gradients, *weights)

    monkeypatch.setattr(residual.Residuals, "apply", counted)
    return calls


@pytest.mark.parametrize(
    "name, size, layers, blocks, down", [("resnet18", 32, 2, 8, 3), ("resnet50", 16, 3, 16, 4)]
)
def test_blocks_without_normalisation_are_fused(fused, name, size, layers, blocks, down) -> None:
    x = normal(2, 3, size, size)
    for norm in ("group", "batch", "none"):
        encoder = build_encoder(name, image_size=size, norm=norm)
        with (
            torch.no_grad(),
            faster_layers(encoder, set(encoder.parameters()), WeightGradients(None)),
        ):
            encoder(x)
        assert len(fused) == (norm == "none")
    assert Counter(fused[0]) == {(layers, True): down, (layers, False): blocks - down}


def small_resnet(kind: type[nn.Module]) -> ResNet:
    torch.manual_seed(0)
    network = ResNet(kind, [2, 1, 1, 1], 10, norm_layer=nn.Identity)
    network.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    network.maxpool = nn.Identity()
    return network


both_kinds = pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])


@both_kinds
def test_the_gradient_of_blocks_by_differences(kind) -> None:
    """Not autograd's word: float64 and finite differences, in a direction of all weights."""
    network, x = small_resnet(kind).double(), normal(2, 3, 9, 9).double()
    grad, gradients = normal(2, 10, seed=3).double(), WeightGradients(None)
    with faster_layers(network, set(network.parameters()), gradients):
        network(x).backward(grad)
    found = gradients.join()
    for name, weight in network.named_parameters():
        step = normal(*weight.shape, seed=4).double() * 1e-8
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                weight += sign * step
                values.append((network(x) * grad).sum())
            weight += step
        slope, expected = (values[0] - values[1]) / 2, (found.get(weight, weight.grad) * step).sum()
        assert torch.isclose(expected, slope, rtol=1e-4, atol=1e-12), name


def _bias(block: nn.Module) -> None:
    block.conv2.bias = nn.Parameter(normal(len(block.conv2.weight)))


def _padding(block: nn.Module) -> None:
    block.conv2.padding_mode = "circular"
    block.conv2._reversed_padding_repeated_twice = [1, 1, 1, 1]


def _same_padding(block: nn.Module) -> None:
    block.conv2.padding, block.conv2.stride = "same", (1, 1)
    block.conv2._reversed_padding_repeated_twice = [1, 1, 1, 1]


def _norm(block: nn.Module) -> None:
    block.bn2 = nn.GroupNorm(4, len(block.conv2.weight))


def _activation(block: nn.Module) -> None:
    block.relu = nn.LeakyReLU()


def _own_forward(block: nn.Module) -> None:
    kind = type(block)
    block.__class__ = type("Halved", (kind,), {"forward": lambda b, x: kind.forward(b, x) / 2})


def _hook(block: nn.Module) -> None:
    block.conv1.register_forward_hook(lambda *given: given[2] * 2)


def _frozen(block: nn.Module) -> None:
    block.conv1.weight.requires_grad_(False)


def _own_convolution(block: nn.Module) -> None:
    kind = nn.Conv2d
    block.conv1.__class__ = type("Half", (kind,), {"forward": lambda c, x: kind.forward(c, x) / 2})


def _long_shortcut(block: nn.Module) -> None:
    block.downsample = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())


def _backward_hook(block: nn.Module) -> None:
    block.register_full_backward_hook(lambda *given: None)


@pytest.mark.parametrize(
    "change",
    [
        _bias, _padding, _same_padding, _norm, _activation, _own_forward, _hook, _frozen,
        _own_convolution, _long_shortcut, _backward_hook,
    ],
)  # fmt: skip
def test_other_networks_are_left_alone(fused, change) -> None:
    network = small_resnet(BasicBlock)
    change(network.layer1[1])
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    assert_alike(network, normal(2, 3, 9, 9), trained)
    assert fused == []


class _Halved(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class _HalfPooled(nn.AdaptiveAvgPool2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize(
    "part, changed",
    [
        ("layer1", lambda stage: _Halved(*stage)),
        ("layer1", lambda stage: nn.Tanh()),
        ("layer4", lambda stage: nn.Conv2d(256, 512, 1, stride=2, bias=False)),
        ("avgpool", lambda pool: _HalfPooled(1)),
        ("_forward_impl", lambda run: lambda x: run(x) / 2),
    ],
)
def test_a_network_with_another_part_is_left_alone(fused, part, changed) -> None:
    network = small_resnet(BasicBlock)
    setattr(network, part, changed(getattr(network, part)))
    with faster_layers(network, set(network.parameters()), WeightGradients(None)):
        z = network(normal(2, 3, 9, 9))
    assert z.equal(network(normal(2, 3, 9, 9)))
    assert fused == []


def test_a_block_twice_in_a_stage_runs_twice(fused) -> None:
    network = small_resnet(BasicBlock)
    network.layer1 = nn.Sequential(network.layer1[0], network.layer1[0])
    assert_alike(network, normal(2, 3, 9, 9))
    assert [len(blocks) for blocks in fused] == [5]


class _FirstStages(nn.Module):
    """Half of a network, stage by stage: its own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_resnet(BasicBlock)

    def forward(self, x: Tensor) -> Tensor:
        return self.network.layer2(self.network.layer1(self.network.conv1(x))).mean((2, 3))


def test_stages_called_by_themselves_are_torchs(fused) -> None:
    encoder, x = _FirstStages(), normal(2, 3, 9, 9)
    with faster_layers(encoder, set(encoder.parameters()), WeightGradients(None)):
        z = encoder(x)
    assert z.equal(encoder(x)) and fused == []


@both_kinds
def test_a_network_that_pools_otherwise_is_left_alone(fused, kind) -> None:
    network = small_resnet(kind)
    assert_alike(network, normal(2, 3, 9, 9))
    assert len(fused) == 1
    network.avgpool = nn.AdaptiveMaxPool2d(1)
    assert_alike(network, normal(2, 3, 9, 9))
    network.avgpool, network.fc = nn.AdaptiveAvgPool2d((2, 1)), nn.Identity()
    assert_alike(network, normal(2, 3, 9, 9))
    assert len(fused) == 1


def test_the_encoder_is_as_it_was_after_an_error() -> None:
    encoder = build_encoder("resnet18", image_size=32)
    given = set(encoder.parameters())
    with pytest.raises(RuntimeError), faster_layers(encoder, given, WeightGradients(None)):
        encoder(normal(1, 4, 32, 32))  # four channels
    assert_untouched(encoder)
    layer = nn.Linear(3, 3)
    layer(normal(2, 3)).sum().backward()  # nobody answers any more
    assert layer.weight.grad is not None


# ---------------------------------------------------------------------------------- the gradients


class Tied(nn.Module):
    """One kernel and one matrix, each used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(x))
        z = x.mean((2, 3))
        for _ in range(3):
            z = torch.tanh(self.linear(z))
        return z


def test_a_weight_used_in_several_layers_gets_the_sum() -> None:
    torch.manual_seed(0)
    module, x = Tied(), normal(2, 4, 6, 6)
    actual, expected = results(module, x, True), results(copy.deepcopy(module), x, False)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-7)
    assert expected["conv.weight"].norm() > 1e-3 and expected["linear.bias"].norm() > 1e-3


def test_without_gradients() -> None:
    encoder = build_encoder("resnet18", image_size=32)
    x, gradients = normal(2, 3, 32, 32), WeightGradients(None)
    with torch.no_grad(), faster_layers(encoder, set(encoder.parameters()), gradients):
        z = encoder(x)
    assert z.equal(encoder(x)) and not z.requires_grad and gradients.join() == {}


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(7, 7), small_resnet(BasicBlock)],
    ids=["linear", "blocks"],
)
def test_second_derivatives_are_refused(layer) -> None:
    x = normal(2, 3, 7, 7).requires_grad_()
    with faster_layers(layer, set(layer.parameters()), WeightGradients(None)):
        y = layer(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_layers_of_every_size() -> None:
    """Strides, dilation, groups, more than two dimensions; what is not ours goes to torch."""
    torch.manual_seed(0)
    for settings in (
        {"stride": 2, "padding": (2, 1)},
        {"dilation": (1, 2), "padding": 1},
        {"groups": 4, "stride": (1, 3)},
        {"padding": "same"},
        {"padding": 1, "padding_mode": "circular"},
        {"bias": True},
    ):
        layer = nn.Conv2d(8, 4, 3, **{"bias": False, **settings})
        assert_alike(layer, normal(2, 8, 11, 9))
    assert_alike(nn.Conv1d(8, 4, 3, bias=False), normal(2, 8, 9))
    for shape in ((5, 6), (2, 5, 6), (2, 3, 4, 6)):
        assert_alike(nn.Linear(6, 3), normal(*shape))
        assert_alike(nn.Linear(6, 3, bias=False), normal(*shape))
        frozen = nn.Linear(6, 3)
        assert_alike(frozen, normal(*shape), [frozen.weight])
    assert_alike(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.MaxPool2d(2)), normal(2, 3, 9, 9))


# ----------------------------------------------------------------------- under the interpreter


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        interpreted(Path(__file__).with_name("layer_cases.py"))
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["few_channels", "many_blocks", "max_pool", "small_blocks", "masked", "encoder"],
)  # fmt: skip
def test_kernels_give_torchs_numbers(told, name) -> None:
    assert told[f"check_{name}"] == []


@pytest.mark.slow
def test_planted_bugs_are_caught(told) -> None:
    planted = {name: found for name, found in told.items() if name.startswith("planted")}
    assert len(planted) == 19 and all(planted.values()), planted
