"""A part of `make faults`: texts, captions and models of others end in a result or a sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sentence_transformers")
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "every"), [("texts", 7), ("captions", 9), ("models", 6)])
def test_files_of_others(fuzz: ModuleType, name: str, every: int, tmp_path: Path) -> None:
    """The cases are the same each time; of the models, the first are pickles and code."""
    tried = fuzz.row(name, str(tmp_path), every)[1]
    assert tried >= 5
