"""What this machine must have for a run on images, with or without captions."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from negchain.data.named import named_sources
from negchain.printable import show
from negchain.tasks.text_settings import check_model_folder
from negchain.train.presets import DATA_DEFAULTS, ConfigError, choose

if TYPE_CHECKING:
    from negchain.train.config import TrainConfig

LARGEST_BETA = 100.0
"""A learned inverse temperature is kept below this, as CLIP's is."""


def check(config: TrainConfig) -> TrainConfig:
    """Refuse a folder or an encoder that is not there; absolute folders."""
    data = config.data
    if data not in DATA_DEFAULTS:
        try:
            parts = named_sources(data)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        data = ",".join(p if p in DATA_DEFAULTS else os.path.abspath(p) for p in parts)
    check_encoder(config.encoder)
    return replace(config, data=data)


def check_encoder(name: str) -> None:
    """Refuse a name timm does not know; "resnet18.a1_in1k" names its weights after the dot."""
    if name in ("small-cnn", "resnet18", "resnet50"):
        return
    if os.path.isdir(name):
        raise ConfigError(
            f"--encoder {show(name)} is a folder, as texts take (captions: --text-encoder); "
            "pictures take small-cnn, resnet18, resnet50 or a name of timm"
        )
    import timm

    base, _, tag = name.partition(".")
    known = timm.list_models()
    choose("--encoder", name if base not in known else base, ["small-cnn", *known])
    if tag:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
        choose(f"the weights named after {base!r} in --encoder", tag, tags)


def check_captioned(config: TrainConfig) -> TrainConfig:
    """Refuse a folder, a model or a temperature that cannot be; absolute paths."""
    if not os.path.exists(config.data):
        raise ConfigError(
            f"--task image-text needs --data FOLDER with a .csv of image,caption, and there is no "
            f"{show(config.data)}; check the path"
        )
    if config.beta > LARGEST_BETA:
        raise ConfigError(
            f"--beta is learned and kept at most {LARGEST_BETA:g}, got {config.beta:g}; start lower"
        )
    changed = replace(config, data=os.path.abspath(config.data))
    if is_open_clip(config.encoder):
        if config.text_encoder is not None:
            raise ConfigError(
                f"--encoder {show(config.encoder)} has a text encoder of its own; leave out "
                "--text-encoder, or name an image encoder"
            )
        if not os.path.isfile(config.encoder):
            raise ConfigError(f"there is no {show(config.encoder)} for --encoder; check the path")
        return replace(changed, encoder=os.path.abspath(config.encoder))
    check_encoder(config.encoder)
    check_model_folder(config.text_encoder, "--text-encoder")
    return replace(changed, text_encoder=os.path.abspath(config.text_encoder or ""))


def is_open_clip(encoder: str) -> bool:
    """Whether --encoder names a config of open_clip, which has both towers."""
    return encoder.endswith(".json")
