"""What the battery found once: each failure with the smallest call that showed it."""

from __future__ import annotations

import torch
from battery_settings import Setting

from negchain import EMC2Loss


def test_stored_augmentations_with_one_view_as_anchors() -> None:
    """The request holds a carried state for both views; only the first view's is used."""
    z = torch.randn(20, 3)
    which = (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    loss_fn = EMC2Loss(10, augmentations=2, symmetric=False)
    index = torch.arange(4)
    loss_fn(z[:4], z[4:8], index, augmentation=which, encode=lambda ids: z[ids])


def test_a_row_without_proposals_leaves_the_running_partition_alone() -> None:
    """Its only value is the carried state's, a draw from p: as an estimate of Z far too high."""
    setting = Setting(denominator="all", batch_size=1, beta=8.0)
    world = setting.world
    unit = torch.nn.functional.normalize(world.table, dim=1)
    loss_fn = setting.build(0)
    index = torch.tensor([0])
    loss_fn(unit[index], unit[index], index, encode=lambda ids: unit[ids])
    assert loss_fn.log_partition[0, 0] == -torch.inf


def test_isir_with_a_held_key_the_batch_never_proposes() -> None:
    """A key counted 0 times has a corrected logit of inf: MH stays there, i-SIR is NaN."""
    queries, keys = torch.randn(4, 3).requires_grad_(), torch.randn(6, 3)
    counts = torch.tensor([1, 1, 1, 1, 0, 0])
    loss_fn = EMC2Loss(4, 5.0, "isir", views="paired", num_keys=6, key_counts=counts)
    loss_fn.chains.states.fill_(5)
    index = torch.arange(4)
    loss_fn(queries, keys[:4], index, key_index=index, encode=lambda ids: keys[ids]).backward()
    assert torch.isfinite(queries.grad).all()
