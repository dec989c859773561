"""benchmarks/estimate_quality.py: its two bounds are what they say."""

from __future__ import annotations

import statistics
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import negchain
from negchain.losses import Uniform
from negchain.reproduce.common import read_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from estimate_quality import ExactLoss, WholeTableLoss  # noqa: E402

M, BETA = 40, 14.28
KEYS = ("global_loss", "probe", "knn20")
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


def test_the_page_says_what_the_record_does() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "better_estimate.md").read_text(encoding="utf-8")
    lines = page[page.index("| minus DCL | encodes beyond") :].split("\n\n")[0].splitlines()[2:]
    names = ("infonce", "emc2, both", "isir, both", "draws-16", "draws-64", "draws-256",
             "whole-table", "exact")  # fmt: skip
    rows = read_rows(root / "records" / "2026-11-18_estimate-quality_cpu.jsonl")
    ends = {(r["job"]["case"], r["job"]["b"], r["job"]["seed"]): r["curve"][-1] for r in rows}
    assert len(ends) == 2 * 3 * (1 + len(names))
    for case, line in zip(names, lines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
        for cell, (b, key) in zip(cells, product((8, 32), KEYS), strict=True):
            gaps = [ends[case, b, s][key] - ends["dcl", b, s][key] for s in range(3)]
            said, error = (float(n.replace("−", "-")) for n in cell.split(" ± "))
            assert said == pytest.approx(statistics.mean(gaps), abs=6e-4)
            assert error == pytest.approx(statistics.stdev(gaps) / 3**0.5, abs=6e-4)
