"""Steps of a run on a GPU, one by one or recorded."""

from __future__ import annotations

import torch

from negchain.optim import set_lr
from negchain.train.trainer import Run


def losses_of(run: Run, graph: bool) -> tuple[list[float], bool]:
    """Losses of six steps, and whether they were a graph."""
    before = torch.cuda.get_rng_state()
    recorded = graph and run.step.try_capture()
    assert torch.equal(torch.cuda.get_rng_state(), before)  # a resumed run drops the same out
    run.step.fill()
    losses = []
    for step in range(6):
        set_lr(run.step.optimizer, 1e-3)
        run.step(step, run.order.batch(step))
        losses.append(run.step.loss.item())
    return losses, recorded
