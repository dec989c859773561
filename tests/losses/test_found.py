"""What the battery found once: each failure with the smallest call that showed it."""

from __future__ import annotations

import pytest
import torch

from negchain import Draw, EMC2Loss, Given


def test_stored_augmentations_with_one_view_as_anchors() -> None:
    """The request holds a carried state for both views; only the first view's is used."""
    z = torch.randn(20, 3)
    which = (torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long))
    loss_fn = EMC2Loss(10, augmentations=2, symmetric=False)
    index = torch.arange(4)
    loss_fn(z[:4], z[4:8], index, augmentation=which, encode=lambda ids: z[ids])


def test_isir_with_a_held_key_the_batch_never_proposes() -> None:
    """A key counted 0 times has a corrected logit of inf: MH stays there, i-SIR is NaN."""
    queries, keys = torch.randn(4, 3).requires_grad_(), torch.randn(6, 3)
    counts = torch.tensor([1, 1, 1, 1, 0, 0])
    loss_fn = EMC2Loss(4, 5.0, "isir", views="paired", num_keys=6, key_counts=counts)
    loss_fn.chains.states.fill_(5)
    index = torch.arange(4)
    loss_fn(queries, keys[:4], index, key_index=index, encode=lambda ids: keys[ids]).backward()
    assert torch.isfinite(queries.grad).all()


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_an_item_that_stands_twice_in_a_batch_leaves_p_as_it_is(kernel) -> None:
    """Its first row says where the chain goes on, moved or not.

    The first that moved once did: p = 0.756 of the likeliest key became 0.699. 1,000 anchors look
    the same, and each starts at p; false alarms: 2e-6 (4.8 deviations).
    """
    angle = torch.tensor([0.2, 1.6, 2.2, 3.0], dtype=torch.float64)
    keys, count = torch.stack([angle.cos(), angle.sin()], 1), 1000
    p, index = (1.5 * keys[:3, 0]).softmax(0), torch.arange(count).repeat(2)
    loss_fn = EMC2Loss(count, 1.5, kernel, views="paired", num_keys=4, proposals=Given())
    generator, seen = torch.Generator().manual_seed(1), []
    loss_fn.chains.states[0] = torch.multinomial(p, count, True, generator=generator)
    anchors, positive = keys.new_tensor([[1.0, 0.0]]).expand(2 * count, -1), 0 * index + 3
    log_q = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1e-9], dtype=torch.float64).log()
    for _ in range(12):
        ids = torch.randint(3, (2 * count, 1), generator=generator)
        call = {"draw": Draw(ids, log_q), "drawn": keys[ids], "encode": lambda ids: keys[ids]}
        loss_fn(anchors, keys[positive], index, key_index=positive, **call)
        seen.append((loss_fn.held(index[:count])[0] == 0).double())
    share = torch.stack(seen[4:]).mean(0)
    assert abs(share.mean() - p[0]) < 4.8 * share.std() / count**0.5
