"""Folders of text models that lack something, or hold what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("sentence_transformers")

from negchain.tasks.text import TextEncoder, tokenise  # noqa: E402
from negchain.train.config import ConfigError  # noqa: E402
from tasks.tiny_texts import write_model  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["modules.json", "README.md", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model.parent / "pipe")
    os.mkfifo(model.parent / "pipe")
    with pytest.raises(ConfigError, match=f"must hold plain files, and '{name}' is a pipe"):
        TextEncoder(str(model), 16)
    with pytest.raises(ConfigError, match="must hold plain files"):
        tokenise(str(model), ["a text"])


def test_a_missing_tokenizer_is_not_made_up(model: Path) -> None:
    """Transformers makes one to which every word is unknown."""
    TextEncoder(str(model), 16)
    for name in ("tokenizer.json", "vocab.txt"):
        (model / name).unlink()
    with pytest.raises(ConfigError, match="its tokenizer knows no words"):
        TextEncoder(str(model), 16)
    with pytest.raises(ConfigError, match="its tokenizer knows no words"):
        tokenise(str(model), ["a text"])


def test_a_model_without_a_transformer_is_called_so(tmp_path: Path) -> None:
    """As static-retrieval-mrl: 'max_seq_length has no setter' was the reason given."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    static = StaticEmbedding(words, embedding_dim=4)
    SentenceTransformer(modules=[static], device="cpu").save(str(tmp_path / "static"))
    with pytest.raises(ConfigError, match="its first module, StaticEmbedding, is no transformer"):
        TextEncoder(str(tmp_path / "static"), 16)
