"""estimator_report: what it says about every method, against gradients known exactly."""

from __future__ import annotations

import math

import pytest
import torch

from negchain import estimator_report, global_loss
from negchain.diagnostics import exact_negative_gradient
from negchain.methods import METHODS


def test_rows_of_all_methods() -> None:
    z = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    seen: list[str] = []
    report = estimator_report(z, batch_size=6, beta=4.0, steps=20, warm_up=5, progress=seen.append)
    assert [row.method for row in report.rows] == list(METHODS) == seen
    for row in report.as_dicts():
        assert all(math.isfinite(v) for k, v in row.items() if k != "method")
        assert row["method"] in str(report)
    assert {row.method: row.state_bytes_per_sample for row in report.rows}["emc2"] <= 8
    with pytest.raises(ValueError, match="methods"):
        estimator_report(z, batch_size=6, beta=4.0, methods=["emc3"])
    with pytest.raises(ValueError, match="batch_size"):
        estimator_report(z, batch_size=41, beta=4.0)
    with pytest.raises(ValueError, match="two views"):
        estimator_report(z[None].repeat(3, 1, 1), batch_size=6, beta=4.0, denominator="all")


def test_no_bias_in_whole_batches() -> None:
    """A batch of the whole data set: DCL's gradient *is* the exact one."""
    z = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for methods, denominator in ((["dcl"], "negatives"), (["infonce"], "all")):
        report = estimator_report(
            z[0], z[1], batch_size=12, beta=4.0, steps=4, warm_up=0, methods=methods,
            denominator=denominator,
        )  # fmt: skip
        for row in report.rows:
            assert row.relative_bias < 1e-10 and abs(row.norm_ratio - 1) < 1e-10


@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_the_exact_gradient_by_autograd(denominator) -> None:
    """Of eq. (1) over two views, its positive term put back."""
    generator = torch.Generator().manual_seed(1)
    z = torch.nn.functional.normalize(
        torch.randn(2, 9, 4, generator=generator, dtype=torch.float64), dim=-1
    ).requires_grad_()
    loss = global_loss(z[0], z[1], 4.0, denominator=denominator, normalize=False)
    (whole,) = torch.autograd.grad(loss, z)
    flat = z.detach().flatten(0, 1)
    logits = 4.0 * flat @ flat.T
    ids = torch.arange(9).repeat(2)
    positive = 4.0 * (z[0] * z[1]).sum(1).detach().repeat(2)
    negatives = logits.masked_fill(ids[:, None] == ids, -math.inf).logsumexp(1)
    pull = torch.sigmoid(negatives - positive) if denominator == "all" else torch.ones(18).double()
    term = 4.0 / 18 * pull[:, None] * flat.roll(9, 0)
    other = 4.0 / 18 * pull.roll(9)[:, None] * flat.roll(9, 0)  # as its partner's positive
    exact = exact_negative_gradient(z.detach(), 4.0, denominator)
    assert (whole - (exact - (term + other).view(2, 9, 4))).abs().max() < 1e-12


@pytest.mark.statistical
@pytest.mark.slow
def test_views_that_differ_show_as_bias() -> None:
    """One chain per item serves all its views: biased if they differ, not if they are equal."""
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.functional.normalize(torch.randn(60, 8, generator=generator), dim=-1)
    noisy = base + 0.25 * torch.randn(2, 60, 8, generator=generator)
    settings = {"batch_size": 8, "beta": 10.0, "steps": 1500, "methods": ["emc2"]}
    equal = estimator_report(base, **settings).rows[0]
    apart = estimator_report(noisy, **settings).rows[0]
    assert equal.relative_bias < 0.1 < apart.relative_bias
