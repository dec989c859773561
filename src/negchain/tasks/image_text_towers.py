"""The towers of pictures and captions, and the temperature they learn.

Either a timm image encoder and a text encoder from a folder, each with a linear projection to a
common dimension, or both towers of an open_clip model built from its config.

Shapes: `R` rows of a pass, `L` tokens, `D` embedding.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from negchain import encoders
from negchain.encoders import EncoderConfig, rebuild_encoder
from negchain.files import read_object
from negchain.tasks import text
from negchain.tasks.checks import is_open_clip
from negchain.train.config import ConfigError, TrainConfig

DIM = 512  # of the common space, unless --embedding-dim says otherwise
CLIP_VOCABULARY = 49408  # of open_clip's own tokenizer


class ImageText(nn.Module):
    """An image tower, a text tower, and the log of beta; made by `build`.

    `image` takes pixels [R,3,S,S], `text` a mapping of tokens [R,L]; both return [R,D], not
    normalised.
    """

    def __init__(self, image: nn.Module, text: nn.Module, described: Mapping[str, Any]) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.log_beta = nn.Parameter(torch.tensor(math.log(described["beta"])))
        clip = described.get("open_clip")
        self.embedding_dim: int = clip["embed_dim"] if clip else described["text"]["dim"]
        self.encoder_config = {**described, "channels": 3}

    def features(self, images: Tensor) -> Tensor:
        """Embeddings of pictures, [R,3,S,S] -> [R,D]: what a trained run encodes them to."""
        return self.image(images)  # type: ignore[no-any-return]

    def beta(self) -> Tensor:
        """The inverse temperature, with a gradient to its logarithm."""
        return self.log_beta.exp()


class Absent(nn.Module):
    """Stands for a text encoder whose folder is gone: pictures can be encoded without it."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Ignore weights: there is no model for them."""


class ClipText(nn.Module):
    """open_clip's text tower, which takes what `TextEncoder` takes."""

    compiles = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of tokens, [R,L] -> [R,D]."""
        return self.model(tokens["input_ids"].long())  # type: ignore[no-any-return]


def build(config: TrainConfig, image_size: int, small_stem: bool) -> ImageText:
    """Towers with the text encoder's weights and fresh ones elsewhere."""
    described: dict[str, Any]
    if is_open_clip(config.encoder):
        described = {"open_clip": _clip_config(config.encoder)}
    else:
        dim = config.embedding_dim or DIM
        image = EncoderConfig(
            name=config.encoder, image_size=image_size, channels=3, norm=config.norm,
            projection="mlp" if config.projector == "mlp" else "linear", embedding_dim=dim,
            seed=config.seed, small_stem=small_stem,
        )  # fmt: skip
        folder = config.text_encoder or ""
        words = {"folder": folder, "max_length": text.MAX_TOKENS, "dim": dim}
        described = {"image": dict(image), "text": words}
    described |= {"image_size": image_size, "seed": config.seed, "beta": config.beta}
    return rebuild(described)


