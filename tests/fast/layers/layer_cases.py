"""The layers' kernels against torch; run as a script it does so without a GPU.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/fast/layers/layer_cases.py
prints {name of a case: [what differed, ...]} as JSON.

Inputs are small integers: float32 sums of them are exact in any order, so results must be equal.
Planted bugs are copies of a kernel's module in which a piece of the source is another.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.resnet import BasicBlock, ResNet

from interpreter import changed, hurry
from negchain.fast.layers import (
    WeightGradients,
    faster_layers,
    few_channels_triton,
    masked_triton,
    max_pool_triton,
)

LAST = torch.channels_last
# side and padding of kernels, by the side of the folded window
WINDOWS = {
    1: [(1, 0), (1, 1), (2, 0), (2, 2)],
    2: [(2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2)],
    4: [(6, 1), (6, 3), (7, 0), (7, 2), (7, 3), (8, 2)],
}
# images, channels, height, width and kernels of a first layer
LAYERS = [(3, 3, 11, 14, 5), (1, 1, 8, 9, 1), (2, 2, 15, 8, 33), (2, 4, 9, 10, 16)]
POOLS = [(3, 2, 1), (2, 2, 0), (3, 1, 1), (1, 1, 0), (2, 3, 1), (5, 2, 2)]  # side, stride, padding
POOLED = [(2, 3, 9, 9), (1, 64, 6, 5), (2, 5, 7, 10)]


def integers(shape: tuple[int, ...], largest: int, seed: int, device: str = "cpu") -> Tensor:
    """[N,C,H,W] from -largest to largest, channels-last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-largest, largest + 1, shape, generator=generator).float()
    return drawn.to(device).contiguous(memory_format=LAST)


def bits_equal(actual: Tensor, expected: Tensor) -> bool:
    """Equal numbers, NaN to NaN."""
    expected = expected.to(actual.dtype)
    return actual.shape == expected.shape and bool(
        ((actual == expected) | (actual.isnan() & expected.isnan())).all()
    )


# ---------------------------------------------------------------------------- a first layer


