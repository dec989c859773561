"""Names after `--data`: built-in sets, lists of sources, and everything that is neither."""

import pickle
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision import datasets
from torchvision.transforms.v2 import functional as tvf

from negchain.data import load_data

RNG = np.random.default_rng(3)


def pictures(folder: Path, names: list[str], side: int = 32) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def test_digits_split_is_stratified_and_never_changes() -> None:
    bundle = load_data("digits")
    assert bundle.train is bundle.pretrain or len(bundle.train or ()) == len(bundle.pretrain)
    assert bundle.test is not None and bundle.classes == tuple("0123456789")
    numbers = [
        [int(n.removeprefix("digits/")) for n in s.names] for s in (bundle.pretrain, bundle.test)
    ]
    assert sorted(numbers[0] + numbers[1]) == list(range(1797))
    assert numbers[0] == sorted(numbers[0])
    target = load_digits().target
    for part, rows in zip((bundle.pretrain, bundle.test), numbers, strict=True):
        assert part.labels is not None and part.labels.tolist() == target[rows].tolist()
    share = np.bincount(target[numbers[1]]) / np.bincount(target)
    assert np.abs(share - 0.2).max() < 0.004
    assert numbers[1][:8] == HELD_OUT and bundle.fingerprint == DIGITS_FINGERPRINT


HELD_OUT = [4, 5, 6, 9, 14, 17, 18, 19]
DIGITS_FINGERPRINT = "068413eec1e91765"


def test_digits_pixels() -> None:
    native = load_data("digits", image_size=8).pretrain
    row = int(native.names[5].removeprefix("digits/"))
    expected = np.rint(load_digits().images[row] * 255 / 16)
    assert native.images is not None and np.array_equal(native.images[5, 0], expected)
    assert torch.equal(load_data("digits").pretrain.fetch(torch.arange(9)), native.images[:9])
    assert torch.equal(
        load_data("digits", image_size=20).pretrain.fetch(torch.tensor([5])),
        tvf.resize(native.images[5:6], [20, 20]),
    )


