"""An encoder in chunks: the gradient of the same chunks with everything kept, in less memory."""

from __future__ import annotations

import copy
import sys
import weakref
from pathlib import Path

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
    random = nn.Sequential(net, nn.Dropout(0.3))
    whole = gradients(name, Kept(copy.deepcopy(random)), items)
    parts = gradients(name, Chunked(copy.deepcopy(random), SIZE), items)
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
    random = nn.Sequential(net, nn.Dropout(0.3))
    whole = gradients("infonce-paired", Kept(copy.deepcopy(random)), items)
    monkeypatch.setattr("negchain.chunked.checkpoint", forgetful)
    parts = gradients("infonce-paired", Chunked(random, SIZE), items)
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
