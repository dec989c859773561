"""The section of what `compare --tune` tried; from the commands in tests/tasks/test_tuning.py."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fabricate_runs import make_config, make_metrics, write_run

from negchain.methods import title_of, trained
from negchain.report import write_report
from negchain.report.tuning import Tried, Tuned


def test_it_has_every_value_and_rings_the_chosen_one(tmp_path: Path) -> None:
    """On the page of one run too; a run that failed has no score, and a text is escaped."""
    scores = {5.0: {0: 0.91}, 14.28: {0: 0.95, 1: 0.93}, 50.0: {}}
    tried = [Tried({"beta": b, "recipe": "<b>"}, s, len(s) > 1) for b, s in scores.items()]
    run = write_run(tmp_path / "r", config := make_config(), make_metrics(config))
    out = write_report([run], tmp_path / "a.html", [Tuned("emc2", "probe_validation", "", tried)])
    page = out.read_text(encoding="utf-8")
    (section,) = re.findall(r'<section class="tuned">(.*?)</section>', page, re.S)
    assert "The best by “Probe, validation” was chosen" in section and "<b><b>" not in section
    rows = section.split("<tbody>")[1].split("</tr>")
    for row, words in zip(rows, (">5<", ">14.28<", ">50<"), strict=False):
        assert words in row and "&lt;b&gt;" in row
    assert "91.0 %" in rows[0] and "chosen" not in rows[0]
    assert "<b>95.0 %</b><small>chosen" in rows[1] and "94.0 %<small>± 1.4 %" in rows[1]
    assert "not ended" in rows[2]
    assert section.count('class="chosen"') == 2  # a chart per setting
    (numbers,) = re.findall(r'id="negchain-data">(.*?)</script>', page, re.S)
    chart = json.loads(numbers)["charts"]["tuned-beta-samples"]
    assert chart["places"] == ["5", "14.28", "50"]
    assert [(line["x"], line["y"]) for line in chart["series"]] == [([0.5, 1.5], [0.91, 0.95])]


def test_nothing_tuned_leaves_no_trace(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", config := make_config(), make_metrics(config))
    page = write_report([run], tmp_path / "a.html").read_text(encoding="utf-8")
    assert "What was tuned" not in page


def test_a_method_whose_runs_all_failed_does_not_name_the_score(tmp_path: Path) -> None:
    """It came first, and its page called accuracies of other methods losses, the least best."""
    none = Tuned("dcl", "", "has no score to choose by: the first of 2 is taken", [
        Tried({"lr": lr}, {}, lr == 0.1) for lr in (0.1, 0.2)
    ])  # fmt: skip
    tried = [Tried({"lr": lr}, {0: lr + 0.7}, lr == 0.2) for lr in (0.1, 0.2)]
    run = write_run(tmp_path / "r", config := make_config(), make_metrics(config))
    tuned = [none, Tuned("emc2", "probe_validation", "", tried)]
    page = write_report([run], tmp_path / "a.html", tuned).read_text(encoding="utf-8")
    (section,) = re.findall(r'<section class="tuned">(.*?)</section>', page, re.S)
    assert "The best by “Probe, validation” was chosen" in section
    assert "<b>90.0 %</b><small>chosen" in section and "<b>not ended</b><small>chosen" in section


def test_a_legend_names_the_lines(tmp_path: Path) -> None:
    """Nine methods, the default, had lines without names; a narrow page never had names."""
    tuned = [
        Tuned(method, "probe", "", [Tried({"lr": lr}, {0: lr}, lr == 0.2) for lr in (0.1, 0.2)])
        for method in trained()
    ]
    tuned[2] = replace(tuned[2], note="has no score to choose by")
    run = write_run(tmp_path / "r", config := make_config(), make_metrics(config))
    page = write_report([run], tmp_path / "a.html", tuned).read_text(encoding="utf-8")
    (legend,) = re.findall(r'<div class="legend">(<button type="button" data-s.*?)</div>', page)
    named = re.findall(r'data-series="(\d)".*?</svg>(.*?)</button>', legend)
    assert named == [(str(i), title_of(name)) for i, name in enumerate(trained()) if i != 2]
    (numbers,) = re.findall(r'id="negchain-data">(.*?)</script>', page, re.S)
    lines = json.loads(numbers)["charts"]["tuned-lr-samples"]["series"]
    assert [(str(line["index"]), line["label"]) for line in lines] == named
    alone = write_report([run], tmp_path / "b.html", tuned[:1]).read_text(encoding="utf-8")
    assert '<button type="button" data-s' not in alone  # nothing to tell apart


RATES = [k / 10_000 for k in range(1, 21)]
ENCODERS = [f"sentence-transformers/all-MiniLM-L{k}-v2" for k in (3, 6, 12)]


@pytest.mark.parametrize(("values", "shown"), [(RATES, 7), (ENCODERS, 3)])
def test_names_of_values_do_not_overlap(values: list[Any], shown: int, tmp_path: Path) -> None:
    """Twenty rates were one black bar. A name in full is shown where the pointer is."""
    tried = [Tried({"encoder": v}, {0: k / 20}, k == 0) for k, v in enumerate(values)]
    run = write_run(tmp_path / "r", config := make_config(), make_metrics(config))
    tuned = [Tuned("emc2", "probe", "", tried)]
    page = write_report([run], tmp_path / "a.html", tuned).read_text(encoding="utf-8")
    (frame,) = re.findall(r'data-chart="tuned-encoder.*?class="frame">(.*?)</g>', page, re.S)
    drawn = r'<text x="([\d.]+)" y="\d+" text-anchor="middle">([^<]+)</text>'
    names = [(float(x), 4.5 * len(name)) for x, name in re.findall(drawn, frame)]
    assert len(names) == shown
    ends = [(x - half, x + half) for x, half in names]  # 9 px a character
    assert all(end < begin for (_, end), (begin, _) in pairwise(ends))
    (numbers,) = re.findall(r'id="negchain-data">(.*?)</script>', page, re.S)
    places = json.loads(numbers)["charts"]["tuned-encoder-samples"]["places"]
    assert places == [str(value) for value in values]
