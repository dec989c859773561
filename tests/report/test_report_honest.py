"""What the page claims: baselines, intervals, winners, warnings; and that names stay readable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricate_runs import (
    answers,
    digit_artifacts,
    make_config,
    make_metrics,
    write_comparison,
    write_many,
    write_run,
    write_unlabelled,
)
from rich.console import Console
from test_report_page import page_of

from negchain.report import comparison_table, load_run, write_report
from negchain.report.advice import advice, against_baselines
from negchain.report.embedding_map import class_colours
from negchain.report.measures import TIME
from negchain.report.results import compare, held_against
from negchain.report.runs import group_runs
from negchain.report.statistics import bounds, estimates, over_start, winner


def finished(root: Path, name: str, knn1: float, seed: int = 0, **answered: Any) -> Path:
    base = {"step": 0, "samples": 0, "knn1": 0.7, "probe": 0.6, "global_loss": 7.0,
            "chance": 0.1, "pixels_knn1": 0.9, "pixels_probe": 0.5}  # fmt: skip
    lines = [base, {"step": 9, "samples": 288, "knn1": knn1, "probe": knn1, "global_loss": 2.0}]
    art = answers(knn1, knn1, seed) if not answered else answered
    method = name.split("-")[0] if name.split("-")[0] in ("emc2", "dcl") else "emc2"
    return write_run(root / name, make_config(method, seed), lines, artifacts=art)


def test_a_result_stands_beside_chance_pixels_and_the_untrained_encoder(tmp_path: Path) -> None:
    page = page_of([finished(tmp_path, "better", 0.97)], tmp_path / "a.html")
    for text in ("Untrained encoder70.0 %", "Raw pixels90.0 %", "Chance10.0 %"):
        assert text in page.text
    assert "training gained 7.0 points over raw pixels, which reach 90.0 % here" in page.text
    page = page_of([finished(tmp_path, "worse", 0.88)], tmp_path / "b.html")
    assert (
        "1-NN accuracy: training shows no gain; on this data raw pixels already reach" in page.text
    )
    run = load_run(finished(tmp_path, "close", 0.91))
    assert "within the noise of the test images" in against_baselines(run)[0]
    run = load_run(finished(tmp_path, "unknown", 0.97, nothing=np.zeros(1)))
    assert "7.0 points (how much of it is noise is not known)" in against_baselines(run)[0]


def test_time_and_speed_are_held_against_nothing(tmp_path: Path) -> None:
    """The first line of metrics is of the untrained encoder, and has a time too."""
    lines = [{"step": 0, "seconds": 1.0, "knn1": 0.5}, {"step": 9, "seconds": 8.0, "knn1": 0.9}]
    run = load_run(write_run(tmp_path / "a", make_config(), lines))
    assert run.baseline("seconds") == {"untrained": 1.0}
    assert held_against(run, TIME) == {} and "untrained" in held_against(run, run.shown.lead[0])


def test_a_pretrained_start_is_not_called_untrained(tmp_path: Path) -> None:
    fresh, tuned = finished(tmp_path, "emc2-seed0", 0.97), finished(tmp_path, "tuned", 0.98)
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"pretrained": "timm"}))
    page = page_of([tuned], tmp_path / "a.html")
    assert "Pretrained encoder70.0 %" in page.text and "Untrained" not in page.text
    page = page_of([fresh, tuned], tmp_path / "b.html")
    assert "Pretrained encoder70.0 %" in page.text and "Untrained encoder70.0 %" in page.text


def test_brackets_are_for_intervals_over_test_images(tmp_path: Path) -> None:
    """Of the probe with few labels no answers are kept: its spread is that of seeds."""
    paths = duel(tmp_path, [0.97, 0.975, 0.97], [0.90, 0.905, 0.90])
    for place, path in enumerate(paths):
        summary = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps(summary | {"probe_10pct": 0.8 + place / 50}))
    page = page_of(paths, tmp_path / "a.html")
    assert re.search(r"97\.2 % \[", page.text) and re.search(r"82\.0 % ± 2\.00", page.text)


def test_runs_of_two_tasks_are_not_compared(tmp_path: Path) -> None:
    one = finished(tmp_path, "pictures", 0.9)
    other = write_run(tmp_path / "texts", make_config(task="retrieval"), [{"step": 1, "loss": 1.0}])
    with pytest.raises(ValueError, match="one --task, got pictures of images, texts of retrieval"):
        write_report([one, other], tmp_path / "a.html")


def test_an_interval_over_test_images_is_that_of_the_binomial(tmp_path: Path) -> None:
    (group,) = group_runs([load_run(finished(tmp_path, "one", 0.9))])
    (found,) = estimates([group], "knn1")
    assert found is not None and found.interval is not None
    error = np.sqrt(0.9 * 0.1 / 359)
    assert found.interval == pytest.approx((0.9 - 1.96 * error, 0.9 + 1.96 * error), abs=0.005)


@pytest.mark.parametrize(("share", "ends"), [(1.0, "[94.0, 100.0]"), (0.0, "[0.0, 6.0]")])
@pytest.mark.parametrize("seeds", [1, 3])
def test_all_right_or_all_wrong_is_not_certain(
    tmp_path: Path, share: float, ends: str, seeds: int
) -> None:
    """The bootstrap has no spread there; Wilson's bound over 60 items is 60 / (60 + 1.96²)."""
    art = {"test_labels": np.arange(60), "right_knn1": np.full(60, share)}
    paths = [finished(tmp_path, f"emc2-{n}", share, n, **art) for n in range(seeds)]
    (found,) = estimates(group_runs([load_run(path) for path in paths]), "knn1")
    assert found is not None and found.interval is not None and bounds(found.interval) == ends
    assert ends in page_of(paths, tmp_path / "a.html").text


