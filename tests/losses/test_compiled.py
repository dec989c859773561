"""A training step through `torch.compile`: encoder, loss and backward pass.

A graph keeps tensors of its forward pass for the backward pass, the loss's state among them. A loss
changes its state in place in between. So losses stay out of graphs.

All of it happens in forked processes: what torch.compile starts in one forbids autograd in its
forks, and other tests fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._dynamo.utils import counters

import negchain
from forked import fork_ranks

pytestmark = [  # the compiler's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]
M, B = 40, 8
LOSSES: dict[str, Callable[..., Any]] = {
    "mh": negchain.EMC2Loss,
    "isir": lambda *size: negchain.EMC2Loss(*size, kernel="isir"),
    "cached": lambda *size: negchain.EMC2Loss(*size, carried="cached"),
    "infonce": negchain.InfoNCELoss,
    "sogclr": negchain.SogCLRLoss,
    "importance": negchain.ImportanceLoss,
}


class Numbers(nn.Module):
    """An encoder whose gradient depends on which ids it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(M, 6)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.net(self.table(ids))
        return found


def train(name: str, backend: str | None, asks: bool) -> list[Tensor]:
    """Value, gradient and state after each of some steps."""
    torch.manual_seed(1)
    encoder, loss_fn, noise = Numbers(), LOSSES[name](M, 5.0), 0.1 * torch.randn(B, 8)
    loss_fn.fill(encoder)

    def step(index: Tensor) -> Tensor:
        z = encoder(index)
        if asks:
            first, second = loss_fn.request(index), loss_fn.request(index, z, z + noise)
            first.answer(encoder(first.ids))
            second.answer(encoder(second.ids))
            loss = loss_fn(z, z + noise, index, first, second)
        else:
            loss = loss_fn(z, z + noise, index, encode=lambda ids: encoder(ids))
        loss.backward()
        return loss.detach()

    call = step if backend is None else torch.compile(step, backend=backend)
    found: list[Tensor] = []
    for _ in range(4):
        encoder.zero_grad()
        found += [call(torch.randperm(M)[:B])]
        found += [p.grad for p in encoder.parameters() if p.grad is not None]
        found += [state.clone() for state in loss_fn.state_dict().values()]
        found += [torch.tensor(list(loss_fn.info.values()))]
    return found


def compare(_rank: int, name: str, backend: str, asks: bool) -> None:
    counters.clear()
    for mine, plain in zip(train(name, backend, asks), train(name, None, asks), strict=True):
        assert torch.allclose(mine, plain, atol=1e-6, equal_nan=True)  # NaN: not cached yet
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.parametrize("name", ["mh", "sogclr"])
def test_a_step_traced_is_the_step(name) -> None:
    fork_ranks(1, compare, name, "aot_eager_decomp_partition", False)


@pytest.mark.slow  # a compiler's start, and C++ of every kernel
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("asks", [False, True])
def test_a_compiled_step_is_the_step(name, asks) -> None:
    # Not forked: the compiler's threads, where a test before has used it, would not be there.
    mp.spawn(compare, (name, "inductor", asks))


def look_into_graphs(_rank: int, name: str) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    encoder = torch.compile(nn.Linear(6, 8), backend=backend)
    loss_fn, items = LOSSES[name](M, 5.0), torch.randn(M, 6)
    call = torch.compile(loss_fn, backend=backend)
    for size in (B, B + 1, B + 2):
        index = torch.randperm(M)[:size]
        z = torch.randn(2, size, 8, requires_grad=True)
        call(z[0], z[1], index, encode=lambda ids: encoder(items[ids])).backward()
    assert set(seen) <= {"<built-in function linear>"}
    assert bool(seen) == (len(loss_fn.request(index).ids) > 0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_in_no_graph(name) -> None:
    """Neither whole nor in pieces; an encoder that is compiled stays so inside `encode`."""
    fork_ranks(1, look_into_graphs, name)
