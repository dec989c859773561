"""Losses without chains against the oracle: the gradient of every single batch, no statistics."""

from __future__ import annotations

import numpy as np
import torch
from battery_run import plan_of, play
from battery_settings import Setting

import oracles
from oracles.in_batch import SogCLR, batch_rows


def worst_difference(setting: Setting, steps: int) -> float:
    """Largest difference to the oracle over a few batches, as a share of the largest entry."""
    world, loss_fn, worst = setting.world, setting.build(0), 0.0
    table, generator = world.table.numpy(), torch.Generator().manual_seed(5)
    sogclr = SogCLR(setting.gamma, setting.beta, setting.denominator)
    for step in plan_of(world, setting.batch_size, setting.order, steps, 5):
        leaf, (pick, first, second) = world.table.clone().requires_grad_(), step
        play(loss_fn, world, leaf, step, generator).backward()
        ids, keys = world.pairs[pick].unbind(1)
        known = None if world.known is None else [set(row) for row in world.known[ids].tolist()]
        sides = batch_rows(
            world.views,
            world.address("anchors", ids, first).tolist(),
            world.address("keys", keys, second).tolist(),
            ids.tolist(),
            keys.tolist(),
            known,
            setting.both_ways,
        )
        if setting.loss == "sogclr":
            others = [setting.copies * (len(world.pairs) - 1)] * len(pick)
            if known is not None:
                own = ids.tolist()
                gone = [len(row - {-1, i}) for row, i in zip(known, own, strict=True)]
                others = [n - setting.copies * g for n, g in zip(others, gone, strict=True)]
            expected = sogclr.step(sides, ids.tolist(), table, others)
        else:
            kept = "all" if setting.loss == "infonce" else "negatives"
            parts = [oracles.exact(rows, table, setting.beta, kept).gradient for rows in sides]
            expected = sum(parts[1:], parts[0]) / len(parts)
        got = np.zeros_like(expected) if leaf.grad is None else leaf.grad.numpy()
        scale = max(np.abs(expected).max(), 1e-12)
        worst = max(worst, float(np.abs(got - expected).max() / scale) if expected.any() else 0.0)
    return worst