def test_no_interval_goes_beyond_what_is_possible(tmp_path: Path) -> None:
    """Of three items a gain was [-99.9, 134.7] points, and an accuracy above 100 %."""
    art = {"test_labels": np.arange(3), "right_knn1": np.array([1, 1, 0]),
           "before_knn1": np.array([0, 1, 1])}  # fmt: skip
    path = finished(tmp_path, "emc2", 2 / 3, 0, **art)
    text = page_of([path], tmp_path / "a.html").text
    (gain,) = over_start(group_runs([load_run(path)]), "knn1")
    assert gain is not None and gain.in_points() == "0.0 points [-100.0, 100.0]"
    assert "[0.0, 100.0]" in text


def test_seeds_widen_an_interval_as_students_t_does(tmp_path: Path) -> None:
    values = (0.90, 0.92, 0.94)
    labels = np.zeros(10**6, dtype=int)  # so many test images that only seeds are uncertain
    runs = []
    for seed, value in enumerate(values):
        right = np.arange(len(labels)) < value * len(labels)
        art = {"test_labels": labels, "right_knn1": right}
        runs.append(load_run(finished(tmp_path, f"emc2-seed{seed}", value, seed, **art)))
    (found,) = estimates(group_runs(runs), "knn1")
    assert found is not None and found.interval is not None
    half = 4.303 * np.std(values, ddof=1) / np.sqrt(3)  # Student's t with 2 degrees of freedom
    assert found.interval == pytest.approx((0.92 - half, 0.92 + half), abs=0.004)


def duel(root: Path, emc2: list[float], dcl: list[float]) -> list[Path]:
    return [finished(root, f"{method}-seed{seed}", value, seed)
            for method, values in (("emc2", emc2), ("dcl", dcl))
            for seed, value in enumerate(values)]  # fmt: skip


def test_a_winner_is_marked_only_where_there_is_one(tmp_path: Path) -> None:
    clear = duel(tmp_path / "clear", [0.97, 0.975, 0.97], [0.90, 0.905, 0.90])
    close = duel(tmp_path / "close", [0.95, 0.97, 0.93], [0.94, 0.96, 0.925])
    single = duel(tmp_path / "single", [0.99], [0.5])
    found = {}
    for paths in (clear, close, single):
        name = paths[0].parent.name
        page = page_of(paths, tmp_path / f"{name}.html")
        table = re.search(r"<tbody>.*</tbody>", (tmp_path / f"{name}.html").read_text(), re.S)
        assert table is not None
        found[name] = (re.findall(r"<b>([\d.]+ %)</b>", table.group()), page.text)
    assert found["clear"][0] and "EMC² is best by 1-NN accuracy" in found["clear"][1]
    assert not found["close"][0] and "No winner by 1-NN accuracy" in found["close"][1]
    assert not found["single"][0] and "no winner is named" in found["single"][1]


