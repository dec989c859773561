"""What is exported is loaded by the library it is for, and gives the same features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from negchain.encoders import Encoder, build_encoder
from negchain.export import export_encoder
from negchain.files import DiskFull
from negchain.train.config import ConfigError, TrainConfig

CASES = [
    ("timm", "resnet18", "none", 16),
    ("timm", "resnet18", "group", 72),
    ("timm", "resnet10t", "batch", 32),
    ("timm", "vit_tiny_patch16_224", "none", 32),
    ("torchvision", "resnet18", "batch", 72),
    ("torchvision", "resnet18", "group", 16),
    ("safetensors", "small-cnn", "batch", 8),
    ("onnx", "small-cnn", "batch", 8),
    *(
        pytest.param(form, name, "batch", 16, marks=pytest.mark.slow)
        for form, name in (("onnx", "resnet18"), ("torchvision", "resnet50"), ("timm", "resnet50"))
    ),
]
HOME = TrainConfig(
    data="/home/me/private/photos,/mnt/more", out="/home/me/run", recipe="cifar",
    root="/srv/data", pretrained="/home/me/weights.pt",
)  # fmt: skip


def trained(name: str, norm: Any, size: int) -> Encoder:
    """As after training: no weight and no statistic is what a fresh model has."""
    encoder = build_encoder(name, norm=norm, image_size=size, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in encoder.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand(tensor.shape, generator=generator))
    return encoder.eval()


@pytest.mark.parametrize(("form", "name", "norm", "size"), CASES)
def test_the_card_loads_what_was_exported(
    form: str, name: str, norm: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    encoder = trained(name, norm, size)
    out = tmp_path / "deep" / "model"
    export_encoder(out, encoder, HOME, {"knn1": 0.5, "step": 3}, form)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    images = torch.rand(5, 3, size, size, generator=torch.Generator().manual_seed(1))
    mean, spread = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]])
    scaled = (images - mean[:, None, None]) / spread[:, None, None]
    card = files["README.md"].decode()
    assert ("(0.4914, 0.4822, 0.4465)" in card) == (form != "onnx")  # in the graph itself
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    assert ("negchain" in code) == (form == "safetensors") and (form == "onnx" or form in code)
    names: dict[str, Any] = {"images": images if form == "onnx" else scaled}
    monkeypatch.chdir(out)
    with torch.no_grad():
        exec(code, names)
        expected = encoder.features(scaled)
    torch.testing.assert_close(torch.as_tensor(names["features"]), expected, rtol=1e-4, atol=1e-4)
    # no absolute path leaves the house
    assert "photos,more" in card and b"weights.pt" in files["config.json"]
    leaks = (b"/home", b"/mnt", b"/srv", b"site-packages", str(Path(__file__).parent).encode())
    assert [(n, leak) for n, text in files.items() for leak in leaks if leak in text] == []


@pytest.mark.parametrize("form", ["timm", "safetensors"])
def test_weights_that_two_layers_share_are_written_for_both(form: str, tmp_path: Path) -> None:
    encoder = trained("test_resnet", "batch", 64)  # coat_tiny is one that timm makes so
    encoder.backbone.layer1[0].bn1.bias = encoder.backbone.layer1[0].bn1.weight
    export_encoder(tmp_path / "model", encoder, HOME, {}, form)
    kept = load_file(tmp_path / "model/model.safetensors")
    prefix = "" if form == "timm" else "backbone."
    for name, weight in encoder.backbone.state_dict().items():
        assert torch.equal(kept[prefix + name], weight)


def test_a_full_disk_names_the_file_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match=r"model.safetensors could not .*free some space"):
        export_encoder(tmp_path, trained("small-cnn", "batch", 8), HOME, {}, "safetensors")
    assert not list(tmp_path.iterdir())


def test_what_a_library_does_not_have_is_refused(tmp_path: Path) -> None:
    refused = [
        ("timm", "small-cnn", "batch", 8, "timm has no small-cnn; use --format onnx"),
        ("torchvision", "small-cnn", "batch", 8, "resnet18 and resnet50, and this .* onnx"),
        ("torchvision", "resnet10t", "batch", 32, "use --format timm"),
        ("timm", "resnet10t", "none", 32, "--norm none took BatchNorm out of resnet10t"),
    ]
    for form, name, norm, size, words in refused:
        with pytest.raises(ConfigError, match=words):
            export_encoder(tmp_path / "m", trained(name, norm, size), TrainConfig(), {}, form)
    assert not (tmp_path / "m").exists()


def test_an_exporter_that_fails_is_a_refusal_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 beside an onnx-ir of a year later: seen with the lowest versions we allow."""
    pytest.importorskip("onnxscript")

    def fails(*args: Any, **more: Any) -> None:
        raise RuntimeError("An error occurred when running a pass\nof many lines")

    monkeypatch.setattr(torch.onnx, "export", fails)
    encoder = build_encoder("small-cnn", image_size=8, channels=1)
    with pytest.raises(ConfigError, match=r"running a pass\); upgrade torch and onnxscript"):
        export_encoder(tmp_path / "model", encoder, TrainConfig(), {}, "onnx")
    assert not (tmp_path / "model").exists()