@pytest.mark.parametrize("name", ["cifar10", "stl10"])
def test_not_downloaded_says_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be read from .*--download.*folder"):
        load_data(name, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_download_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise URLError("no route")

    monkeypatch.setattr(datasets.cifar, "download_and_extract_archive", no_network)
    with pytest.raises(ValueError, match="no route.*try again with a network, or give --data"):
        load_data("cifar10", root=tmp_path, download=True)


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = RNG.integers(0, 256, (18, 3072), dtype=np.uint8)
    labels = RNG.integers(0, 10, 18).tolist()
    files = [name for name, _ in datasets.CIFAR10.train_list + datasets.CIFAR10.test_list]
    for k, name in enumerate(files):
        part = {"data": rows[3 * k : 3 * k + 3], "labels": labels[3 * k : 3 * k + 3]}
        (folder / name).write_bytes(pickle.dumps(part))
    classes = ["airplane", *map(str, range(8)), "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda path, md5: Path(path).exists())
    bundle = load_data("cifar10", root=tmp_path)
    assert bundle.classes == tuple(classes)
    assert bundle.train is not None and bundle.test is not None
    assert bundle.pretrain.images is not None and bundle.train.labels is not None
    assert np.array_equal(bundle.pretrain.images.reshape(15, -1), rows[:15])
    assert bundle.train.labels.tolist() == labels[:15]
    assert bundle.test.labels is not None and bundle.test.labels.tolist() == labels[15:]
    assert bundle.test.names == ("cifar10/test/0", "cifar10/test/1", "cifar10/test/2")


def test_stl10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = RNG.integers(0, 256, (9, 3, 96, 96), dtype=np.uint8)  # [M,C,H,W]
    for split, part in (("train", images[:4]), ("unlabeled", images[4:7]), ("test", images[7:])):
        part.transpose(0, 1, 3, 2).tofile(folder / f"{split}_X.bin")  # stored column by column
    np.array([10, 1, 2, 10], dtype=np.uint8).tofile(folder / "train_y.bin")  # stored from 1
    np.array([2, 1], dtype=np.uint8).tofile(folder / "test_y.bin")
    classes = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    (folder / "class_names.txt").write_text("\n".join(classes))
    monkeypatch.setattr(datasets.stl10, "check_integrity", lambda path, md5: Path(path).exists())
    bundle = load_data("stl10", root=tmp_path)
    assert bundle.train is not None and bundle.test is not None
    assert bundle.classes == tuple(classes)
    assert bundle.pretrain.labels is not None and bundle.pretrain.images is not None
    assert bundle.pretrain.labels.tolist() == [9, 0, 1, 9, -1, -1, -1]
    assert np.array_equal(bundle.pretrain.images, images[:7])
    assert bundle.train.labels is not None and bundle.train.labels.tolist() == [9, 0, 1, 9]
    assert bundle.test.labels is not None and bundle.test.labels.tolist() == [1, 0]
    assert bundle.pretrain.names[3:5] == ("stl10/train/3", "stl10/unlabeled/0")
    paper = load_data("stl10-unlabeled", root=tmp_path)  # its 100,000; probes as with 105,000
    assert paper.pretrain.names == bundle.pretrain.names[4:] and paper.train is not None
    assert paper.train.names == bundle.train.names and paper.test is not None
    assert paper.fingerprint != bundle.fingerprint
    heap = pictures(tmp_path / "heap", ["a.png", "b.png"])
    both = load_data(f"stl10-unlabeled,{heap}", root=tmp_path, image_size=96, progress=False)
    assert both.pretrain.names[-2:] == ("heap/a.png", "heap/b.png")
    with pytest.raises(ValueError, match="built-in sets are kept in memory and 2 images"):
        load_data(f"stl10,{heap}", root=tmp_path, resident_bytes=0, progress=False)
    assert both.train is not None and both.train.names == bundle.train.names
    assert both.test is not None and both.test.names == bundle.test.names
    small = load_data("stl10", root=tmp_path, image_size=24)
    assert small.pretrain.size == (24, 24) and small.fingerprint != bundle.fingerprint


def test_lists_run_source_after_source(tmp_path: Path) -> None:
    heap = pictures(tmp_path / "z heap", ["b.png", "a.png"])
    names = [f"train/{n}.png" for n in ("x/1", "y/1", "y/2", "y/3")] + ["unlabeled/1.png"]
    split = [*names, "test/y/1.png"]
    pets = pictures(tmp_path / "pets", split)
    for budget in (8 << 30, 0):
        bundle = load_data(f"{heap},{pets}", resident_bytes=budget, progress=False)
        assert bundle.pretrain.names == (
            "z heap/a.png",
            "z heap/b.png",
            *(f"pets/{n}" for n in names),
        )
        assert bundle.pretrain.labels is not None
        assert bundle.pretrain.labels.tolist() == [-1, -1, 0, 1, 1, 1, -1]
        assert bundle.train is not None and bundle.train.names == bundle.pretrain.names[2:6]
        assert bundle.test is not None and bundle.test.names == ("pets/test/y/1.png",)
        assert bundle.classes == ("x", "y") and bundle.name == "z heap+pets"
        alone = load_data(str(pets), progress=False).pretrain.fetch(torch.arange(5))
        assert torch.equal(bundle.pretrain.fetch(torch.arange(2, 7)), alone)
    other = load_data(f"{pets},{heap}", progress=False)
    assert (
        other.fingerprint != bundle.fingerprint and other.pretrain.names[0] == "pets/train/x/1.png"
    )


def test_only_the_first_labelled_source_labels(tmp_path: Path) -> None:
    split = ["train/x/1.png", "train/y/1.png", "test/y/1.png"]
    first = pictures(tmp_path / "a/pets", split)
    second = pictures(tmp_path / "b/pets", [n.replace("x", "p") for n in split])
    (second / "train/broken.png").write_text("no")
    bundle = load_data(f"{first},{second}", progress=False)
    assert bundle.pretrain.labels is not None
    assert bundle.pretrain.labels.tolist() == [0, 1, -1, -1] and bundle.classes == ("x", "y")
    assert bundle.pretrain.names[2] == "pets#2/train/p/1.png"
    assert bundle.skipped == (("pets#2/train/broken.png", "not an image of a known format"),)


def test_only_of_the_source_that_is_probed_pictures_are_held_out(tmp_path: Path) -> None:
    names = [f"{kind}/{number}.png" for kind in "xy" for number in range(10)]
    first, second = (pictures(tmp_path / folder, names) for folder in "ab")
    bundle = load_data(f"{first},{second}", progress=False)
    assert bundle.test is not None and bundle.held_out == len(bundle.test) == 4
    assert all(name.startswith("a/") for name in bundle.test.names)
    everything = {f"{folder}/{name}" for folder in "ab" for name in names}
    assert {*bundle.pretrain.names, *bundle.test.names} == everything
    assert sum("held out" in note for note in bundle.notes) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("cifar-10", "--data 'cifar-10' is neither a folder nor one of digits, cifar10, stl10, "
         "stl10-unlabeled; did you mean cifar10?"),
        ("nothing like it", "check the spelling of the path"),
        ("", "--data '' is neither a folder"),
        ("digits,", "--data '' is neither a folder"),
        ("digits,digits", "names 'digits' more than once"),
        ("digits,stl10", "digits is grey and goes alone, got 'digits,stl10'; leave it out"),
    ],
)  # fmt: skip
def test_unknown_names(data: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_data(data)
    assert message in str(caught.value)


def test_near_folders_files_and_commas(tmp_path: Path) -> None:
    pictures(tmp_path / "photos, 2024", ["a.png", "b.png"])
    assert len(load_data(str(tmp_path / "photos, 2024"), progress=False).pretrain) == 2
    with pytest.raises(ValueError, match="did you mean .*photos, 2024?"):
        load_data(str(tmp_path / "fotos 2024"))
    (tmp_path / "photos.zip").touch()
    with pytest.raises(ValueError, match="is another file; name its folder"):
        load_data(str(tmp_path / "photos.zip"))
