"""Reading run folders: what interrupted runs leave behind, grouping, means over seeds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from fabricate_runs import make_config, make_metrics, write_run

from negchain.report import load_run
from negchain.report.charts import Chart, Series, draw, spaced, ticks
from negchain.report.runs import Curve, Run, group_runs, has_setting, mean_curve, thinned


def test_half_written_lines_are_left_out_as_a_resumed_run_does(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_config(), [{"step": 1, "samples": 32, "loss": 2.0}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert load_run(run).curve("loss").values.tolist() == [2.0]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "samples": 96, "loss": 1.0}\n')
    assert load_run(run).curve("loss").values.tolist() == [2.0, 1.0]


def test_null_nan_and_text_are_no_points(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_config(), [])
    values = ["null", "NaN", "Infinity", '"high"', "true", f"1{'0' * 400}", "0.5"]
    lines = [f'{{"step":{n},"samples":{n * 32},"loss":{v}}}\n' for n, v in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(lines))
    curve = load_run(run).curve("loss")
    assert curve.values.tolist() == [0.5]
    assert curve.samples.tolist() == [6 * 32]


def test_steps_repeated_around_a_resume_count_once_and_the_later_wins(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "samples": 32, "loss": 3.0},
        {"step": 2, "samples": 64, "loss": 9.0},
        {"step": 2, "samples": 64, "loss": 2.0},
        {"step": 2, "samples": 64, "knn1": 0.5},
    ]
    run = load_run(write_run(tmp_path / "run", make_config(), lines))
    assert run.curve("loss").values.tolist() == [3.0, 2.0]
    assert run.curve("knn1").samples.tolist() == [64.0]


def test_final_prefers_the_summary_then_the_last_line_then_none(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", make_config(), [{"step": 1, "knn1": 0.5}], finished=False)
    assert load_run(path).final("knn1") == 0.5 and not load_run(path).finished
    (path / "summary.json").write_text(json.dumps({"knn1": 0.75, "probe": None}))
    assert load_run(path).final("knn1") == 0.75
    assert load_run(path).final("probe") is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json must hold JSON.*restore"),
        ("config.json", "[]", "must hold a JSON object, got list"),
        ("summary.json", "nonsense", "summary.json must hold JSON"),
        ("artifacts.npz", "nonsense", "must be an .npz of plain arrays.*delete it"),
    ],
)
def test_broken_files_are_named_with_a_remedy(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    path = write_run(tmp_path / "run", make_config(), [])
    (path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_run(path)


def test_a_pickle_in_the_artifacts_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", make_config(), [])
    np.savez(path / "artifacts.npz", map_xy=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="plain arrays"):
        load_run(path)


def test_groups_name_what_differs_within_a_method_and_ignore_seed_and_bookkeeping(
    tmp_path: Path,
) -> None:
    configs = [make_config("emc2", seed, carried=carried, out=f"{seed}{carried}", logger=f"{seed}")
               for carried in ("encode", "cached") for seed in (0, 1)]  # fmt: skip
    configs.append(make_config("infonce", 0, lr=0.5))
    loaded = [load_run(write_run(tmp_path / str(i), c, [])) for i, c in enumerate(configs)]
    groups = group_runs(loaded)
    assert [(g.label, len(g.runs), g.variant) for g in groups] == [
        ("EMC² · carried=encode", 2, 0), ("EMC² · carried=cached", 2, 1), ("InfoNCE", 1, 0),
    ]  # fmt: skip
    assert groups[2].settings == {"carried": "encode", "lr": 0.5}
    cpu, gpu = (make_config(device=device) for device in ("cpu", "cuda"))
    loaded = [load_run(write_run(tmp_path / n, c, [])) for n, c in (("a", cpu), ("b", gpu))]
    assert len(group_runs(loaded)) == 2


def test_runs_before_and_after_files_were_added_are_no_seeds_of_one_group(tmp_path: Path) -> None:
    states = [{"num_samples": n, "fingerprint": mark} for n, mark in ((90, "abcdef12"), (95, "98"))]
    configs = [make_config("emc2", seed, data_info=state, lr=lr)
               for state in states for lr in (0.1, 0.2) for seed in (0, 1)]  # fmt: skip
    loaded = [load_run(write_run(tmp_path / str(i), c, [])) for i, c in enumerate(configs)]
    assert [(g.label, len(g.runs)) for g in group_runs(loaded)] == [
        (f"EMC² · {state} · lr={lr}", 2)
        for state in ("90 samples (abcdef)", "95 samples (98)") for lr in (0.1, 0.2)
    ]  # fmt: skip
    assert [g.label for g in group_runs(loaded[:4])] == ["EMC² · lr=0.1", "EMC² · lr=0.2"]


def test_mean_curve_equals_numpy_over_seeds_and_leaves_no_seed_out(tmp_path: Path) -> None:
    configs = [make_config("emc2", seed) for seed in range(4)]
    loaded = [load_run(write_run(tmp_path / str(c["seed"]), c, make_metrics(c))) for c in configs]
    curve, spread = mean_curve(loaded, "knn1", 200)
    stacked = np.array([run.curve("knn1").values for run in loaded])
    np.testing.assert_allclose(curve.values, stacked.mean(0), rtol=1e-12)
    np.testing.assert_allclose(spread, stacked.std(0, ddof=1), rtol=1e-9)
    seconds = np.array([run.curve("knn1").seconds for run in loaded])
    np.testing.assert_allclose(curve.seconds, seconds.mean(0), rtol=1e-12)


def test_mean_curve_of_seeds_read_at_other_places_interpolates_between_them(
    tmp_path: Path,
) -> None:
    first = [{"step": s, "samples": s, "loss": 2.0 * s} for s in (0, 10, 20)]
    second = [{"step": s, "samples": s, "loss": 4.0 * s} for s in (5, 15)]
    loaded = [load_run(write_run(tmp_path / n, make_config(), lines))
              for n, lines in (("a", first), ("b", second))]  # fmt: skip
    curve, spread = mean_curve(loaded, "loss", 200)
    assert curve.samples.tolist() == [0, 5, 10, 15, 20]
    assert curve.values.tolist() == [0, 15, 30, 45, 40]  # alone at the ends, a mean between
    assert spread[0] == 0 and spread[1] == pytest.approx(np.std([10, 20], ddof=1))
    assert np.isnan(curve.seconds).all()


def test_mean_curve_has_no_points_where_no_run_has_any(tmp_path: Path) -> None:
    lines = [[{"step": s, "samples": s, "loss": 1.0} for s in span] for span in ((0, 2), (98, 100))]
    loaded = [load_run(write_run(tmp_path / str(n), make_config(), own))
              for n, own in enumerate(lines)]  # fmt: skip
    curve, spread = mean_curve(loaded, "loss", 3)  # the grid has 0, 50 and 100
    assert curve.samples.tolist() == [0, 100] and curve.values.tolist() == [1, 1]
    assert spread.tolist() == [0, 0]


def test_thinning_keeps_the_mean_and_the_end() -> None:
    x, y = np.arange(1000.0), np.random.default_rng(0).standard_normal(1000)
    small = thinned(Curve(x, x / 10, y), 200)
    assert len(small) == 200 and small.samples[-1] == 999 and small.seconds[-1] == 99.9
    assert small.values.mean() == pytest.approx(y.mean())


def test_unfinished_seeds_stay_out_of_means_where_another_has_finished(tmp_path: Path) -> None:
    loaded = [load_run(write_run(tmp_path / n, make_config(), [{"step": 1, "knn1": value}],
                                 finished=done))
              for n, value, done in (("a", 0.9, True), ("b", 0.1, False))]  # fmt: skip
    (group,) = group_runs(loaded)
    assert group.finals("knn1").tolist() == [0.9]
    (group,) = group_runs(loaded[1:])
    assert group.finals("knn1").tolist() == [0.1]


def test_a_curve_of_one_point_is_a_dot_with_its_value() -> None:
    """A run shorter than --log-every has one line of metrics; its dot looked like a speck."""
    one = Curve(np.array([320.0]), np.array([1.0]), np.array([0.234]))
    drawn = draw(
        Chart("k", "Acceptance", "", "percent", [Series("a", one, None, "red")]), "samples"
    )
    assert drawn is not None
    assert drawn[0].count("<circle") == 1 and 'r="5"' in drawn[0] and ">23.4 %</text>" in drawn[0]


@pytest.mark.parametrize("seed", range(20))
def test_labels_never_overlap_leave_the_box_or_change_order(seed: int) -> None:
    draws = np.random.default_rng(seed)
    wanted = (draws.random(8) * 60 + 100).tolist()
    places = spaced(wanted, 15.0, 10.0, 200.0)
    ordered = np.array(places)[np.argsort(wanted)]
    assert np.all(np.diff(ordered) >= 15.0 - 1e-9)
    assert ordered[0] >= 10.0 - 1e-9 and ordered[-1] <= 200.0 + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_round_evenly_spaced_and_cover_the_range(seed: int) -> None:
    draws = np.random.default_rng(seed)
    low = float(draws.normal() * 10 ** draws.uniform(-4, 4))
    high = low + float(10 ** draws.uniform(-3, 4))
    places = ticks(low, high, 4)
    assert places[0] <= low + 1e-6 * (high - low) and places[-1] >= high - 1e-6 * (high - low)
    assert 3 <= len(places) <= 8
    np.testing.assert_allclose(np.diff(places), places[1] - places[0], rtol=1e-6)


@pytest.mark.parametrize("values", [[0.97, 0.97], [1.0, 1.0], [0.0], [0.91, 0.999], [0.2, 1.0]])
def test_a_percentage_ends_at_100(values: list[float]) -> None:
    points = np.arange(len(values), dtype=float)
    line = Series("a", Curve(points, points, np.array(values)), None, "red")
    drawn = draw(Chart("k", "1-NN", "", "percent", [line]), "samples")
    assert drawn is not None
    low, high = drawn[1]["y"]
    assert 0 <= low <= min(values) and max(values) <= high <= 1 + 1e-9


@pytest.mark.parametrize(
    ("unit", "values", "texts"),
    [
        ("number", [-30.0, -10.0], ["−30", "−25", "−20", "−15", "−10"]),  # a loss may be negative
        ("number", [-3.0, 0.0], ["−3", "−2", "−1", "0"]),
        ("number", [1e-5, 2e-5], ["1e−5", "1.25e−5", "1.5e−5", "1.75e−5", "2e−5"]),
        ("percent", [0.0, 4e-5], ["0", "1e−3 %", "2e−3 %", "3e−3 %", "4e−3 %"]),
        ("percent", [0.0, 0.04], ["0 %", "1 %", "2 %", "3 %", "4 %"]),
        ("number", [0.0012341, 0.0012344], ["1.2341e−3", "1.2342e−3", "1.2343e−3", "1.2344e−3"]),
        ("number", [1e6 + 1, 1e6 + 4], ["1000001", "1000002", "1000003", "1000004"]),
    ],
)
def test_ticks_say_what_they_are(unit: str, values: list[float], texts: list[str]) -> None:
    assert tick_labels(unit, values) == texts


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [1.2341e-3, 9.99e-3, 1.0, 1000.1, 1e6])
@pytest.mark.parametrize("width", [2e-6, 3e-5, 2.2e-4, 0.5])  # relative to the size
def test_ticks_are_told_apart_by_their_labels(sign: int, size: float, width: float) -> None:
    """Small ones had three digits: those from 0.0012341 to 0.0012344 were all "1.23e−3"."""
    ends = sorted([sign * size, sign * size * (1 + width)])
    shown = [float(text.replace("−", "-")) for text in tick_labels("number", ends)]
    places = ticks(*ends, 4)
    np.testing.assert_allclose(shown, places, rtol=0, atol=1e-3 * (places[1] - places[0]))


def tick_labels(unit: str, values: list[float]) -> list[str]:
    """What stands beside the y axis of a chart of two points."""
    points = np.arange(2.0)
    line = Series("a", Curve(points, points, np.array(values)), None, "red")
    svg, _ = draw(Chart("k", "Loss", "", unit, [line]), "samples") or ("", {})
    return re.findall(r'text-anchor="end">([^<]*)<', svg)


@pytest.mark.parametrize("length", [1, 8, 24, 60])
def test_names_beside_lines_are_not_cut_off(length: int) -> None:
    """At the widest mean advance of the font; the drawing ends at its width."""
    line = np.arange(3.0)
    names = ["a" * length, "b" * length]
    lines = [Series(name, Curve(line, line, line), None, "red") for name in names]
    svg, _ = draw(Chart("key", "title", "", "number", lines), "samples") or ("", {})
    placed = re.findall(r'<text x="([\d.]+)" y="[\d.]+"><title>[^<]*</title>([^<]*)<', svg)
    assert len(placed) == 2
    assert all(float(x) + 7.2 * len(name) <= 400 for x, name in placed)


def test_a_setting_that_a_method_does_not_have_tells_no_runs_apart() -> None:
    """`compare --methods dcl,isir` had a column: DCL is offered the batch, i-SIR both."""
    chosen = [("dcl", "batch"), ("isir", "both")]
    runs = [Run(Path(m), {"method": m, "proposal": p}, [], {}, {}) for m, p in chosen]
    assert [group.settings for group in group_runs(runs)] == [{}, {}]
    runs.append(Run(Path("c"), {"method": "isir", "proposal": "batch"}, [], {}, {}))
    assert list(group_runs(runs)[0].settings) == ["proposal"]
    assert not has_setting("dcl", "proposal") and has_setting("isir", "proposal")
