"""What pages say of gains over the encoder as it was: what is beyond the noise, and by how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from negchain.report.advice import against_baselines
from negchain.report.measures import Metric
from negchain.report.results import recommendation
from negchain.report.retrieval import proposals
from negchain.report.runs import Group, Run
from negchain.report.sections import settings, standing
from negchain.report.statistics import over_start

LEAD = Metric("ndcg10", "nDCG@10", "percent", "", True)


def group(label: str, gain: float, *, seeds: int = 1, noise: float = 0.1) -> Group:
    before = np.random.default_rng(0).uniform(0.3, 0.6, 200)
    runs = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, *label.encode()])
        got = before + gain + noise * rng.standard_normal(200)
        art = {"before_ndcg10": before, "right_ndcg10": got, "test_labels": np.arange(200)}
        runs.append(Run(Path(label), {"seed": seed}, [], {"ndcg10": float(got.mean())}, art))
    return Group(label, label, 0, {}, runs)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_best_is_recommended_with_its_interval(seeds: int) -> None:
    groups = [group("weak", 0.05, seeds=seeds), group("good", 0.2, seeds=seeds)]
    said = recommendation(groups, LEAD)
    assert said is not None and said.startswith("Recommended: good, ")
    assert "points [" in said and "Within the noise" not in said
    assert ("--seeds 3 would make sure" in said) == (seeds == 1)  # its queries also chose it
    groups.append(group("other", 0.2, seeds=seeds, noise=0.12))
    assert "Within the noise of it: " in str(recommendation(groups, LEAD))


def test_the_gain_on_queries_that_chose_nothing_stands_beside_it() -> None:
    tuned = group("good", 0.2)
    tuned.runs[0].artifacts["before_test_ndcg10"] = np.full(9, 0.4)
    tuned.runs[0].summary["test_ndcg10"], tuned.runs[0].config["task"] = 0.414, "retrieval"
    said = str(recommendation([tuned], LEAD))
    assert "over the encoder as it was (1.4 points on test queries)." in said
    assert "on test" not in str(recommendation([group("good", 0.2)], LEAD))


def test_the_gain_on_test_queries_has_an_interval() -> None:
    tuned = group("good", 0.2)
    before = np.linspace(0.1, 0.9, 50)
    got = before + 0.03 + 0.01 * np.random.default_rng(0).standard_normal(50)
    tuned.runs[0].artifacts.update(before_test_ndcg10=before, right_test_ndcg10=got)
    tuned.runs[0].summary["test_ndcg10"], tuned.runs[0].config["task"] = got.mean(), "retrieval"
    (gain,) = over_start([tuned], "test_ndcg10")
    assert gain is not None and gain.interval is not None
    error = (got - before).std() / np.sqrt(50)  # of the differences, not of the answers
    mean = (got - before).mean()
    assert gain.interval == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=4e-4)
    assert f"({gain.in_points()} on test queries)" in str(recommendation([tuned], LEAD))


def retriever(gain: float, noise: float = 0.05) -> Run:
    (run,) = group("one", gain, noise=noise).runs
    run.config.update(task="retrieval", data_info={"validation": 200, "test": 230})
    run.summary["untrained_ndcg10"] = float(run.artifacts["before_ndcg10"].mean())
    return run


def test_a_run_is_held_against_its_start_query_by_query() -> None:
    """Queries differ by far more than training moves them: unpaired, every gain is noise."""
    (said,) = against_baselines(retriever(0.015))
    assert "training gained 1." in said and "points [" in said
    (said,) = against_baselines(retriever(-0.015))
    assert "training made it worse, -1." in said
    (said,) = against_baselines(retriever(0.0))
    assert ("is within the noise" in said or "no gain, -" in said) and "points [" in said
    (said,) = against_baselines(retriever(0.0, noise=0.0))
    assert "training shows no gain; on this data" in said


def test_settings_do_not_count_validation_queries_as_test() -> None:
    assert "200 for validation, 30 for test" in settings(retriever(0.1))


def test_a_start_of_nothing_is_a_start() -> None:
    """Zero was taken for a number that is not known."""
    run = replace(retriever(0.1), metrics=[{"step": 4.0, "ndcg10": 0.3}])
    run.summary["untrained_ndcg10"] = 0.0
    assert run.baseline("ndcg10") == {"untrained": 0.0}


def test_a_page_says_which_queries_are_meant_and_what_each_measure_was_before() -> None:
    run = retriever(0.1)
    run.summary.update(mrr10=0.5, untrained_mrr10=0.4, step=120, best_step=80)
    page = standing(run)
    assert "What was kept is the encoder of step 80 of 120, the best by validation." in page
    assert "Results on 230 held-out queries (200 validation, 30 test)." in page
    assert "<b>50.0 %</b> <small>40.0 % before. " in page


def test_one_that_is_tested_on_is_no_plural() -> None:
    run = retriever(0.1)
    run.config.update(data_info={"test": 1})
    assert "Results on the held-out queries, of which there is 1." in standing(run)


def test_proposals_that_look_like_false_negatives_come_first() -> None:
    scores = np.array([[0.5, 0.4], [0.9, -2.0], [0.7, 0.1]])
    art = {
        "proposal_queries": np.array(["easy", "hardest", "hard"]),
        "proposal_positives": np.array(["a", "b", "c"]),
        "proposal_positive_scores": np.array([0.8, 0.3, 0.6]),
        "proposal_texts": np.array([["d", "e"]] * 3),
        "proposal_scores": scores,
    }
    run = Run(Path("a"), {"task": "retrieval"}, [], {}, art)
    page = proposals(run, rows=12)
    assert page.index("hardest") < page.index(">hard<") < page.index("easy")
    assert "2 of the 3 queries looked at have one" in page
    assert "easy" not in proposals(run, rows=2)


def test_none_is_recommended_where_nothing_gains() -> None:
    for gain in (0.0, -0.1):
        said = recommendation([group("a", gain), group("b", gain)], LEAD)
        assert said is not None and said.startswith("Recommended: none of these.")
        assert "keep the encoder you have" in said and "--seeds" not in said


def test_two_seeds_that_leave_everything_open_ask_for_a_third() -> None:
    tuned = group("good", 0.2, seeds=2)
    for run, score in zip(tuned.runs, (0.6, 0.7), strict=True):
        assert run.summary is not None
        run.summary["ndcg10"] = score  # 12.7 standard errors either way
    said = recommendation([tuned], LEAD)
    assert said is not None and said.startswith("Recommended: none of these.")
    assert "two seeds leave it wide, so add --seeds 3 or more; else keep" in said


def test_the_best_of_eight_that_gain_nothing_is_not_recommended() -> None:
    """Held against the noise of one method, one in five such comparisons recommended one."""
    said = [
        str(recommendation([group(f"{trial} {place}", 0.0) for place in range(8)], LEAD))
        for trial in range(30)
    ]
    assert sum(not text.startswith("Recommended: none of these.") for text in said) <= 2
    assert "and seeds, for the largest of 8 gains: keep" in said[0]


@pytest.mark.parametrize("queries", [1, 2, 3, 8])
def test_a_few_queries_are_not_sure(queries: int) -> None:
    """A bootstrap of three answers is as sure as one of three seeds: it covered 76 %."""
    rng, covered, known = np.random.default_rng(queries), 0, 0
    for _ in range(100):
        one = group("few", 0.0)
        before = np.full(queries, 0.5)
        got = before + rng.standard_normal(queries)
        one.runs[0].artifacts.update(
            before_ndcg10=before, right_ndcg10=got, test_labels=np.arange(queries)
        )
        one.runs[0].summary["ndcg10"] = float(got.mean())
        (gain,) = over_start([one], "ndcg10")
        assert gain is not None
        if gain.interval is not None:
            known += 1
            covered += gain.interval[0] <= 0 <= gain.interval[1]
    assert known == (100 if queries > 1 else 0)  # one answer says nothing about others
    assert covered >= 0.9 * known


def test_nothing_is_said_without_a_start_to_compare_with() -> None:
    bare = Run(Path("a"), {}, [], {"ndcg10": 0.5}, {})
    assert recommendation([Group("a", "a", 0, {}, [bare])], LEAD) is None
