"""An operation the kernels do not know is done by the readable twin, not left out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from negchain.augment import RECIPES, Augmentation, augmentation
from negchain.augment.pipeline import Params
from negchain.fast import augment as fused


@dataclass(frozen=True, kw_only=True)
class Inverting(Augmentation):
    """With an operation that has no kernel."""

    invert: bool = False

    def _normalized(self, pixels: Tensor) -> Tensor:
        return 1 - pixels if self.invert else pixels


class Black(Augmentation):
    def apply(self, images: Tensor, params: Params) -> Tensor:
        return torch.zeros(len(images), images.shape[1], self.size, self.size)


IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("negchain.fast.augment.prefers_triton", lambda like: True)


def test_every_recipe_has_kernels() -> None:
    assert RECIPES
    for name in RECIPES:
        assert fused.applies(augmentation(name, size=32), IMAGES), name


def test_an_operation_without_a_kernel_is_not_dropped() -> None:
    for augment, value in ((Inverting(size=8, invert=True), 1.0), (Black(size=8), 0.0)):
        assert not fused.applies(augment, IMAGES)
        u, index = torch.empty(2, 0), torch.arange(2)
        assert (augment(IMAGES, u) == value).all()
        assert (augment.from_table(IMAGES, index, u, torch.float32) == value).all()
    assert fused.applies(Inverting(size=8), IMAGES)
