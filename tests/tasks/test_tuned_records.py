"""Tables of pages that tell tuned runs are those of their records."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCIFACT = {  # a row of the page, by words in it; the method in the record
    "in-batch (": "in-batch",
    "GIST": "GIST",
    "EMC², uniform": "emc2 uniform",
    "random documents": "random",
    "SogCLR": "sogclr",
    "logQ": "logQ uniform",
    "CachedMNRL": "CachedMNRL 256",
    "mined once": "mined",
    "EMC², informed": "emc2 informed",
    "uncorrected": "table top-k",
    "importance weights": "informed importance",
}
IN_RECORD = {  # a row of the record's tables
    "informed importance": "informed importance",
    "table top-k, uncorrected": "table top-k",
    "EMC², informed proposals": "emc2 informed",
    "CachedMNRL, 256": "CachedMNRL 256",
    "mined once": "mined",
    "SogCLR, random documents": "sogclr",
    "logQ, uniform draws": "logQ uniform",
    "random documents": "random",
    "EMC², uniform draws": "emc2 uniform",
    "GIST": "GIST",
    "in-batch": "in-batch",
}
FLICKR = {
    "`infonce`, a batch of 2 b": "infonce 2b",
    "`sogclr`, b draws": "sogclr",
    "`informed`, b draws": "informed",
    "`emc2`": "emc2",
    "`infonce`, a batch of b": "infonce",
}


Cells = dict[tuple[str, int], str]
NUMBER = r"[−+]?\.\d+"


def rows_of(record: str) -> list[dict[str, Any]]:
    text = (ROOT / f"records/2026-11-16_{record}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def key(row: dict[str, Any]) -> tuple[str, int]:
    return row["method"], row["batch"]


def validated(row: dict[str, Any]) -> float:
    return float(row["validation"])


def setting(row: dict[str, Any]) -> tuple[float | None, float | None]:
    return row.get("beta"), row.get("lr")


def cells_of(page: str, head: str, names: dict[str, str]) -> Cells:
    """A page's table under a head: its cells by method and batch."""
    lines = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split(f"| {head} |")[1]
    first, _, *lines = lines.split("\n\n")[0].splitlines()
    batches = [int(cell.split("=")[1]) for cell in first.strip("| ").split("|")]
    assert len(lines) == len(names)
    found: Cells = {}
    for line in lines:
        title, *told = [cell.strip() for cell in line.strip("|").split("|")]
        (method,) = (name for words, name in names.items() if words in title)
        found |= {(method, b): cell for b, cell in zip(batches, told, strict=True)}
    return found


@pytest.mark.parametrize(
    "page, head, record, names, tried, seeds, cells",
    [
        ("retrieval", "test nDCG@10, five seeds", "scifact", SCIFACT, 4, 5, 33),
        ("image_text", "test R@1, mean of both ways, three seeds", "flickr8k", FLICKR, 2, 3, 13),
    ],
)
def test_a_page_shows_what_validation_chose(
    page: str, head: str, record: str, names: dict[str, str], tried: int, seeds: int, cells: int
) -> None:
    """Of `tried` settings with seed 0, or more; a cell is "–" if these or seeds are missing."""
    rows, shown = rows_of(f"{record}_h200/runs"), 0
    for case, cell in cells_of(page, head, names).items():
        own = [r for r in rows if key(r) == case]
        grid = [r for r in own if r["seed"] == 0]
        best = max(grid, key=lambda r: r["validation"], default={})
        tests = [r["test"] for r in own if setting(r) == setting(best)]
        assert (cell == "–") == (len(grid) < tried or len(tests) < seeds), case
        if cell == "–":
            continue
        assert len(tests) == seeds, case
        assert abs(float(cell) - mean(tests)) < 6e-4, (case, mean(tests))
        shown += 1
    assert shown == cells


def in_equal_time() -> dict[tuple[str, int], list[dict[str, Any]]]:
    """SciFact's runs in equal time, by method and batch: five seeds of what validation chose."""
    rows, found = rows_of("scifact_h200/runs"), rows_of("scifact_h200/time_graph")
    cases = {case: [r for r in found if key(r) == case] for case in {key(r) for r in found}}
    assert set(cases) == {(name, b) for name in SCIFACT.values() for b in (4, 16, 64)}
    for case, own in cases.items():
        grid = [r for r in rows if key(r) == case and r["seed"] == 0]
        best = max(grid, key=lambda r: r["validation"])
        assert len(grid) == 4 and {setting(r) for r in own} == {setting(best)}, case
        assert sorted(r["seed"] for r in own) == [0, 1, 2, 3, 4], case
    return cases


def test_runs_in_equal_time_took_it() -> None:
    """Steps of a method times the time of a step: what informed importance takes."""
    alone = {key(r): r["ms"] for r in rows_of("scifact_h200/alone_graph")}
    runs = in_equal_time()
    assert set(alone) == set(runs)
    for (method, b), own in runs.items():
        base = ("informed importance", b)
        whole = runs[base][0]["steps"] * alone[base]
        for r in own:
            assert abs(r["steps"] * alone[method, b] / whole - 1) < 0.03, (method, b)


def test_the_page_shows_what_equal_time_gives() -> None:
    found = cells_of("retrieval", "test nDCG@10, in the time of `informed`", SCIFACT)
    runs = in_equal_time()
    assert set(found) == set(runs)
    for case, cell in found.items():
        tests = [r["test"] for r in runs[case]]
        assert abs(float(cell) - mean(tests)) < 6e-4, (case, mean(tests))


