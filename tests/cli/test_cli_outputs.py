"""What a run leaves behind, and what the other commands make of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from negchain.data import load_data
from negchain.encoders import Encoder, build_encoder
from negchain.neighbours import knn_accuracy
from negchain.train.pretrained import load_trained
from negchain.train.step import TrainStep
from tool_runs import DIGITS, TINY, class_folder, metrics_of, negchain, picture_folder

Capture = pytest.CaptureFixture[str]

FIXED_KEYS = {
    "step", "epoch", "samples", "seconds", "loss", "global_loss", "acceptance_rate",
    "carried_mass", "knn1", "probe", "samples_per_second",
}  # fmt: skip
OUR_KEYS = {
    "lr", "effective_negatives", "chain_age", "estimated_global_loss",
    "estimated_global_loss_low", "estimated_global_loss_high",
    "knn1_euclidean", "probe_l2", "probe_paper", "knn20", "knn20_top5", "probe_top5", "knn200",
    "knn200_top5", "probe_1pct", "probe_10pct", "embedding_variance", "chance", "pixels_knn1",
    "pixels_probe", "online_probe", "probe_validation", "feature_spread",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    options = DIGITS.replace("--eval-every 0", "--eval-every 1")
    assert negchain("train", options, "--subset 96 --epochs 2 --log-every 1 --out", out) == 0
    return out


def plain_features(encoder: Encoder, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return encoder.features(pixels.float() / 255)


def test_a_run_folder_holds_what_was_promised(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "report.html", "summary.json"}
    config = json.loads((run / "config.json").read_text())
    assert (config["method"], config["batch_size"], config["subset"]) == ("emc2", 32, 96)
    assert config["versions"]["torch"] and config["data_info"]["fingerprint"]
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert names == ["best.pt", "step-000000006.pt"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["step"] == 6 and summary["samples"] == 192
    assert {"knn1", "probe", "global_loss", "loss", "knn20", "knn200", "knn20_top5", "probe_top5",
            "probe_1pct", "probe_10pct"} <= set(summary)  # fmt: skip


def test_a_result_is_held_against_chance_pixels_and_the_untrained_encoder(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == first["samples"] == 0
    data, encoder = load_data("digits"), build_encoder("small-cnn", image_size=8, channels=1,
                                                       norm="batch", seed=0).eval()  # fmt: skip
    assert data.test is not None and data.test.labels is not None
    base = data.train  # --subset is about pretraining
    assert (
        base is not None
        and base.images is not None
        and base.labels is not None
        and data.test.images is not None
    )
    counts = [int((data.test.labels == c).sum()) for c in range(10)]
    assert summary["chance"] == pytest.approx(max(counts) / 359)
    pixels = [(x.float() / 255).flatten(1) for x in (base.images, data.test.images)]
    expected = knn_accuracy(pixels[0], base.labels, pixels[1], data.test.labels)
    assert summary["pixels_knn1"] == pytest.approx(expected)
    fresh = [plain_features(encoder, x) for x in (base.images, data.test.images)]
    expected = knn_accuracy(fresh[0], base.labels, fresh[1], data.test.labels)
    assert summary["untrained_knn1"] == first["knn1"] == pytest.approx(expected)
    assert 0 < summary["embedding_variance"] <= 1
    with np.load(run / "artifacts.npz") as arrays:
        assert arrays["right_knn1"].mean() == pytest.approx(summary["knn1"])
        right = arrays["probe_predicted"] == arrays["test_labels"]
        assert right.mean() == pytest.approx(summary["probe"])
        assert str(arrays["map_method"]) == "t-SNE"
        assert arrays["views_augmented"].shape == (6, 6, 1, 8, 8)


def test_the_terminal_says_whether_training_helped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the page does: a table alone leaves open that raw pixels are hard to beat on digits."""
    options = DIGITS + " --subset 64 --steps 2 --out"
    assert negchain("train", options, tmp_path / "run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "result untrained encoder raw pixels chance" in said
    assert re.search(r"1-NN accuracy \S+ % 97\.2 % 98\.9 % 10\.3 %", said)
    assert "1-NN accuracy: training shows no gain; on this data raw pixels already reach" in said


def test_the_page_is_written_before_the_first_step_and_with_every_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "run", list[tuple[int, bool]]()
    call = TrainStep.__call__

    def looked_at(self: TrainStep, now: int, *inputs: Any) -> None:
        text = (out / "report.html").read_text()
        seen.append((text.count("<circle"), "This run is unfinished" in text))
        call(self, now, *inputs)

    monkeypatch.setattr(TrainStep, "__call__", looked_at)
    options = TINY.replace("--eval-every 0", "--eval-every 1 --subset 16 --epochs 3")
    data = class_folder(tmp_path / "data")
    assert negchain("train", options, "--data", data, "--out", out) == 0
    counts = [count for count, _ in seen]
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4]
    assert all(unfinished for _, unfinished in seen)
    assert "This run is unfinished" not in (out / "report.html").read_text()


def test_metrics_have_the_fixed_names(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = {key for line in lines for key in line}
    assert FIXED_KEYS <= seen <= FIXED_KEYS | OUR_KEYS
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "knn1" in line] == [0, 3, 6]
    assert all(line["samples"] == 32 * line["step"] for line in lines)
    assert all(line["epoch"] == pytest.approx(line["step"] / 3) for line in lines)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] == 0 < seconds[1]
    assert all(0 <= line["acceptance_rate"] <= 1 for line in lines if "acceptance_rate" in line)