def rebuild(described: Mapping[str, Any]) -> ImageText:
    """The towers of an `encoder_config`: the text encoder from its folder, the rest fresh."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(described["seed"])
        if "open_clip" in described:
            model = _clip(**described["open_clip"])
            image = model.visual.to(memory_format=torch.channels_last)
            return ImageText(image, ClipText(model.text), described)
        image = rebuild_encoder(described["image"])
        words: nn.Module = Absent()
        if os.path.isdir(described["text"]["folder"]):
            words = text.TextEncoder.rebuilt(described["text"])
    return ImageText(image, words, described)


def refuse_larger(described: Mapping[str, Any], num_bytes: int) -> None:
    """Refuse towers whose weights cannot be in a file of so many bytes, before they are built."""
    if "open_clip" in described:
        text.refuse_larger(described["open_clip"], num_bytes, _clip)
    elif not is_open_clip(described.get("name", "")):
        encoders.refuse_larger(described.get("image", described), num_bytes)
    if "text" in described:
        text.TextEncoder.refuse_larger(described["text"], num_bytes)


def image_size_of(encoder: str) -> int | None:
    """The side an open_clip config asks for; None where any will do."""
    if not is_open_clip(encoder):
        return None
    size = _clip_config(encoder)["vision_cfg"].get("image_size", 224)
    return int(size if isinstance(size, int) else size[0])


def tokens_of(config: TrainConfig, texts: Sequence[str]) -> tuple[dict[str, Tensor], int]:
    """Tokens of all texts as the text tower takes them, and how many fill the limit."""
    if not is_open_clip(config.encoder):
        return text.tokenise(config.text_encoder or "", texts)
    from open_clip.tokenizer import (  # type: ignore[import-untyped,unused-ignore]
        SimpleTokenizer,
    )

    length = _clip_config(config.encoder)["text_cfg"].get("context_length", 77)
    ids = SimpleTokenizer(context_length=length)(list(texts)).int()
    return {"input_ids": ids}, int((ids[:, -1] != 0).sum())


def start_from(encoder: ImageText, source: str) -> str:
    """Weights of both towers from a run or an open_clip file, else of the image tower alone."""
    from negchain.train import pretrained
    from negchain.train.run_folder import is_run, load_run_config

    if is_run(source) and load_run_config(Path(source)).task == "image-text":
        weights = dict(pretrained.load_trained(Path(source))[0].state_dict())
    elif "open_clip" not in encoder.encoder_config:
        return pretrained.start_from(encoder.image, source)  # type: ignore[arg-type]
    elif source == "timm":
        raise ConfigError(
            "--pretrained timm has image encoders, and --encoder is a config of open_clip; give a "
            "file of its weights"
        )
    else:
        from open_clip.model import (  # type: ignore[import-untyped,unused-ignore]
            convert_to_custom_text_state_dict,
        )

        read = pretrained.without_wrapper(pretrained.read_weights(Path(source)))
        found = convert_to_custom_text_state_dict(read)
        weights = {"log_beta": encoder.log_beta.detach()}
        for theirs, own in (("visual.", "image."), ("text.", "text.model.")):
            parts = {name: tensor for name, tensor in found.items() if name.startswith(theirs)}
            weights |= {own + name.removeprefix(theirs): t for name, t in parts.items()}
    try:
        encoder.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--pretrained {source} does not fit these towers ({reason}); give the encoders it was "
            "made with"
        ) from error
    return f"weights from {source}: both towers"


def _clip_config(file: str) -> dict[str, Any]:
    """The model of an open_clip config; refuses what would be fetched from the hub."""
    content = read_object(Path(file))
    content = content.get("model_cfg", content)
    if not all(key in content for key in ("embed_dim", "vision_cfg", "text_cfg")):
        raise ConfigError(
            f"--encoder {file} must be a config of open_clip with embed_dim, vision_cfg and "
            f"text_cfg, got {', '.join(content)[:80]}"
        )
    words = content["text_cfg"]
    if "hf_model_name" in words or words.get("vocab_size", CLIP_VOCABULARY) != CLIP_VOCABULARY:
        raise ConfigError(
            f"--encoder {file} must have open_clip's own text encoder and tokenizer of "
            f"{CLIP_VOCABULARY} words, and it names another; use --encoder NAME with "
            "--text-encoder FOLDER"
        )
    if "timm_model_name" in content["vision_cfg"]:
        content["vision_cfg"]["timm_model_pretrained"] = False
    names = ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu")
    return {name: content[name] for name in names if name in content}


def _clip(**config: Any) -> Any:
    try:
        from open_clip.model import CustomTextCLIP
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--encoder CONFIG.json needs open_clip: pip install open_clip_torch, or use --encoder "
            "NAME with --text-encoder FOLDER"
        ) from error
    return CustomTextCLIP(**config)
