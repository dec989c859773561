"""The file that is EMC² and nothing else equals the library's loss."""

from __future__ import annotations

import pytest
import torch

from negchain import EMC2Loss
from negchain.emc2_plain import PlainEMC2


@pytest.mark.parametrize(("batch_size", "beta"), [(2, 5.0), (7, 14.28), (16, 50.0)])
def test_gradients_and_chains_are_the_library_s(batch_size: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    plain, loss_fn = PlainEMC2(40, beta, seed=3), EMC2Loss(40, beta, seed=3)
    items = torch.randn(3, 40, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    moved = 0
    for _ in range(12):
        index = torch.randperm(40, generator=generator)[:batch_size]
        index[5:] = index.roll(5)[5:]  # some stand there twice
        (held,) = loss_fn.held(index)
        assert torch.equal(plain.carried(index), held)
        z_a, z_b, z_carried = (items[0][index], items[1][index], items[2][held])
        ours = plain(z_a @ weight, z_b @ weight, index, z_carried @ weight)
        theirs = loss_fn(
            z_a @ weight, z_b @ weight, index, encode=lambda ids: items[2][ids] @ weight
        )
        expected, found = (torch.autograd.grad(value, weight)[0] for value in (theirs, ours))
        assert torch.allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
        moved += int((plain.carried(index) != held).sum())
    assert torch.equal(plain.states, loss_fn.held(torch.arange(40))[0])
    assert moved > 0  # the comparison was of chains that do something
