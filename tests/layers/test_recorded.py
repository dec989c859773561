"""A pass recorded over all images and made again over some; the kernels' part is `layer_cases`."""

from __future__ import annotations

import copy

import pytest
import torch
from recorded_cases import MOVES
from test_layers import normal, small_resnet
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from negchain.encoders import build_encoder
from negchain.fast.layers import FasterLayers, Recorded, WeightGradients, is_fused
from negchain.fast.layers.recorded import move_rows


@pytest.mark.parametrize("first, source", MOVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
def test_rows_are_moved_in_place(first, source, dtype) -> None:
    drawn = (normal(first + 6, 4, 5, 3) * 100).to(torch.int64) % 256
    last = drawn.to(dtype).contiguous(memory_format=torch.channels_last)
    tensors = [last, drawn[:, 0, 0].to(dtype), drawn[:, 0, 0, 0].to(dtype).clone()]
    places = [tensor.data_ptr() for tensor in tensors]
    rows = [[row.clone() for row in tensor] for tensor in tensors]
    move_rows(tensors, first, torch.tensor(source))
    for tensor, place, old in zip(tensors, places, rows, strict=True):
        assert tensor.data_ptr() == place
        wanted = [*old[:first], *(old[first + row] for row in source)]
        wanted += old[len(wanted) :]  # the others are as they were
        assert tensor.equal(torch.stack(wanted))


def recorded_network(
    kind: type[nn.Module],
) -> tuple[nn.Module, Recorded, FasterLayers, WeightGradients]:
    """A network in float64, behind it linear layers and ReLUs, that has scored nine images."""
    network = small_resnet(kind).double()
    network.maxpool = nn.MaxPool2d(3, 2, 1)  # torch's on a CPU: computed again
    network.fc = nn.Sequential(nn.Linear(network.fc.in_features, 9), nn.ReLU(), nn.Linear(9, 5))
    network.double()
    recorded, gradients = Recorded(normal(9, 3, 9, 9).double()), WeightGradients(None)
    return network, recorded, FasterLayers(
        network, set(network.parameters()), gradients, recorded), gradients  # fmt: skip


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("first, source", MOVES)
def test_gradients_are_those_of_the_kept_images(kind, first, source) -> None:
    """In float64, to its rounding: the sums over images are in the same order."""
    network, recorded, layers, gradients = recorded_network(kind)
    twin, chosen = copy.deepcopy(network), torch.tensor(source)
    images = recorded.images[: first + 6].clone()
    recorded.images = images.clone()
    with torch.no_grad(), layers:
        scored = network(recorded.images)
    assert scored.allclose(twin(images), rtol=1e-12)
    kept = recorded.keep(first, chosen)
    assert kept.equal(torch.cat([images[:first], images[first + chosen]]))
    with layers:
        z = network(kept)
    recorded.end()
    grad = normal(*z.shape, seed=3).double()
    z.backward(grad)
    expected = twin(kept.clone())
    expected.backward(grad)
    found = gradients.join()
    assert z.allclose(expected, rtol=1e-12)
    for (name, weight), other in zip(network.named_parameters(), twin.parameters(), strict=True):
        assert weight.grad is None
        assert (found[weight] - other.grad).norm() <= 1e-12 * other.grad.norm(), name


def test_a_result_changed_in_place_is_refused() -> None:
    recorded = Recorded(torch.ones(4, 2))
    first, second = recorded.result(lambda: (torch.ones(4, 2), torch.ones(4)))
    recorded.result(lambda: (first + 1,))
    second.zero_()
    with pytest.raises(AssertionError, match="changed in place"):
        recorded.keep(1, torch.tensor([0]))


def test_results_have_a_row_for_every_image() -> None:
    with pytest.raises(AssertionError):
        Recorded(torch.ones(4, 2)).result(lambda: (torch.ones(3),))


def test_a_second_pass_that_asks_for_less_is_refused() -> None:
    recorded = Recorded(torch.ones(4, 2))
    for value in (1.0, 2.0):
        recorded.result(lambda value=value: (torch.full((4,), value),))
    recorded.keep(1, torch.tensor([0]))
    assert recorded.result(tuple)[0].tolist() == [1.0, 1.0]
    with pytest.raises(AssertionError, match="more than they asked for"):
        recorded.end()
    assert recorded.result(tuple)[0].tolist() == [2.0, 2.0]
    recorded.end()


def _tanh(encoder: nn.Module) -> None:
    encoder.projector = nn.Sequential(encoder.projector, nn.Tanh())


def _leaky(encoder: nn.Module) -> None:
    encoder.backbone.layer2[0].relu = nn.LeakyReLU()


def _hook(encoder: nn.Module) -> None:
    encoder.backbone.layer2[0].conv1.register_forward_hook(lambda *given: None)


def _hook_of_the_stem(encoder: nn.Module) -> None:
    encoder.backbone.conv1.register_forward_hook(lambda *given: None)


class Centred(nn.Sequential):
    """Looks at the other images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def _centred(encoder: nn.Module) -> None:
    encoder.projector = Centred(encoder.projector)


def _two_networks(encoder: nn.Module) -> None:
    encoder.projector = nn.Sequential(small_resnet(BasicBlock), encoder.projector)


def _dropout(encoder: nn.Module) -> None:
    encoder.backbone.fc.append(nn.Dropout(0.1))


CHANGES = [_tanh, _leaky, _hook, _hook_of_the_stem, _centred, _two_networks, _dropout]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_fused_encoder(change) -> None:
    """`test_passes` has the encoders that `build_encoder` makes."""
    encoder = build_encoder("resnet18", image_size=32)
    assert is_fused(encoder.backbone, encoder.projector)
    change(encoder)
    assert not is_fused(encoder.backbone, encoder.projector)
