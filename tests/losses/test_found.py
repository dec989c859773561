"""What the battery found and nobody has repaired yet: strict, so that a repair must come here."""

from __future__ import annotations

import pytest
import torch
from battery_settings import Setting
from test_battery import verdict_of

from negchain import EMC2Loss


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="two answers, one view of anchors")
def test_stored_augmentations_with_one_view_as_anchors() -> None:
    """The request holds a carried state for both views; only the first view's is used."""
    z = torch.randn(20, 3)
    which = (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    loss_fn = EMC2Loss(10, augmentations=2, symmetric=False)
    index = torch.arange(4)
    loss_fn(z[:4], z[4:8], index, augmentation=which, encode=lambda ids: z[ids])


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="m_neg exp(beta s) of a draw from p is more than Z"
)
def test_a_row_without_proposals_leaves_the_running_partition_alone() -> None:
    """Its only value is the carried state's, a draw from p: as an estimate of Z far too high."""
    setting = Setting(denominator="all", batch_size=1, beta=8.0)
    world = setting.world
    unit = torch.nn.functional.normalize(world.table, dim=1)
    loss_fn = setting.build(0)
    index = torch.tensor([0])
    loss_fn(unit[index], unit[index], index, encode=lambda ids: unit[ids])
    assert loss_fn.log_partition[0, 0] == -torch.inf


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the same, seen in the gradient: 1 - p+ is too large"
)
def test_the_gradient_of_rows_without_proposals_is_not_too_long() -> None:
    setting = Setting(denominator="all", batch_size=1, partition_rate=1.0)
    verdict = verdict_of(setting, seeds=16, steps=48)
    assert verdict.passes and verdict.length < 1.1, verdict


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="logit - log 0 = inf, softmax NaN")
def test_isir_with_a_held_key_the_batch_never_proposes() -> None:
    """A key counted 0 times has a corrected logit of inf: MH stays there, i-SIR is NaN."""
    queries, keys = torch.randn(4, 3).requires_grad_(), torch.randn(6, 3)
    counts = torch.tensor([1, 1, 1, 1, 0, 0])
    loss_fn = EMC2Loss(4, 5.0, "isir", views="paired", num_keys=6, key_counts=counts)
    loss_fn.chains.states.fill_(5)
    index = torch.arange(4)
    loss_fn(queries, keys[:4], index, key_index=index, encode=lambda ids: keys[ids]).backward()
    assert torch.isfinite(queries.grad).all()