def test_no_winner_is_named_across_states_of_the_data(tmp_path: Path) -> None:
    paths = duel(tmp_path, [0.97, 0.975, 0.97], [0.90, 0.905, 0.90])
    for path in paths:
        config = json.loads((path / "config.json").read_text())
        config["data_info"] |= {"fingerprint": config["method"]}
        (path / "config.json").write_text(json.dumps(config))
    text = page_of(paths, tmp_path / "page.html").text
    assert "No winner is named: the runs were made on different data" in text
    assert "is best by" not in text and "Recommended" not in text


def test_no_winner_is_named_before_all_have_finished(tmp_path: Path) -> None:
    """A method whose runs failed at once had the best time, with a star, and led the table."""
    paths = duel(tmp_path, [0.97, 0.975, 0.97], [0.90, 0.905, 0.90])
    for path in paths[:3]:
        (path / "summary.json").unlink()
    text = page_of(paths, tmp_path / "page.html").text
    assert "No winner is named: no run of EMC² has finished" in text
    assert "is best by" not in text and "Recommended" not in text
    console = Console(width=80, record=True, force_terminal=False)
    console.print(comparison_table(paths))
    told = " ".join(console.export_text().split())
    assert "unfinished" in told and "*" not in told


def test_a_seed_run_again_is_no_other_seed(tmp_path: Path) -> None:
    """Its numbers are the same, and would make the noise of seeds nothing."""
    paths = [finished(tmp_path, f"{method}-again{nth}", value, 0)
             for method, value in (("emc2", 0.97), ("dcl", 0.90)) for nth in range(3)]  # fmt: skip
    page = page_of(paths, tmp_path / "page.html")
    assert "no winner is named" in page.text and "is best by" not in page.text
    assert page.text.count("(2 repeated)") == 2
    console = Console(width=80, record=True, force_terminal=False)
    console.print(comparison_table(paths))
    assert console.export_text().count("(1 seed)") == 2


def test_pairing_over_test_images_finds_what_two_intervals_would_hide(tmp_path: Path) -> None:
    """One run right wherever the other is and on twelve images more: intervals overlap."""
    labels, draws = np.zeros(359, dtype=int), np.random.default_rng(0)
    hard = draws.random(359) < 0.3
    extra = np.flatnonzero(hard)[:12]
    runs = []
    for method in ("emc2", "dcl"):
        right = ~hard
        right[extra] |= method == "emc2"
        for seed in range(3):
            flipped = right.copy()
            flipped[draws.integers(0, 359)] ^= True
            art = {"test_labels": labels, "right_knn1": flipped}
            path = finished(tmp_path, f"{method}-seed{seed}", flipped.mean(), seed, **art)
            runs.append(load_run(path))
    found = estimates(group_runs(runs), "knn1")
    first, second = (e.interval for e in found if e is not None)
    assert first is not None and second is not None and first[0] < second[1]
    assert winner(found, higher=True) == 0


@pytest.mark.slow
def test_false_winners_are_rare(tmp_path: Path) -> None:
    """Equal methods, three seeds: at most one comparison of twenty names a winner (of 60: 7)."""
    draws, named = np.random.default_rng(0), 0
    for trial in range(60):
        values = 0.9 + 0.01 * draws.standard_normal((2, 3))
        paths = duel(tmp_path / str(trial), *values.tolist())
        found = estimates(group_runs([load_run(path) for path in paths]), "knn1")
        named += winner(found, higher=True) is not None
    assert named <= 7  # P(more) < 0.02 at 5 %


