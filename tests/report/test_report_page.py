"""The page as text: what it says, that it is whole, safe and small."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricate_runs import (
    digit_artifacts,
    make_config,
    make_metrics,
    write_comparison,
    write_many,
    write_run,
)

from negchain.files import DiskFull
from negchain.report import write_report

_VOID = {"meta", "img", "input", "br"}
NASTY = '<script>alert("x")</script>&"\'.png'


class Parsed(HTMLParser):
    """A page taken apart; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data: Any = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.tags[-1][1].get("id") == "negchain-data":
                self.data = json.loads(data)
        elif "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def count(self, tag: str, cls: str) -> int:
        return sum(t == tag and cls in (a.get("class") or "").split() for t, a in self.tags)


def page_of(paths: list[Path], out: Path) -> Parsed:
    assert write_report(paths, out) == out
    return Parsed(out.read_text(encoding="utf-8"))


def test_run_page_holds_numbers_curves_pictures_and_settings(tmp_path: Path) -> None:
    config = make_config("emc2")
    lines = make_metrics(config)
    run = write_run(tmp_path / "emc2-0", config, lines, artifacts=digit_artifacts())
    page = page_of([run], tmp_path / "page.html")
    assert "EMC² on digits" in page.text
    knn = [line["knn1"] for line in lines if "knn1" in line]
    assert f"{100 * knn[-1]:.1f} %" in page.text
    assert page.count("svg", "chart") == 2 * 9
    assert page.count("figure", "same") + page.count("figure", "other") == 16 * 8
    assert page.count("path", "dots") == 10
    assert "3.12.3" in page.text and "unfinished" not in page.text
    chart = page.data["charts"]["run-knn1-samples"]
    np.testing.assert_allclose(chart["series"][0]["y"], knn, rtol=1e-4)
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_label_agreement_is_said_in_words_and_marks_not_by_colour_alone(tmp_path: Path) -> None:
    art = digit_artifacts()
    wrong = art["neighbour_labels"] != art["neighbour_query_labels"][:, None]
    run = write_run(tmp_path / "run", make_config(), [], artifacts=art)
    page = page_of([run], tmp_path / "page.html")
    assert page.text.count("✗ ") == int(wrong.sum()) + 1  # and once in the explanation
    assert f"{int((~wrong).sum())} of the {wrong.size} neighbours" in page.text
    alts = [a["alt"] or "" for t, a in page.tags if t == "img"]
    assert sum("other label" in alt for alt in alts) == int(wrong.sum())


