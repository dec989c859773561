"""Folders nobody prepared for the tool: it trains on what can be read and names the rest."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tool_runs import TINY, assert_same, negchain, picture_folder, state_of

BAD = ("train/cat/truncated.jpg", "train/dog/zero.png", "test/dog/words.jpg")


def _pixels(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _messy(root: Path) -> Path:
    """An ImageFolder of everything people keep in their folders."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for kind in ("cat", "dog", "Vögel 鳥"):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                side = rng.integers(1, 70, 2)
                _pixels(rng, *side).save(folder / f"{number}.png")
    picture = _pixels(rng, 33, 17)
    cat = root / "train" / "cat"
    picture.convert("L").save(cat / "grey.png")
    picture.convert("P").save(cat / "palette.gif")
    picture.convert("RGBA").save(cat / "alpha.png")
    picture.convert("1").save(cat / "bilevel.png")
    picture.convert("CMYK").save(cat / "print.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(cat / "turned 📷.jpg", exif=exif)
    whole = io.BytesIO()
    _pixels(rng, 64, 64).save(whole, "JPEG")
    (root / BAD[0]).write_bytes(whole.getvalue()[:700])
    (root / BAD[1]).touch()
    (root / BAD[2]).write_text("not a picture")
    (root / "train" / "cat" / "notes.txt").write_text("remember the milk")
    (root / "train" / "cat" / ".hidden.png").write_text("")
    return root


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _messy(tmp_path_factory.mktemp("data") / "mein Ordner ü")


@pytest.fixture(scope="module")
def run(messy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert negchain("train", TINY, "--steps 2 --data", messy, "--out", out) == 0
    return out


def test_a_messy_folder_trains_and_names_what_it_left_out(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    info = config["data_info"]
    assert sorted(name for name, _ in info["skipped"]) == sorted(BAD)
    assert all(reason for _, reason in info["skipped"])
    assert (info["num_samples"], info["test"]) == (3 * 12 + 6, 3 * 6)
    assert info["classes"] == ["Vögel 鳥", "cat", "dog"]
    assert any("1 file without an image suffix" in note for note in info["notes"])
    page = (run / "report.html").read_text()
    assert all(name in page for name in BAD)
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["knn1"] <= 1 and 0 <= summary["probe"] <= 1


def test_the_user_is_told_while_it_happens(
    messy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert negchain("train", TINY, "--steps 1 --data", messy, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().err.replace("\n", " ")
    assert all(f"left out: {name}" in said for name in BAD)
    assert "batch 8, 1 step, small-cnn" in said


def test_a_messy_folder_evaluates_and_embeds(run: Path, messy: Path, tmp_path: Path) -> None:
    assert negchain("evaluate", run) == 0
    numbers = json.loads((run / "evaluation.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    for key in ("knn1", "knn1_euclidean", "probe", "probe_paper", "global_loss"):
        assert numbers[key] == pytest.approx(summary[key], abs=1e-6)
    assert negchain("embed", run, "--data", messy, "--out", tmp_path / "all.npz") == 0
    with np.load(tmp_path / "all.npz") as found:
        names = [str(name) for name in found["names"]]
        assert len(names) == len(set(names)) == len(found["embeddings"]) == 60
        assert "train/cat/turned 📷.jpg" in names and "test/Vögel 鳥/0.png" in names
        assert list(found["classes"]) == [name.split("/")[1] for name in names]


def test_strict_refuses_unreadable_files(
    messy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert negchain("train", TINY, "--strict --steps 1 --data", messy, "--out", out) == 2
    said = capsys.readouterr().err
    assert "3" in said and "leave out --strict" in said and not out.exists()


def test_a_folder_without_labels_is_not_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    data = picture_folder(tmp_path / "heap" / "deep")
    options = "--epochs 2 --eval-every 1 --data"
    arguments = TINY.replace("--eval-every 0", "")
    assert negchain("train", arguments, options, data.parent, "--out", out) == 0
    assert "nothing was probed" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("global_loss" in line for line in lines)
    assert not any("knn1" in line or "probe" in line for line in lines)
    assert "nothing was probed" in (out / "report.html").read_text().lower()


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        ("emc2", 2),
        ("negcache", 0),
        pytest.param("emc2", 0, marks=pytest.mark.slow),
        pytest.param("negcache", 2, marks=pytest.mark.slow),
    ],
)
def test_data_on_disk_equals_resident(
    method: str, workers: int, messy: Path, tmp_path: Path
) -> None:
    settings = TINY.replace("--workers 0", f"--workers {workers} --method {method} --steps 7")
    kept, on_disk = tmp_path / "kept", tmp_path / "on_disk"
    assert negchain("train", settings, "--data", messy, "--out", kept) == 0
    settings += " --resident-gb 0"
    assert negchain("train", settings, "--data", messy, "--out", on_disk) == 0
    assert_same(state_of(kept), state_of(on_disk))


def test_a_data_set_of_two(tmp_path: Path) -> None:
    data = picture_folder(tmp_path / "two", count=2)
    settings = TINY.replace("--batch-size 8", "--batch-size 2")
    for method in ("emc2", "negcache", "infonce"):
        arguments = (settings, f"--method {method} --steps 2 --data")
        assert negchain("train", *arguments, data, "--out", tmp_path / method) == 0


@pytest.mark.parametrize("layout", ["folders", "table"])
def test_classes_without_a_test_split_are_probed_on_a_holdout(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = ["path,label"]
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(10):
            _pixels(rng, *rng.integers(20, 60, 2)).save(tmp_path / f"pets/{kind}/{number}.png")
            rows.append(f"pets/{kind}/{number}.png,{kind}")
    (tmp_path / "pets.csv").write_text("\n".join(rows))
    data = tmp_path / ("pets" if layout == "folders" else "pets.csv")
    out = tmp_path / "run"
    assert negchain("train", TINY, "--steps 2 --data", data, "--out", out) == 0
    said = capsys.readouterr()
    assert "held out" in said.err and "nothing was probed" not in said.out
    info = json.loads((out / "config.json").read_text())["data_info"]
    assert (info["num_samples"], info["train"], info["test"], info["held_out"]) == (16, 16, 4, 4)
    assert any("crops are cut from whole pictures" in note for note in info["notes"])
    assert "probe" in json.loads((out / "summary.json").read_text())
    assert negchain("train", TINY, "--steps 2 --out", out, "--resume") == 0
    assert negchain("train", TINY, "--steps 2 --out", out, "--resume --holdout 0.5") == 2


def test_two_classes_of_one_picture_train_and_say_why_nothing_is_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        picture_folder(tmp_path / "pets" / name, count=1)
    settings = TINY.replace("--batch-size 8", "--batch-size 2")
    out = tmp_path / "run"
    assert negchain("train", settings, "--steps 2 --data", tmp_path / "pets", "--out", out) == 0
    said = capsys.readouterr()
    assert "3 training images" in said.err.replace("\n", " ") and "nothing was probed" in said.out
    assert "has no labels" not in said.out + (out / "report.html").read_text()
