"""What this machine must have for a run on images: the data, and the encoder's name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from negchain.train.presets import DATA_DEFAULTS, ConfigError, choose

if TYPE_CHECKING:
    from negchain.train.config import TrainConfig


def check(config: TrainConfig) -> TrainConfig:
    """Refuse a folder or an encoder that is not there; absolute folders."""
    # Imported here because it takes seconds, and a mistyped name is told before.
    from negchain.data.sources import named_sources

    check_encoder(config.encoder)
    data = config.data
    if data not in DATA_DEFAULTS:
        try:
            parts = named_sources(data)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        data = ",".join(p if p in DATA_DEFAULTS else os.path.abspath(p) for p in parts)
    return replace(config, data=data)


def check_encoder(name: str) -> None:
    """Refuse a name timm does not know; "resnet18.a1_in1k" names its weights after the dot."""
    if name in ("small-cnn", "resnet18", "resnet50"):
        return
    import timm

    base, _, tag = name.partition(".")
    known = timm.list_models()
    choose("--encoder", name if base not in known else base, ["small-cnn", *known])
    if tag:
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
        choose(f"the weights named after {base!r} in --encoder", tag, tags)
