"""Which method a comparison recommends: only what gains beyond the noise of held-out queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from negchain.report.measures import Metric
from negchain.report.results import recommendation
from negchain.report.runs import Group, Run

LEAD = Metric("ndcg10", "nDCG@10", "percent", "", True)


def group(label: str, gain: float, *, seeds: int = 1, noise: float = 0.1) -> Group:
    before = np.random.default_rng(0).uniform(0.3, 0.6, 200)
    runs = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, *label.encode()])
        got = before + gain + noise * rng.standard_normal(200)
        art = {"before_ndcg10": before, "right_ndcg10": got, "test_labels": np.arange(200)}
        runs.append(Run(Path(label), {}, [], {"ndcg10": float(got.mean())}, art))
    return Group(label, label, 0, {}, runs)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_best_is_recommended_with_its_interval(seeds: int) -> None:
    groups = [group("weak", 0.05, seeds=seeds), group("good", 0.2, seeds=seeds)]
    said = recommendation(groups, LEAD)
    assert said is not None and said.startswith("Recommended: good, ")
    assert "points [" in said and "Within the noise" not in said
    groups.append(group("other", 0.2, seeds=seeds, noise=0.12))
    assert "Within the noise of it: " in str(recommendation(groups, LEAD))


def test_the_gain_on_queries_that_chose_nothing_stands_beside_it() -> None:
    tuned = group("good", 0.2)
    tuned.runs[0].artifacts["before_test_ndcg10"] = np.full(9, 0.4)
    tuned.runs[0].summary["test_ndcg10"], tuned.runs[0].config["task"] = 0.414, "retrieval"
    said = str(recommendation([tuned], LEAD))
    assert "over the encoder as it was (1.4 on test queries)." in said
    assert "on test" not in str(recommendation([group("good", 0.2)], LEAD))


def test_none_is_recommended_where_nothing_gains() -> None:
    for gain in (0.0, -0.1):
        said = recommendation([group("a", gain), group("b", gain)], LEAD)
        assert said is not None and said.startswith("Recommended: none of these.")
        assert "keep the encoder you have" in said


def test_nothing_is_said_without_a_start_to_compare_with() -> None:
    bare = Run(Path("a"), {}, [], {"ndcg10": 0.5}, {})
    assert recommendation([Group("a", "a", 0, {}, [bare])], LEAD) is None
