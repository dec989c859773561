"""The layers on a CUDA device: kernels in bf16 at a ResNet's sizes, encoders on two streams."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from layer_cases import (  # noqa: E402
    check_masked,
    differing_layer,
    differing_pool,
    pooled_images,
)
from test_layers import assert_untouched, normal, results  # noqa: E402

from negchain.encoders import build_encoder  # noqa: E402
from negchain.fast.layers import (  # noqa: E402
    few_channels_triton,
    max_pool_triton,
)
from negchain.fast.layers.few_channels_triton import (  # noqa: E402
    few_channels_forward,
    few_channels_gradient,
)

pytestmark = pytest.mark.gpu
# images, channels, height, width and kernels of a ResNet's first layer
FIRST_LAYERS = [(64, 3, 96, 96, 64), (8, 3, 224, 224, 64), (7, 1, 97, 95, 64), (5, 4, 65, 96, 128)]


@pytest.mark.parametrize("sizes", FIRST_LAYERS)
def test_gpu_first_layers(sizes) -> None:
    """Of integers, whose sums are exact in float32: the results are the exact ones, rounded."""
    for side, padding in ((7, 3), (3, 1), (4, 2), (2, 0)):
        found = differing_layer(few_channels_triton, side, padding, sizes, torch.bfloat16, "cuda")
        assert found == []


def test_gpu_first_layer_of_real_numbers() -> None:
    """bf16: half a unit in the last place of the result is 2^-9 of it; float32 sums add less."""
    x, weight = (
        normal(64, 3, 96, 96).bfloat16().cuda(),
        normal(64, 3, 7, 7, seed=1).bfloat16().cuda(),
    )
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    reference = weight.double().requires_grad_()
    expected = nn.functional.conv2d(x.double(), reference, stride=2, padding=3)
    y, folded = few_channels_forward(x, weight, 3)
    grad = normal(*y.shape, seed=2).bfloat16().cuda().contiguous(memory_format=torch.channels_last)
    expected.backward(grad.double())
    found = few_channels_gradient(folded, weight, grad, 3)
    for actual, exact in ((y, expected.detach()), (found, reference.grad)):
        scale = float(exact.std()) * 1e-4
        torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("shape", [(64, 64, 48, 48), (3, 70, 57, 31), (2, 2048, 9, 9)])
def test_gpu_max_pool(shape, window, dtype) -> None:
    for name, x in pooled_images(shape, "cuda").items():
        assert differing_pool(max_pool_triton, x, window, dtype) == [], name


def test_gpu_masked() -> None:
    assert list(check_masked(device="cuda")) == []


@pytest.mark.parametrize("side", [True, False], ids=["own stream", "same stream"])
@pytest.mark.parametrize("norm", ["none"])
@pytest.mark.parametrize("name, count", [("resnet18", 32), ("resnet50", 16)])
def test_gpu_encoders_in_bf16(name, count, norm, side) -> None:
    """As far from float64 as torch's layers in bf16 are, times 1.5 (a weight's gradient: twice)."""
    exact = build_encoder(name, norm=norm).cuda().double()
    x = normal(count, 3, 96, 96).bfloat16().cuda().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for weight in exact.parameters():
            weight.copy_(weight.bfloat16())
    plain = copy.deepcopy(exact).bfloat16().to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    expected = results(exact, x.double(), False)
    usual = results(plain, x, False)
    actual = results(fast, x, True, stream=torch.cuda.Stream() if side else None)
    torch.cuda.synchronize()
    assert list(actual) == list(expected)
    for key, reference in expected.items():
        mine, theirs = (
            float((found[key].double() - reference).norm() / reference.norm())
            for found in (actual, usual)
        )
        assert mine <= (1.5 if key == "z" else 2.0) * theirs + 1e-3, (key, mine, theirs)
    assert_untouched(fast)
