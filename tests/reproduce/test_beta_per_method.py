"""benchmarks/beta_per_method.py: tuned on pictures that are neither pretrained on nor tested on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from negchain.methods import METHODS
from negchain.reproduce.common import read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    known = dict(METHODS)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("beta_per_method")
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.parametrize("subset", [3, None])
def test_every_picture_has_one_part(code: ModuleType, monkeypatch, subset: int | None) -> None:  # type: ignore[no-untyped-def]
    used: list[tuple[list[int], list[int]]] = []

    def probe(x, y, held_x, held_y, **more):  # type: ignore[no-untyped-def]
        used.append((x.flatten().tolist(), held_x.flatten().tolist()))
        return SimpleNamespace(accuracy=len(used) / 10)

    monkeypatch.setattr(code, "linear_probe", probe)
    monkeypatch.setattr(code, "few_label_probe", lambda *given, **more: 0.0)
    x, held = torch.arange(8)[:, None], torch.arange(8, 14)[:, None]
    judge = SimpleNamespace(_features=lambda _: (x, x, held, held), losses=lambda _: {})
    run = SimpleNamespace(judge=judge, encoder=None, config=SimpleNamespace(subset=subset))
    found = code.judged(run)
    (fitted, valid), (again, test) = used
    assert fitted == again and sorted(fitted + valid + test) == list(range(14))
    assert fitted == list(range(subset or 8))  # what is pretrained on, and nothing else
    assert (found["valid"], found["test"]) == (0.1, 0.2)


def test_beta_is_chosen_by_validation_pictures(code: ModuleType) -> None:
    values = ((5.0, 0.9, 0.1), (5.0, 0.7, 0.1), (25.0, 0.85, 0.2), (25.0, 0.85, 0.2))
    rows = [{"job": {"beta": b}, "valid": valid, "test": test} for b, valid, test in values]
    assert code.chosen(rows) == 25.0
    assert code.chosen(rows[:1] + rows[2:]) == 5.0


def test_the_page_shows_what_the_record_says(code: ModuleType) -> None:
    rows = read_rows(ROOT / "records" / "2026-11-16_beta-per-method_cpu.jsonl")
    page = (ROOT / "docs" / "better_estimate.md").read_text(encoding="utf-8")
    assert rows and code.table(rows) in page
