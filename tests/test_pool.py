"""Writing state with repeated slots, the probabilities of mixed columns, sides of a batch."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from negchain import pool
from negchain.pool import (
    Draw,
    Kind,
    Side,
    first_writer,
    is_among,
    matches,
    num_distinct,
    write_rows,
)

# ---------------------------------------------------------------- repeated slots


def all_pairs(slots: Tensor, allowed: Tensor) -> Tensor:
    """`first_writer` by comparing every row with every other."""
    same = (slots[:, None] == slots[None, :]) & allowed[None, :]
    return torch.where(same.any(1), same.long().argmax(1), -1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def other_cases(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Arguments of `is_among`: ids [B] and others [B], int64."""
    generator = torch.Generator().manual_seed(size)
    ids, others = (torch.randint(0, 2 * size, (size,), generator=generator) for _ in range(2))
    return {
        "some": (ids, others),
        "all": (ids, ids.flip(0)),
        "none": (ids, -1 - others),
        "padding": (torch.zeros_like(ids), others + 1),
        "largest": (ids + 2**31 - 2 * size, others + 2**31 - 2 * size),
        "other upper halves": (ids, others + 2**32),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 33, 129])
def test_is_among(size, device) -> None:
    for ids, others in other_cases(size).values():
        expected = (ids[:, None] == others[None, :]).any(1)
        assert torch.equal(is_among(ids.to(device), others.to(device)).cpu(), expected)


def test_nothing_is_among_others() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert is_among(none, none).shape == is_among(none, torch.tensor([3])).shape == (0,)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("size, num_slots", [(1, 1), (7, 2), (64, 10), (500, 10**6), (1000, 300)])
def test_first_writer(size, num_slots, share, rng) -> None:
    for _ in range(5):
        slots = torch.randint(0, num_slots, (size,), generator=rng)
        allowed = torch.rand(size, generator=rng) < share
        assert torch.equal(first_writer(slots, allowed), all_pairs(slots, allowed))
        far = first_writer(slots + 2**40, allowed)
        assert torch.equal(far, all_pairs(slots, allowed))


@pytest.mark.parametrize("as_a_gpu", [False, True])
@pytest.mark.parametrize("width", [(), (3,)])
def test_write_rows_against_a_loop(width, as_a_gpu, rng, monkeypatch) -> None:
    if as_a_gpu:
        monkeypatch.setattr(pool, "fit_for_numpy", lambda table: False)
    size, num_slots = 4096, 700
    slots = torch.randint(0, num_slots, (size,), generator=rng)
    allowed, changed = torch.rand(2, size, generator=rng) < 0.3
    values = torch.randn(size, *width, generator=rng)
    got = torch.zeros(num_slots, *width)
    expected, moved, written = got.clone(), got.clone(), set()
    for row, slot in enumerate(slots.tolist()):
        if allowed[row] and slot not in written:
            expected[slot] = values[row]
            moved[slot] = values[row] * changed[row]
            written.add(slot)
    some = got.clone()
    write_rows(some, slots, values, allowed, changed)
    write_rows(got, slots, values, allowed)
    assert torch.equal(got, expected) and 0 < len(written) < num_slots
    assert torch.equal(some, moved)
    untouched = got.clone()
    write_rows(got, slots, values + 1, torch.zeros_like(allowed))
    assert torch.equal(got, untouched)


def test_first_writer_of_a_large_batch_needs_little_memory(rng) -> None:
    """32,768 rows: comparing all pairs would take 1 GB for the mask alone."""
    slots = torch.randint(0, 20_000, (32_768,), generator=rng)
    allowed = torch.rand(32_768, generator=rng) < 0.5
    begin = time.perf_counter()
    writer = first_writer(slots, allowed)
    assert time.perf_counter() - begin < 1.0
    written = writer >= 0
    assert torch.equal(slots[writer[written]], slots[written]) and allowed[writer[written]].all()
    assert (writer[allowed] <= torch.arange(32_768)[allowed]).all() and written[allowed].all()


# ---------------------------------------------------------------- who is excluded


@pytest.mark.parametrize(("columns", "width"), [(9, 3), (9, 0), (9, 40), (1, 3), (0, 3)])
def test_matches_by_loops(rng, columns: int, width: int) -> None:
    ids = torch.randint(0, 6, (columns,), generator=rng)
    own = torch.randint(0, 6, (5,), generator=rng)
    known = torch.randint(-1, 9, (5, width), generator=rng)
    mask, alone = matches(ids, own, known), matches(ids, own, None)
    assert mask.shape == alone.shape == (5, columns)
    for row in range(5):
        for column in range(columns):
            same = bool(ids[column] == own[row])
            assert bool(alone[row, column]) == same
            assert bool(mask[row, column]) == (same or int(ids[column]) in known[row].tolist())
    counts = [len({k for k in row.tolist() if k >= 0} - {int(o)}) for row, o in zip(known, own)]  # noqa: B905
    assert num_distinct(known, own).tolist() == counts


# ---------------------------------------------------------------- mixtures of kinds


def side_with(kinds: tuple[Kind, ...], width: int) -> Side:
    z = torch.zeros(2, 1, dtype=torch.float64)
    return Side(
        queries=z,
        positives=z,
        anchor_ids=torch.arange(2),
        positive_ids=torch.tensor([8, 9]),
        known=None,
        keys=torch.zeros(1, width, 1, dtype=torch.float64),
        key_ids=torch.zeros(1, width, dtype=torch.int64),
        excluded=torch.zeros(2, width, dtype=torch.bool),
        multiplicity=1,
        ids_per_item=1,
        num_keys=10,
        kinds=kinds,
    )


def test_the_correction_is_that_of_the_mixture() -> None:
    """log(m_neg sum_k n_k q_k / n): two uniform draws, three of a q, of m_neg = 9."""
    q = torch.softmax(torch.arange(10, dtype=torch.float64) / 3, 0)
    log_q = q.log() + math.log(9)
    draws = Kind(2, 5, torch.tensor([3, 3]), lambda ids: log_q[ids])
    batch = Kind(0, 2, torch.tensor([2, 2]), None)
    ids = torch.tensor([[0, 4, 7], [1, 1, 9]])
    got = side_with((batch, draws), 5).correction(ids)
    assert got is not None
    expected = (9 * (2 / 9 + 3 * q[ids]) / 5).log()
    assert (got - expected).abs().max() < 1e-12
    assert side_with((batch, draws), 5).counts().tolist() == [5, 5]
    assert side_with((batch,), 2).correction(ids) is None
    alone = side_with((draws,), 5).correction(ids)
    assert alone is not None and torch.equal(alone, log_q[ids])


def test_probabilities_of_a_draw() -> None:
    log_q = torch.softmax(torch.arange(4.0), 0).log()
    ids = torch.tensor([[3, 0], [1, 1]])
    assert Draw(ids).log_q_of(ids) is None
    for given in (log_q, lambda i: log_q[i]):
        got = Draw(ids, given).log_q_of(ids)
        assert got is not None and torch.equal(got, log_q[ids])