def test_tensorboard_has_the_same_numbers(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    logged = {e.step: e.value for e in events.Scalars("loss")}
    expected = {line["step"]: line["loss"] for line in metrics_of(run) if "loss" in line}
    assert logged == pytest.approx(expected)


def test_evaluate_repeats_the_numbers_of_the_end(run: Path, capsys: Capture) -> None:
    assert negchain("evaluate", run) == 0
    text = capsys.readouterr().out
    assert re.search(r"1-NN accuracy +\d\d\.\d % +97\.2 % +98\.9 % +10\.3 %", text)
    assert "raw pixels" in text and "untrained encoder" in text and "chance" in text
    found = json.loads((run / "evaluation.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    for key in ("global_loss", "knn1", "knn1_euclidean", "probe", "probe_paper", "pixels_knn1",
                "untrained_knn1", "chance", "knn20", "probe_1pct"):  # fmt: skip
        assert found[key] == pytest.approx(summary[key], abs=1e-9), key


def test_embed_writes_the_features_of_plain_images(run: Path, tmp_path: Path) -> None:
    encoder, _ = load_trained(run)
    data = load_data("digits")
    assert data.test is not None
    names = [*data.pretrain.names, *data.test.names]
    images = [part.images for part in (data.pretrain, data.test)]
    labels = torch.cat([p.labels for p in (data.pretrain, data.test) if p.labels is not None])
    expected = torch.cat([plain_features(encoder, x) for x in images if x is not None]).numpy()
    out = tmp_path / "all.npz"
    assert negchain("embed", run, "--data digits --out", out) == 0
    with np.load(out) as found:
        assert found["names"].tolist() == names
        assert found["classes"].tolist() == [str(label) for label in labels.tolist()]
        np.testing.assert_allclose(found["embeddings"], expected, atol=1e-5)
        assert found["embeddings"].dtype == np.float32 and len(names) == 1797


def test_report_of_several_runs(run: Path, tmp_path: Path, capsys: Capture) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    page = tmp_path / "both.html"
    assert negchain("report", run, other, "--out", page) == 0
    assert f"report: {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "<html" in text and "digits" in text and "other" in text
    assert not re.search(r"(src|href)=[\"']https?://", text)


@pytest.mark.slow  # four processes; test_cli_first_minutes.py compares two
def test_compare_two_methods_and_two_seeds(tmp_path: Path, capsys: Capture) -> None:
    data = picture_folder(tmp_path / "pictures")
    out = tmp_path / "duel"
    options = TINY.replace("--quiet", "") + " --methods dcl,emc2 --seeds 2 --steps 4 --jobs 2"
    arguments = ("compare", options, "--burn-in 0.25 --data", data, "--out", out)
    assert negchain(*arguments) == 0
    text = capsys.readouterr().out
    assert "EMC² (2 seeds)" in text and "DCL (2 seeds)" in text and "Global loss, exact" in text
    runs = {f"{method}-seed{seed}" for method in ("dcl", "emc2") for seed in (0, 1)}
    assert {p.name for p in out.iterdir() if p.is_dir()} == runs
    configs = {name: json.loads((out / name / "config.json").read_text()) for name in runs}
    assert configs["emc2-seed1"]["burn_in"] == 0.25 and configs["emc2-seed1"]["seed"] == 1
    assert metrics_of(out / "dcl-seed0") != metrics_of(out / "dcl-seed1")
    page = (out / "report.html").read_text()
    assert "emc2" in page and "dcl" in page
    before = (out / "emc2-seed0" / "metrics.jsonl").stat().st_mtime_ns
    (out / "report.html").unlink()
    assert negchain(*arguments) == 0  # everything is there already: only the page is made
    assert (out / "emc2-seed0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert (out / "report.html").exists()


TRAIN = """--data --method --batch-size --epochs --steps --beta --burn-in --carried --denominator
--encoder --norm --optimizer --lr --seed --device --out --resume --preset --strict --no-graph"""


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", TRAIN),
        ("evaluate", "RUN --data"),
        ("embed", "RUN --data --out"),
        ("export", "RUN --format --checkpoint --out"),
        ("duplicates", "RUN --data --above --out"),
        ("report", "RUN --out"),
        ("compare", "--methods --seeds --jobs --data --out"),
        ("", "train evaluate embed export duplicates compare report"),
    ],
)
def test_help_names_every_option(
    command: str, options: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert negchain(command, "--help") == 0
    text = capsys.readouterr().out
    assert [name for name in options.split() if name not in text] == []


def test_help_does_not_name_a_default_that_is_not_taken(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert negchain("train", "--help") == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "--proposal " in x)
    assert "default: batch" not in line and "both (default: fresh views)" in line


@pytest.mark.parametrize("command", ["train", "compare", "bench", "reproduce"])
def test_help_has_a_line_for_each_example(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert negchain(command, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.count(f"negchain {command}") <= 1 for line in lines)
    assert sum(line.startswith(f"  negchain {command} ") for line in lines) >= 2


def test_help_teaches_the_presets_and_choices(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert negchain("train -h") == 0
    text = capsys.readouterr().out
    for word in ("stl10-b32", "stl10-b256", "imagenet100-b256", "stl10-subset", "--resume",
                 "infonce|dcl|sogclr|negcache|emc2|isir", "encode|cached"):  # fmt: skip
        assert word in text
