"""Text encoders from a folder on this machine: nothing is ever fetched.

Shapes: `R` texts of a pass, `L` tokens, `D` embedding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from negchain.files import read_object
from negchain.printable import show
from negchain.train.presets import ConfigError

MAX_TOKENS = 77
"""Tokens a text is cut to: CLIP's."""

Pooling = Literal["mean", "cls"]


class TextTower(nn.Module):
    """A transformers encoder, its pooling and a projection: tokens to [R,D], not normalised.

    Dropout is off: one text has one embedding in a step, whichever part of the loss asks for it.
    Made by `read_text_tower`; `described` is all `TextTower.rebuilt` needs.
    """

    def __init__(self, model: Any, pooling: Pooling, dim: int) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.project = nn.Linear(model.config.hidden_size, dim, bias=False)
        settings = json.loads(model.config.to_json_string(use_diff=False))
        self.described = {"model": settings, "pooling": pooling, "dim": dim}

    @classmethod
    def rebuilt(cls, described: Mapping[str, Any]) -> TextTower:
        """A tower of the same layers with fresh weights."""
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.for_model(**described["model"])
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call,unused-ignore]
        return cls(model, described["pooling"], described["dim"])

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Embeddings of tokens, [R,L] each -> [R,D]."""
        longest = int(tokens["attention_mask"].sum(1).max())  # padding beyond is not computed
        cut = {name: table[:, :longest].long() for name, table in tokens.items()}
        hidden = self.model(**cut).last_hidden_state
        if self.pooling == "cls":
            return self.project(hidden[:, 0])  # type: ignore[no-any-return]
        mask = cut["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.project(mean)  # type: ignore[no-any-return]


def read_text_tower(folder: str, dim: int) -> TextTower:
    """The encoder a folder of transformers or sentence-transformers holds, with its weights."""
    check_text_folder(folder)
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        for name, value in config.to_dict().items():
            if "dropout" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = AutoModel.from_pretrained(folder, config=config, **local).float()
    except Exception as error:  # the library raises nearly every type on folders of other things
        raise _unreadable(folder, error) from error
    if config.is_encoder_decoder or not hasattr(config, "hidden_size"):
        raise ConfigError(
            f"--text-encoder must be an encoder such as BERT, and {folder} holds "
            f"{config.model_type}; choose another"
        )
    return TextTower(model, _pooling(Path(folder)), dim)


def check_text_folder(folder: str | None) -> None:
    """Refuse what is no folder of a model, before anything slow."""
    if find_spec("transformers") is None:
        raise ConfigError("--text-encoder needs transformers: pip install 'negchain[text]'")
    if folder is None or not os.path.isfile(Path(folder, "config.json")):
        given = "none was given" if folder is None else f"{show(folder)} has none"
        raise ConfigError(
            "--text-encoder must be a folder with the config.json, weights and tokenizer of a "
            f"transformers or sentence-transformers model, and {given}; nothing is downloaded: "
            "save one with model.save_pretrained(FOLDER)"
        )


def read_tokenizer(folder: str) -> Any:
    """The tokenizer of such a folder."""
    check_text_folder(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, padding_side="right"
        )
    except Exception as error:  # as above
        raise _unreadable(folder, error) from error


def tokenise(tokenizer: Any, texts: Sequence[str]) -> tuple[dict[str, Tensor], int]:
    """Tokens of all texts, int32 [texts,L], and how many texts were cut."""
    limit = min(MAX_TOKENS, tokenizer.model_max_length)
    found = tokenizer(list(texts), truncation=True, max_length=limit, padding=True)
    tokens = {
        name: torch.tensor(found[name], dtype=torch.int32)
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in found
    }
    cut = int((tokens["attention_mask"].sum(1) >= limit).sum())
    return tokens, cut


def _pooling(folder: Path) -> Pooling:
    """What sentence-transformers wrote beside the weights; the mean where it wrote nothing."""
    file = folder / "1_Pooling" / "config.json"
    said = read_object(file) if file.is_file() else {}
    cls = said.get("pooling_mode_cls_token") or said.get("pooling_mode") == "cls"
    return "cls" if cls else "mean"


def _unreadable(folder: str, error: Exception) -> ConfigError:
    reason = str(error).split("\n")[0]
    return ConfigError(
        f"--text-encoder {folder} cannot be read by transformers ({reason}); save it anew with "
        "model.save_pretrained and tokenizer.save_pretrained"
    )
