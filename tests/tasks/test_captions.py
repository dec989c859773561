"""Tables of captions: layouts people have, splits, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pairs_data import table

from negchain import tasks
from negchain.data.folder import list_table
from negchain.tasks.captions import find_tables, read_pairs
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve

HEAD = ("image", "caption")


def folder(path: Path, *names: str) -> Path:
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    return path


def test_the_layout_of_unpack_py(tmp_path: Path) -> None:
    folder(tmp_path, "train/1.jpg", "train/2.jpg", "test/3.jpg")
    rows = [HEAD, ("2.jpg", "a dog, running"), ("1.jpg", "a cat"), ("2.jpg", "it runs")]
    table(tmp_path / "train.csv", rows)
    table(tmp_path / "test.csv", [HEAD, ("3.jpg", "a bird")])
    pairs = read_pairs(str(tmp_path), holdout=0)
    assert [(p.name, p.captions) for p in pairs.train] == [
        ("train/1.jpg", ("a cat",)),
        ("train/2.jpg", ("a dog, running", "it runs")),
    ]
    assert [p.name for p in pairs.test] == ["test/3.jpg"] and not pairs.validation
    folder(tmp_path, "val/4.jpg")
    table(tmp_path / "val.csv", [HEAD, ("4.jpg", "a fish")])
    assert [p.name for p in read_pairs(str(tmp_path)).validation] == ["val/4.jpg"]
    assert tasks.of_data(str(tmp_path)).name == "image-text"
    (tmp_path / "train.csv").unlink()
    pairs = read_pairs(str(tmp_path))
    sizes = len(pairs.train), len(pairs.validation), len(pairs.test)
    assert sizes == (0, 1, 1)  # test.csv is no table to train on, though none is left


@pytest.mark.parametrize(
    ("name", "where"),
    [("captions.csv", ""), ("mine.csv", "images/"), ("captions.txt", "Images/"), ("a.csv", "a/b/")],
)
def test_other_layouts_and_a_holdout_that_is_said(name: str, where: str, tmp_path: Path) -> None:
    count = 20
    folder(tmp_path, *(f"{where}{n:02d}.png" for n in range(count)))
    inside = "b/" if where == "a/b/" else ""
    rows = [(f"{inside}{n:02d}.png", f"text {n} {again}") for n in range(count) for again in "ab"]
    table(tmp_path / name, [("\ufeffImage", " Caption ", "likes"), *((*row, "7") for row in rows)])
    table(tmp_path / "other.csv", [("path", "label"), ("x.png", "cat")])
    for data in (tmp_path, tmp_path / name):
        pairs = read_pairs(str(data), holdout=0.2)
        assert (len(pairs.train), len(pairs.validation), pairs.test) == (16, 4, ())
        assert "no validation split: 4 images are held out, 20%, with every" in pairs.notes[0]
        assert all(len(p.captions) == 2 for p in pairs.train + pairs.validation)
        assert not {p.name for p in pairs.train} & {p.name for p in pairs.validation}
        assert pairs.train[0].name.startswith(where)
    assert read_pairs(str(tmp_path), holdout=0.0).validation == ()
    (note,) = read_pairs(str(tmp_path), holdout=0.05).notes
    assert "no validation split: 1 image is held out, 5%" in note


def test_a_table_may_have_semicolons(tmp_path: Path) -> None:
    folder(tmp_path, "a.png")
    (tmp_path / "captions.csv").write_text("Image;Caption\na.png;a dog, running\n")
    assert read_pairs(str(tmp_path), holdout=0).train[0].captions == ("a dog, running",)


def test_a_split_column(tmp_path: Path) -> None:
    folder(tmp_path, "a.png", "b.png", "c.png", "d.png")
    splits = [("a", "train"), ("b", "restval"), ("c", "Test"), ("d", "val")]
    rows = [(f"{n}.png", n, s) for n, s in splits]
    table(tmp_path / "captions.csv", [(*HEAD, "split"), *rows])
    pairs = read_pairs(str(tmp_path))
    assert [p.name for p in pairs.train] == ["a.png", "b.png"]
    assert [p.name for p in pairs.test] == ["c.png"]
    assert [p.name for p in pairs.validation] == ["d.png"] and not pairs.notes


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("path", "label"), ("a.png", "x")],
            "columns image and caption, .* a.csv with path, label",
        ),
        ([HEAD, ("a.png", "x"), ("b.png", "  ")], r"line 3 of a.csv has no caption \(b.png\)"),
        ([HEAD, ("a.png",)], r"line 2 of a.csv has no caption \(a.png\)"),
        ([HEAD, ("", "a dog")], r"line 2 of a.csv has no image \(a dog\)"),
        ([HEAD, ("a.png", "x"), ("gone.png", "y")], r"1 is not: gone.png \(line 3\)"),
        ([HEAD, *[("gone.png", "y"), ("away.png", "z")] * 5], r"2 are not: gone.png \(line 2\)"),
        ([HEAD, ("../\x1b.png", "y")], r"\\x1b.png"),
        ([HEAD, ("a\0.png", "y")], "1 is not"),
        ([(*HEAD, "split"), ("a.png", "x", "tets")], "split must be one of train, .*got 'tets'"),
        ([(*HEAD, "split"), ("a.png", "x", "train"), ("./a.png", "y", "test")], "in one split"),
    ],
)
def test_refusals(rows: list[tuple[str, ...]], said: str, tmp_path: Path) -> None:
    table(folder(tmp_path, "a.png", "b.png") / "a.csv", rows)
    with pytest.raises(ValueError, match=said) as error:
        read_pairs(str(tmp_path))
    assert ";" in str(error.value)  # and what to do about it


@pytest.mark.parametrize("there", ["X.JPG", "x.jpeg", "x"])
def test_a_name_in_other_letters_is_named(there: str, tmp_path: Path) -> None:
    """A file system without case took x.jpg for X.JPG; the refusal did not say what is there."""
    table(folder(tmp_path, f"images/{there}", "y.jpg") / "a.csv", [HEAD, ("x.jpg", "a dog")])
    with pytest.raises(ValueError, match=rf"images/; did you mean '{there}'\? If so, correct"):
        read_pairs(str(tmp_path))


def test_other_columns_are_told_all_at_once(tmp_path: Path) -> None:
    """It took a refusal that named other columns, and one that named another option."""
    file = folder(tmp_path, "a.png") / "captions.csv"
    table(file, [("picture", "text"), ("a.png", "a dog")])
    with pytest.raises(ValueError, match=r"path and label \(or image and caption, .*got picture"):
        list_table(file)
    with pytest.raises(ConfigError, match=r"image-text needs: .* the columns image and caption"):
        resolve(None, {"data": str(tmp_path), "text_encoder": "bert"})


def test_more_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no .csv; add it"):
        read_pairs(str(tmp_path))
    folder(tmp_path, "a.png")
    for name in ("one.csv", "two.csv"):
        table(tmp_path / name, [HEAD, ("a.png", "x")])
    with pytest.raises(ValueError, match="has one.csv, two.csv; name one of them captions.csv"):
        read_pairs(str(tmp_path))
    (tmp_path / "captions.csv").write_bytes(b"image,caption\na.png,caf\xe9\n")
    with pytest.raises(ValueError, match="must be a CSV file in UTF-8"):
        read_pairs(str(tmp_path))
    (tmp_path / "captions.csv").write_bytes(b"image,caption\n")
    os.truncate(tmp_path / "captions.csv", 8 << 30)  # zeros, which take no room on a disk
    with pytest.raises(ValueError, match="a line of it has more than"):
        read_pairs(str(tmp_path))
    for lines, said in (
        (b"a.png,a dog, running\n", "line 2 of captions.csv has 3, not 2; put quotes around"),
        (b'a.png,"a dog\na.png,x\n', "a CSV file .* but unexpected end of data"),
    ):
        (tmp_path / "captions.csv").write_bytes(b"image,caption\n" + lines)
        with pytest.raises(ValueError, match=said):
            read_pairs(str(tmp_path))
    (tmp_path / "captions.csv").write_bytes(b'image,caption\na.png,"a ""big"" dog,\n brown",,\n')
    assert read_pairs(str(tmp_path)).train[0].captions == ('a "big" dog, brown',)
    (tmp_path / "captions.csv").write_bytes(b"\xff\xfe\0")
    assert "captions" not in find_tables(str(tmp_path))
    assert tasks.of_data("digits").name == "images"
