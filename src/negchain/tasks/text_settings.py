"""What this machine must have for a run on texts: refused before torch is imported."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from negchain import methods
from negchain.printable import show
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from negchain.train.config import TrainConfig


def check(config: TrainConfig) -> TrainConfig:
    """Refuse what is not there; absolute folders."""
    if config.encoder == "none":
        raise ConfigError(
            f"{show(config.data)} holds texts, which need --encoder, the folder of a "
            "sentence-transformers or transformers model; name one"
        )
    if config.pretrained is not None:
        raise ConfigError(
            f"--pretrained goes with images, got {show(config.pretrained)}; --encoder names the "
            "folder of the weights: leave out --pretrained"
        )
    check_model_folder(config.encoder)
    known = methods.named(config.method)
    chains = "proposal" in known.options  # which spend one draw on what they carry
    if keeps_table(config) and config.draws < 1 + chains:
        raise ConfigError(
            f"--draws must be at least {1 + chains} where negatives come from a table "
            f"(--method {known.name}), got {config.draws}; raise it, or use --method infonce"
        )
    folders = {"data": os.path.abspath(config.data), "encoder": os.path.abspath(config.encoder)}
    return replace(config, **folders)  # type: ignore[arg-type]


def keeps_table(config: TrainConfig) -> bool:
    """Whether negatives come from a stale table of the corpus."""
    options = methods.named(config.method).options
    return config.proposal == "informed" if "proposal" in options else "refresh" in options


def check_model_folder(folder: str | None, option: str = "--encoder") -> None:
    """Refuse what is no folder of a model, before anything slow: names are not looked up."""
    if find_spec("sentence_transformers") is None:
        raise ConfigError(f"{option} needs sentence-transformers: pip install 'negchain[text]'")
    files = ("modules.json", "config.json")
    if folder is None or not any(os.path.isfile(Path(folder) / name) for name in files):
        there = "is no folder"
        if folder is not None and os.path.isdir(folder):
            there = "holds neither modules.json nor config.json"
        given = "none was given" if folder is None else f"{show(folder)} {there}"
        raise ConfigError(
            f"{option} must be the folder of a sentence-transformers or transformers model, and "
            f"{given}; nothing is fetched here: hf download NAME --local-dir FOLDER gets one"
        )
    for file in Path(folder).rglob("*"):  # libraries would wait for somebody to write
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ConfigError(
                f"{option} {show(folder)} must hold plain files, and {show(file.name)} is a pipe "
                "or a device; remove it"
            )
