"""benchmarks/estimate_quality.py: its two bounds are what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import negchain
from negchain.losses import Uniform

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from estimate_quality import ExactLoss, WholeTableLoss  # noqa: E402

M, BETA = 40, 14.28
BATCHES = torch.arange(M).view(8, 5)


def gradients(encoder: torch.nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    encoder.zero_grad()
    sum(losses).backward()
    return [p.grad.clone() for p in encoder.parameters()]


@pytest.mark.parametrize("stale", [False, True])
def test_over_an_epoch_both_have_the_global_gradient(stale: bool) -> None:
    """With an encoder that stands still; a table of another encoder has another gradient."""
    torch.manual_seed(0)
    items, encoder = torch.randn(M, 8).double(), torch.nn.Linear(8, 6).double()
    other = items + 0.3 * torch.randn(M, 8).double()
    expected = gradients(encoder, negchain.global_loss(encoder(items), encoder(other), BETA))
    table = WholeTableLoss(M, BETA, dim=6)
    before = torch.nn.Linear(8, 6).double() if stale else encoder
    for batch in BATCHES.repeat(2, 1):  # the second time log sums are of the whole table
        table(before(items[batch]), before(other[batch]), batch)
    table.eval()
    found = gradients(
        encoder, *(table(encoder(items[b]), encoder(other[b]), b) / 8 for b in BATCHES)
    )
    close = [
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, expected, strict=True)
    ]
    assert close == [not stale] * 2

    exact = ExactLoss(M, BETA, proposals=Uniform(M, alone=True))
    encode = lambda ids: encoder(items[ids])  # noqa: E731
    losses = [exact(encode(b), encode(b), b, encode=encode) / 8 for b in BATCHES]
    same = gradients(encoder, negchain.global_loss(encoder(items), encoder(items), BETA))
    for a, b in zip(gradients(encoder, *losses), same, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
