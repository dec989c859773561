"""Ranks by sorting equal counting all pairs, ties and invalid items included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from negchain import rng  # noqa: E402
from negchain.fast.fused import forward  # noqa: E402

DRAWS = ((0, 0, 1), (2**40 + 5, 7, 1 + 16), (3, 2**31 + 9, 1))  # seed, step, use
FEW_KEYS = 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def id_cases(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Arguments of `num_equal`: ids [B] int64 and valid [B] int32."""
    generator = torch.Generator().manual_seed(size)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    valid = draw(0, 4).int()
    repeated = draw(0, size // 2 + 1)
    outside = repeated + torch.tensor([2**32, -(2**32), -size - 1])[draw(0, 3)]
    return {
        "distinct": (torch.randperm(size, generator=generator), torch.full_like(valid, 3)),
        "all equal": (torch.full((size,), 2**31 - 1), valid),
        "repeated": (repeated + 2**31 - size, valid),
        "out of range": (torch.where(valid == 3, repeated, outside), valid),
    }


RULES = {
    "right": lambda keys, mine, j, i: (keys < mine) | ((keys == mine) & (j < i)),
    "ties the other way": lambda keys, mine, j, i: (keys < mine) | ((keys == mine) & (j > i)),
    "ties at one time": lambda keys, mine, j, i: keys < mine,
    "at most": lambda keys, mine, j, i: keys <= mine,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of_ties(rule, monkeypatch) -> None:
    """With five different keys nearly all are equal: items of a key keep their order."""
    bits = rng.bits
    monkeypatch.setattr(rng, "bits", lambda *args: bits(*args) % FEW_KEYS)
    for seed, step, use in DRAWS:
        size = 129
        row = torch.zeros(1, dtype=torch.int32)
        keys = rng.bits(seed, torch.tensor(step), use, row, size)[0]
        item = torch.arange(size)
        before = RULES[rule](keys[None, :], keys[:, None], item[None, :], item[:, None])
        expected = forward.proposal_times(seed, torch.tensor(step), use, size)
        assert torch.equal(before.sum(1).int(), expected) == (rule == "right")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 33, 129])
def test_counting_by_hand(size, device) -> None:
    for ids, valid in id_cases(size).values():
        good = valid == 3
        pairs = (ids[None, :] == ids[:, None]) & good[None, :] & good[:, None]
        expected = torch.where(good, pairs.sum(1), 1).int()
        given = ids.to(device), valid.to(device)
        assert torch.equal(forward.num_equal(*given).cpu(), expected)
        earlier = (pairs & torch.ones_like(pairs).tril(-1)).any(1).int()
        assert torch.equal(forward.repeated(*given).cpu(), earlier)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [33, 8192])
def test_times_on_a_gpu(size) -> None:
    for seed, step, use in DRAWS:
        expected = forward.proposal_times(seed, torch.tensor(step), use, size)
        got = forward.proposal_times(seed, torch.tensor(step, device="cuda"), use, size)
        assert torch.equal(got.cpu(), expected)
