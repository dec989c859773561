"""Encoders: shapes, heads, norm layers, stems, rebuilding, refusals."""

import json

import pytest
import torch
import torchvision
from torch import Tensor, nn

from negchain.encoders import build_encoder, rebuild_encoder

NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d)


def images(count: int, size: int, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(0))


def norm_layers(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, NORM_LAYERS)]


@pytest.mark.parametrize(
    ("name", "features", "embedding"), [("resnet18", 512, 512), ("resnet50", 2048, 128)]
)
def test_the_papers_heads(name: str, features: int, embedding: int) -> None:
    encoder = build_encoder(name, image_size=96)
    assert (encoder.feature_dim, encoder.embedding_dim) == (features, embedding)
    linears = [m for m in encoder.projector.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == (1 if name == "resnet18" else 2)
    with torch.no_grad():
        x = images(2, 96)
        out = encoder.features(x)
        assert out.shape == (2, features) and (out >= 0).all() and (out == 0).any()  # after a ReLU
        assert torch.equal(encoder(x), encoder.projector(out))
    fc = encoder.backbone.fc
    assert isinstance(fc[0], nn.Linear) and isinstance(fc[1], nn.ReLU)
    assert fc[0].weight.shape == (features, features)


def test_batch_norm_resnet_is_torchvisions() -> None:
    encoder = build_encoder("resnet18", norm="batch").eval()
    reference = torchvision.models.resnet18(weights=None)
    reference.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
    reference.load_state_dict(encoder.backbone.state_dict())
    reference.to(memory_format=torch.channels_last)  # sums in the same order
    x = images(2, 96)
    with torch.no_grad():
        assert torch.equal(reference.eval()(x), encoder.features(x))


@pytest.mark.parametrize("name", ["resnet18", "small-cnn"])
def test_norm_none_has_no_norm_layers_and_no_new_biases(name: str) -> None:
    encoder = build_encoder(name, image_size=32, norm="none")
    assert not norm_layers(encoder)
    if name == "resnet18":
        assert all(m.bias is None for m in encoder.modules() if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
@pytest.mark.parametrize("name", ["resnet18", "small-cnn", "resnet10t"])
def test_whether_a_sample_depends_on_its_batch(name: str, norm: str) -> None:
    encoder = build_encoder(name, image_size=32, norm=norm)  # training mode
    x = images(4, 32)
    with torch.no_grad():
        full, half = encoder(x), encoder(x[:2])
    independent = torch.allclose(full[:2], half, rtol=1e-4, atol=1e-5)
    assert independent == (norm != "batch")


def test_group_norm_replaces_every_batch_norm() -> None:
    batch = build_encoder("resnet18", image_size=32, norm="batch")
    group = build_encoder("resnet18", image_size=32, norm="group")
    assert all(isinstance(m, nn.GroupNorm) and m.num_groups == 32 for m in norm_layers(group))
    assert len(norm_layers(group)) == len(norm_layers(batch)) == 20


def test_group_count_is_the_largest_divisor() -> None:
    encoder = build_encoder("resnet10t", image_size=32, norm="group")
    layers = norm_layers(encoder)
    assert layers and all(isinstance(m, nn.GroupNorm) for m in layers)
    for layer in layers:
        width = layer.num_channels
        assert layer.num_groups == max(g for g in range(1, 33) if width % g == 0)


def test_group_norm_keeps_the_zero_initialised_residuals() -> None:
    def zeroed(norm: str) -> list[str]:
        encoder = build_encoder("resnet10t", image_size=32, norm=norm)  # timm zeroes the last norm
        named = encoder.backbone.named_modules()
        return [n for n, m in named if isinstance(m, NORM_LAYERS) and not m.weight.any()]

    assert zeroed("group") == zeroed("batch") != []


@pytest.mark.parametrize(("norm", "layers"), [("none", 0), ("group", 1)])
def test_fused_norm_and_activation_keep_the_activation(norm: str, layers: int) -> None:
    encoder = build_encoder("mobilenetv3_small_050", image_size=32, norm=norm)
    assert (len(norm_layers(encoder)) > 0) == (layers > 0)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in encoder.modules())
    hardswish = [m for m in encoder.backbone.modules() if "swish" in type(m).__name__.lower()]
    assert hardswish


@pytest.mark.parametrize(("size", "spatial"), [(32, 32), (64, 64), (96, 24)])
def test_small_stem_keeps_the_spatial_size(size: int, spatial: int) -> None:
    backbone = build_encoder("resnet18", image_size=size).backbone
    with torch.no_grad():
        out = backbone.maxpool(backbone.relu(backbone.conv1(images(1, size))))
    assert out.shape[-2:] == (spatial, spatial)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_small_cnn(size: int, channels: int) -> None:
    encoder = build_encoder("small-cnn", image_size=size, channels=channels)
    assert encoder(images(2, size, channels)).shape == (2, 64) and encoder.feature_dim == 128
    assert 90_000 < sum(p.numel() for p in encoder.parameters()) < 110_000


def test_small_cnn_activations_neither_vanish_nor_explode() -> None:
    encoder = build_encoder("small-cnn", image_size=8, channels=1)
    spread = encoder.features(images(64, 8, 1)).std().item()
    assert 0.1 < spread < 3


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channel_counts(channels: int) -> None:
    for size in (32, 96):
        encoder = build_encoder("resnet18", image_size=size, channels=channels)
        assert encoder(images(1, size, channels)).shape == (1, 512)


@pytest.mark.parametrize(
    ("name", "size", "features"), [("resnet10t", 64, 512), ("vit_tiny_patch16_224", 32, 192)]
)
def test_timm_models(name: str, size: int, features: int) -> None:
    encoder = build_encoder(name, image_size=size, norm="batch")
    with torch.no_grad():
        assert encoder.features(images(2, size)).shape == (2, features)
        assert encoder(images(2, size)).shape == (2, 128)
    assert encoder.feature_dim == features and encoder.training


def test_embedding_dim_and_projection_can_be_chosen() -> None:
    encoder = build_encoder("small-cnn", image_size=8, channels=1, embedding_dim=7)
    assert encoder.embedding_dim == 7 and encoder(images(2, 8, 1)).shape == (2, 7)
    assert build_encoder("small-cnn", image_size=8, projection="mlp").embedding_dim == 128
    assert build_encoder("small-cnn", image_size=8, projection="linear").embedding_dim == 512


@pytest.mark.parametrize("name", ["resnet18", "small-cnn", "resnet10t"])
def test_rebuild_from_json_and_load_weights(name: str) -> None:
    encoder = build_encoder(name, image_size=32, norm="group", embedding_dim=16, seed=1).eval()
    twin = rebuild_encoder(json.loads(json.dumps(encoder.encoder_config)) | {"seed": 2}).eval()
    assert str(twin) == str(encoder)
    x = images(2, 32)
    with torch.no_grad():
        assert not torch.allclose(twin(x), encoder(x))
        twin.load_state_dict(encoder.state_dict())
        assert torch.equal(twin(x), encoder(x))


def test_the_seed_decides_and_global_randomness_is_untouched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = build_encoder("small-cnn", image_size=8, seed=3)
    assert torch.equal(torch.rand(1), expected)
    second = build_encoder("small-cnn", image_size=8, seed=3)
    other = build_encoder("small-cnn", image_size=8, seed=4)
    pairs = [(a, b, c) for a, b, c in zip(*map(list, (
        first.parameters(), second.parameters(), other.parameters())), strict=True)]  # fmt: skip
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("name", ["hf-hub:someone/model", "local-dir:/tmp", "", "resnet18x."])
def test_names_that_would_reach_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="encoder must be"):
        build_encoder(name)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"norm": "layer"}, "norm"),
        ({"projection": "deep"}, "projection"),
        ({"image_size": 0}, "image_size"),
        ({"channels": 0}, "channels"),
        ({"embedding_dim": 0}, "embedding_dim"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        build_encoder("small-cnn", **settings)


def test_a_model_that_cannot_take_the_images_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="does not take 3-channel images of 8 px"):
        build_encoder("vit_tiny_patch16_224", image_size=8, norm="batch")
