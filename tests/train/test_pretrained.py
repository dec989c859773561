"""`--pretrained`: weights from timm, a run or a file go where their names and shapes fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from negchain.encoders import Encoder, build_encoder
from negchain.export import export_encoder
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.pretrained import start_from


def encoder(seed: int, **settings: Any) -> Encoder:
    return build_encoder("small-cnn", image_size=8, norm="batch", seed=seed, **settings)


def same_backbone(a: Encoder, b: Encoder) -> bool:
    pairs = zip(a.backbone.state_dict().values(), b.backbone.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_link_is_read_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source, target = encoder(1), encoder(2)
    weights = {name: value.contiguous() for name, value in source.backbone.state_dict().items()}
    save_file({**weights, "more": torch.zeros(9)}, tmp_path / "w.safetensors")
    os.symlink(tmp_path / "w.safetensors", tmp_path / "link.safetensors")  # as in a cache
    start_from(target, str(tmp_path / "link.safetensors"))
    assert same_backbone(source, target)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ConfigError, match="must be a plain file"):
        start_from(target, str(tmp_path / "pipe.safetensors"))


WRAPPED = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")


@pytest.mark.parametrize(
    "kind", ["plain", "old", "lightning", "whole", "safetensors", "exported", *WRAPPED]
)
def test_files_as_people_have_them(kind: str, tmp_path: Path) -> None:
    source, target = encoder(1), encoder(2)
    weights = source.backbone.state_dict()
    path = tmp_path / "weights.pt"
    if kind == "plain":
        torch.save(weights, path)
    elif kind == "old":  # of torch before 1.6
        torch.save(weights, path, _use_new_zipfile_serialization=False)
    elif kind == "lightning":
        named = {f"backbone.{name}": value for name, value in weights.items()}
        torch.save({"epoch": 3, "state_dict": named}, path)
    elif kind in WRAPPED:
        torch.save({"model": {kind + name: value for name, value in weights.items()}}, path)
    elif kind == "whole":
        torch.save(source.state_dict(), path)
    elif kind == "exported":
        path = tmp_path / "model"
        export_encoder(path, source, TrainConfig(), {}, "safetensors")
    else:
        path = tmp_path / "weights.safetensors"
        save_file({name: value.contiguous() for name, value in weights.items()}, path)
    assert not same_backbone(source, target)
    note = start_from(target, str(path))
    assert same_backbone(source, target) and str(path) in note and "fresh" not in note


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_compiled_encoder_brings_its_projector_too(suffix: str, tmp_path: Path) -> None:
    source, target = encoder(1), encoder(2)
    source.backbone = torch.compile(source.backbone)  # type: ignore[assignment]
    weights = {f"module.{name}": t.contiguous() for name, t in source.state_dict().items()}
    assert any(name.startswith("module.backbone._orig_mod.") for name in weights)
    path = tmp_path / f"weights.{suffix}"
    torch.save(weights, path) if suffix == "pt" else save_file(weights, path)
    start_from(target, str(path))
    assert same_backbone(source, target)
    head = target.projector.state_dict()
    assert all(torch.equal(value, head[n]) for n, value in source.projector.state_dict().items())


class Wrapping(torch.nn.Module):
    """A backbone with a part that is called as what DDP adds."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.my_orig_mod = module, torch.nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", *WRAPPED, "backbone.", "module.backbone."])
def test_a_part_called_module_is_no_wrapper(prefix: str, tmp_path: Path) -> None:
    source, target = encoder(1), encoder(2)
    for each in (source, target):
        each.backbone = Wrapping(each.backbone)
    weights = {prefix + name: value for name, value in source.backbone.state_dict().items()}
    torch.save(weights, tmp_path / "a.pt")
    note = start_from(target, str(tmp_path / "a.pt"))
    assert same_backbone(source, target) and "fresh" not in note


def test_what_does_not_fit_stays_fresh_and_is_named(tmp_path: Path) -> None:
    source, target = encoder(1), encoder(2)
    weights = source.backbone.state_dict()
    del weights["0.weight"]
    torch.save(weights, tmp_path / "a.pt")
    assert "fresh: 0.weight" in start_from(target, str(tmp_path / "a.pt"))
    assert torch.equal(target.backbone.state_dict()["3.weight"], weights["3.weight"])


class Exploit:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["empty", "text", "pickle", "other", "list", "link"])
def test_other_files_are_refused_with_a_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    if kind in ("empty", "text"):
        path.write_bytes(b"" if kind == "empty" else b"hello")
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        content = {"pickle": Exploit(str(tmp_path / "owned")), "list": [1]}.get(
            kind, build_encoder("resnet10t", image_size=32).state_dict()
        )
        torch.save(content, path)
    with pytest.raises(ConfigError, match="--pretrained") as caught:
        start_from(encoder(0), str(path))
    assert "\n" not in str(caught.value) and not (tmp_path / "owned").exists()


def test_timms_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: what timm would fetch is made here."""
    real = timm.create_model

    def fetched(name: str, pretrained: bool = False, **settings: Any) -> Any:
        torch.manual_seed(7)
        return real(name, pretrained=False, **settings)

    target = build_encoder("resnet18", image_size=64, norm="batch", small_stem=False)
    monkeypatch.setattr("timm.create_model", fetched)
    note = start_from(target, "timm")
    torch.manual_seed(7)
    expected = real("resnet18", num_classes=0).state_dict()
    assert torch.equal(target.backbone.state_dict()["conv1.weight"], expected["conv1.weight"])
    assert "fresh: fc.0.weight, fc.0.bias" in note
    with pytest.raises(ConfigError, match="timm has no weights for 'small-cnn'"):
        start_from(encoder(0), "timm")


def test_no_network_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: object, **settings: object) -> None:
        raise RuntimeError("cannot reach the hub\nlong story")

    target = build_encoder("resnet18", image_size=64, norm="batch", small_stem=False)
    monkeypatch.setattr("timm.create_model", offline)
    with pytest.raises(ConfigError, match="could not be fetched .cannot reach the hub.; try again"):
        start_from(target, "timm")


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    weights = encoder(1).backbone.state_dict()
    weights["0.weight"][0] = float("nan")
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="must hold finite weights, and '0.weight' has NaN"):
        start_from(encoder(2), str(tmp_path / "w.pt"))
