"""What goes through the encoder together in one step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from negchain.bench.runs import prepared
from negchain.losses.request import Want
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


@pytest.mark.parametrize(
    ("method", "more"), [("informed", {}), ("topk", {}), ("isir", {"proposal": "informed"})]
)
def test_the_loss_is_of_that_one_pass(method: str, more: dict[str, object]) -> None:
    """Its rows, in their order, are the batch's and the answers; the first pass is dropped."""
    given = {
        "data": "digits", "subset": 200, "device": "cpu", "norm": "batch", "method": method,
        "batch_size": SIZE, "eval_every": 0, "checkpoint_every": 0, **more,
    }  # fmt: skip
    config = resolve(None, given)
    passed: list[tuple[Tensor, Tensor]] = []
    called: list[Any] = []
    with ExitStack() as stack:
        run = stack.enter_context(prepared(config, load_images(config)))
        run.step.fill()
        run.encoder.register_forward_hook(
            lambda module, given, z: passed.append((given[0], z)) if z.requires_grad else None
        )
        run.step.loss_fn.register_forward_pre_hook(lambda module, given: called.extend(given))
        index = run.order.batch(0)
        run.step(0, index)
        ((pixels, z),) = passed
        z_a, z_b, _, *requests = called
        parts = [part for request in requests for part in request.parts if part.want.gradient]
        rows = torch.cat([z_a, z_b, *(part.embeddings for part in parts)])
        assert rows.requires_grad and torch.equal(rows, z)
        ids = [index, index, *(part.ids.flatten() for part in parts)]
        wants = [Want(each, "anchors") for each in ids]
        assert torch.equal(pixels, run.task.inputs(wants, torch.tensor(0), 0))


def test_without_batchnorm_what_is_drawn_has_a_pass_of_its_own() -> None:
    found, _ = passes("group", "informed")
    assert [count for count, gradient in found if gradient] == [2 * SIZE, SIZE]
    assert (2 * SIZE, False) not in found
