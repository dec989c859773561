"""What goes through the encoder together in one step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from negchain.bench.runs import prepared
from negchain.tasks.images import load_images
from negchain.train.resolve import resolve

SIZE = 8


def passes(norm: str, method: str, **settings: object) -> tuple[list[tuple[int, bool]], list[int]]:
    """Of the third step: pictures of each pass and whether it has a gradient; counts of batches."""
    given = {
        "data": "digits", "subset": 200, "device": "cpu", "norm": norm, "method": method,
        "batch_size": SIZE, "eval_every": 0, "checkpoint_every": 0, **settings,
    }  # fmt: skip
    config = resolve(None, given)
    found: list[tuple[int, bool]] = []
    with prepared(config, load_images(config)) as run:
        run.step.fill()
        run.encoder.backbone.register_forward_pre_hook(
            lambda module, given: found.append((len(given[0]), torch.is_grad_enabled()))
        )
        for step in range(3):
            found.clear()
            run.step(step, run.order.batch(step))
        layers = [m for m in run.encoder.modules() if isinstance(m, nn.BatchNorm2d)]
        counts = [int(m.num_batches_tracked) for m in layers if m.num_batches_tracked is not None]
    return found, counts


@pytest.mark.parametrize(
    ("method", "more"), [("informed", {}), ("topk", {}), ("isir", {"proposal": "informed"})]
)
def test_batchnorm_sees_what_is_drawn_with_the_batch(method: str, more: dict[str, object]) -> None:
    """In a pass of its own a draw is told from an anchor by its neighbours (a planted bug).

    A first pass without gradient says what to draw. It leaves no trace in the running statistics.
    """
    found, counts = passes("batch", method, **more)
    assert (2 * SIZE, False) in found
    trained = [count for count, gradient in found if gradient]
    assert len(trained) == 1
    assert trained[0] > 2 * SIZE
    assert set(counts) == {3}  # a batch for each step


def test_without_batchnorm_what_is_drawn_has_a_pass_of_its_own() -> None:
    found, _ = passes("group", "informed")
    assert [count for count, gradient in found if gradient] == [2 * SIZE, SIZE]
    assert (2 * SIZE, False) not in found
