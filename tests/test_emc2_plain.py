"""The file that is EMC² and nothing else equals the library's loss."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import negchain
from negchain import EMC2Loss
from negchain.emc2_plain import PlainEMC2


@pytest.mark.parametrize(("batch_size", "beta"), [(1, 5.0), (2, 5.0), (7, 14.28), (16, 50.0)])
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
    assert moved > 0 or batch_size == 1  # the comparison was of chains that do something


def test_a_call_on_a_cpu_stays_within_twelve_files_and_1450_lines() -> None:
    """What docs/design.md draws under "Reading EMC² on a CPU", and nothing else."""
    root, found, lines = Path(negchain.__file__).parent, set(), {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            found.add(str(path.relative_to(root)))
            if not frame.f_code.co_name.startswith("<"):  # lines of those are its function's
                lines[frame.f_code] = len(inspect.getsourcelines(frame.f_code)[0])

    items, encoder, index = torch.randn(50, 3), torch.nn.Linear(3, 8), torch.tensor([4, 7, 9])
    kept = sys.getprofile()
    sys.setprofile(note)
    try:
        loss_fn = EMC2Loss(50)
        encode = lambda ids: encoder(items[ids])  # noqa: E731
        loss_fn(encode(index), encode(index), index, encode=encode).backward()
    finally:
        sys.setprofile(kept)
    page = (root.parents[1] / "docs/design.md").read_text()
    drawn = page.split("### Reading EMC² on a CPU")[1].split("```")[1]
    assert found == set(re.findall(r"[\w/]+\.py", drawn)) and len(found) == 12
    assert sum(lines.values()) < 1450  # of the functions that were called, with their docstrings