def test_the_terminal_shows_the_same_table(tmp_path: Path) -> None:
    paths = duel(tmp_path / "clear", [0.97, 0.975, 0.97], [0.90, 0.905, 0.90])
    console = Console(width=80, record=True, force_terminal=False)
    console.print(comparison_table(paths))
    text = console.export_text()
    assert re.search(r"EMC² \(3 seeds\) +\*97\.2 %", text) and re.search(
        r"\[9\d\.\d, 9\d\.\d\]", text
    )
    for name in ("Raw pixels", "Untrained encoder", "Chance"):
        assert name in text
    assert "EMC² is best by 1-NN accuracy" in text


@pytest.mark.parametrize(
    ("method", "numbers", "said"),
    [
        ("emc2", {"carried_mass": 0.001}, "chains add next to nothing"),
        ("emc2", {"acceptance_rate": 0.005}, "each sits on one very hard negative"),
        ("emc2", {"acceptance_rate": 0.99}, "--beta is too small"),
        ("emc2", {"embedding_variance": 0.003}, "The embeddings have collapsed"),
        ("emc2", {"acceptance_rate": 0.99, "embedding_variance": 0.001}, "because the embeddings"),
        ("isir", {"acceptance_rate": 0.99}, None),
        ("emc2", {"acceptance_rate": 0.3, "carried_mass": 0.3, "embedding_variance": 0.9}, None),
    ],
)
def test_odd_numbers_come_with_a_sentence_and_a_remedy(
    tmp_path: Path, method: str, numbers: dict[str, float], said: str | None
) -> None:
    fine = {"acceptance_rate": 0.5, "carried_mass": 0.5}
    lines = [{"step": s, "samples": 999 * s, **(fine if s < 8 else numbers)} for s in range(1, 13)]
    path = write_run(tmp_path / "run", make_config(method), lines)
    sentences = advice(load_run(path))
    if said is None:
        assert sentences == []
        return
    assert any(said in sentence for sentence in sentences)
    assert said in page_of([path], tmp_path / "page.html").text


def test_chains_are_not_called_idle_before_a_second_visit(tmp_path: Path) -> None:
    """A chain begins at its picture's first visit: nothing is carried in the first pass."""
    config = make_config("emc2")
    size = config["data_info"]["num_samples"]
    for passes, said in ((1, 0), (3, 1)):
        lines = [{"step": s, "samples": s * passes * size / 4, "carried_mass": 0.0}
                 for s in range(1, 5)]  # fmt: skip
        assert len(advice(load_run(write_run(tmp_path / f"{passes}", config, lines)))) == said


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_after_a_collapse_advice_is_of_it_alone(tmp_path: Path, norm: str) -> None:
    """It told a run with --norm batch to try --norm batch, and to raise --beta as to lower it."""
    odd = {"embedding_variance": 0.003, "carried_mass": 0.0}
    lines = [{"step": s, "samples": s, **odd} for s in range(1, 13)]
    path = write_run(tmp_path / "run", {**make_config("emc2"), "norm": norm}, lines)
    (sentence,) = advice(load_run(path))
    assert "a smaller --beta" in sentence and ("--norm batch" in sentence) == (norm == "none")


def test_a_collapse_is_that_of_training_not_of_the_encoder_that_was_kept(tmp_path: Path) -> None:
    """A run that kept its start was told that training collapsed where it did not, and never so."""
    for start, end, said in ((0.01, 0.5, 0), (0.5, 0.01, 1)):
        lines = [
            {"step": s, "samples": s, "embedding_variance": v} for s, v in enumerate((start, end))
        ]
        path = write_run(tmp_path / f"{said}", make_config("dcl"), lines)
        (path / "summary.json").write_text(json.dumps({"step": 1, "embedding_variance": start}))
        assert len(advice(load_run(path))) == said


def test_estimates_from_batches_are_not_drawn(tmp_path: Path) -> None:
    """With small batches they are nats below the exact loss, and so was the upper one."""
    lines = [{"step": s, "samples": s, "seconds": s, "global_loss": 3.0,
              "estimated_global_loss": 4.5, "estimated_global_loss_low": 4.0,
              "estimated_global_loss_high": 5.0} for s in (1, 2, 3)]  # fmt: skip
    runs = [write_run(tmp_path / n, make_config("emc2", seed=i), lines) for i, n in enumerate("ab")]
    for shown in (runs[:1], runs):
        page = page_of(shown, tmp_path / "page.html")
        assert "run-global_loss-samples" in page.data["charts"] or len(shown) == 2
        assert not any("estimated" in key for key in page.data["charts"])


