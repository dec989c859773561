"""How sure is a number: intervals over test images and seeds, and whether there is a winner.

A mean accuracy is uncertain twice: other test images, and other seeds. Both are drawn anew,

    mean*  =  mean over resampled test images  +  s / sqrt(S) * t,      t ~ Student(S - 1)

with s the standard deviation over S seeds: a bootstrap over images, the same images for all groups
(so that a difference between two groups is paired), and for the few seeds the distribution of a
mean with unknown variance, as a bootstrap of two or three seeds is far too sure. So is one of a few
images: what resampling moves a mean by is multiplied by sqrt(Q / c), c ~ chi squared(Q - 1), which
makes Student's distribution of a normal one and is 1 where Q is large. One seed says
nothing about other seeds: its interval covers test images only, and it cannot win. If all Q answers
are right, or all wrong, resampling moves nothing: the interval is then Wilson's.

Shapes: S seeds, Q test images, N resampled means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from .runs import FloatArray, Group, Run

RESAMPLED = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of a group over its seeds, and what it might have been [N] (empty: unknown)."""

    mean: float
    seeds: int
    means: FloatArray
    items: int = 0  # test images that they are resampled over; 0: over seeds alone

    @property
    def interval(self) -> tuple[float, float] | None:
        """The central 95 % of what the mean might have been."""
        if not len(self.means):
            return None
        if self.items and self.mean in (0.0, 1.0) and not np.ptp(self.means):
            beyond = 1 / (1 + self.items / NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2)
            return (0.0, beyond) if self.mean == 0 else (1 - beyond, 1.0)
        low, high = np.quantile(self.means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def in_points(self) -> str:
        """A difference of two shares, with its interval where one is known.

        >>> Estimate(0.014, 1, np.linspace(-0.01, 0.03, 99)).in_points()
        '1.4 points [-0.9, 2.9]'
        """
        sure = "" if self.interval is None else f" {bounds(self.interval, -1.0)}"
        return f"{100 * self.mean:.1f} points{sure}"


def bounds(interval: tuple[float, float], least: float = 0.0) -> str:
    """The ends of an interval in percent, none of them beyond what a share can be.

    >>> bounds((0.914, 1.02)), bounds((-1.2, 0.3), least=-1.0)
    ('[91.4, 100.0]', '[-100.0, 30.0]')
    """
    low, high = (100 * min(max(end, least), 1.0) for end in interval)
    return f"[{low:.1f}, {high:.1f}]"


def estimates(groups: Sequence[Group], key: str) -> list[Estimate | None]:
    """The mean of every group for a metric, resampled in pairs between groups."""
    resampled = _over_images(groups, key)
    generator = np.random.default_rng(1)
    found: list[Estimate | None] = []
    for i, group in enumerate(groups):
        values = group.finals(key)
        if not len(values):
            found.append(None)
            continue
        mean, seeds = float(values.mean()), len(values)
        alone = np.full(RESAMPLED, mean) if seeds > 1 else np.empty(0)
        means, items = resampled.get(i, (alone, 0))
        if seeds > 1:
            spread = float(values.std(ddof=1)) / math.sqrt(seeds)
            means = means + spread * generator.standard_t(seeds - 1, RESAMPLED)
        found.append(Estimate(mean, seeds, means, items))
    return found


def interval_of(run: Run, key: str) -> tuple[float, float] | None:
    """The range that other test images would give one run's result; None where it is unknown."""
    (found,) = estimates([Group(run.name, "", 0, {}, [run])], key)
    return None if found is None else found.interval


def over_start(groups: Sequence[Group], key: str) -> list[Estimate | None]:
    """By how much the mean of every group is above that of its encoder before training.

    The same test items were answered before and after, so they are paired. None where the
    answers before training are not known.
    """
    starts = [_at_start(group, key) for group in groups]
    found = estimates([*groups, *filter(None, starts)], key)
    before = iter(found[len(groups) :])
    gains: list[Estimate | None] = []
    for own, start in zip(found, starts, strict=False):
        first = None if start is None else next(before)
        if own is None or first is None:
            gains.append(None)
            continue
        paired = len(own.means) == len(first.means)
        means = own.means - first.means if paired else np.empty(0)
        gains.append(Estimate(own.mean - first.mean, own.seeds, means))
    return gains


def _at_start(group: Group, key: str) -> Group | None:
    """The encoder of a group before training, as a group of one run."""
    run = next((run for run in group.counted if f"before_{key}" in run.artifacts), None)
    if run is None:
        return None
    answers = run.artifacts[f"before_{key}"]
    summary = {key: float(answers.mean())}
    artifacts = {**run.artifacts, f"right_{key}": answers}
    return replace(group, runs=[replace(run, summary=summary, artifacts=artifacts)])


def winner(found: Sequence[Estimate | None], *, higher: bool) -> int | None:
    """The place of the group that is better than every other with 97.5 % probability, if any.

    >>> sure = [Estimate(m, 3, m + 0.001 * np.random.default_rng(i).standard_normal(99))
    ...         for i, m in enumerate((0.9, 0.8))]
    >>> winner(sure, higher=True), winner(sure, higher=False)
    (0, 1)
    >>> winner([Estimate(0.9, 1, np.full(99, 0.9)), sure[1]], higher=True) is None
    True
    """
    known = [(i, e) for i, e in enumerate(found) if e is not None]
    if len(known) < 2 or any(e.seeds < 2 for _, e in known):
        return None
    sign = 1.0 if higher else -1.0
    best, lead = max(known, key=lambda entry: sign * entry[1].mean)
    beaten = [
        float(np.mean(sign * (lead.means - other.means) <= 0)) < (1 - LEVEL) / 2
        for i, other in known
        if i != best
    ]
    return best if all(beaten) else None


def beyond_chance(gains: Sequence[Estimate]) -> bool:
    """Whether the largest of several gains is more than the largest of as many by chance.

    Of eight methods that gain nothing one may well seem to. In 97.5 % of what might have been,
    none deviates by more than `sure` times what it alone does in 97.5 %.

    >>> noise = np.random.default_rng(0).standard_normal((8, 999))
    >>> found = [Estimate(m, 3, m + row) for m, row in zip((2.2, *[0.0] * 7), noise)]
    >>> beyond_chance(found[:1]), beyond_chance(found)
    (True, False)
    """
    deviations = np.stack([gain.mean - gain.means for gain in gains])
    alone = np.quantile(deviations, (1 + LEVEL) / 2, axis=1).clip(min=0)
    scale = np.where(alone > 0, alone, np.inf)  # what has no noise never deviates
    sure = float(np.quantile((deviations.T / scale).max(1), (1 + LEVEL) / 2))
    largest = max(range(len(gains)), key=lambda i: gains[i].mean)
    return bool(gains[largest].mean > max(sure, 1.0) * alone[largest])


def _over_images(groups: Sequence[Group], key: str) -> dict[int, tuple[FloatArray, int]]:
    """Means [N] of each group with its Q test images resampled, and Q; none where unknown.

    Groups with equal test images share the resampled images.
    """
    shared: dict[tuple[bytes, int], list[tuple[int, FloatArray]]] = {}
    for i, group in enumerate(groups):
        arrays = [run.artifacts for run in group.counted if run.final(key) is not None]
        if not arrays or any(f"right_{key}" not in a or "test_labels" not in a for a in arrays):
            continue
        tests = {a["test_labels"].tobytes() for a in arrays}
        if len(tests) == 1 and len(arrays[0][f"right_{key}"]) > 1:
            right = np.stack([a[f"right_{key}"] for a in arrays]).astype(np.float64).mean(axis=0)
            shared.setdefault((tests.pop(), len(right)), []).append((i, right))
    found = {}
    for members in shared.values():
        # images answered alike by all groups are exchangeable: draw how many of each kind
        rows = np.stack([right for _, right in members], axis=1)
        kinds, counts = np.unique(rows, axis=0, return_counts=True)
        generator = np.random.default_rng(0)
        drawn = generator.multinomial(len(rows), counts / len(rows), size=RESAMPLED)
        means, mean = drawn @ kinds / len(rows), rows.mean(0)
        few = np.sqrt(len(rows) / generator.chisquare(len(rows) - 1, RESAMPLED))
        means = mean + few[:, None] * (means - mean)
        found.update({i: (means[:, place], len(rows)) for place, (i, _) in enumerate(members)})
    return found
