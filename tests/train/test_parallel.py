"""BatchNorm over ranks: with one rank it is the layer itself (with two: test_torchrun.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import nn

from negchain.chunked import statistics_kept
from negchain.train.parallel import join_norms


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LAYERS = {
    "plain": lambda: nn.BatchNorm2d(3),
    "1d": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(60, momentum=None)),
    "bare": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    "timm": lambda: BatchNormAct2d(3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_layer(name: str, group: None) -> None:
    alone = LAYERS[name]().double()
    joint = copy.deepcopy(alone)
    assert join_norms(joint) == 1
    x = torch.randn(7, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for layer in (alone, joint):
        own = x.clone().requires_grad_()
        for factor in (1.0, 2.0):
            out = layer(factor * own + 1)
        (out**3).sum().backward()
        with statistics_kept(layer):
            layer(5 * own)
        layer.eval()
        grads = [own.grad, *(p.grad for p in layer.parameters())]
        found.append([out, layer(own), *grads, *layer.state_dict().values()])
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-11)
