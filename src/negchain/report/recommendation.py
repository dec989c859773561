"""Which method to use, or none: by held-out results against the encoder as it was, if it was any.

A task whose encoder is good before the first step keeps, beside what each query got (`right_KEY`),
what it would have got then (`before_KEY`). Both are resampled together (see `statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .measures import Metric
from .runs import Group
from .statistics import LEVEL, estimates


def recommendation(groups: Sequence[Group], lead: Metric) -> str | None:
    """A sentence or two; None where nothing says how good the encoder was."""
    before = f"before_{lead.key}"
    known = [g for g in groups if any(before in run.artifacts for run in g.counted)]
    if not known:
        return None
    first = next(run for run in known[0].counted if before in run.artifacts)
    art = {**first.artifacts, f"right_{lead.key}": first.artifacts[before]}
    summary = {lead.key: float(first.artifacts[before].mean())}
    start = replace(known[0], runs=[replace(first, summary=summary, artifacts=art)])
    found = estimates([*known, start], lead.key)
    sign = 1.0 if lead.higher else -1.0
    gains = [sign * (e.draws - found[-1].draws) for e in found[:-1]]  # type: ignore[union-attr]
    means = [sign * (e.mean - found[-1].mean) for e in found[:-1]]  # type: ignore[union-attr]
    best = int(np.argmax(means))
    low, high = np.quantile(gains[best], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    gain = f"{100 * means[best]:.1f} points [{100 * low:.1f}, {100 * high:.1f}]"
    name = known[best].label
    if low <= 0:
        return (
            f"Recommended: none of these. The most is gained by {name}, {gain} of {lead.name} over "
            "the encoder as it was, which is within the noise of queries and seeds: keep that one, "
            "or look at the proposals for false negatives."
        )
    alike = [
        known[i].label
        for i, other in enumerate(gains)
        if i != best and np.quantile(gains[best] - other, (1 - LEVEL) / 2) <= 0
    ]
    more = f" Within the noise of it: {', '.join(alike)}." if alike else ""
    return f"Recommended: {name}, {gain} of {lead.name} over the encoder as it was.{more}"
