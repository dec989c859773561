"""Encoders: an image batch to backbone features (for probes) and to embeddings (for the loss).

    images [B,C,H,W] --backbone--> features [B,F] --projector--> embeddings [B,D]  (not normalised)

| name | backbone | features | projector ("paper") |
|---|---|---|---|
| resnet18 | torchvision, fc = Linear(512,512) + ReLU inside | after fc, F = 512 | Linear -> 512 |
| resnet50 | torchvision, fc = Linear(2048,2048) + ReLU inside | after fc, F = 2048 | MLP -> 128 |
| small-cnn | ours, 97,000 parameters, for digits | F = 128 | Linear -> 64 |
| any timm name | timm, no classifier | pooled, F is the model's | MLP -> 128 |

The ResNets' projectors "paper", and their fc, are the authors' code's; the paper states D alone.

MLP is Linear(F,F)-ReLU-Linear(F,D): a timm model has as many layers in all as resnet18, and is
probed one layer earlier.

`norm="none"` is the authors' code's: every BatchNorm becomes the identity, so that no sample sees
another; convolutions keep torchvision's initialisation and have no bias term. Nothing explodes or
vanishes then, but different images start almost parallel (STL-10, mean cosine of embeddings .99,
with BatchNorm .87), which is the plateau a run without norm layers has to leave first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

import timm
import torch
import torchvision
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

Norm = Literal["batch", "group", "none"]
Projection = Literal["paper", "linear", "mlp"]

OWN_ENCODERS = ("resnet18", "resnet50", "small-cnn")

LARGEST = {"image_size": 2048, "channels": 16, "embedding_dim": 65536}

SMALL_IMAGE = 64  # px; up to here the 7x7 stride-2 stem and its pooling throw too much away


class EncoderConfig(TypedDict):
    """The arguments of `build_encoder`, ready for JSON."""

    name: str
    image_size: int
    channels: int
    norm: Norm
    projection: Projection
    embedding_dim: int | None
    seed: int
    small_stem: bool


class Encoder(nn.Module):
    """A backbone and the projector that only the loss sees; made by `build_encoder`."""

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        dims: tuple[int, int],
        config: EncoderConfig,
    ) -> None:
        """`dims` are the widths of the features and of the embeddings."""
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.feature_dim, self.embedding_dim = dims
        self.encoder_config = config

    def features(self, images: Tensor) -> Tensor:
        """Backbone features, [B,C,H,W] -> [B,F]; what probes and k-NN use."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings for the loss, [B,C,H,W] -> [B,D], not normalised."""
        embeddings: Tensor = self.projector(self.features(images))
        return embeddings


def build_encoder(
    name: str,
    *,
    image_size: int = 96,
    channels: int = 3,
    norm: Norm = "none",
    projection: Projection = "paper",
    embedding_dim: int | None = None,
    seed: int = 0,
    small_stem: bool | None = None,
) -> Encoder:
    """Build an encoder with fresh weights.

    Args:
        name: "resnet18", "resnet50", "small-cnn" or any timm model name.
        image_size: side of the square images.
        channels: of the images.
        norm: "batch" keeps BatchNorm, "group" and "none" replace it by GroupNorm or nothing.
            LayerNorm and the like, which look at one sample at a time, always stay.
        projection: "paper" (the table above; the authors' code's), or "linear" or "mlp" for any
            backbone.
        embedding_dim: width of the embeddings; None for the table's (512 for "linear", 128 for
            "mlp" when asked for by name).
        seed: of the initial weights; the global generator is left as it was.
        small_stem: the ResNets begin with a 3x3 convolution that keeps every pixel, at 4 to 16
            times the cost; None: up to 64 px.

    Example:
        >>> encoder = build_encoder("small-cnn", image_size=8, channels=1)
        >>> images = torch.zeros(5, 1, 8, 8)
        >>> encoder(images).shape, encoder.features(images).shape
        (torch.Size([5, 64]), torch.Size([5, 128]))
        >>> rebuild_encoder(encoder.encoder_config).embedding_dim
        64
    """
    config = EncoderConfig(
        name=name, image_size=image_size, channels=channels, norm=norm, projection=projection,
        embedding_dim=embedding_dim, seed=seed,
        small_stem=image_size <= SMALL_IMAGE if small_stem is None else small_stem,
    )  # fmt: skip
    _check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = _backbone(config)
        _replace_batch_norm(backbone, norm)
        feature_dim = _feature_dim(backbone, config)
        projector, dim = _projector(config, feature_dim)
    encoder = Encoder(backbone, projector, dims=(feature_dim, dim), config=config)
    # as convolutions are fastest, on any device
    return encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def rebuild_encoder(config: dict[str, Any] | EncoderConfig) -> Encoder:
    """Build the encoder that `config` (an `encoder_config`) describes, e.g. to load weights."""
    described: Mapping[str, Any] = config
    return build_encoder(**{key: described[key] for key in EncoderConfig.__annotations__})