def test_long_names_keep_their_ends_under_pictures(tmp_path: Path) -> None:
    """Names of a kind differ at their ends, which five lines under a small picture would hide."""
    run = write_many(tmp_path / "run", 200, "a rather long class name of some animal")
    page = page_of([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    queries = re.findall(r'class="query" title="([^"]*)">.*?<figcaption>([^<]*)<', text)
    assert len(queries) >= 16
    for title, caption in queries[:16]:
        assert len(caption) <= 36 < len(title) and caption.split()[-1] == title.split()[-1]
    assert "9,000 to train on" in page.text


def test_everything_is_escaped_and_nothing_is_fetched(tmp_path: Path) -> None:
    info = {"num_samples": 5, "classes": [NASTY] * 10, "skipped": [[NASTY, "truncated " + NASTY]]}
    config = make_config(data=f"/data/{NASTY.replace('/', '')}", encoder=NASTY, data_info=info)
    config[NASTY] = {NASTY: [NASTY]}
    paths = [write_run(tmp_path / f"<b>run{i}", {**config, "lr": NASTY * i}, make_metrics(config),
                       artifacts=digit_artifacts()) for i in range(2)]  # fmt: skip
    for chosen in (paths[:1], paths):
        out = tmp_path / "page.html"
        page = page_of(chosen, out)
        assert [a.get("type") for t, a in page.tags if t == "script"] == ["application/json", None]
        assert not any(t in ("link", "iframe", "object") for t, _ in page.tags)
        assert f"truncated {NASTY}" in page.text and "1 file was left out" in page.text
        for tag, attributes in page.tags:
            assert not any(name.startswith("on") for name in attributes), tag
            assert tag != "img" or (attributes["src"] or "").startswith("data:image/")
        assert not re.search(r"https?://", out.read_text())


@pytest.mark.parametrize("value", [-1, NASTY, [-1], [[NASTY] * 3], None, {"a": 1}, True, 1e300])
def test_data_that_is_described_by_nonsense_is_shown_without(tmp_path: Path, value: Any) -> None:
    names = ("num_samples", "train", "test", "classes", "notes", "skipped", "unprobed")
    config = make_config(data_info=dict.fromkeys(names, value))
    run = write_run(tmp_path / "run", config, make_metrics(config), artifacts=digit_artifacts())
    page = page_of([run], tmp_path / "page.html")
    assert [a.get("type") for t, a in page.tags if t == "script"] == ["application/json", None]
    assert "left out" not in page.text


def test_policy_allows_exactly_the_page_s_own_script(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_report([write_run(tmp_path / "run", make_config(), [])], out)
    text = out.read_text()
    script = text.rsplit("<script>", 1)[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] or "" for t, a in Parsed(text).tags if "http-equiv" in a)
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_a_run_without_labels_and_one_cut_short_say_so(tmp_path: Path) -> None:
    info = {"num_samples": 100, "classes": [], "skipped": []}
    lines = [{"step": 3, "samples": 96, "seconds": 1.0, "loss": 2.0}]
    run = write_run(tmp_path / "run", make_config(data_info=info), lines, finished=False)
    page = page_of([run], tmp_path / "page.html")
    assert "Nothing was probed, because the data has no labels" in page.text
    assert "This run is unfinished: the numbers are those after 96 samples." in page.text
    assert "goes on with negchain train --out and --resume." in page.text
    assert page.count("span", "option") == 2  # not broken after the two dashes
    assert "Not recorded in this run: global loss." in page.text
    assert "accuracy" not in page.text.lower()
    assert page.count("svg", "chart") == 2  # one point is a chart too


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1}],
        [{"step": 0, "samples": 0, "seconds": 0.0, "loss": 0.0, "knn1": 0.0}],
        [{"step": s, "loss": 1.0, "knn1": 1.0, "samples_per_second": 5e5} for s in (1, 2)],
        [{"step": s, "loss": x, "lr": 1e-12} for s, x in ((1, 1e30), (2, -1e30), (3, None))],
        [{"loss": 1.0}],
    ],
)
def test_poor_metrics_still_make_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    paths = [write_run(tmp_path / n, make_config(seed=i), lines) for i, n in enumerate("ab")]
    for chosen in (paths[:1], paths):
        page = page_of(chosen, tmp_path / "page.html")
        assert page.data is not None
        numbers = [v for t, a in page.tags if t in ("path", "circle", "text") for v in a.values()]
        assert not any("nan" in (v or "") or "inf" in (v or "") for v in numbers)


@pytest.mark.parametrize(("samples", "told"), [(50, "0.5 passes"), (100, "1 pass")])
def test_one_pass_is_no_plural(samples: int, told: str, tmp_path: Path) -> None:
    config = make_config(data_info={"num_samples": 100, "classes": [], "skipped": []})
    lines = [{"step": 3, "samples": samples, "seconds": 1.0, "loss": 2.0}]
    page = page_of([write_run(tmp_path / "run", config, lines)], tmp_path / "page.html")
    assert f"{told} over 100" in page.text


def test_odd_artifacts_still_make_a_page(tmp_path: Path) -> None:
    art = {
        "neighbour_queries": np.zeros((2, 4, 50, 40), np.uint8),
        "neighbour_images": np.zeros((2, 3, 4, 50, 40), np.uint8),
        "chain_anchors": np.zeros((0, 3, 8, 8), np.uint8),
        "chain_negatives": np.zeros((0, 3, 8, 8), np.uint8),
        "map_xy": np.array([[1.0, 1.0], [np.nan, 0.0], [1.0, 1.0]], np.float32),
    }
    page = page_of([write_run(tmp_path / "r", make_config(), [], artifacts=art)], tmp_path / "p")
    assert page.count("figure", "unknown") == 6 and "✓" not in page.text
    assert page.count("path", "dots") == 1 and "unlabelled" not in page.text


