"""benchmarks/released_code.py: without deviations its chain is `EMC2Loss`, and each one bites."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize

from negchain.methods import METHODS, LossSettings, build_loss
from negchain.reproduce import stationarity

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "released_code.py"


@pytest.fixture(scope="module")
def code() -> Iterator[ModuleType]:
    known = dict(METHODS)
    spec = importlib.util.spec_from_file_location("released_code", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    METHODS.clear()
    METHODS.update(known)


def walked(loss_fn, steps: int = 25) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of many visits of 12 items by batches of 4, and where the chains end."""
    torch.manual_seed(3)
    views, gradients = torch.randn(12, 2, 6), []
    for _ in range(steps):
        index = torch.randperm(12)[:4]
        pair = torch.randint(0, 2, (2, 4)).unbind()
        table = views.clone().requires_grad_()
        z_a, z_b = (table[index, view] for view in pair)
        loss = loss_fn(
            z_a, z_b, index, augmentation=pair, encode=lambda ids: table.flatten(0, 1)[ids]
        )
        loss.backward()
        gradients.append(table.grad)
    chains = loss_fn.chains if hasattr(loss_fn, "chains") else loss_fn
    states = chains.states if chains is loss_fn else chains.ids(0, torch.arange(24))
    return torch.stack(gradients), states


def settings() -> LossSettings:
    return LossSettings(12, 5.0, 6, seed=4, options=stationarity.OPTIONS)


def test_without_deviations_it_is_the_librarys_chain(code: ModuleType) -> None:
    ours, plain = build_loss("emc2", settings()), code.Chain(12, 5.0, 4, set())
    (wanted, states), (found, ends) = walked(ours), walked(plain)
    assert torch.equal(states, ends)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