def layer_cases() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Side, padding, sizes: those of ResNets with all sizes, the others with one."""
    yield from ((3, 1, sizes) for sizes in LAYERS)
    yield from ((7, 3, sizes) for sizes in LAYERS[:2])
    for number, (side, padding) in enumerate(itertools.chain(*WINDOWS.values())):
        if (side, padding) not in ((3, 1), (7, 3)):
            yield side, padding, LAYERS[number % len(LAYERS)]


def differing_layer(
    module: ModuleType,
    side: int,
    padding: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[str]:
    """What of a layer's images and gradient is not torch's."""
    count, channels, height, width, out = sizes
    x = integers((count, channels, height, width), 4, 1, device).to(dtype)
    weight = integers((out, channels, side, side), 3, 2, device).to(dtype)
    reference = weight.double().requires_grad_()
    expected = F.conv2d(x.double(), reference, stride=2, padding=padding)
    grad = integers(tuple(expected.shape), 2, 3, device).to(dtype)
    expected.backward(grad.double())
    y, folded = module.few_channels_forward(x, weight, padding)
    found = module.few_channels_gradient(folded, weight, grad, padding)
    name = f"side {side} padding {padding} sizes {sizes}"
    told = [] if bits_equal(y, expected) else [f"forward: {name}"]
    told += [] if bits_equal(found, reference.grad) else [f"gradient: {name}"]
    told += [] if y.is_contiguous(memory_format=LAST) else [f"layout of y: {name}"]
    told += [] if found.stride() == weight.stride() else [f"layout of the gradient: {name}"]
    return told


def check_few_channels(module: ModuleType = few_channels_triton) -> Iterator[str]:
    for side, padding, sizes in layer_cases():
        yield from differing_layer(module, side, padding, sizes)


def check_many_blocks(module: ModuleType = few_channels_triton) -> Iterator[str]:
    """More blocks than programs, more programs than a sum takes at once, an unfinished block."""
    with (
        mock.patch.object(module, "GRADIENT_PIXELS", 16),
        mock.patch.object(module, "PROGRAMS", 35),
        mock.patch.object(module, "PIXELS", 16),
    ):
        yield from differing_layer(module, 3, 1, (2, 3, 37, 35, 3))


# ---------------------------------------------------------------------------- max-pooling


def pooled_images(shape: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    """Many ties, ties of everything, less than the zeros around, NaN, infinity."""
    few, mask = integers(shape, 2, 4, device), integers(shape, 5, 5, device)
    return {
        "few numbers": few,
        "all equal": torch.zeros_like(few),
        "negative": few - 9,
        "nan": torch.where(mask == 0, math.nan, few),
        "infinite": torch.where(mask == 0, math.inf, few),
    }


def differing_pool(
    module: ModuleType, x: Tensor, window: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> list[str]:
    """What of a pool's images and gradient is not torch's."""
    x = x.to(dtype)
    reference = x.float().contiguous().requires_grad_()
    expected = F.max_pool2d(reference, *window)
    grad = integers(tuple(expected.shape), 3, 6, str(x.device)).to(dtype)
    expected.backward(grad.float())
    y, winner = module.max_pool_forward(x, *window)
    found = module.max_pool_backward(grad, winner, x.shape, *window)
    told = [] if bits_equal(y, expected) else ["forward"]
    told += [] if bits_equal(found, reference.grad) else ["backward"]
    layouts = all(t.is_contiguous(memory_format=LAST) for t in (y, winner, found))
    return told if layouts else [*told, "layout"]


def check_max_pool(module: ModuleType = max_pool_triton) -> Iterator[str]:
    first = [(POOLED[0], window) for window in POOLS]
    for shape, window in (*first, *itertools.product(POOLED[1:], POOLS[:3])):
        for name, x in pooled_images(shape).items():
            for what in differing_pool(module, x, window):
                yield f"{what}: {window} of {shape}, {name}"


def check_small_blocks(module: ModuleType = max_pool_triton) -> Iterator[str]:
    """Several programs, the last one unfinished; more channels than a program's numbers."""
    with (
        mock.patch.object(module, "NUMBERS", 64),
        mock.patch.object(module, "GRADIENT_NUMBERS", 32),
    ):
        for shape in ((2, 5, 7, 9), (1, 70, 3, 3)):
            x = pooled_images(shape)["few numbers"]
            yield from (f"{what}: {shape}" for what in differing_pool(module, x, (3, 2, 1)))


# ---------------------------------------------------------------------------- below a ReLU


def check_masked(module: ModuleType = masked_triton, device: str = "cpu") -> Iterator[str]:
    """One block and several; one pixel per image, where pooled gradients look like others."""
    for shape in ((2, 3, 5, 4), (3, 70, 6, 5), (3, 5, 1, 1), (1, 1, 2, 1)):
        rectified = integers(shape, 2, 8, device).relu()
        grad, added = integers(shape, 5, 9, device), integers(shape, 5, 10, device)
        pooled = integers((*shape[:2], 1, 1), 5, 11, device)
        for given in ((grad, None), (grad, added), (pooled, None), (pooled, added)):
            for first in (given[0], given[0].contiguous()):
                expected = torch.where(
                    rectified > 0, first if given[1] is None else first + given[1], 0.0
                )
                found = module.masked_triton(first, rectified, given[1])
                if not bits_equal(found, expected) or found.stride() != rectified.stride():
                    yield f"{shape}, {tuple(first.shape)}, added: {given[1] is not None}"


# ---------------------------------------------------------------------------- all together


