"""What this machine must have for pictures with captions: tables, a text encoder, a name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from negchain.printable import show
from negchain.tasks.image_settings import check_encoder
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from negchain.train.config import TrainConfig

LARGEST_BETA = 100.0
"""A learned inverse temperature is kept below this, as CLIP's is."""


def check(config: TrainConfig) -> TrainConfig:
    """Refuse a folder, a model or a temperature that cannot be; absolute paths."""
    from negchain.tasks.text import check_model_folder

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
