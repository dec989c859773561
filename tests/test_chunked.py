"""An encoder in chunks: the gradient of the same chunks with everything kept, in less memory."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from negchain import Chunked, InfoNCELoss

sys.path.append(str(Path(__file__).parent / "losses"))
import losses_under_test as under_test  # noqa: E402

CASES = {
    under_test.case_name(case): case
    for case in under_test.battery()
    if case[1].get("denominator", "all") == "all"
}
SIZE = 3


class Kept(nn.Module):
    """The same chunks with all activations kept."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.encoder(part) for part in x.split(SIZE)])


def gradients(name: str, net: nn.Module, items: Tensor) -> list[Tensor]:
    method, options = CASES[name]
    beta = nn.Parameter(torch.tensor(5.0))
    loss_fn = under_test.METHODS[method].build(beta, **options)
    torch.manual_seed(7)
    for index in (torch.arange(8), torch.arange(4, 12)):
        under_test.run(loss_fn, net, items, index).backward()
    assert beta.grad is not None
    return [*(p.grad for p in net.parameters() if p.grad is not None), beta.grad]


@pytest.mark.parametrize("name", CASES)
def test_every_loss_has_its_gradient(name: str) -> None:
    net, items = under_test.data()
    dropping = nn.Sequential(net, nn.Dropout(0.3))
    whole = gradients(name, Kept(copy.deepcopy(dropping)), items)
    parts = gradients(name, Chunked(copy.deepcopy(dropping), SIZE), items)
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", CASES)
def test_without_dropout_it_is_the_gradient_of_the_whole_batch(name: str) -> None:
    net, items = under_test.data()
    whole = gradients(name, copy.deepcopy(net), items)
    for mine, theirs in zip(gradients(name, Chunked(net, SIZE), items), whole, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_other_random_numbers_in_the_replay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: dropout's masks are not restored."""
    from torch.utils.checkpoint import checkpoint

    def forgetful(function: nn.Module, *args: Tensor, **options: object) -> object:
        return checkpoint(function, *args, **options, preserve_rng_state=False)  # type: ignore[arg-type]

    net, items = under_test.data()
    dropping = nn.Sequential(net, nn.Dropout(0.3))
    whole = gradients("infonce-paired", Kept(copy.deepcopy(dropping)), items)
    monkeypatch.setattr("negchain.chunked.checkpoint", forgetful)
    parts = gradients("infonce-paired", Chunked(dropping, SIZE), items)
    assert not torch.allclose(parts[0], whole[0])


def test_running_statistics_are_counted_once() -> None:
    def trained(wrap: type[nn.Module], *size: int) -> nn.Module:
        torch.manual_seed(0)
        net = wrap(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), *size)
        x = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
        InfoNCELoss()(net(x), net(x + 0.1)).backward()
        return net

    mine, theirs = trained(Chunked, SIZE), trained(Kept)
    for (name, a), (_, b) in zip(mine.named_buffers(), theirs.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class PythonNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.5, 1.5)


class NumpyMask(nn.Module):
    """As wav2vec 2.0 masks its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy((np.random.rand(*x.shape) > 0.4).astype(np.float32))


class Centred(nn.Module):
    """Minus a running mean, which this pass has moved; times a running scale, in place."""

    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.scale.mul_(0.9).add_(0.1 * x.detach().std(0))
        return (x - self.mean) * self.scale.clone()


UNKIND = {
    "batch norm": lambda: [nn.BatchNorm1d(6, momentum=None)],
    "instance norm": lambda: [
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ],
    "running mean": lambda: [Centred()],
    "spectral norm": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))],
    "Python's random": lambda: [PythonNoise()],
    "numpy's random": lambda: [NumpyMask()],
}  # fmt: skip


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("kind", UNKIND)
def test_both_passes_find_the_same(kind: str, retain: bool) -> None:
    """Gradients, buffers, and the random numbers that come next; also where a graph is retained."""

    def trained(wrap: type[nn.Module], *size: int) -> list[Tensor]:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        net = wrap(nn.Sequential(nn.Linear(7, 6), *UNKIND[kind](), nn.Linear(6, 5)), *size)
        x = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            value = InfoNCELoss()(net(x), net(x + 0.1))
            if retain:
                value.backward(retain_graph=True)
            value.backward()
        after = torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])
        return [*net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None), after]

    for mine, theirs in zip(trained(Chunked, SIZE), trained(Kept), strict=True):
        torch.testing.assert_close(mine, theirs)


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor
    power: Tensor


def test_named_tuples_and_numbers_as_inputs() -> None:
    class Taking(nn.Module):
        def forward(self, given: Pair) -> Tensor:
            return (given.x * given.scale[:, None]) ** given.power

    given = Pair(torch.randn(5, 3), torch.rand(5), torch.tensor(2.0))
    torch.testing.assert_close(Chunked(Taking(), 2)(given), Taking()(given))
    with pytest.raises(ValueError, match="B = 5 rows each, got \\(4,\\)"):
        Chunked(Taking(), 2)(given._replace(scale=torch.rand(4)))


class Counting(nn.Module):
    """An encoder that knows how many rows of its activations are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0
        self.net = nn.Linear(4, 4)

    def _gone(self, rows: int) -> None:
        self.alive -= rows

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x).exp()
        self.alive += len(hidden)
        self.most = max(self.most, self.alive)
        weakref.finalize(hidden.untyped_storage(), self._gone, len(hidden))
        return hidden * hidden


@pytest.mark.parametrize("nested", [False, True])
def test_memory_is_that_of_a_chunk(nested: bool) -> None:
    class Taking(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x["pixels"] if isinstance(x, dict) else x)

    inner = Taking()
    x = torch.randn(64, 4)
    z = Chunked(inner, 8)({"pixels": x} if nested else x)
    InfoNCELoss()(z, z + 0.1).backward()
    assert inner.most <= 16
    plain = Counting()
    z = plain(x)
    InfoNCELoss()(z, z + 0.1).backward()
    assert plain.most == 64


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Chunked(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="needs a tensor"):
        Chunked(nn.Linear(2, 2), 4)("text")
