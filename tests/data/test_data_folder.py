"""Folders as people have them: layouts, order, labels, damage, links."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from negchain.data import DataBundle, load_data
from negchain.data.folder import list_folder

RNG = np.random.default_rng(1)


def picture(path: Path, size: tuple[int, int] = (12, 12)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return path


def load(
    path: Path | str, image_size: int | None = None, strict: bool = False, budget: int = 8 << 30
) -> DataBundle:
    return load_data(
        str(path),
        image_size=image_size,
        strict=strict,
        resident_bytes=budget,
        num_workers=2,
        progress=False,
    )


def labelled(root: Path, classes: Sequence[str] = ("cat", "dog"), each: int = 3) -> Path:
    for name in classes:
        for number in range(each):
            picture(root / "train" / name / f"{number}.png")
        picture(root / "test" / name / "0.png")
    return root


def test_plain_folder_is_sorted_by_code_point_and_unlabelled(tmp_path: Path) -> None:
    names = ["Z.png", "a/b/c.png", "a-b.png", "a.PNG", "é.png", "日本/猫.png", "b 1.png", "b/d.jpg"]
    for name in reversed(names):
        picture(tmp_path / name)
    bundle = load(tmp_path)
    assert bundle.pretrain.names == tuple(sorted(names))
    assert bundle.pretrain.labels is None and bundle.train is None and bundle.test is None
    assert bundle.classes == () and bundle.skipped == () and bundle.name == tmp_path.name
    assert bundle.pretrain.images is not None
    for name, row in zip(bundle.pretrain.names, bundle.pretrain.images, strict=True):
        with Image.open(tmp_path / name) as image:
            assert np.array_equal(row, np.asarray(image).transpose(2, 0, 1))


def test_split_folder_agrees_with_torchvision(tmp_path: Path) -> None:
    labelled(tmp_path, ("dog", "cat", "Ärger", "Zoo", "10", "9"))
    picture(tmp_path / "train/cat/deep/er/x.png")
    picture(tmp_path / "unlabeled/all/1.png")
    picture(tmp_path / "unlabeled/0.png")
    bundle = load(tmp_path)
    assert bundle.train is not None and bundle.test is not None and bundle.labelled
    for split, ours in (("train", bundle.train), ("test", bundle.test)):
        theirs = ImageFolder(str(tmp_path / split))
        assert bundle.classes == tuple(theirs.classes)
        expected = {f"{split}/{os.path.relpath(p, tmp_path / split)}": k for p, k in theirs.samples}
        assert ours.labels is not None and ours.labels.dtype == torch.int64
        assert dict(zip(ours.names, ours.labels.tolist(), strict=True)) == expected
        assert list(ours.names) == sorted(expected)
    assert bundle.pretrain.names[-2:] == ("unlabeled/0.png", "unlabeled/all/1.png")
    assert bundle.pretrain.labels is not None
    assert bundle.pretrain.labels.tolist() == [*bundle.train.labels.tolist(), -1, -1]
    assert bundle.pretrain.images is not None and bundle.train.images is not None
    assert bundle.train.images.data_ptr() == bundle.pretrain.images.data_ptr()  # one copy in memory


def messy(root: Path) -> Path:
    labelled(root)
    train = root / "train"
    picture(train / "cat/wide.jpg", (50, 21))
    picture(train / "dog/tall.webp", (19, 64))
    picture(train / "dog/ünï cödé ☃.png")
    picture(train / "loose.png")
    Image.fromarray(RNG.integers(0, 256, (30, 30), dtype=np.uint8)).save(train / "cat/grey.png")
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(train / "cat/rgba.png")
    (train / "cat/empty.jpg").touch()
    (train / "cat/text.jpg").write_text("not a picture")
    whole = (picture(train / "dog/whole.jpg", (64, 64))).read_bytes()
    (train / "dog/truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (train / "dog/notes.txt").write_text("x")
    (train / "dog/Thumbs.db").write_text("x")
    (train / "dog/IMG_1.HEIC").write_text("x")
    (train / "dog/.DS_Store").write_text("x")
    (train / "dog/._hidden.png").write_text("x")
    picture(train / ".cache/secret.png")
    (train / "empty class").mkdir()
    (train / "cat/gone.png").symlink_to(root / "nowhere.png")
    (train / "cat/self.png").symlink_to("self.png")
    (train / "cat/folder.png").mkdir()
    (train / "circle").symlink_to(train, target_is_directory=True)
    os.mkfifo(train / "cat/pipe.png")
    picture(root / "val/cat/1.png")
    return root


SKIPPED = {
    "train/cat/empty.jpg": "empty file",
    "train/cat/gone.png": "broken link",
    "train/cat/pipe.png": "not a regular file",
    "train/cat/self.png": "broken link",
    "train/cat/text.jpg": "not an image of a known format",
}


@pytest.mark.parametrize("budget", [8 << 30, 0], ids=["resident", "on disk"])
def test_messy_folder(tmp_path: Path, budget: int) -> None:
    bundle = load(messy(tmp_path), image_size=16, budget=budget)
    skipped = dict(bundle.skipped)
    assert "truncated" in skipped.pop("train/dog/truncated.jpg")
    assert skipped == SKIPPED and len(bundle.skipped) == 6
    assert bundle.pretrain.names == (
        *(
            f"train/cat/{n}"
            for n in ("0.png", "1.png", "2.png", "grey.png", "rgba.png", "wide.jpg")
        ),
        *(f"train/dog/{n}" for n in ("0.png", "1.png", "2.png", "tall.webp", "whole.jpg")),
        "train/dog/ünï cödé ☃.png",
        "train/loose.png",
    )
    assert bundle.classes == ("cat", "dog")
    assert bundle.train is not None and bundle.test is not None
    assert bundle.train.names == bundle.pretrain.names[:-1]  # the loose one has no label
    assert bundle.train.labels is not None and bundle.train.labels.tolist() == [0] * 6 + [1] * 6
    assert bundle.pretrain.labels is not None and bundle.pretrain.labels[-1] == -1
    assert bundle.test.names == ("test/cat/0.png", "test/dog/0.png")
    assert bundle.pretrain.size == (16, 16) and bundle.pretrain.channels == 3
    rgba = bundle.pretrain.fetch(torch.tensor([4]))
    assert (rgba == 255).all()
    notes = " | ".join(bundle.notes)
    assert "3 files without an image suffix ignored" in notes and ".heic 1" in notes
    assert "val" in notes


def test_resident_and_streamed_are_the_same_set(tmp_path: Path) -> None:
    messy(tmp_path)
    resident, on_disk = load(tmp_path, 16), load(tmp_path, 16, budget=0)
    assert resident.pretrain.resident and not on_disk.pretrain.resident
    assert resident.fingerprint == on_disk.fingerprint
    assert resident.pretrain.names == on_disk.pretrain.names
    everything = torch.arange(len(resident.pretrain))
    assert torch.equal(resident.pretrain.fetch(everything), on_disk.pretrain.fetch(everything))


def test_strict_names_the_first_and_counts(tmp_path: Path) -> None:
    messy(tmp_path)
    with pytest.raises(ValueError, match=r"holds 6 \(train/cat/gone.png: broken link; .*--strict"):
        load(tmp_path, 16, strict=True)
    clean = labelled(tmp_path / "clean")
    assert load(clean, strict=True).skipped == ()


@pytest.mark.parametrize("budget", [8 << 30, 0])
def test_unreadable_files_move_no_one_else(tmp_path: Path, budget: int) -> None:
    for number in range(6):
        picture(tmp_path / f"{number}.png")
    before = load(tmp_path, budget=budget)
    (tmp_path / "3 bad.png").write_text("no")
    after = load(tmp_path, budget=budget)
    assert after.pretrain.names == before.pretrain.names
    assert after.fingerprint == before.fingerprint


def test_fingerprint_sees_every_change_and_not_the_place(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "elsewhere" / "b"
    labelled(first)
    second.parent.mkdir()
    os.system(f"cp -r '{first}' '{second}'")
    prints = [load(first).fingerprint]
    assert load(second).fingerprint == prints[0] == load(first).fingerprint
    prints.append(load(first, 10).fingerprint)
    added = picture(first / "train/cat/9.png")
    prints.append(load(first).fingerprint)
    added.rename(first / "train/dog/9.png")
    prints.append(load(first).fingerprint)
    (first / "train/dog/9.png").rename(first / "test/dog/9.png")
    prints.append(load(first).fingerprint)
    picture(first / "test/dog/9.png", (14, 14))
    prints.append(load(first, 12).fingerprint)
    assert len(set(prints)) == len(prints)
    (first / "test/dog/9.png").unlink()
    assert load(first).fingerprint == prints[0]


def test_class_only_in_test_is_named(tmp_path: Path) -> None:
    labelled(tmp_path)
    picture(tmp_path / "test/zebra/0.png")
    with pytest.raises(ValueError, match="zebra has none; add them to train/"):
        load(tmp_path)
    (tmp_path / "train/zebra").mkdir()
    with pytest.raises(ValueError, match="zebra"):
        load(tmp_path)
    (tmp_path / "train/zebra/0.png").write_text("unreadable")
    with pytest.raises(ValueError, match="zebra"):
        load(tmp_path)
    picture(tmp_path / "train/zebra/1.png")
    assert load(tmp_path).classes == ("cat", "dog", "zebra")


def test_train_without_classes_is_unlabelled(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / f"train/{number}.png")
    picture(tmp_path / "test/cat/0.png")
    bundle = load(tmp_path)
    assert len(bundle.pretrain) == 3 and bundle.pretrain.labels is None
    assert bundle.train is None and bundle.test is None and bundle.classes == ()
    assert "nothing is probed" in " ".join(bundle.notes)
    assert bundle.unprobed == "probes need 2 classes to train on, and there are 0"
    picture(tmp_path / "train/cat/0.png")  # one class: still nothing to tell apart
    bundle = load(tmp_path)
    assert len(bundle.pretrain) == 4 and bundle.train is None and bundle.test is None


def test_class_lost_to_damage_leaves_nothing_to_probe(tmp_path: Path) -> None:
    labelled(tmp_path, ("cat",))
    (tmp_path / "train/dog").mkdir()
    (tmp_path / "train/dog/0.png").write_text("unreadable")
    bundle = load(tmp_path)
    assert bundle.train is None and bundle.test is None and bundle.classes == ()
    assert bundle.unprobed == "only cat has readable images to train on"
    assert f"nothing is probed: {bundle.unprobed}" in bundle.notes


def test_train_alone_and_unlabeled_alone(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        picture(tmp_path / "a/train" / name / "0.png")
        picture(tmp_path / "b/unlabeled" / name / "0.png")
    alone = load(tmp_path / "a")
    assert alone.train is not None and alone.test is None and not alone.labelled
    assert load(tmp_path / "b").pretrain.labels is None


def test_folder_reached_twice_is_read_once(tmp_path: Path) -> None:
    picture(tmp_path / "a/1.png")
    picture(tmp_path / "a/2.png")
    (tmp_path / "b").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "a/up").symlink_to(tmp_path, target_is_directory=True)
    assert load(tmp_path).pretrain.names == ("a/1.png", "a/2.png")


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    os.rename(picture(tmp_path / "b.png"), os.path.join(os.fsencode(tmp_path), b"b\xff.png"))
    bundle = load(tmp_path)
    assert bundle.pretrain.names == ("a.png", "b\\xff.png")
    assert load(tmp_path, budget=0).pretrain.fetch(torch.tensor([1])).shape == (1, 3, 12, 12)


def test_no_image_is_refused_and_one_is_read(tmp_path: Path) -> None:
    """A folder of one picture can be embedded; it is the batch size that asks for more."""
    with pytest.raises(ValueError, match="holds 0 readable images; give"):
        load(tmp_path)
    (tmp_path / "IMG_1.HEIC").write_text("a phone's")
    with pytest.raises(ValueError, match=r"0 readable images; 1 file without .* \(.heic 1\); give"):
        load(tmp_path)
    (tmp_path / "bad.png").write_text("no")
    with pytest.raises(ValueError, match="0 readable images and 1 unreadable .bad.png: not an im"):
        load(tmp_path)
    picture(tmp_path / "a.png")
    assert load(tmp_path).pretrain.names == ("a.png",)


@pytest.mark.parametrize(
    ("sizes", "side", "noted"),
    [
        ([(20, 30), (20, 20)], 20, False),
        ([(20, 30), (22, 30)], 96, True),
        ([(300, 260), (260, 400)], 224, True),
    ],
)
def test_default_size(tmp_path: Path, sizes: list, side: int, noted: bool) -> None:
    for number, size in enumerate(sizes):
        picture(tmp_path / f"{number}.png", size)
    bundle = load(tmp_path)
    assert bundle.pretrain.size == (side, side)
    assert any("--image-size" in note for note in bundle.notes) == noted


# ------------------------------------------------------------------------------------- labels


def classes(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        for number in range(count):
            picture(root / name / f"{number}.png")
    return root


def table(root: Path, counts: dict[str, int]) -> Path:
    """The same pictures in a CSV file, in reverse."""
    names = [f"{name}/{n}.png" for name, count in counts.items() for n in range(count)]
    classes(root, counts)
    rows = [f"{name},{name.split('/')[0]}" for name in reversed(names)]
    (root / "labels.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    return root / "labels.csv"


PETS = {"cat": 10, "dog": 20}
LAYOUTS = {
    "folders": lambda root: classes(root, PETS),
    "train alone": lambda root: classes(root / "train", PETS).parent,
    "table": lambda root: table(root, PETS),
}


def test_a_class_of_one_image_is_not_said_to_be_held_out(tmp_path: Path) -> None:
    """It said "20% of each of 2 classes" where every test image was of the other class."""
    bundle = load(classes(tmp_path / "pets", {"cat": 1, "dog": 20}))
    (note,) = [note for note in bundle.notes if "held out" in note]
    assert "20% of each of 2 classes but 1 with too few images" in note


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [8 << 30, 0], ids=["resident", "on disk"])
def test_classes_without_a_test_split_have_one_held_out(
    tmp_path: Path, layout: str, budget: int
) -> None:
    root = LAYOUTS[layout](tmp_path)
    bundle = load(root, budget=budget)
    assert bundle.labelled and bundle.classes == ("cat", "dog") and bundle.held_out == 6
    assert bundle.train is not None and bundle.test is not None
    assert bundle.train.labels is not None and bundle.test.labels is not None
    assert bundle.train.labels.bincount().tolist() == [8, 16]
    assert bundle.test.labels.bincount().tolist() == [2, 4]
    assert not set(bundle.pretrain.names) & set(bundle.test.names)  # never seen by the encoder
    assert len(bundle.pretrain) == 24
    for part in (bundle.train, bundle.test):
        named = ["cat" in name for name in part.names]
        assert [label == 0 for label in part.labels.tolist()] == named
    (note,) = [note for note in bundle.notes if "held out" in note]
    assert "6 images are held out" in note and ", 20% of each of 2 classes, and not" in note
    assert load(root, budget=budget).test.names == bundle.test.names
    half = load_data(str(root), holdout=0.5, progress=False)
    assert half.held_out == 15 and half.fingerprint != bundle.fingerprint
    none = load_data(str(root), holdout=0.0, progress=False)
    assert not none.labelled and len(none.pretrain) == 30 and "--holdout 0" in none.unprobed


def test_an_added_picture_moves_few_others(tmp_path: Path) -> None:
    before = load(classes(tmp_path, {"cat": 50, "dog": 50}))
    picture(tmp_path / "cat/new.png")
    after = load(tmp_path)
    assert before.test is not None and after.test is not None
    assert len(set(before.test.names) ^ set(after.test.names)) <= 2


def test_a_split_that_is_not_read_is_not_walked(tmp_path: Path, monkeypatch) -> None:
    picture(labelled(tmp_path) / "val/cat/0.png")
    listed, scandir = [], os.scandir
    monkeypatch.setattr("os.scandir", lambda path: listed.append(Path(path)) or scandir(path))
    listing = list_folder(tmp_path)
    assert len(listing.pretrain) == 6 and len(listing.test) == 2
    assert "the split val is not read" in listing.notes
    assert tmp_path / "test/cat" in listed and tmp_path / "val" not in listed


@pytest.mark.parametrize("split", ["val", "valid", "validation"])
def test_train_and_val(tmp_path: Path, split: str) -> None:
    classes(tmp_path / "train", {"cat": 3, "dog": 3})
    classes(tmp_path / split, {"cat": 1, "dog": 2})
    bundle = load(tmp_path)
    assert bundle.labelled and bundle.held_out == 0 and len(bundle.pretrain) == 6
    assert bundle.test is not None and bundle.test.names[0] == f"{split}/cat/0.png"
    picture(tmp_path / "test/1.png")  # a test split without classes, as in competitions
    bundle = load(tmp_path)
    assert bundle.test is not None and bundle.test.names[0] == f"{split}/cat/0.png"
    assert "the split test (no classes) is not read" in bundle.notes
    classes(tmp_path / "test", {"cat": 1})
    bundle = load(tmp_path)
    assert bundle.test is not None and bundle.test.names == ("test/cat/0.png",)


@pytest.mark.parametrize("layout", ["folders", "split", "table"])
def test_too_few_pictures_to_probe_are_noticed_at_once(tmp_path: Path, layout: str) -> None:
    one = {"cat": 1, "dog": 1}
    if layout == "split":
        classes(tmp_path / "test", one)
        root = classes(tmp_path / "train", one).parent
    else:
        root = (classes if layout == "folders" else table)(tmp_path, one)
    bundle = load(root)
    assert not bundle.labelled and len(bundle.pretrain) == 2
    assert "a probe needs 2 classes and 3 training images" in bundle.unprobed
    assert any(bundle.unprobed in note for note in bundle.notes)


def test_damage_to_a_held_out_class_stops_nothing(tmp_path: Path) -> None:
    classes(tmp_path, {"cat": 10, "dog": 10, "owl": 2})
    bundle = load(tmp_path)
    owl = next(n for n in bundle.pretrain.names if n.startswith("owl"))
    (tmp_path / owl).write_text("no")
    bundle = load(tmp_path)
    assert bundle.labelled and bundle.classes == ("cat", "dog") and bundle.held_out == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "columns path and label .or image and caption, .*, got nothing",
        ),
        ("file,class\na.png,cat\n", "got file, class; name them so"),
        ("path,label\na.png,cat\n./a.png,dog\n", "a.png is there twice"),
        (
            "path,label\ngone.png,cat\n",
            r"0 readable images and 1 unreadable .gone.png: no such .* relative to the table",
        ),
        ("path,label\n" + "x" * 200_000 + ",cat\n", "must be a CSV file in UTF-8, but"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "t.csv")


def test_a_table_of_endless_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\n")
    os.truncate(tmp_path / "t.csv", 8 << 30)  # zeros, which take no room on a disk
    with pytest.raises(ValueError, match="a line of it has more than"):
        load(tmp_path / "t.csv")


def test_tables_name_files_anywhere_and_need_no_label(tmp_path: Path) -> None:
    paths = [picture(tmp_path / "else where" / f"{n}.png") for n in range(8)]
    os.mkfifo(tmp_path / "pipe.png")
    rows = [f'"{path}",{"ab"[n % 2]}' for n, path in enumerate(paths)]
    extra = ["else where/../x.png,a", "pipe.png,a", "x2.png,"]
    picture(tmp_path / "x.png")
    picture(tmp_path / "x2.png")
    text = "\ufeffpath,label\r\n" + "\r\n".join(rows + extra)
    (tmp_path / "t, 1.csv").write_text(text, encoding="utf-8")
    bundle = load(tmp_path / "t, 1.csv")
    assert dict(bundle.skipped) == {"pipe.png": "not a regular file"}
    assert bundle.labelled and bundle.classes == ("a", "b") and bundle.name == "t, 1.csv"
    assert bundle.pretrain.labels is not None and bundle.pretrain.names[-1] == "x2.png"
    assert bundle.pretrain.labels[-1] == -1


# -------------------------------------------------------------------------- links and odd names


def test_links_around_the_data_are_not_followed(tmp_path: Path) -> None:
    data = classes(tmp_path / "data", {"a": 2})
    picture(tmp_path / "secret.png")
    elsewhere = classes(tmp_path / "else", {"b": 2}) / "b"
    (data / "root").symlink_to("/", target_is_directory=True)
    (data / "up").symlink_to(tmp_path, target_is_directory=True)
    (data / "b").symlink_to(elsewhere, target_is_directory=True)
    bundle = load(data)
    assert bundle.pretrain.names == ("a/0.png", "a/1.png", "b/0.png", "b/1.png")
    notes = " | ".join(bundle.notes)
    assert "root leads to /, around the data: not followed" in notes and "up leads to" in notes
    assert f"b leads out of the data, to {elsewhere}: read as well" in notes


def test_escape_sequences_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    nasty = "a\x1b[2J\x9b31m\n\u202e.png"
    picture(tmp_path / "fine.png")
    picture(tmp_path / nasty)
    (tmp_path / f"bad{nasty}").write_text("no")
    for budget in (8 << 30, 0):
        bundle = load(tmp_path, budget=budget)
        said = [*bundle.pretrain.names, bundle.name, *(part for s in bundle.skipped for part in s)]
        assert bundle.pretrain.names[0] == "a\\x1b[2J\\x9b31m\\n\\u202e.png"
        assert not any(c in text for text in said for c in "\x1b\x9b\n\u202e")
    (tmp_path / nasty).unlink()
    with pytest.raises(ValueError) as caught:
        bundle.pretrain.fetch(torch.tensor([0]))
    assert "\x1b" not in str(caught.value) and "\\x1b[2J" in str(caught.value)
