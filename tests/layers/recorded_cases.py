"""Moving rows, and an encoder's backward pass over some images, with kernels; see `layer_cases`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from torchvision.models.resnet import BasicBlock, ResNet

from negchain.fast.layers import (
    FasterLayers,
    Recorded,
    WeightGradients,
    few_channels_triton,
    max_pool_triton,
    recorded_triton,
)

LAST = torch.channels_last
# rows that stay before, and the images that are wanted of 6 behind them
MOVES = [
    (3, [4, 1, 5]),
    (3, [3, 5, 4]),  # all are moved
    (3, [0, 1, 2]),  # none
    (0, [5, 1]),
    (0, [5]),
    (1, [0, 1, 2, 3, 4, 5]),
]


def rows_of_every_kind(
    count: int, width: int, device: str = "cpu"
) -> Iterator[tuple[torch.dtype, Tensor]]:
    """`width` numbers in a row, or about: of two and four dimensions, channels-last."""
    for dtype in (torch.bfloat16, torch.uint8, torch.float32):
        for shape in ((count, width), (count, 3, 2, -(-width // 6)), (count, width, 1, 1)):
            drawn = torch.randint(256, shape, generator=torch.Generator().manual_seed(width))
            rows = drawn.to(dtype).to(device)
            yield dtype, rows.contiguous(memory_format=LAST) if len(shape) == 4 else rows


def differing_move(
    module: ModuleType, tensors: list[Tensor], first: int, source: list[int]
) -> list[int]:
    """Which tensors are not as indexing has them; also those that should not change at all."""
    chosen = torch.tensor(source, device=tensors[0].device)
    expected = [tensor.clone() for tensor in tensors]
    for old, new in zip(tensors, expected, strict=True):
        for place, row in enumerate(source):
            new[first + place] = old[first + row]
    module.move_rows_triton(tensors, first, chosen)
    return [i for i, (a, b) in enumerate(zip(tensors, expected, strict=True)) if not a.equal(b)]


def check_move_rows(module: ModuleType = recorded_triton, device: str = "cpu") -> Iterator[str]:
    """Rows shorter than a block, of a block, of all programs' blocks, and a number more."""
    with mock.patch.object(module, "BLOCK", 8), mock.patch.object(module, "PARTS", 2):
        for first, source in MOVES:
            widths = (1, 7, 8, 16, 17, 37) if source == MOVES[0][1] else (19,)
            tensors = [t for w in widths for _, t in rows_of_every_kind(first + 6, w, device)]
            for which in differing_move(module, tensors, first, source):
                yield f"{source} after {first}: tensor {which}, {tensors[which].shape}"


KERNELS = (
    (few_channels_triton, "few_channels_forward"),
    (max_pool_triton, "max_pool_forward"),
    (recorded_triton, "move_rows_triton"),
)


def check_recorded_encoder() -> Iterator[str]:
    """A backward pass over some images: no kernel is run again, gradients as over these alone."""
    torch.manual_seed(0)
    plain = ResNet(BasicBlock, [1, 1, 1, 1], 10, norm_layer=torch.nn.Identity)
    plain = plain.to(memory_format=LAST)
    fast, gradients = copy.deepcopy(plain), WeightGradients(None)
    x = torch.randn(5, 3, 17, 17).contiguous(memory_format=LAST)
    first, source = 1, torch.tensor([3, 1])
    kept = torch.cat([x[:first], x[first + source]]).contiguous(memory_format=LAST)
    scored, z = plain(x).detach(), plain(kept)
    grad = torch.randn(z.shape)
    z.backward(grad)
    recorded = Recorded(x)
    layers = FasterLayers(fast, set(fast.parameters()), gradients, recorded)
    with contextlib.ExitStack() as patches:
        patches.enter_context(
            mock.patch("negchain.fast.backends.prefers_triton", lambda like: True)
        )
        calls = [
            patches.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in KERNELS
        ]
        with torch.no_grad(), layers:
            embeddings = fast(x).clone()
        again = recorded.keep(first, source)
        with layers:
            chosen = fast(again)
        recorded.end()
        chosen.backward(grad)
    found = gradients.join()
    if any(call.call_count != 1 for call in calls):
        yield f"calls: {[call.call_count for call in calls]}"
    pairs = {"all": (embeddings, scored), "some": (chosen, z), "images": (again, kept)}
    for (name, old), new in zip(plain.named_parameters(), fast.parameters(), strict=True):
        pairs[name] = (found[new], old.grad)
    far = {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
    yield from (f"{name}: {value:.1e}" for name, value in far.items() if not value <= 1e-5)