def check_encoder() -> Iterator[str]:
    """A ResNet takes all kernels; embeddings and gradients to float32's rounding."""
    torch.manual_seed(0)
    plain = ResNet(BasicBlock, [1, 1, 1, 1], 10, norm_layer=torch.nn.Identity)
    plain = plain.to(memory_format=LAST)
    fast = copy.deepcopy(plain)
    x = integers((2, 3, 33, 33), 4, 7) / 4
    z = plain(x)
    grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    z.backward(grad)
    gradients, called = WeightGradients(None), []
    with (
        mock.patch("negchain.fast.backends.prefers_triton", lambda like: True),
        _counting(few_channels_triton, "few_channels_forward", called),
        _counting(few_channels_triton, "few_channels_gradient", called),
        _counting(max_pool_triton, "max_pool_forward", called),
        _counting(max_pool_triton, "max_pool_backward", called),
        _counting(masked_triton, "masked_triton", called),
        faster_layers(fast, set(fast.parameters()), gradients),
    ):
        again = fast(x)
        again.backward(grad)
    found = gradients.join()
    below_relus = 8  # two in each of the four blocks
    expected = ["few_channels_forward", "max_pool_forward", *["masked_triton"] * below_relus]
    expected += ["max_pool_backward", "few_channels_gradient"]
    if called != expected:
        yield f"called: {called}"
    pairs = {"embeddings": (again, z)}
    for (name, old), new in zip(plain.named_parameters(), fast.parameters(), strict=True):
        pairs[name] = (found[new], old.grad)
    far = {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
    yield from (f"{name}: {value:.1e}" for name, value in far.items() if value > 1e-5)


@contextlib.contextmanager
def _counting(module: ModuleType, name: str, called: list[str]) -> Iterator[None]:
    real = getattr(module, name)

    def counted(*args: Any) -> Any:
        called.append(name)
        return real(*args)

    with mock.patch.object(module, name, counted):
        yield


# ---------------------------------------------------------------------------- planted bugs

PLANTED: dict[str, tuple[ModuleType, str, str, Callable[[ModuleType], Iterator[str]]]] = {
    f"{module.__name__.split('.')[-1]}: {name}": (module, old, new, check)
    for module, check, bugs in (
        (
            few_channels_triton,
            check_few_channels,
            {
                "shifted by two pixels": ("(row - MARGIN)[:, None] * 2", "row[:, None] * 2"),
                "shifted by one pixel": ("(corner % 2)[None, :]", "((corner + 1) % 2)[None, :]"),
                "kernels one row too low": ("corner // 2 - SHIFT,", "corner // 2,"),
                "margin one too small": ("(padding + shift) // 2", "padding // 2"),
                "wraps at the right side": ("(x < width) & (y >= 0)", "(y >= 0)"),
                "channels in the wrong order": ("channel % C)[None, :]", "channel // 4)[None, :]"),
                "rows of the kernel": ("tap + row * F * FOLDED", "tap"),
                "gradient without shift": ("element // (K * C) + SHIFT", "element // (K * C)"),
            },
        ),
        (
            few_channels_triton,
            check_many_blocks,
            {
                "one block per program": ("tl.num_programs(0)):", "num_pixels):"),
                "one chunk of programs": ("range(0, programs, CHUNK)", "range(0, CHUNK, CHUNK)"),
            },
        ),
        (
            max_pool_triton,
            check_max_pool,
            {
                "the last of equals wins": ("x > best", "x >= best"),
                "NaN never wins": (" | (x != x)", ""),
                "padding counts as zero": ('other=float("-inf")', "other=0.0"),
                "a window too few": ("WINDOWS=triton.cdiv(size, stride)", "WINDOWS=size // stride"),
                "windows beside the pixel": ("inside &= (down < K) & (right < K)", "pass"),
                "rows and columns": ("(down * K + right)", "(right * K + down)"),
            },
        ),
        (
            masked_triton,
            check_masked,
            {
                "zero lets through": ("where(rectified > 0", "where(rectified >= 0"),
                "added afterwards": ("if ADDED:", "if False:"),
                "another pixel's channel": ("at % channels", "at // 2 % channels"),
            },
        ),
    )
    for name, (old, new) in bugs.items()
}


def planted() -> dict[str, list[str]]:
    """The first thing the comparison says about planted bugs."""
    found = {}
    for name, (module, old, new, check) in PLANTED.items():
        with changed(module, old, new) as other:
            found[name] = list(itertools.islice(check(other), 1))
    return found


def main() -> None:
    """Check everything and print what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hurry()
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = list(check())
        except Exception:
            found[check.__name__] = [traceback.format_exc()]
    print(json.dumps(found | {f"planted: {name}": told for name, told in planted().items()}))


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    check_few_channels,
    check_many_blocks,
    check_max_pool,
    check_small_blocks,
    check_masked,
    check_encoder,
)

if __name__ == "__main__":
    main()
