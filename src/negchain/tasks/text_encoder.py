"""A sentence-transformers model as an encoder of the trainer: token ids in, embeddings out.

Shapes: `N` texts, `R` of them in a pass, `T` tokens, `D` embedding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from negchain.printable import show
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Role = Literal["query", "document"]
Tokens = dict[str, Any]  # what a sentence-transformers model eats, and "role"

PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names under which models keep what stands before a text, as in their `encode_query`."""
CHUNK = 1024  # texts tokenised at a time
PASS = 256  # texts encoded at a time where no gradient is kept


class TextEncoder(nn.Module):
    """The model of a folder, which is never fetched from anywhere else.

    Args:
        folder: of a sentence-transformers model, or of a transformers model, which gets mean
            pooling (last token, where it is a causal one).
        max_length: tokens of a text that it sees, at most what the model allows.
    """

    def __init__(self, folder: str, max_length: int) -> None:
        super().__init__()
        self.model = load_model(folder)
        allowed = self.model.max_seq_length
        self.model.max_seq_length = min(max_length, allowed) if allowed else max_length
        self.embedding_dim = int(self.model.get_embedding_dimension())
        self.encoder_config = {"folder": folder, "max_length": max_length}

    def forward(self, tokens: Tokens) -> Tensor:  # -> [R, D]
        """Embeddings; of models with routes, by that of the role."""
        count = len(tokens["input_ids"])
        parts = [slice(None)]
        if not torch.is_grad_enabled():
            parts = [slice(begin, begin + PASS) for begin in range(0, count, PASS)]
        return torch.cat([self._pass(tokens, part) for part in parts])

    def _pass(self, tokens: Tokens, part: slice) -> Tensor:
        given = {k: v[part] if isinstance(v, Tensor) else v for k, v in tokens.items()}
        embeddings: Tensor = self.model(given, task=given.pop("role"))["sentence_embedding"]
        return embeddings


def load_model(folder: str) -> SentenceTransformer:
    """The model of a folder, float32, on the CPU; nothing in it is run."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    check_model_folder(folder)
    disable_progress_bar()  # the tool shows its own
    try:
        return SentenceTransformer(
            folder, device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
        )
    except Exception as error:  # whatever transformers finds wrong with its files
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"--encoder {folder} must hold a model that sentence-transformers can load, but "
            f"{reason}; restore the folder or name another"
        ) from error


def check_model_folder(folder: str) -> None:
    """Refuse what is no folder of a model: names are not looked up on the hub."""
    files = ("modules.json", "config.json")
    if not any(os.path.isfile(Path(folder) / name) for name in files):
        there = "holds neither modules.json nor config.json"
        raise ConfigError(
            f"--encoder must be the folder of a sentence-transformers or transformers model, and "
            f"{show(folder)} {there if os.path.isdir(folder) else 'is no folder'}; nothing is "
            "fetched here: hf download NAME --local-dir FOLDER gets one"
        )


class Texts:
    """Many texts as token ids: kept ragged in memory, padded when a pass needs them.

    Args:
        encoder: whose tokeniser, prompts and length limit count.
        texts: N of them.
        role: queries and documents may have prompts of their own.
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], role: Role) -> None:
        model, self.role = encoder.model, role
        prompt = next((model.prompts[n] for n in PROMPTS[role] if n in model.prompts), None)
        if prompt is None and model.default_prompt_name is not None:
            prompt = model.prompts[model.default_prompt_name]
        tokenizer: Any = model.tokenizer
        self.left = tokenizer.padding_side == "left"
        self.padding = tokenizer.pad_token_id or 0
        self.rows: list[np.ndarray] = []
        self.more: Tokens = {}  # the length of a prompt that pooling leaves out
        for begin in range(0, len(texts), CHUNK):
            found = model.preprocess(list(texts[begin : begin + CHUNK]), prompt=prompt, task=role)
            ids, mask = found["input_ids"].numpy().astype(np.int32), found["attention_mask"].numpy()
            self.rows += [row[m > 0] for row, m in zip(ids, mask, strict=True)]
            self.more = {k: v for k, v in found.items() if not isinstance(v, Tensor)}
        self.lengths = torch.tensor([len(row) for row in self.rows], dtype=torch.int64)

    def __len__(self) -> int:
        """N."""
        return len(self.rows)

    def tokens(self, places: Tensor, device: torch.device) -> Tokens:  # [R] -> ids, mask [R, T]
        """What the encoder eats for the texts at some places."""
        rows = [self.rows[place] for place in places.tolist()]
        longest = max(map(len, rows), default=0)
        ids = np.full((len(rows), longest), self.padding, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for number, row in enumerate(rows):
            part = slice(longest - len(row), None) if self.left else slice(len(row))
            ids[number, part], mask[number, part] = row, 1
        both = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        moved = {name: value.to(device, non_blocking=True) for name, value in both.items()}
        return {**moved, **self.more, "role": self.role}
