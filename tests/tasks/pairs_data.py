"""A dozen captioned pictures, and a tiny BERT and CLIP of random weights, made on the spot."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}
COLOURS |= {"white": (250, 250, 250), "black": (10, 10, 10), "yellow": (240, 220, 20)}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a the square on of picture with top side".split()


def captioned(path: Path, copies: int = 2, side: int = 12, split: bool = False) -> Path:
    """Pictures of one colour above another: train/, test/ and a table each, as unpack.py writes."""
    noise = np.random.default_rng(0)
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    names = [(a, b) for a in COLOURS for b in COLOURS if a != b]
    for number, (top, bottom) in enumerate(names * copies):
        where = "test" if number % 5 == 4 else "train"
        pixels = np.zeros((side, side, 3))
        pixels[: side // 2], pixels[side // 2 :] = COLOURS[top], COLOURS[bottom]
        pixels = (pixels + noise.integers(0, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
        (path / where).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path / where / f"{number:03d}.png")
        again = f" of {number // len(names)}" if split else ""
        rows[where].append((f"{number:03d}.png", f"{top} on {bottom}{again}"))
        rows[where].append((f"{number:03d}.png", f"a picture with {top} on the top side{again}"))
    for where, own in rows.items():
        table(path / f"{where}.csv", [("image", "caption"), *own])
    return path


def table(path: Path, rows: list[tuple[str, ...]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def tiny_bert(path: Path) -> Path:
    """A BERT of 2 layers and 32 dimensions with a tokenizer of whole words, as a folder."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    path.mkdir(parents=True)
    vocabulary = [*WORDS, *COLOURS, *"0123456789"]
    (path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    BertTokenizerFast(str(path / "vocab.txt"), model_max_length=32).save_pretrained(path)
    return path


def tiny_clip(path: Path) -> Path:
    """A config of open_clip for pictures of 16 pixels."""
    vision = {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
    words = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    path.write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": words}))
    return path