def test_runs_go_by_the_names_they_were_given(tmp_path: Path) -> None:
    names = ["big crops-seed0", "big crops-seed1", "emc2-seed0", "2026-11-15_143210_dcl_x_seed0"]
    options: list[dict[str, Any]] = [{"beta": 5.0}, {"beta": 5.0}, {"beta": 7.0, "lr": 0.5}, {}]
    methods = ["emc2", "emc2", "emc2", "dcl"]
    loaded = [
        load_run(write_run(tmp_path / n, make_config(m, seed=i, workers=i, **o), []))
        for i, (n, m, o) in enumerate(zip(names, methods, options, strict=True))
    ]
    assert [g.label for g in group_runs(loaded)] == ["big crops", "EMC²", "DCL"]
    many = {k: 1.5 for k in ("beta", "lr", "burn_in", "momentum", "gamma")}
    twin = load_run(write_run(tmp_path / "x" / "big crops", make_config("emc2", **many), []))
    assert [g.label for g in group_runs([loaded[0], twin])] == [
        "big crops · beta=5.0 · burn_in=0.5 · lr=0.001 · 2 more",
        "big crops · beta=1.5 · burn_in=1.5 · lr=1.5 · 2 more",
    ]


@pytest.mark.parametrize("classes", [2, 10, 37, 200])
def test_many_long_class_names_stay_readable(tmp_path: Path, classes: int) -> None:
    out = tmp_path / "page.html"
    page = page_of([write_many(tmp_path / "run", classes)], out)
    text = out.read_text()
    names = re.search(r'<g class="names">(.*?)</g>', text)
    assert names is not None
    placed = re.findall(r'x="(\d+)" y="(\d+)"[^>]*>([^<]*)<', names.group(1))
    assert min(classes, 8) - 1 <= len(placed) <= 20
    spans = [(int(x) - 4.5 * len(n), int(y) - 13, int(x) + 4.5 * len(n), int(y))
             for x, y, n in placed]  # fmt: skip
    for i, a in enumerate(spans):
        assert a[0] >= 0 and a[2] <= 720
        assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
                       for b in spans[:i])  # fmt: skip
    assert len({n for *_, n in placed}) == len(placed)  # cut in the middle, ends differ
    buttons = [a for t, a in page.tags if t == "button" and "data-class" in a]
    assert len({a["style"] for a in buttons}) == len(buttons) > 0.8 * classes
    assert page.count("g", "names") == 2 and "Placed by t-SNE" in page.text
    assert ("Find a class" in text) == (classes > 30)
    assert f"confusion matrix of {min(classes, 40)} classes" in text
    assert ("40 of 200 classes with most mistakes" in page.text) == (classes == 200)
    assert "Commonest mistakes" in page.text and "taken for" in page.text
    assert out.stat().st_size < 1_500_000


def test_two_hundred_colours_differ_and_ten_are_the_familiar_ones() -> None:
    assert len(set(class_colours(200))) == 200
    assert class_colours(10)[0] == "#3f90da"


def test_the_confusion_matrix_counts_the_probes_answers(tmp_path: Path) -> None:
    art = {"test_labels": np.array([0, 0, 0, 1, 1]), "probe_predicted": np.array([0, 1, 1, 1, 1]),
           "right_probe": np.array([1, 0, 0, 1, 1], bool)}  # fmt: skip
    info = {"num_samples": 9, "train": 9, "test": 5, "classes": ["cat", "dog"], "skipped": []}
    config = make_config(data_info=info)
    page = page_of([write_run(tmp_path / "r", config, [], artifacts=art)], tmp_path / "p.html")
    assert "cat → dog: 2 of 3" in page.text and "cat → cat: 1 of 3" in page.text
    assert "dog → dog: 2 of 2" in page.text and "2 of 5 answers are wrong" in page.text
    assert "cat taken for dog2 of 3 (67 %)" in page.text
    (left, top) = re.search(
        r'class="edge" d="M([\d.]+) ([\d.]+)h', (tmp_path / "p.html").read_text()
    ).groups()
    assert (float(left), float(top)) == (35.6, 24)  # names that lie need no room to stand
    art["probe_predicted"][1] = 0
    page = page_of([write_run(tmp_path / "s", config, [], artifacts=art)], tmp_path / "s.html")
    assert "1 of 5 answers is wrong" in page.text


