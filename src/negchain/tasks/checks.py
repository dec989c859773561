"""What this machine must have for a run of each task: refused before torch is imported."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from negchain import methods
from negchain.data.named import BUILT_IN, named_sources
from negchain.printable import show
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.presets import choose

LARGEST_BETA = 100.0
"""A learned inverse temperature is kept below this, as CLIP's is."""


def check_images(config: TrainConfig) -> TrainConfig:
    """Refuse a folder or an encoder that is not there; absolute folders."""
    data = absolute_sources(config.data)
    check_encoder(config.encoder)
    return replace(config, data=data)


def absolute_sources(data: str) -> str:
    """The sources that `data` names, with absolute paths."""
    try:
        parts = named_sources(data)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return ",".join(part if part in BUILT_IN else os.path.abspath(part) for part in parts)


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


def check_texts(config: TrainConfig) -> TrainConfig:
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
