"""The check of a captured step finds what is planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_step import checked

from negchain.bench import Settings, runs
from negchain.fast.encoder import CopyingEncoder, accelerate


@pytest.mark.parametrize(
    ("planted", "shape", "factor"),
    [
        ("nothing", None, 1.0),
        ("one missing", (128, 256), 0.0),  # of the first linear layer
        ("one too large", (64, 128), 1.1),  # the projector's, which bf16 hardly rounds
    ],
)
def test_a_fast_step_with_another_gradient_is_found(
    planted: str, shape: tuple[int, ...] | None, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's first steps hide the size of a gradient from the losses, not from its moments."""
    collect = CopyingEncoder.collect

    def wrong(fast: CopyingEncoder, *given: Any) -> list[Any]:
        found = collect(fast, *given)
        return [factor * g if shape is None or g.shape == shape else g for g in found]

    monkeypatch.setattr(CopyingEncoder, "collect", wrong)
    settings = Settings(device=torch.device("cpu"), quick=True)
    data = runs.pictures(settings)
    given = {"carried": "cached", "precision": "bf16", "norm": "none"}
    with runs.prepared(runs.config(settings, 32, {"method": "emc2"}, given), data) as fast:
        made = accelerate(fast.encoder, torch.bfloat16, "blocks")
        fast.step.embed = {"anchors": made, "keys": made}
        ok, found = checked(fast, data, steps=2)
    assert ok is (planted == "nothing"), found
