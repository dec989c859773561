"""How precisely an encoder computes."""

from __future__ import annotations

import pytest
import torch

from negchain import tasks
from negchain.encoders import build_encoder
from negchain.fast.encoder import PlainEncoder
from negchain.tasks import task
from negchain.train.config import TrainConfig
from negchain.train.resolve import resolve
from negchain.train.start import record

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("able", "expected"), [(True, torch.bfloat16), (False, None)])
def test_auto_is_bf16_on_a_cpu_that_multiplies_it(
    able: bool, expected: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "multiplies_bf16", lambda: able)
    assert task.autocast_dtype(TrainConfig(encoder="resnet18"), CPU) == expected
    assert task.autocast_dtype(TrainConfig(encoder="small-cnn"), CPU) is None  # the demo's
    assert task.autocast_dtype(TrainConfig(encoder="small-cnn"), GPU) == torch.bfloat16


def test_a_precision_that_was_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "multiplies_bf16", lambda: True)
    for where in (CPU, GPU):
        asked = TrainConfig(encoder="resnet18", precision="float32")
        assert task.autocast_dtype(asked, where) is None
        asked = TrainConfig(encoder="small-cnn", precision="bf16")
        assert task.autocast_dtype(asked, where) == torch.bfloat16


@pytest.mark.parametrize("flags", [{"avx512_bf16": True}, {"avx2": True}, None])
def test_a_torch_that_cannot_tell_counts_as_a_cpu_without(
    flags: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert task.multiplies_bf16() == ("avx512_bf16" in (flags or {}))


def test_weights_and_pixels_lie_channels_last_on_a_cpu_too() -> None:
    """A fifth of a ResNet's time on a CPU (records/2026-11-18_cpu-step.md)."""
    encoder = build_encoder("resnet18", image_size=32, norm="batch")
    seen: list[bool] = []

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))

    encoder.backbone.layer1.register_forward_pre_hook(look)
    weight = encoder.backbone.layer2[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    PlainEncoder(encoder, None)(torch.randn(2, 3, 32, 32))
    encoder(torch.randn(2, 3, 32, 32))  # as judges call it
    assert seen == [True, True]


def test_a_run_on_a_cpu_trains_in_bf16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "multiplies_bf16", lambda: True)
    loaded = tasks.load(resolve(None, {"encoder": "resnet18", "subset": 64, "image_size": 8}))
    loaded.place(CPU)
    assert loaded.autocast == torch.bfloat16


@pytest.mark.parametrize("able", [True, False])
def test_the_record_says_what_auto_came_to(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "multiplies_bf16", lambda: able)
    asked = {"encoder": "resnet18", "subset": 64, "image_size": 8, "device": "cpu"}
    assert record(tasks.load(resolve(None, asked)))["hardware"].endswith(", in bf16") == able