def test_a_comparison_shows_the_same_images_by_every_method(tmp_path: Path) -> None:
    paths = write_comparison(tmp_path / "runs", seeds=1)
    page = page_of(paths, tmp_path / "page.html")
    assert "Nearest neighbours, side by side" in page.text
    assert "One seed, the best first" in page.text and "Means over seeds" not in page.text
    assert page.count("div", "side") == 6 and page.count("div", "line") == 6 * 7


def test_unlabelled_data_is_not_talked_about_as_if_it_had_labels(tmp_path: Path) -> None:
    config = make_config("dcl", seed=1)
    run = write_unlabelled(tmp_path / "heap")
    page = page_of([run], tmp_path / "page.html")
    for word in ("accuracy", "unlabelled", "test image", "Choose a class", "fixed probe set"):
        assert (word in page.text) == (word == "fixed probe set"), word
    assert "Each image, then the images" in page.text and page.count("div", "legend") == 0
    lines = [{k: v for k, v in line.items() if k not in ("knn1", "probe", "chance")}
             for line in make_metrics(config)]  # fmt: skip
    other = write_run(tmp_path / "other", config | {"data_info": {}}, lines)
    page = page_of([run, other], tmp_path / "both.html")
    assert "best first by Global loss, exact." in page.text and "1-NN" not in page.text
    assert "test image" not in page.text and "In brackets" not in page.text
    assert "in any of these runs: the data has no labels." in page.text
    few = {"data_info": {"unprobed": "train/ has 1 class folder with images, and probes need 2"}}
    two = [write_run(tmp_path / n, config | few | {"seed": i}, []) for i, n in enumerate("ab")]
    page = page_of(two, tmp_path / "few.html")
    assert "train/ has 1 class folder" in page.text and "no labels" not in page.text


def test_views_are_shown_as_the_encoder_gets_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", make_config(recipe="digits"), [], artifacts=digit_artifacts())
    page = page_of([run], tmp_path / "page.html")
    assert "as the encoder gets them (recipe digits)" in page.text
    assert sum(a.get("alt") == "augmented view" for _, a in page.tags) == 24


def test_baselines_of_different_data_are_not_averaged(tmp_path: Path) -> None:
    """A mean of chances, 20 % here and 33 % there, is the chance of neither."""
    paths = duel(tmp_path, [0.97], [0.90])
    for path in paths:
        config = json.loads((path / "config.json").read_text())
        config["data_info"] |= {"fingerprint": config["method"]}
        (path / "config.json").write_text(json.dumps(config))
    found = compare(group_runs([load_run(path) for path in paths]))
    assert not found.baselines and "the baselines: see each run's own" in found.notes[0]


def test_exact_losses_of_another_beta_compare_nothing(tmp_path: Path) -> None:
    """The smaller beta has the smaller loss, whatever was learned: it was named the best."""
    paths = []
    for beta, loss in ((2.0, 2.0), (14.28, 5.0)):
        for seed in range(3):
            lines = [{"step": step, "samples": step, "global_loss": loss + 1 - step + 0.01 * seed}
                     for step in (0, 1)]  # fmt: skip
            config = make_config("emc2", seed) | {"beta": beta}
            paths.append(write_run(tmp_path / f"b{beta:g}-seed{seed}", config, lines))
    found = compare(group_runs([load_run(path) for path in paths]))
    assert found.notes == [
        "No winner is named: exact losses of another --beta are no better or worse."
    ]
    assert not any(cell.wins for row in found.rows for cell in row) and not found.baselines
    same = compare(group_runs([load_run(path) for path in paths[:3]]))
    assert [name for name, _ in same.baselines] == ["Untrained encoder"]
