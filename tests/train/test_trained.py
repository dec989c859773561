"""A trained encoder at work: files, folders, lists and images give the features they should."""

from __future__ import annotations

import csv
import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

import negchain
from negchain.train.config import ConfigError
from negchain.train.pretrained import load_trained
from tool_runs import TINY
from tool_runs import negchain as command

Capture = pytest.CaptureFixture[str]


def draw(path: Path, seed: int, size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    places = itertools.product(("train", "test"), ("cat", "dog"), range(6))
    for seed, (split, kind, i) in enumerate(places):
        draw(root / split / kind / f"{i}.png", seed)
    twin = (root / "train/cat/0.png").read_bytes()
    (root / "test/dog/0.png").write_bytes(twin)
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "photos"
    assert command("train", TINY, "--steps 3 --data", photos, "--out", out) == 0
    return out


def test_paths_images_and_tensors_give_the_same_features(run: Path, photos: Path) -> None:
    trained = negchain.load(run, device="cpu")
    files = [photos / "train/cat/1.png", photos / "test/dog/3.png"]
    features = trained.encode(files)
    assert features.shape == (2, trained.encoder.feature_dim) and features.dtype == torch.float32
    found = trained.read(files)
    pixels = torch.stack([found.picture(i) for i in range(2)])
    encoder, _ = load_trained(run)
    with torch.no_grad():
        expected = encoder.features(pixels.float() / 255)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(trained.encode(pixels), expected)
    torch.testing.assert_close(trained.encode(pixels[1]), expected[1:])
    torch.testing.assert_close(trained.encode(files[0]), expected[:1])
    torch.testing.assert_close(trained.encode(str(files[1])), expected[1:])
    with Image.open(files[0]) as first, Image.open(files[1]) as second:
        torch.testing.assert_close(trained.encode([first, second]), expected)
        torch.testing.assert_close(trained.encode(second), expected[1:])


@pytest.mark.parametrize(
    ("height", "width"), [(12, 30), (12, 29), (29, 12), (13, 40), (40, 13), (8, 13), (13, 8)]
)
def test_a_tensor_is_seen_as_a_picture_is(run: Path, height: int, width: int) -> None:
    """Where H - W is odd its square was half a pixel off."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    trained, tensor = negchain.load(run, device="cpu"), torch.from_numpy(pixels)
    of_pictures = trained.encode([Image.fromarray(picture) for picture in pixels])
    torch.testing.assert_close(trained.encode(tensor.permute(0, 3, 1, 2)), of_pictures)


def test_no_more_squares_than_a_batch_are_in_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large encoder can take many times the memory of small tensors."""
    monkeypatch.setattr("negchain.train.trained.ENCODE_BATCH", 3)
    trained, cut = negchain.load(run, device="cpu"), []
    squares = type(trained)._squares
    monkeypatch.setattr(
        type(trained), "_squares", lambda self, p: cut.append(squares(self, p)) or cut[-1]
    )
    pixels = torch.randint(256, (7, 3, 12, 10), dtype=torch.uint8)
    features = trained.encode(pixels)
    assert [len(part) for part in cut] == [3, 3, 1]
    torch.testing.assert_close(features, trained.encode(torch.cat(cut)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "I;16", "turned"])
def test_an_open_image_is_read_as_its_file_is(run: Path, tmp_path: Path, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (14, 10, 4), dtype=np.uint8)
    image, options, path = Image.fromarray(pixels), {}, tmp_path / "a.png"
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image, options = image.convert("RGB"), {"exif": exif}
    elif mode == "I;16":
        image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 16)  # 12 bits
    elif mode == "CMYK":
        image, path = image.convert("RGB").convert(mode), tmp_path / "a.tiff"
    else:
        image = image.convert(mode)
    image.save(path, **options)
    trained = negchain.load(run, device="cpu")
    with Image.open(path) as opened:
        torch.testing.assert_close(trained.encode(opened), trained.encode(path))


def test_a_folder_a_list_and_a_file_of_paths(run: Path, photos: Path, tmp_path: Path) -> None:
    trained = negchain.load(run, device="cpu")
    whole = trained.embed(photos)
    assert len(whole.names) == 24 and whole.names[0] == "train/cat/0.png"
    assert whole.class_names == ["cat"] * 6 + ["dog"] * 6 + ["cat"] * 6 + ["dog"] * 6
    listed = tmp_path / "some.txt"
    listed.write_text(f"{photos / 'train/cat/1.png'}\n\n{photos / 'train/dog/0.png'}\n")
    some = trained.embed(listed)
    torch.testing.assert_close(some.features, whole.features[[1, 6]])
    assert some.class_names == ["", ""]


