"""benchmarks/retrieval.py: its methods are those of `negchain train`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers")

from tasks.tiny_texts import write_beir, write_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_losses_are_told_how_likely_each_document_is_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the trainer tells them; counted on the way, q is too large in the first pass."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    code = importlib.import_module("retrieval")
    model, folder = str(write_model(tmp_path / "model")), str(write_beir(tmp_path / "beir"))
    monkeypatch.setattr(code, "LENGTH", 32)
    data, encoder = code.load(folder, model), code.fresh(model)
    relevant = data["relevant"]["train"]
    assert max(map(len, relevant)) == 2
    expected = torch.zeros(41, dtype=torch.float64)
    for own in relevant:
        expected[own] += 1 / len(own)
    for method in code.OURS:
        loss_fn = code.Ours(method, data, encoder, {"batch": 4, "beta": 10.0, "seed": 0}).loss_fn
        assert not loss_fn._counts_keys
        assert torch.equal(loss_fn.key_counts[:-1].cpu(), expected)