def refuse_larger(config: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse an encoder whose weights cannot be in a file of that size, before it is built.

    Others may have written the file, and timm knows over a thousand names: without this a small
    file could ask for a huge model. On torch's meta device a model takes no memory.

    >>> refuse_larger({"name": "resnet50", "channels": 3, "image_size": 64}, 1000)
    Traceback (most recent call last):
    ValueError: resnet50 has 105 MB of weights and the file has 0 MB
    """
    described = EncoderConfig(
        name=config["name"], channels=config["channels"], image_size=config["image_size"],
        norm="none", projection="linear", embedding_dim=None, seed=0, small_stem=True,
    )  # fmt: skip
    _check(described)
    with torch.device("meta"):
        backbone = _backbone(described)
    refuse_weights(backbone, described["name"], num_bytes)


def refuse_weights(model: nn.Module, name: str, num_bytes: int) -> None:
    """Refuse a model whose weights are more than so many bytes."""
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if needed > num_bytes:
        raise ValueError(
            f"{name} has {needed >> 20:,} MB of weights and the file has {num_bytes >> 20:,} MB"
        )


def _check(config: EncoderConfig) -> None:
    given: Mapping[str, Any] = config
    for key, allowed in (("norm", get_args(Norm)), ("projection", get_args(Projection))):
        if given[key] not in allowed:
            raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {given[key]!r}")
    for key, largest in LARGEST.items():
        number = given[key]
        if number is not None and not (type(number) is int and 1 <= number <= largest):
            raise ValueError(f"{key} must be from 1 to {largest}, got {number!r}")
    base = str(config["name"]).split(".")[0]  # timm's "resnet18.a1_in1k" names weights behind it
    if base not in (*OWN_ENCODERS, *timm.list_models()):
        own = ", ".join(OWN_ENCODERS)
        raise ValueError(f"encoder must be {own} or a name of timm, got {config['name']!r}")


def _backbone(config: EncoderConfig) -> nn.Module:
    name, channels = config["name"], config["channels"]
    if name == "small-cnn":
        return _small_cnn(channels)
    if name in OWN_ENCODERS:
        return _resnet(name, channels, small=config["small_stem"])
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **timm_arguments(config))
    except Exception as error:  # over a thousand models, each with its own way to refuse
        raise _refused(config, error) from error
    return model


def timm_arguments(config: EncoderConfig) -> dict[str, Any]:
    """Of `timm.create_model`, for a backbone without a classifier."""
    arguments = {"num_classes": 0, "in_chans": config["channels"]}
    published = timm.get_pretrained_cfg(config["name"])
    if published is not None and published.fixed_input_size:  # ViTs and their kin
        arguments["img_size"] = config["image_size"]
    return arguments


def _resnet(name: str, channels: int, *, small: bool) -> nn.Module:
    """torchvision's network with Linear + ReLU as its fc, and the stem the images need."""
    network: Any = getattr(torchvision.models, name)(weights=None)  # torchvision is untyped
    width = network.fc.in_features
    network.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU())
    if small:
        network.conv1 = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        if channels != 3:
            network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        # max(ReLU(x)) = ReLU(max(x)): the same function, with a quarter of the pixels to rectify
        network.maxpool = nn.Sequential(network.maxpool, nn.ReLU(inplace=True))
        network.relu = nn.Identity()
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone: nn.Module = network
    return backbone


def _small_cnn(channels: int) -> nn.Module:
    """Three convolutions, a 2x2 pool of what is left, Linear + ReLU -> [B,128]."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((channels, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    pool = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 128), nn.ReLU()]
    network = nn.Sequential(*layers, *pool)
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # torch's default shrinks activations 2.4 times a layer, and no norm layer undoes it
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return network


def _replace_batch_norm(module: nn.Module, norm: Norm) -> None:
    """Put GroupNorm or nothing in the place of every BatchNorm below `module`."""
    if norm == "batch":
        return
    for name, child in module.named_children():
        if not isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            _replace_batch_norm(child, norm)
            continue
        new = nn.Identity() if norm == "none" else _group_norm(child)
        if isinstance(child, BatchNormAct2d):  # normalises and activates
            new = nn.Sequential(new, child.drop, child.act)
        setattr(module, name, new)


def _group_norm(batch_norm: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
    """GroupNorm with 32 groups or the largest divisor below; keeps the affine start (zero-init)."""
    width = batch_norm.num_features
    groups = max(g for g in range(1, 33) if width % g == 0)
    new = nn.GroupNorm(groups, width, affine=batch_norm.affine)
    new.load_state_dict(dict(batch_norm.named_parameters(recurse=False)))
    return new


def _feature_dim(backbone: nn.Module, config: EncoderConfig) -> int:
    """Width of the features, from one forward pass: timm's attributes disagree between models."""
    size, channels = config["image_size"], config["channels"]
    backbone.eval()
    try:
        with torch.no_grad():
            features: Tensor = backbone(torch.zeros(1, channels, size, size))
    except Exception as error:  # too small an image for the network's strides, mostly
        raise _refused(config, error) from error
    backbone.train()
    if features.ndim != 2:
        raise _refused(config, f"its features have shape {list(features.shape)}, not [B,F]")
    return features.shape[1]


def _refused(config: EncoderConfig, reason: object) -> ValueError:
    return ValueError(
        f"encoder {config['name']!r} does not take {config['channels']}-channel images of "
        f"{config['image_size']} px with norm={config['norm']!r} ({reason}); change the image size "
        "or norm, or choose another encoder"
    )


def _projector(config: EncoderConfig, width: int) -> tuple[nn.Module, int]:
    """The head and the width of its output."""
    kind, name = config["projection"], config["name"]
    default = 512 if kind == "linear" else 128
    if kind == "paper" and name in ("resnet18", "small-cnn"):
        kind, default = "linear", 512 if name == "resnet18" else 64
    dim = config["embedding_dim"] or default
    if kind == "linear":
        return nn.Linear(width, dim), dim
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim)), dim