def test_lists_as_other_tools_write_them(run: Path, photos: Path, tmp_path: Path) -> None:
    trained, odd, listed = negchain.load(run, device="cpu"), b"caf\xe9\x85.png", tmp_path / "a.txt"
    (tmp_path / os.fsdecode(odd)).write_bytes((photos / "train/cat/1.png").read_bytes())
    for text in (b"\xef\xbb\xbf" + os.fsencode(photos) + b"/train/cat/1.png\r\n", odd):
        listed.write_bytes(text)
        assert torch.equal(trained.encode(listed), trained.encode(photos / "train/cat/1.png"))
    for suffix in ("csv", "parquet", "npz"):  # the name that is not UTF-8 is shown escaped
        trained.embed(listed).save(tmp_path / f"a.{suffix}")
    assert "caf\\xe9" in (tmp_path / "a.csv").read_text()
    table = tmp_path / "A.CSV"
    table.write_text(f"path,label\n{photos / 'train/cat/1.png'},cat\n")
    assert len(trained.encode(table)) == 1


def test_pictures_that_are_not_read_are_named(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(photos, tmp_path / "data")
    draw(tmp_path / "data/valid/cat/0.png", 1)
    for name, out in (("embed", "a.npz"), ("duplicates", "a.html")):
        capsys.readouterr()
        assert command(name, run, "--data", tmp_path / "data", "--out", tmp_path / out) == 0
        assert capsys.readouterr().err == "note: the split valid is not read\n"


@pytest.mark.parametrize("words", ["evaluate", "embed --out a.npz", "duplicates --out a.html"])
def test_root_is_where_downloaded_data_sets_lie(
    words: str, run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(words, run, "--data cifar10 --root", tmp_path / "sets") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"cifar10 cannot be read from {tmp_path / 'sets'}" in said


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_embed_writes_file_and_class_names(
    run: Path, photos: Path, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / "deep" / f"all.{suffix}"
    assert command("embed", run, "--data", photos, "--out", out) == 0
    expected = negchain.load(run, device="cpu").embed(photos)
    if suffix == "npz":
        with np.load(out) as found:
            got = found["names"].tolist(), found["classes"].tolist(), found["embeddings"]
    elif suffix == "csv":
        with out.open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head[:3] == ["file", "class", "f0"]
        vectors = np.array([row[2:] for row in rows], dtype=np.float32)
        got = [row[0] for row in rows], [row[1] for row in rows], vectors
    else:
        table = parquet.read_table(out).to_pydict()
        got = table["file"], table["class"], np.array(table["embedding"], np.float32)
    assert got[0] == expected.names and got[1] == expected.class_names
    np.testing.assert_allclose(got[2], expected.features.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(run: Path, capsys: Capture) -> None:
    with pytest.raises(ValueError, match="needs a GPU and none is visible"):
        negchain.load(run, device="cuda")
    assert command("evaluate", run, "--device cuda") == 2
    assert "needs a GPU and none is visible" in capsys.readouterr().err


def test_embed_takes_files_and_names_the_unreadable(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    good, out = photos / "train/cat/0.png", tmp_path / "a.npz"
    options = ("--data", good, "--data", broken, "--data", tmp_path / "gone.png", "--out", out)
    assert command("embed", run, *options) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 embedding of size" in text and re.search(
        r"\S*broken\.png \(not an image of a known", text
    )
    assert re.search(r"left out: \S*gone\.png \(no such file", text)
    assert command("embed", run, "--data", broken, "--out", out) == 2
    assert "no image could be read" in capsys.readouterr().err
    assert command("embed", run, "--data", good, "--out", tmp_path / "a.xlsx") == 2
    assert ".npz, .csv, .parquet" in capsys.readouterr().err


def test_colour_files_are_turned_grey_for_an_encoder_of_grey_images(
    photos: Path, tmp_path: Path
) -> None:
    options = "--data digits --batch-size 32 --subset 64 --steps 1 --probe-samples 8 --quiet"
    assert command("train", options, "--device cpu --eval-every 0 --out", tmp_path / "r") == 0
    features = negchain.load(tmp_path / "r", device="cpu").encode(photos / "train/cat/0.png")
    assert features.shape == (1, 128)
    with pytest.raises(ValueError, match="give such images .*converts files .* no folders"):
        negchain.load(tmp_path / "r", device="cpu").encode(photos)


def test_refusals(run: Path, photos: Path) -> None:
    trained = negchain.load(run, device="cpu")
    with pytest.raises(ValueError, match="empty list"):
        trained.encode([])
    with pytest.raises(ValueError, match="is a folder; give it alone"):
        trained.encode([photos])
    with Image.open(photos / "train/cat/0.png") as image:
        with pytest.raises(ValueError, match="some of each"):
            trained.encode([image, "a.png"])  # type: ignore[list-item]


def test_what_is_no_picture_is_told_apart(run: Path, photos: Path) -> None:
    trained = negchain.load(run, device="cpu")
    files = sorted((photos / "train/cat").iterdir())
    assert torch.equal(trained.encode(path for path in files), trained.encode(files))
    grey = torch.zeros(2, 1, 12, 10, dtype=torch.uint8)
    for shape in (grey, grey[0, 0]):
        with pytest.raises(ValueError, match=re.escape("takes images [N,3,H,W], got")):
            trained.encode(shape)
    assert trained.encode(torch.zeros(0, 3, 12, 10, dtype=torch.uint8)).shape[0] == 0
    with pytest.raises(ValueError, match="uint8"):
        trained.encode(torch.zeros(2, 3, 12, 10))
    with pytest.raises(ValueError, match="must have pixels"):  # once noise, as of some memory
        trained.encode(torch.zeros(2, 3, 0, 10, dtype=torch.uint8))
    for wrong in (np.zeros((2, 8, 8, 3), np.uint8), [grey[0]], [1], [b"x"]):
        with pytest.raises(ConfigError, match="a list names files, got"):
            trained.encode(wrong)  # type: ignore[arg-type]
    with Image.open(files[0]) as image, pytest.raises(ConfigError, match="a list names files"):
        trained.embed([image])  # type: ignore[list-item]


def test_duplicates_finds_a_copy_across_train_and_test(
    run: Path, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "twins.html"
    assert command("duplicates", run, "--above 0.99999 --out", out) == 0
    with out.with_suffix(".csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["similarity", "file_a", "file_b", "class_a", "class_b"]
    assert ["1.000000", "train/cat/0.png", "test/dog/0.png", "cat", "dog"] in rows
    text = out.read_text()
    assert "in training and test, two classes" in text and text.count("<img") == 2 * len(rows)
    assert len(rows) == 1 and "1 pair in" in text and not re.search(r"https?://", text)
    said = capsys.readouterr().out
    assert f"table: {out.with_suffix('.csv')}" in said and "1 pair of 24 images" in said
    assert command("duplicates", run, "--above -1 --out", out) == 0  # every pair: too many
    assert "raise --above" in " ".join(capsys.readouterr().out.split())
    assert "276 pairs" in out.read_text() and "Raise --above" in out.read_text()
    assert command("duplicates", run, "--out", tmp_path / "twins.csv") == 2
    assert "--out must end in .html" in capsys.readouterr().err


@pytest.mark.parametrize("test", ["Testing", "cat"])
def test_a_copy_is_across_whatever_the_split_is_called(test: str, tmp_path: Path) -> None:
    """Also where there is none and pictures of each class are held out."""
    root, out = tmp_path / "photos", tmp_path / "twins.html"
    train = root / ("" if test == "cat" else "Training")
    for number in range(12):
        draw(train / ("cat", "dog")[number % 2] / f"{number}.png", number)
    if test == "Testing":
        for kind in ("cat", "dog"):
            shutil.copytree(train / kind, root / test / kind)
    else:
        for file in (train / "cat").iterdir():  # all of one class are copies
            file.write_bytes((train / "cat/0.png").read_bytes())
    assert command("train", TINY, "--steps 1 --data", root, "--out", tmp_path / "run") == 0
    assert command("duplicates", tmp_path / "run", "--above 0.99999 --out", out) == 0
    across = {"Testing": 12, "cat": 5}[test]
    assert out.read_text().count("in training and test") == across
    listed = ["--data", os.path.relpath(root), "--above 0.99999 --out", out]
    assert command("duplicates", tmp_path / "run", *listed) == 0
    assert out.read_text().count("in training and test") == across
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    listed[1] = moved  # of other pictures none was held out when it trained
    assert command("duplicates", tmp_path / "run", *listed) == 0
    assert out.read_text().count("in training and test") == (12 if test == "Testing" else 0)