def test_the_record_of_scifact_tells_its_rows() -> None:
    """Its tables of a step alone and of equal time."""
    text = (ROOT / "records/2026-11-16_scifact_h200/README.md").read_text(encoding="utf-8")
    alone = {key(r): r["ms"] for r in rows_of("scifact_h200/alone_graph")}
    _, steps, timed = re.split(r"^## A step alone$|^## In the time .*$", text, flags=re.M)

    def table(text: str) -> dict[str, list[str]]:
        lines = text.split("|---|\n")[1].split("\n\n")[0].splitlines()
        cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
        assert sorted(title for title, *_ in cells) == sorted(IN_RECORD)
        return {IN_RECORD[title]: told for title, *told in cells}

    for method, told in table(steps).items():
        for b, cell in zip((4, 16, 64), told, strict=True):
            assert cell == f"{alone[method, b]:.1f}", (method, b)
    runs = in_equal_time()
    _, *parts = re.split(r"^\| b = \d+ ", timed, flags=re.M)
    for b, part in zip((4, 16, 64), parts, strict=True):
        for method, (count, test, *_) in table(part).items():
            own = runs[method, b]
            told = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]+", count)}
            assert told == {r["steps"] for r in own}, (method, b)
            assert abs(float(test) - mean(r["test"] for r in own)) < 6e-4, (method, b)


@pytest.mark.parametrize("page", ["retrieval", "which_method", "methods/top_k"])
def test_what_the_correction_is_worth(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each query the mean of six differences: three batches, equal steps and equal time."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    paired = importlib.import_module("many_runs").paired
    told = cells_of("retrieval", "test nDCG@10, five seeds", SCIFACT)
    rows, timed, sides = rows_of("scifact_h200/runs"), in_equal_time(), []
    for method in ("informed importance", "table top-k"):
        scores: dict[int, list[list[float]]] = {seed: [] for seed in range(5)}
        for b in (4, 16, 64):
            best = setting(timed[method, b][0])
            equal = [r for r in rows if key(r) == (method, b) and setting(r) == best]
            assert abs(float(told[method, b]) - mean(r["test"] for r in equal)) < 6e-4
            for r in (*equal, *timed[method, b]):
                scores[r["seed"]].append(r["per_query"])
        assert {len(per_query) for per_query in scores.values()} == {6}
        sides.append(
            [
                {"seed": seed, "per_query": [mean(one) for one in zip(*per_query, strict=True)]}
                for seed, per_query in scores.items()
            ]
        )
    found = [round(value, 3) for value in paired(*sides)[:3]]
    assert found == [0.009, 0.001, 0.016]
    text = " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())
    assert ".009 [.001, .016]" in text


def test_an_average_of_the_partition_changes_nothing_at_equal_settings() -> None:
    """Its record's table: four settings, seed 0; afresh minus an average, over test queries."""
    text = (ROOT / "records/2026-11-16_partition-rate.md").read_text(encoding="utf-8")
    names = ("emc2 fresh partition", "emc2 fast partition", "emc2, partition rate 0.05")
    runs = {
        (r["method"].removesuffix(" (draws after the batch)"), *setting(r)): r
        for r in rows_of("scifact_h200/runs")
        if r["seed"] == 0 and r["method"].endswith("(draws after the batch)")
    }
    lines = re.findall(r"^\| (\d+), (\de-5) \|(.*)\|$", text, flags=re.M)
    assert len(lines) == 4
    apart = []
    for beta, lr, told in lines:
        own = [runs[name, float(beta), float(lr)] for name in names]
        *cells, difference = [cell.strip() for cell in told.split("|")]
        shown = [re.findall(r"\.\d+", cell) for cell in cells]
        for r, (test, validation) in zip(own, shown, strict=True):
            assert abs(float(test) - r["test"]) < 6e-4
            assert abs(float(validation) - r["validation"]) < 6e-4
        apart.append(mean(own[0]["per_query"]) - mean(own[2]["per_query"]))
        (first, low, high) = (float(n.replace("−", "-")) for n in re.findall(NUMBER, difference))
        assert low < 0 < high and abs(first - apart[-1]) < 6e-4
    assert round(mean(apart), 3) in (-0.004, -0.005) and "over the four −.005 [" in text


def test_what_tuning_costs_on_other_data() -> None:
    rows = rows_of("scifact_h200/runs")
    text = " ".join((ROOT / "docs/retrieval.md").read_text(encoding="utf-8").split())
    found = {}
    for case in {key(r) for r in rows if "wikiqa" in r}:
        best = max((r for r in rows if key(r) == case and r["seed"] == 0), key=validated)
        own = [r for r in rows if key(r) == case and setting(r) == setting(best)]
        found[case] = [
            mean(r[k] for r in own if k in r) for k in ("wikiqa", "msmarco_trec_sample5k")
        ]
    names = {"`informed`": "informed importance", "`topk`": "table top-k"} | {
        "the batch alone": "in-batch",
        "CachedMNRL": "CachedMNRL 256",
    }
    for words, method in names.items():
        (told,) = re.findall(rf"(\.\d+) after {words}", text)
        assert abs(float(told) - found[method, 16][0]) < 6e-4, method
    there = [wikiqa for (_, b), (wikiqa, _) in found.items() if b == 64]
    assert "with b = 64 .692 to .702" in text
    assert [round(min(there), 3), round(max(there), 3)] == [0.692, 0.702]
    kept = [msmarco for _, msmarco in found.values()]
    assert "stays at .989 to .994" in text
    assert [round(min(kept), 3), round(max(kept), 3)] == [0.989, 0.994]
