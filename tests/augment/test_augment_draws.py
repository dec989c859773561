"""Parameters: their distributions equal torchvision's, and the tests see planted bugs.

Seeds are fixed. Every test below has a false-alarm rate of at most 1e-4 over seeds, Bonferroni over
its comparisons (Kolmogorov-Smirnov p-values are conservative for whole-number parameters).
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import ColorJitter, RandomResizedCrop

from negchain.augment import Augmentation, augmentation
from negchain.augment.colour import sample_jitter
from negchain.augment.crop import NUM_TRIES, sample_box

FALSE_ALARM = 1e-4
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
SHAPES = [(96, 96), (40, 200), (150, 30), (33, 57)]  # the narrow ones reach the fallback often
COUNT = 6000


def uniforms(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.rand(count, width, generator=torch.Generator().manual_seed(seed))


def crop_p_value(height: int, width: int, warp: Callable[[Tensor], Tensor]) -> float:
    """Smallest two-sample KS p-value over six statistics of the box, times six."""
    box = sample_box(warp(uniforms(COUNT, 22)), height, width, scale=SCALE, ratio=RATIO)
    ours = torch.stack(box, dim=1).double()
    image = torch.empty(1, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drawn = [RandomResizedCrop.get_params(image, SCALE, RATIO) for _ in range(COUNT)]
    theirs = torch.tensor(drawn, dtype=torch.float64)
    both = [
        (*sample.unbind(1), sample[:, 2] * sample[:, 3], sample[:, 3] / sample[:, 2])
        for sample in (ours, theirs)
    ]
    p_values = [stats.ks_2samp(a.numpy(), b.numpy()).pvalue for a, b in zip(*both, strict=True)]
    return min(p_values) * len(p_values)


@pytest.mark.parametrize("height, width", SHAPES)
def test_crop_boxes_are_torchvisions(height: int, width: int) -> None:
    assert crop_p_value(height, width, lambda drawn: drawn) > FALSE_ALARM


def uniform_ratio(drawn: Tensor) -> Tensor:
    """Uniforms that make the log-uniform ratio a uniform one."""
    low, high = RATIO
    drawn = drawn.clone()
    ratio = low + (high - low) * drawn[:, NUM_TRIES : 2 * NUM_TRIES]
    drawn[:, NUM_TRIES : 2 * NUM_TRIES] = (ratio / low).log() / math.log(high / low)
    return drawn


def uniform_side(drawn: Tensor) -> Tensor:
    """Uniforms that make the side, not the area, uniform."""
    drawn = drawn.clone()
    drawn[:, :NUM_TRIES] = drawn[:, :NUM_TRIES].square()
    return drawn


def centred(drawn: Tensor) -> Tensor:
    """Uniforms that put every box nearer the middle."""
    drawn = drawn.clone()
    drawn[:, -2:] = 0.25 + drawn[:, -2:] / 2
    return drawn


@pytest.mark.parametrize("bug", [uniform_ratio, uniform_side, centred])
def test_crop_test_catches_planted_bugs(bug: Callable[[Tensor], Tensor]) -> None:
    assert crop_p_value(96, 96, bug) < FALSE_ALARM


@pytest.mark.parametrize("height, width", SHAPES)
@pytest.mark.parametrize("value", [0.0, 1 - 2**-24])
def test_crop_boxes_stay_inside_at_the_ends_of_the_uniforms(
    height: int, width: int, value: float
) -> None:
    drawn = uniforms(500, 22)
    drawn[:, -2:] = value
    top, left, box_height, box_width = sample_box(drawn, height, width, scale=SCALE, ratio=RATIO)
    assert (top >= 0).all() and (top + box_height <= height).all() and (box_height > 0).all()
    assert (left >= 0).all() and (left + box_width <= width).all() and (box_width > 0).all()


def test_crop_fallback_is_the_central_box() -> None:
    """With a scale that never fits, torchvision and we fall back to the same box."""
    for height, width in SHAPES:
        image = torch.empty(1, height, width)
        expected = RandomResizedCrop.get_params(image, (30.0, 40.0), RATIO)
        box = sample_box(uniforms(3, 22), height, width, scale=(30.0, 40.0), ratio=RATIO)
        assert all(tuple(row) == expected for row in torch.stack(box, dim=1).int().tolist())


def order_p_value(order: Tensor) -> float:
    """Chi-square p-value of equal shares over the 24 permutations."""
    codes = (order * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    table = {
        64 * a + 16 * b + 4 * c + d: rank
        for rank, (a, b, c, d) in enumerate(itertools.permutations(range(4)))
    }
    ranks = torch.tensor([table[code] for code in codes.tolist()])
    return float(stats.chisquare(torch.bincount(ranks, minlength=24).numpy()).pvalue)


def test_jitter_order_is_uniform_over_permutations() -> None:
    order, _ = sample_jitter(uniforms(24_000, 9), (0.8, 0.8, 0.8, 0.2), 0.8)
    assert order_p_value(order) > FALSE_ALARM


def test_order_test_catches_planted_bugs() -> None:
    order, _ = sample_jitter(uniforms(24_000, 9), (0.8, 0.8, 0.8, 0.2), 0.8)
    start = uniforms(24_000, 1, seed=3).mul(4).long()
    assert order_p_value((start + torch.arange(4)) % 4) < FALSE_ALARM  # cyclic orders only
    biased = torch.where(uniforms(24_000, 1, seed=4) < 0.1, torch.arange(4), order)
    assert order_p_value(biased) < FALSE_ALARM


def test_jitter_factors_are_torchvisions() -> None:
    """KS of the applied factors with ColorJitter's own ranges; strength above 1 clips at 0."""
    for strength in [(0.8, 0.8, 0.8, 0.2), (1.5, 0.4, 0.2, 0.1)]:
        theirs = ColorJitter(*strength)
        _, factors = sample_jitter(uniforms(COUNT, 9), strength, 1.0)
        limits = (theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
        for operation, (low, high) in enumerate(limits):
            law = stats.uniform(low, high - low)
            assert stats.kstest(factors[:, operation].numpy(), law.cdf).pvalue > FALSE_ALARM / 8


def assert_share(hits: Tensor, probability: float) -> None:
    test = stats.binomtest(int(hits.sum()), len(hits), probability)
    assert test.pvalue > FALSE_ALARM / 4


def test_probabilities() -> None:
    augment = augmentation("simclr-imagenet", size=32)
    params = augment.sample(uniforms(20_000, augment.num_uniforms), 40, 40)
    untouched = (params.factors == torch.tensor([1.0, 1.0, 1.0, 0.0])).all(dim=1)
    assert_share(params.flip, 0.5)
    assert_share(~untouched, 0.8)
    assert_share(params.grey, 0.2)
    assert_share(params.sigma > 0, 0.5)
    with pytest.raises(AssertionError):
        assert_share(params.grey, 0.22)  # saboteur


def test_sigma_is_uniform_and_always_drawn_on_stl10() -> None:
    augment = augmentation("simclr-stl10", size=96)
    sigma = augment.sample(uniforms(COUNT, augment.num_uniforms), 96, 96).sigma
    assert sigma.min() >= 0.1
    assert stats.kstest(sigma.numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > FALSE_ALARM


def test_operations_draw_independently() -> None:
    """No pair of parameters of different operations is correlated (Bonferroni over pairs)."""
    augment = augmentation("simclr-stl10", size=96)
    params = augment.sample(uniforms(COUNT, augment.num_uniforms), 96, 96)
    groups = [params.height, params.flip, params.factors[:, 0], params.grey, params.sigma]
    pairs = list(itertools.combinations([group.double().numpy() for group in groups], 2))
    assert min(stats.pearsonr(a, b).pvalue for a, b in pairs) > FALSE_ALARM / len(pairs)


def test_number_of_uniforms_follows_the_operations() -> None:
    assert Augmentation(size=8).num_uniforms == 0
    assert augmentation("none", size=8).num_uniforms == 0
    assert augmentation("digits", size=8).num_uniforms == 22
    assert augmentation("simclr-stl10", size=96).num_uniforms == 22 + 1 + 9 + 1 + 2
