"""`negchain compare --tune`: each method keeps its best settings, by the score of its task."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from negchain.cli import compare
from negchain.cli import run as command_line
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve


@pytest.fixture
def by() -> list[str]:
    """Of what the scores of `launched` runs are."""
    return ["ndcg10"]


@pytest.fixture
def launched(by: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that take no time: infonce likes a large rate, dcl a small one."""
    names: list[str] = []

    def launch(plan: compare.Plan, first) -> SimpleNamespace:
        path, config, _ = plan
        names.append(path.name)
        path.mkdir(parents=True)
        score = config.lr * (1 if config.method == "infonce" else -1)
        (path / "summary.json").write_text(json.dumps({"score": score, "score_by": by[0]}))
        (path / "config.json").write_text(json.dumps(asdict(config)))
        (path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(compare, "_launch", launch)
    return names


def rows_of_what_was_tuned(page: str) -> list[list[str]]:
    """The texts of the cells of each row."""
    (section,) = re.findall(r'<section class="tuned">(.*?)</section>', page, re.S)
    (body,) = re.findall(r"<tbody>(.*?)</tbody>", section, re.S)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in rows]


def test_every_method_keeps_its_best(launched: list[str], tmp_path: Path, capsys) -> None:
    words = ["compare", "--methods", "infonce,dcl", "--tune", "lr=0.1,0.2", "--seeds", "2"]
    words += ["--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert command_line(words) == 0
    assert launched == [
        "infonce-lr=0.1-seed0", "infonce-lr=0.2-seed0", "dcl-lr=0.1-seed0", "dcl-lr=0.2-seed0",
        "infonce-lr=0.2-seed1", "dcl-lr=0.1-seed1",
    ]  # fmt: skip
    assert "infonce lr=0.2 is best of 2" in " ".join(capsys.readouterr().err.split())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "dcl-lr=0.1" in page and "dcl-lr=0.2" not in page
    rows = rows_of_what_was_tuned(page)
    assert rows == [
        ["InfoNCE", "0.1", "0.1", "", ""],
        ["InfoNCE", "0.2", "0.2chosen", "0.2± 0", ""],
        ["DCL", "0.1", "−0.1chosen", "−0.1± 0", ""],
        ["DCL", "0.2", "−0.2", "", ""],
    ]
    assert 'data-chart="tuned-lr-samples"' in page and page.count('class="chosen"') == 2
    infonce, dcl = json.loads((tmp_path / "tuning.json").read_text())
    assert (infonce["method"], infonce["by"], dcl["method"]) == ("infonce", "ndcg10", "dcl")
    assert infonce["tried"] == [
        {"settings": {"lr": 0.1}, "scores": {"0": 0.1}, "chosen": False},
        {"settings": {"lr": 0.2}, "scores": {"0": 0.2, "1": 0.2}, "chosen": True},
    ]
    launched.clear()
    assert command_line(words) == 0 and launched == []  # what is finished is kept


def test_exact_losses_of_another_beta_choose_nothing(
    by: list[str], launched: list[str], tmp_path: Path, capsys
) -> None:
    by[0] = "global_loss"
    words = ["compare", "--methods", "dcl", "--tune", "lr=0.1,0.2", "--device", "cpu", "--quiet"]
    assert command_line([*words, "--out", str(tmp_path / "rates")]) == 0
    assert "dcl lr=0.1 is best of 2 (global_loss 0.1000)" in capsys.readouterr().err
    assert command_line([*words, "--tune", "beta=9,5", "--out", str(tmp_path / "betas")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "dcl has no score to choose by: exact losses of another --beta are no better" in said
    page = (tmp_path / "betas" / "report.html").read_text(encoding="utf-8")
    assert "dcl-lr=0.1-beta=9-seed0" in page and "beta=5-seed0" not in page
    assert [row[1:4] for row in rows_of_what_was_tuned(page)] == [
        ["0.1", "9", "0.1chosen"], ["0.1", "5", "0.1"],
        ["0.2", "9", "0.2"], ["0.2", "5", "0.2"],
    ]  # fmt: skip
    assert "DCL has no score to choose by: exact losses of another --beta are no better" in page
    assert "tuned-beta" not in page and "The best by" not in page  # nothing to compare


def test_a_value_whose_run_failed_is_not_taken(tmp_path: Path) -> None:
    configs = [resolve(None, {"method": "dcl", "beta": beta}) for beta in (9.0, 5.0)]
    failed, other = ([compare.Plan(tmp_path / f"{c.beta}", c, {})] for c in configs)
    other[0].path.mkdir()
    (other[0].path / "summary.json").write_text('{"score": -1.0, "score_by": "global_loss"}')
    assert compare._best("dcl", [failed, other]).plans is other


def test_where_every_run_failed_nothing_says_what_the_score_is(tmp_path: Path) -> None:
    """It was said to be the exact loss, and the page took that for the score of all methods."""
    configs = [resolve(None, {"method": "dcl", "lr": lr}) for lr in (0.1, 0.2)]
    plans = [[compare.Plan(tmp_path / f"{c.lr}", c, {"lr": c.lr})] for c in configs]
    found = compare._tuned("dcl", plans, compare.Choice(plans[0]), ["lr"])
    assert found.by == "" and [one.scores for one in found.tried] == [{}, {}]


def test_runs_that_tune_and_that_follow_are_counted_together(
    launched: list[str], tmp_path: Path, capsys
) -> None:
    words = ["compare", "--methods", "infonce,dcl", "--tune", "lr=0.1,0.2", "--seeds", "2"]
    assert command_line([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "run 1 of 6: infonce-lr=0.1-seed0: 0/6 runs done" in said
    assert "run 6 of 6: dcl-lr=0.1-seed1: 5/6 runs done" in said


def test_what_a_method_does_not_know_is_not_tuned(launched: list[str], tmp_path: Path) -> None:
    words = ["compare", "--methods", "dcl,sogclr", "--tune", "gamma=0.5,0.9", "--device", "cpu"]
    assert command_line([*words, "--quiet", "--out", str(tmp_path)]) == 0
    assert sorted(launched) == ["dcl-seed0", "sogclr-gamma=0.5-seed0", "sogclr-gamma=0.9-seed0"]


def test_scores_of_an_earlier_tuning_go_with_its_page(launched: list[str], tmp_path: Path) -> None:
    """They stayed beside a page of other runs; the same --tune, which trains nothing, has them."""
    words = ["compare", "--methods", "dcl", "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    page, scores = tmp_path / "report.html", tmp_path / "tuning.json"
    assert command_line([*words, "--tune", "lr=0.1,0.2"]) == 0 and scores.exists()
    before, tuned = scores.read_bytes(), page.read_bytes()
    assert command_line(words) == 0
    assert not scores.exists() and 'class="tuned"' not in page.read_text(encoding="utf-8")
    launched.clear()
    assert command_line([*words, "--tune", "lr=0.1,0.2"]) == 0 and launched == []
    assert scores.read_bytes() == before and 'class="tuned"' in tuned.decode()


def test_values_that_differ_late_are_runs_of_their_own(launched: list[str], tmp_path: Path) -> None:
    """In six digits both were 0.1: the second value was never trained, and one of both was best."""
    words = ["compare", "--methods", "dcl", "--tune", "lr=0.10000001,0.10000002"]
    assert command_line([*words, "--device", "cpu", "--quiet", "--out", str(tmp_path)]) == 0
    assert launched == ["dcl-lr=0.10000001-seed0", "dcl-lr=0.10000002-seed0"]


def test_texts_that_differ_in_a_slash_are_runs_of_their_own(
    launched: list[str], tmp_path: Path, monkeypatch
) -> None:
    """`/` was written `_`: a/b and a_b shared a folder, and only one of them was trained."""
    monkeypatch.chdir(tmp_path)
    encoders = ("a/b", "a_b", "a%2Fb")
    for name in encoders:
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text("{}")
    Path("data").mkdir()
    Path("data/corpus.jsonl").touch()
    words = ["compare", "--methods", "dcl", "--tune", f"encoder={','.join(encoders)}"]
    words += ["--task", "retrieval", "--data", "data", "--device", "cpu", "--quiet", "--out", "out"]
    assert command_line(words) == 0
    assert launched == [f"dcl-encoder={n}-seed0" for n in ("a%2Fb", "a_b", "a%252Fb")]


@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
        ({"dcl": (2, "refused: too large; lower it"), "emc2": (2, "")}, 2, "refused: too large"),
        ({"dcl": (2, "refused: too large; lower it"), "emc2": (1, "")}, 1, "exit status 1 (emc2-"),
        ({"dcl": (-9, "")}, 1, "failed: exit status -9 (dcl-seed0, see"),
    ],
)
def test_it_is_refused_where_all_that_failed_was_refused(
    ends: dict, status: int, words: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    """As `train` would have been; what a run said is said again, once, in its words."""

    def launch(plan: compare.Plan, first) -> SimpleNamespace:
        path, config, _ = plan
        code, said = ends[config.method]
        Path(f"{path}.log").write_text(f"note: x\n{said}\n")
        return SimpleNamespace(poll=lambda: code, returncode=code)

    monkeypatch.setattr(compare, "_launch", launch)
    options = ["--methods", ",".join(ends), "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert command_line(["compare", *options]) == status
    said = " ".join(capsys.readouterr().err.split())
    assert words in said and said.count("dcl-seed0.log") == 1 and "failed: refused" not in said


@pytest.mark.parametrize("name", ["lr", "beta"])  # of which exact losses can, and cannot, choose
def test_what_cannot_be_judged_is_not_called_best(
    name: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    started: list[str] = []

    def launch(plan: compare.Plan, *rest) -> SimpleNamespace:
        path = plan.path
        started.append(path.name)
        Path(f"{path}.log").write_text("refused: too large; lower it\n")
        return SimpleNamespace(poll=lambda: 2, returncode=2)

    monkeypatch.setattr(compare, "_launch", launch)
    words = ["compare", "--methods", "dcl", "--tune", f"{name}=0.1,0.2", "--device", "cpu"]
    assert command_line([*words, "--quiet", "--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "dcl has no score to choose by: the first of 2 is taken" in said and "inf" not in said
    assert started == [f"dcl-{name}=0.1-seed0", f"dcl-{name}=0.2-seed0"]  # none of them twice


@pytest.mark.parametrize(
    "tune, message",
    [
        ("beta", "SETTING=VALUE,VALUE .* no value is named"),
        ("bata=1", "the setting of --tune is unknown, got 'bata'; did you mean 'beta'"),
        ("beta=1,two", "--tune beta must be a number, got 'two'"),
        ("epochs=1.5", "--tune epochs must be an integer, got '1.5'"),
        ("strict=yes,no", "--strict must be true or false, got 'yes'"),
        ("lr=1", "--lr is given twice"),
        ("seed=0,1", "--seed must be the same in all that --tune chooses from"),
        ("name=a,b", "--name must be the same"),  # of two methods: one line on the page
        ("holdout=0.1,0.3", "--holdout must be the same"),  # each would be judged on other pictures
    ],
)
def test_nonsense_is_refused(tune: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare.grid([tune], {"lr": 0.1})


def test_true_and_false_are_values() -> None:
    """They were refused: "must be true or false, got 'true'"."""
    assert compare.grid(["strict=true,false"], {}) == [{"strict": True}, {"strict": False}]
