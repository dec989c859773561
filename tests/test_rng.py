"""Random numbers as a function of (seed, step, use, row, column).

False alarms: 1e-3 per test where a distribution is tested; seeds are fixed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from scipy import stats

import negchain
from negchain import rng
from negchain.weights import draw_from

STEP = torch.tensor(5)
ROWS = torch.arange(200)


def test_a_function_of_its_arguments() -> None:
    whole = rng.bits(3, STEP, 2, ROWS, 50)
    assert torch.equal(whole, rng.bits(3, torch.tensor(5), 2, ROWS, 50))
    assert torch.equal(whole[20:30], rng.bits(3, STEP, 2, torch.arange(20, 30), 50))
    assert torch.equal(whole[:, :7], rng.bits(3, STEP, 2, ROWS, 7))
    assert torch.equal(whole[:, 7:19], rng.bits(3, STEP, 2, ROWS, 12, first_column=7))
    assert whole.min() >= 0
    for seed, step, use in ((4, 5, 2), (3, 6, 2), (3, 5, 3), (3 + 2**32, 5, 2)):
        other = rng.bits(seed, torch.tensor(step), use, ROWS, 50)
        assert (other == whole).float().mean() < 1e-3


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, -5])
@pytest.mark.parametrize("step", [torch.tensor(5), torch.tensor(2**33 + 1), torch.arange(200)])
def test_numpy_and_torch_draw_the_same_bits(seed, step) -> None:
    """One step, or one per row (chains beyond 2^32); rows and columns anywhere."""
    rows = ROWS + 2**31 - 100
    key = (seed, step, rng.FOR_INIT, rows, 1 if step.dim() else 9, 3)
    assert torch.equal(rng._bits_numpy(*key), rng._bits_torch(*key))


@pytest.mark.parametrize("step", [0, 31, 32, 100, 2**33 + 1])
@pytest.mark.parametrize("draw", [rng.bits, rng.coins, rng.log_uniform, rng.gumbel])
def test_draws_made_ahead_are_the_same(draw, step) -> None:
    """To the bit, though they are made for many steps at once; no two cells get in the way."""
    more = () if draw in (rng.bits, rng.coins) else (torch.float32, 3)
    for rows in (torch.arange(16), torch.arange(5, 12), torch.zeros(1, dtype=torch.int32)):
        for seed, use, columns in ((3, 2, 9), (3, 18, 9), (2**40 + 3, 2, 9), (3, 2, 10)):
            where = (seed, torch.tensor(step), use, rows, columns, *more)
            assert torch.equal(rng.ahead(draw, *where), draw(*where))
    order = torch.argsort(rng.bits(3, torch.tensor(step), 1, torch.zeros(1), 40)[0], stable=True)
    assert torch.equal(rng.permutation(3, torch.tensor(step), 1, 40), order)


def test_draws_made_ahead_stay_few() -> None:
    """Large ones are made for their own step alone; those first made in inference mode train."""
    before = rng._block.cache_info().currsize
    rows = torch.arange(rng.FEW)
    assert rng.ahead(rng.bits, 0, STEP, 2, rows, 2).shape == (rng.FEW, 2)
    assert rng._block.cache_info().currsize == before
    assert rng._block.cache_info().maxsize * rng.AHEAD * rng.FEW <= 2**21  # 8 MiB of floats
    with torch.inference_mode():
        rng.ahead(rng.uniform, 77, STEP, 2, ROWS[:4], 5, torch.float32)
    kept = rng.ahead(rng.uniform, 77, STEP, 2, ROWS[:4], 5, torch.float32)
    weight = torch.ones(5, requires_grad=True)
    (kept * weight).sum().backward()
    assert torch.equal(weight.grad, kept.sum(0))


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7])
def test_uniform(seed) -> None:
    u = rng.uniform(seed, STEP, rng.FOR_ACCEPT, ROWS, 500, torch.float64)
    assert u.min() > 0 and u.max() <= 1
    counts = torch.histc(u.float(), bins=64, min=0, max=1)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.statistical
def test_rows_columns_and_steps_are_uncorrelated() -> None:
    def centred(step: int, use: int = 2) -> torch.Tensor:
        return rng.uniform(0, torch.tensor(step), use, ROWS, 500, torch.float64) - 0.5

    u = centred(5)
    pairs = [
        (u[1:], u[:-1]),
        (u[:, 1:], u[:, :-1]),
        (u[1:, 1:], u[:-1, :-1]),
        (u[1:, :-1], u[:-1, 1:]),
        (u, centred(6)),
        (u, centred(5, 3)),
        (u[:, :200], u[:, :200].T),
    ]
    for a, b in pairs:
        z = float((a * b).sum() * 12 / math.sqrt(a.numel()))
        assert abs(z) < 3.9  # 1e-4 each, 1e-3 together
    # no row is a shifted copy of another
    bits = rng.bits(0, STEP, 2, ROWS, 500)
    assert len(torch.unique(bits)) > 0.999 * bits.numel()


@pytest.mark.statistical
def test_gumbel_argmax_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    rows = torch.arange(40_000)
    noise = rng.gumbel(1, STEP, rng.FOR_GUMBEL, rows, 5, torch.float32)
    winner = (logits.float() + noise).argmax(1)
    counts = torch.bincount(winner, minlength=5)
    assert stats.chisquare(counts.numpy(), (logits.softmax(0) * 40_000).numpy()).pvalue > 1e-3


def test_log_uniform_is_finite_in_float32() -> None:
    log_u = rng.log_uniform(0, STEP, 2, torch.arange(2000), 500, torch.float32)
    assert torch.isfinite(log_u).all() and log_u.max() <= 0
    noise = rng.gumbel(0, STEP, 3, torch.arange(2000), 500, torch.float32)
    assert not torch.isnan(noise).any() and not (noise == math.inf).any()


@pytest.mark.statistical
def test_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for step in range(2400):
        order = tuple(rng.permutation(0, torch.tensor(step), rng.FOR_ORDER, 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize(("size", "least", "most"), [(10**8, 0.975, 1.025), (10**9, 0.93, 1.4)])
def test_how_evenly_31_bits_fall_on_many_items(size, least, most) -> None:
    """What docs/large_tables.md says of uniform draws; of 10^10 items one in five is reached."""
    some = torch.arange(10**6, 2 * 10**6, dtype=torch.float64).add(0.5).mul(2.0**-31)
    found = rng.integers_below(torch.full((10**6,), size), some)
    share = torch.bincount(found - found.min())[1:-1] * size / 2**31
    assert least < share.min() < share.max() < most
    assert 0.2 < 2**31 / 10**10 < 0.22


def test_integers_below() -> None:
    bound = torch.tensor([1, 2, 5, 5])
    u = torch.tensor([1.0, 0.49, 1.0, 1e-9], dtype=torch.float64)
    assert rng.integers_below(bound, u).tolist() == [0, 0, 4, 0]


@pytest.mark.statistical
def test_draws_from_a_distribution() -> None:
    q = torch.tensor([0.05, 0.3, 0.0, 0.2, 0.4, 0.05], dtype=torch.float64)
    u = rng.uniform(0, STEP, rng.FOR_PROPOSE, torch.zeros(1), 40_000, torch.float64)[0]
    counts = torch.bincount(draw_from(q.log(), u), minlength=6)
    assert counts[2] == 0
    kept = q > 0
    assert stats.chisquare(counts[kept].numpy(), (q * 40_000)[kept].numpy()).pvalue > 1e-3
    planted = torch.bincount(draw_from((q + 0.01).log(), u), minlength=6)[kept].double()
    expected = q[kept] * planted.sum()
    assert stats.chisquare(planted.numpy(), expected.numpy()).pvalue < 1e-6


# ---------------------------------------------------------------- one number per use

REGISTER = {name: value for name, value in vars(rng).items() if name.startswith("FOR_")}
OF_LOSSES = [value for value in REGISTER.values() if value < 16]


def test_no_two_uses_share_a_number() -> None:
    """The numbers of a loss are shifted by 16 for the second direction."""
    others = [value for value in REGISTER.values() if value >= 16]
    used = [*OF_LOSSES, *(16 + value for value in OF_LOSSES), *others]
    assert len(set(used)) == len(used)
    assert len(OF_LOSSES) >= 7 and len(others) >= 3


def test_uses_are_registered_nowhere_else() -> None:
    root = Path(negchain.__file__).parent
    own = re.compile(r"^FOR_\w+ = (?!tl\.constexpr\(rng\.)", re.MULTILINE)
    found = [str(p.relative_to(root)) for p in root.rglob("*.py") if own.search(p.read_text())]
    assert found == ["rng.py"]
