"""Ranks by all pairs equal ranks by sorting (taxonomy 12), ties and invalid items included.

Without a GPU the kernels run under Triton's interpreter, in one process of its own; see
`rank_cases` for the cases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreter import interpreted

pytest.importorskip("triton")

from rank_cases import (  # noqa: E402
    CHECKS,
    DRAWS,
    FEW_KEYS,
    check_among,
    check_num_equal,
    check_repeated,
    check_times,
    id_cases,
    other_cases,
)

from negchain import draws  # noqa: E402
from negchain.fast.fused import ranks  # noqa: E402


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    told: dict[str, list[str]] = json.loads(interpreted(Path(__file__).with_name("rank_cases.py")))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_all_pairs_equal_a_sort(found, name) -> None:
    assert found[name] == []


@pytest.mark.slow
def test_a_planted_bug_is_caught(found) -> None:
    planted = {name: told for name, told in found.items() if name.startswith("planted")}
    assert len(planted) == 7
    assert all(planted.values()), planted


# ---------------------------------------------------------------------------- the twins

RULES = {
    "right": lambda keys, mine, j, i: (keys < mine) | ((keys == mine) & (j < i)),
    "ties the other way": lambda keys, mine, j, i: (keys < mine) | ((keys == mine) & (j > i)),
    "ties at one time": lambda keys, mine, j, i: keys < mine,
    "at most": lambda keys, mine, j, i: keys <= mine,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of_ties(rule, monkeypatch) -> None:
    """Of the rules one might write, the inputs of `check_ties` fit the right one only."""
    bits = draws.bits
    monkeypatch.setattr(draws, "bits", lambda *args: bits(*args) % FEW_KEYS)
    for seed, step, stream in DRAWS:
        size = 129
        row = torch.zeros(1, dtype=torch.int32)
        keys = draws.bits(seed, torch.tensor(step), stream, row, size)[0]
        item = torch.arange(size)
        before = RULES[rule](keys[None, :], keys[:, None], item[None, :], item[:, None])
        expected = ranks.times_sorted(seed, torch.tensor(step), stream, size)
        assert torch.equal(before.sum(1).int(), expected) == (rule == "right")


@pytest.mark.parametrize("size", [1, 2, 33, 129])
def test_counting_by_hand(size) -> None:
    for ids, valid in id_cases(size).values():
        good = valid == 3
        pairs = (ids[None, :] == ids[:, None]) & good[None, :] & good[:, None]
        expected = torch.where(good, pairs.sum(1), 1).int()
        assert torch.equal(ranks.num_equal_sorted(ids, valid), expected)
        earlier = (pairs & torch.ones_like(pairs).tril(-1)).any(1).int()
        assert torch.equal(ranks.repeated_sorted(ids, valid), earlier)
    for ids, others in other_cases(size).values():
        expected = (ids[:, None] == others[None, :]).any(1).int()
        assert torch.equal(ranks.among_sorted(ids, others), expected)


def test_large_batches_are_sorted(monkeypatch) -> None:
    """Beyond the limit no kernel runs: here, where there is no GPU, it could not."""
    monkeypatch.setattr(ranks, "MOST_PAIRED", 4)
    step, ids = torch.tensor(3), torch.tensor([7, 1, 7, 2, 9])
    order = draws.permutation(0, step, 1, 5)
    assert ranks.times(0, step, 1, 5)[order].tolist() == [0, 1, 2, 3, 4]
    assert ranks.num_equal(ids, torch.full((5,), 3)).tolist() == [2, 1, 2, 1, 1]
    assert ranks.repeated(ids, torch.full((5,), 3)).tolist() == [0, 0, 1, 0, 0]
    assert ranks.among(ids, ids + 1).tolist() == [0, 0, 0, 1, 0]


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("size", [1, 33, 1025, 8192, 20_000])
def test_on_a_gpu(size, paired, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "MOST_PAIRED", size if paired else 0)
    assert check_times((size,), "cuda") == []
    assert check_num_equal((size,), "cuda") == []
    assert check_repeated((size,), "cuda") == []
    assert check_among((size,), "cuda") == []


def _keys(step: int, size: int) -> Tensor:
    row = torch.zeros(1, dtype=torch.int32)
    return draws.bits(0, torch.tensor(step), draws.STREAM_ORDER, row, size)[0]


@pytest.mark.gpu
def test_equal_keys_on_a_gpu() -> None:
    """One step in 32 at B = 16,384 has two equal keys."""
    size = ranks.MOST_PAIRED
    steps = [step for step in range(100) if len(_keys(step, size).unique()) < size]
    assert steps
    for step in steps:
        got = ranks.times(0, torch.tensor(step, device="cuda"), draws.STREAM_ORDER, size)
        expected = ranks.times_sorted(0, torch.tensor(step), draws.STREAM_ORDER, size)
        assert torch.equal(got.cpu(), expected)