@pytest.mark.parametrize("lost", ["chain_anchors", "chain_negatives"])
def test_similarities_of_chains_that_are_lost_still_make_a_page(lost: str, tmp_path: Path) -> None:
    art = {name: array for name, array in digit_artifacts().items() if name != lost}
    page = page_of([write_run(tmp_path / "r", make_config(), [], artifacts=art)], tmp_path / "p")
    assert page.count("div", "chains") == 0 and page.count("figure", "query") > 0


def test_a_page_of_photographs_stays_under_3_mb(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    coarse = draws.integers(0, 256, (16 * 9, 3, 12, 12), dtype=np.uint8)
    photos = coarse.repeat(8, -1).repeat(8, -2) // 2 + draws.integers(
        0, 40, (16 * 9, 3, 96, 96), dtype=np.uint8
    )  # [144,3,96,96], noisier than photographs are
    art = {
        "neighbour_queries": photos[:16], "neighbour_images": photos[16:].reshape(16, 8, 3, 96, 96),
        "chain_anchors": photos[:48], "chain_negatives": photos[48:96],
        "map_xy": draws.standard_normal((4000, 2)), "map_labels": draws.integers(0, 10, 4000),
        "map_thumbs": draws.integers(0, 256, (4000, 3, 24, 24), dtype=np.uint8),
    }  # fmt: skip
    out = tmp_path / "page.html"
    config = make_config()
    write_report([write_run(tmp_path / "r", config, make_metrics(config, 1, 5000), artifacts=art)],
                 out)  # fmt: skip
    assert "data:image/jpeg" in out.read_text() and out.stat().st_size < 3_000_000


def test_comparison_table_shows_mean_and_spread_and_every_run(tmp_path: Path) -> None:
    paths = write_comparison(tmp_path / "runs")
    (paths[0] / "report.html").write_text("a page")
    page = page_of(paths, tmp_path / "page.html")
    assert "6 methods on digits" in page.text and "emc2-cached" in page.text
    knn = [json.loads((p / "summary.json").read_text())["knn1"] for p in paths
           if p.name.startswith("sogclr")]  # fmt: skip
    shown = re.search(rf"{100 * np.mean(knn):.1f} % \[([\d.]+), ([\d.]+)\]", page.text)
    assert shown is not None
    assert float(shown[1]) < 100 * min(knn) and 100 * max(knn) < float(shown[2])
    assert page.count("details", "run") == len(paths) == 21
    assert page.count("path", "band") > 0
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert links == [f"runs/{paths[0].name}/report.html"]
    chart = page.data["charts"]["all-knn1-samples"]
    assert len(chart["series"]) == 7
    colours = {s["colour"] for s in chart["series"] if s["label"] in ("EMC²", "emc2-cached")}
    assert colours == {"var(--emc2)"}


def test_fifty_runs_make_one_page_of_bounded_size(tmp_path: Path) -> None:
    paths = []
    for i in range(50):
        config = make_config("emc2", seed=i % 2, lr=0.1 * (i // 2 + 1))
        paths.append(write_run(tmp_path / str(i), config, make_metrics(config, 10),
                               finished=i % 10 > 0, artifacts=digit_artifacts()))  # fmt: skip
    page = page_of(paths, tmp_path / "page.html")
    assert "25 variants" in page.text and "5 of 50 runs are unfinished" in page.text
    assert (tmp_path / "page.html").stat().st_size < 4_000_000


def test_writing_replaces_at_once_and_a_failure_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", make_config(), [])
    out = tmp_path / "new" / "folder" / "page.html"
    write_report([run], out)
    before = out.read_text()

    def fail(source: str, target: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_report([run], out)
    assert out.read_text() == before and os.listdir(out.parent) == ["page.html"]


def test_a_full_disk_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    run = write_run(tmp_path / "run", make_config(), [])
    monkeypatch.setattr("negchain.files.os.fsync", full)
    with pytest.raises(DiskFull, match="page.html could not be written"):
        write_report([run], tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
