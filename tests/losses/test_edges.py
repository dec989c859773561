"""EMC² where little is left: burn-ins as long as a row's walk, rows without negatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from negchain import ISIR, MH, Draw, EMC2Loss, Given, InfoNCELoss

INDEX = torch.arange(8)


def gradient(kernel: MH, index: Tensor = INDEX) -> tuple[Tensor, dict[str, float]]:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2, 8, 6, generator=generator).requires_grad_()
    loss_fn = EMC2Loss(40, 5.0, kernel, views="paired", symmetric=False, carried="cached")
    loss_fn(z[0], z[1], index)
    value = loss_fn(z[1], z[0], index)
    return torch.autograd.grad(value, z)[0], loss_fn.info


def test_a_burn_in_in_steps_goes_with_thinned_counting() -> None:
    steps, share = gradient(MH(4, count_every=3)), gradient(MH(0.5, count_every=3))
    assert torch.equal(steps[0], share[0])
    assert not torch.equal(steps[0], gradient(MH(6, count_every=3))[0])


@pytest.mark.parametrize("every", [1, 3])
def test_a_burn_in_of_all_steps_of_a_row_leaves_the_final_state(every) -> None:
    """Rows of the repeated item have 4 or 5 steps, the others 7, of which the last counts."""
    index = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    assert gradient(MH(6, every), index)[1]["effective_negatives"] == pytest.approx(1.0)


@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_a_row_without_negatives_has_no_loss(denominator) -> None:
    """All rows are one item, and no embedding of a carried state is known yet."""
    loss_fn = EMC2Loss(9, 5.0, carried="cached", denominator=denominator)
    z = torch.randn(2, 3, 4, requires_grad=True)
    value = loss_fn(z[0], z[1], torch.tensor([2, 2, 2]))
    info = loss_fn.info
    names = ("global_loss", "global_loss_low", "global_loss_high")
    assert value == 0 and [info[name] for name in names] == [0, 0, 0]
    assert info["rows_without_negatives"] == 6
    assert not torch.autograd.grad(value, z)[0].any()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_draws_nobody_asked_for_are_refused(backend) -> None:
    z = torch.randn(2, 8, 4)
    with pytest.raises(ValueError, match="Given"):
        InfoNCELoss(40, backend=backend)(z[0], z[1], INDEX, draw=Draw(INDEX), drawn=z[0])


@pytest.mark.parametrize("kernel", [MH(), MH(count_every=3), ISIR()])
@pytest.mark.parametrize("shape", [(0,), (8, 0)])
def test_a_draw_of_nothing_leaves_the_carried_state(shape, kernel) -> None:
    """Shared by all rows or private to each; the latter had no shape to be brought into."""
    loss_fn, z = EMC2Loss(40, 5.0, kernel, proposals=Given()), torch.randn(40, 6)
    draw, drawn = Draw(torch.zeros(shape, dtype=torch.int64)), torch.zeros(*shape, 6)
    held = loss_fn.held(INDEX)[0]
    loss_fn(z[:8], z[:8], INDEX, draw=draw, drawn=drawn, encode=lambda ids: z[ids])
    assert loss_fn.info["carried_mass"] == 1 and torch.equal(loss_fn.held(INDEX)[0], held)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("shape", [(6,), (8, 2)])
def test_draws_of_any_integers(shape, kind) -> None:
    """torch takes uint8 positions for a mask: they are those of int64."""
    ids, z = torch.randint(40, shape, dtype=torch.int64), torch.randn(40, 6)
    log_q, found = torch.randn(40).log_softmax(0), []
    for mine in (ids, ids.to(kind)):
        loss_fn = EMC2Loss(40, 5.0, proposals=Given(alone=False))
        more = {"draw": Draw(mine, log_q), "drawn": z[ids], "encode": lambda ids: z[ids]}
        found.append((loss_fn(z[:8], z[8:16], INDEX, **more), loss_fn.held(INDEX)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_batch_of_one_saturates_too_little() -> None:
    """Chain at p, every state listed: the mean of 1 - p+ from the carried state alone."""
    z = torch.nn.functional.normalize(
        torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1
    )
    settings = {"views": "paired", "symmetric": False, "denominator": "all", "normalize": False}
    loss_fn, logits = EMC2Loss(12, 8.0, **settings).eval(), 8.0 * z[1:] @ z[0]
    positive, pulls = z[:1].clone().requires_grad_(), []
    for state in range(1, 12):
        loss_fn.chains.states[0, 0] = state
        value = loss_fn(z[:1], positive, [0], encode=lambda ids: z[ids])
        (gradient,) = torch.autograd.grad(value, positive)
        pulls.append(-float(gradient[0] @ z[0]) / 8.0)
    exact = float(torch.sigmoid(logits.logsumexp(0) - 8.0))
    assert float(logits.softmax(0) @ torch.tensor(pulls).double()) > 1.5 * exact > 0
