"""Labels as people have them: splits by other names, a folder around all, spreadsheets."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from negchain.data import DataBundle, load_data

RNG = np.random.default_rng(1)


def load(path: Path) -> DataBundle:
    return load_data(str(path), num_workers=1, progress=False)


def classes(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = RNG.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("names", [("Train", "Test"), ("TRAIN", "Val"), ("Training", "Testing")])
def test_splits_by_other_names(tmp_path: Path, names: tuple[str, str]) -> None:
    """They are not two classes, which a probe would be asked to tell apart."""
    classes(tmp_path / names[0], {"cat": 4, "dog": 5})
    classes(tmp_path / names[1], {"cat": 1, "dog": 2})
    bundle = load(tmp_path)
    assert bundle.classes == ("cat", "dog") and bundle.held_out == 0 and len(bundle.pretrain) == 9
    assert bundle.test is not None and bundle.test.names[0] == f"{names[1]}/cat/0.png"


def test_a_class_may_be_called_as_a_split(tmp_path: Path) -> None:
    bundle = load(classes(tmp_path, {"Bus": 5, "Train": 5}))
    assert bundle.classes == ("Bus", "Train")


@pytest.mark.parametrize("name", ["test", "Val"])
def test_a_test_folder_alone_is_not_data_without_labels(tmp_path: Path, name: str) -> None:
    bundle = load(classes(tmp_path, {"cat": 5, "dog": 5, f"{name}/cat": 2}))
    assert bundle.classes == () and bundle.unprobed == f"there is {name}/, and no train/ beside it"
    assert f"nothing is probed: {bundle.unprobed}" in bundle.notes


@pytest.mark.parametrize("inner", ["pets", "pets/images"])
def test_a_folder_around_everything_is_passed_through(tmp_path: Path, inner: str) -> None:
    """As archives unpack; names stay relative to what was named."""
    classes(tmp_path / inner / "train", {"cat": 4, "dog": 5})
    classes(tmp_path / inner / "val", {"cat": 1, "dog": 2})
    (tmp_path / "LICENSE.txt").write_text("free")
    (tmp_path / inner / "train/cat/bad.png").write_text("no")
    bundle = load(tmp_path)
    assert bundle.classes == ("cat", "dog") and bundle.name == tmp_path.name
    assert bundle.test is not None and bundle.test.names[0] == f"{inner}/val/cat/0.png"
    assert bundle.skipped[0][0] == f"{inner}/train/cat/bad.png"
    assert not any("labels nothing" in note for note in bundle.notes)
    shutil.rmtree(tmp_path / inner)
    bundle = load(classes(tmp_path / inner, {"cat": 4}).parents[inner.count("/")])
    assert bundle.classes == () and bundle.pretrain.names[0] == f"{inner}/cat/0.png"
    assert any(f"all images lie in {inner}/cat/, and one" in note for note in bundle.notes)


def test_a_link_is_no_folder_around_everything(tmp_path: Path) -> None:
    classes(tmp_path / "else", {"cat": 4, "dog": 4})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/pets").symlink_to(tmp_path / "else", target_is_directory=True)
    bundle = load(tmp_path / "data")
    assert bundle.classes == () and any("leads out of the data" in note for note in bundle.notes)


@pytest.mark.parametrize(("stray", "told"), [(1, "1 image lies"), (2, "2 images lie")])
def test_a_stray_picture_takes_the_labels_with_a_word(
    stray: int, told: str, tmp_path: Path
) -> None:
    classes(tmp_path, {"cat": 4, "dog": 4, ".": stray})
    bundle = load(tmp_path)
    assert bundle.pretrain.labels is None
    assert f"{told} beside cat/ and dog/" in bundle.unprobed
    assert any(bundle.unprobed in note for note in bundle.notes)


def table(root: Path, head: str, between: str, *more: str) -> Path:
    classes(root, {"cat": 6, "dog": 6})
    rows = [f"{kind}/{n}.png{between}{kind}" for kind in ("cat", "dog") for n in range(6)]
    rows = [between.join([row, *more]) for row in rows]
    (root / "t.csv").write_text("\r\n".join([head, *rows]), encoding="utf-8-sig")
    return root / "t.csv"


@pytest.mark.parametrize("head", ["path;label", "path\tlabel", "Path,LABEL", "path; label;note"])
def test_tables_as_spreadsheets_write_them(tmp_path: Path, head: str) -> None:
    between = next(c for c in ";\t," if c in head)
    more = ("a, b",) if "note" in head else ()
    bundle = load(table(tmp_path, head, between, *more))
    assert bundle.labelled and bundle.classes == ("cat", "dog") and bundle.held_out == 2


def test_a_table_may_name_splits(tmp_path: Path) -> None:
    """Pictures that somebody set aside for testing are never trained on."""
    rows = [f"cat/{n}.png,cat,{'train' if n else 'Test'}" for n in range(6)]
    rows += [f"dog/{n}.png,dog,{'' if n else 'test'}" for n in range(5)]
    rows += ["dog/5.png,dog,unlabeled"]
    classes(tmp_path, {"cat": 6, "dog": 6})
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *rows]))
    bundle = load(tmp_path / "t.csv")
    assert bundle.test is not None and bundle.test.names == ("cat/0.png", "dog/0.png")
    assert bundle.held_out == 0 and len(bundle.pretrain) == 10
    assert bundle.train is not None and "dog/5.png" not in bundle.train.names
    (tmp_path / "t.csv").write_text("path,label,split\ncat/0.png,cat,fold1\n")
    with pytest.raises(ValueError, match="split must be one of train, .* got 'fold1' for cat/0"):
        load(tmp_path / "t.csv")


def test_a_table_with_one_label_says_so(tmp_path: Path) -> None:
    classes(tmp_path, {"cat": 6})
    rows = [f"cat/{n}.png,cat" for n in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    bundle = load(tmp_path / "t.csv")
    assert "probes need 2 classes to train on, and there is 1" in bundle.unprobed
    assert any(bundle.unprobed in note for note in bundle.notes)


def test_what_a_mac_packs_beside_a_folder_is_no_folder(tmp_path: Path) -> None:
    classes(tmp_path / "pets", {"cat": 5, "dog": 5})
    (tmp_path / "__MACOSX/pets/cat").mkdir(parents=True)
    (tmp_path / "__MACOSX/pets/cat/._0.png").write_bytes(b"a resource fork")
    assert load(tmp_path).classes == ("cat", "dog")


def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    for root in (tmp_path / "classes", tmp_path / "split/train"):
        classes(root, {"cat": 5, "dog": 5})
    for root in (tmp_path / "classes", tmp_path / "split"):
        (root / "loop").symlink_to("loop")
        assert load(root).classes == ("cat", "dog")
