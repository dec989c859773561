"""Shards and saved data sets: the pictures a folder has, at the same positions, or refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import negchain
from negchain.data import (
    DataBundle,
    Indexed,
    decode,
    from_files,
    image_set,
    load_batches,
    load_data,
    prefetch,
)
from negchain.data import sources as data_sources
from negchain.data.shards import list_shards

COUNT = 12
Members = Sequence[tuple[str, bytes]]


def png(value: int) -> bytes:
    pixels = np.random.default_rng(value).integers(0, 256, (9 + value % 3, 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Members) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(numbers: Sequence[int]) -> Members:
    return [
        (f"{n:03d}.{ending}", content)
        for n in numbers
        for ending, content in (("png", png(n)), ("cls", b"dog\n" if n % 2 else b"cat"))
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same pictures and labels in a table, in three shards, and saved by `datasets`."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    top = tmp_path_factory.mktemp("sources")
    (top / "plain").mkdir()
    rows = ["path,label"]
    for n in range(COUNT):
        (top / "plain" / f"{n:03d}.png").write_bytes(png(n))
        rows.append(f"{n:03d}.png,{'dog' if n % 2 else 'cat'}")
    (top / "plain" / "table.csv").write_text("\n".join(rows))
    for shard in range(3):
        write_tar(top / "tar" / f"pets-{shard:04d}.tar", samples(range(4 * shard, 4 * shard + 4)))
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
    table = {
        "image": [{"bytes": png(n), "path": None} for n in range(COUNT)],
        "label": [1 - n % 2 for n in range(COUNT)],
    }
    dataset = datasets.Dataset.from_dict(table, features=datasets.Features(kinds))
    dataset.save_to_disk(top / "saved", num_shards=2)
    return {
        "table": str(top / "plain" / "table.csv"),
        "folder": str(top / "tar"),
        "pattern": str(top / "tar" / "pets-{0000..0002}.tar"),
        "saved": str(top / "saved"),
        "object": dataset,
    }


def load(source: Any, budget: int = 0, holdout: float = 0.0) -> DataBundle:
    return load_data(
        source, image_size=8, resident_bytes=budget, holdout=holdout, progress=False, num_workers=1
    )


@pytest.mark.parametrize("kind", ["folder", "pattern", "saved"])
def test_a_position_has_the_picture_it_has_in_a_folder(kind: str, sources: dict[str, Any]) -> None:
    expected = load(sources["table"], 1 << 30).pretrain
    positions = torch.tensor([[11, 0, 11], [4, 3, 8]])
    for budget in (1 << 30, 0):
        found = load(sources[kind], budget)
        images = found.pretrain
        assert len(images) == COUNT and found.classes == ("cat", "dog") and found.native == 10
        assert images.labels is not None and images.labels.equal(expected.labels)
        assert images.resident == bool(budget)
        for row, batch in zip(positions, load_batches(images, positions, 0), strict=True):
            assert images.fetch(row).equal(expected.fetch(row))  # as a carried item is asked for
            pairs = zip(batch, expected.pictures(row), strict=True)
            assert all(a.equal(b) for a, b in pairs)


def test_workers_read_shards(sources: dict[str, Any]) -> None:
    images, positions = load(sources["folder"]).pretrain, torch.arange(COUNT).view(4, 3)
    for row, batch in zip(positions, load_batches(images, positions, 2), strict=True):
        pairs = zip(batch, images.pictures(row), strict=True)
        assert all(a.equal(b) for a, b in pairs)


def test_all_cores_decode_unless_told_otherwise(
    sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pool, loader = from_files.ThreadPoolExecutor, image_set.DataLoader
    monkeypatch.setattr(from_files, "ThreadPoolExecutor", lambda n: (asked.append(n), pool(1))[1])
    for module in (data_sources, image_set):
        monkeypatch.setattr(module, "num_cores", lambda: 3)
    images = load_data(sources["folder"], image_size=8, resident_bytes=0, progress=False).pretrain
    assert set(asked) == {3}

    def alone(*given: Any, num_workers: int, **more: Any) -> Any:
        asked.append(num_workers)
        return loader(*given, **more)

    monkeypatch.setattr(image_set, "DataLoader", alone)
    assert len([*load_batches(images, torch.arange(8).view(4, 2))]) == 4 and asked[-1] == 3


def test_a_saved_data_set_is_mapped_and_not_read(tmp_path: Path) -> None:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    datasets.disable_progress_bars()
    padded = [png(n) + bytes(1 << 20) for n in range(4)]  # after its end a PNG may have anything
    table = {"image": [{"bytes": content, "path": None} for content in padded]}
    kinds = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict(table, features=kinds).save_to_disk(tmp_path / "saved")
    before = arrow.default_memory_pool()
    pool = arrow.proxy_memory_pool(before)
    arrow.set_memory_pool(pool)
    try:
        assert len(load(str(tmp_path / "saved")).pretrain) == 4
    finally:
        arrow.set_memory_pool(before)
    assert (pool.max_memory() or 0) < 1 << 18


def test_held_out_and_test_shards(sources: dict[str, Any], tmp_path: Path) -> None:
    held = load(sources["folder"], holdout=0.25)
    assert held.test is not None and held.held_out == len(held.test) == 4
    write_tar(tmp_path / "train-0.tar", samples(range(8)))
    write_tar(tmp_path / "val-0.tar", samples(range(8, 12)))
    write_tar(tmp_path / "unlabeled" / "0.tar", samples(range(12, 15)))
    own = load(str(tmp_path))
    assert own.test is not None and own.held_out == 0
    assert [name[:5] for name in own.test.names] == ["val-0"] * 4
    assert len(own.pretrain) == 11 and own.train is not None and len(own.train) == 8


def test_splits_of_a_saved_dict(sources: dict[str, Any], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": sources["object"].select(range(8)), "test": sources["object"].select([9, 10])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "pets")
    found = load(str(tmp_path / "pets"))
    assert len(found.pretrain) == 8 and found.test is not None and len(found.test) == 2
    datasets.DatasetDict({"a": parts["test"]}).save_to_disk(tmp_path / "odd")
    with pytest.raises(ValueError, match="needs a split named train.*has a;"):
        load(str(tmp_path / "odd"))


def test_names_are_keys_and_do_not_move(tmp_path: Path) -> None:
    """Equal keys in two shards are two items, and the order does not depend on that of members."""
    write_tar(tmp_path / "a.tar", samples([1, 0]))
    write_tar(tmp_path / "b.tar", [("000.cls", b"cat"), ("x/000.png", png(2)), ("000.png", png(0))])
    listing = list_shards(str(tmp_path))
    names = [file.name for file in listing.pretrain]
    assert names == ["a.tar/000.png", "a.tar/001.png", "b.tar/000.png", "b.tar/x/000.png"]
    assert "without a .cls member, and not probed: 1 of 4 pictures" in listing.notes[0]


REFUSED: dict[str, tuple[Members, str]] = {
    "two pictures": ([("a.left.png", png(0)), ("a.right.png", png(1))], "must have one picture"),
    "the same key twice": ([("a.png", png(0)), ("a.png", png(0))], "a key of its own"),
    "an empty class": ([("a.png", png(0)), ("a.cls", b" ")], "a .cls holds the one class"),
    "a long class": ([("a.png", png(0)), ("a.cls", b"7" * 999)], "at most 256 bytes"),
    "a binary class": ([("a.png", png(0)), ("a.cls", b"\xff")], r"holds b'\\xff'"),
    "two classes": ([("a.cls", b"1"), ("a.cls", b"2")], "holds another one"),
    "no picture": ([("a.txt", b"hello")], "holds 0 readable images"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    members, words = REFUSED[case]
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=words):
        load(str(tmp_path))


def test_pictures_beside_shards_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", samples(range(4)))
    (tmp_path / "b.png").write_bytes(png(0))
    with pytest.raises(ValueError, match="pictures or .tar shards.*holds 1 and 1"):
        load(str(tmp_path))
    for folder in (".hidden", "train/cat"):  # unpacked, and the archive left there
        assert len(load(str(tmp_path / "a.tar")).pretrain) == 4
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "b.png").write_bytes(png(0))
    (tmp_path / "b.png").unlink()
    with pytest.raises(ValueError, match="pictures or .tar shards.*holds 1 and 1"):
        load(str(tmp_path))


def test_a_missing_shard_and_a_compressed_one(tmp_path: Path) -> None:
    write_tar(tmp_path / "a-0.tar", samples(range(4)))
    with pytest.raises(ValueError, match="names 2 shards and 1 of them.*a-1.tar; correct the"):
        load(str(tmp_path / "a-{0..1}.tar"))
    with tarfile.open(tmp_path / "b.tar", "w:gz") as tar:
        tar.add(tmp_path / "a-0.tar", "x.png")
    with pytest.raises(ValueError, match="must be a whole .tar that is not compressed"):
        load(str(tmp_path / "b.tar"))


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.tar").symlink_to("pipe")
    with pytest.raises(ValueError, match="must be a plain file"):
        load(str(tmp_path))


def test_a_cut_shard_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", samples(range(3))).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        end = max(m.offset_data + (m.size + 511) // 512 * 512 for m in tar)
    for size in range(0, end + 512, 128):  # the mark at the end is two blocks, and more behind it
        (tmp_path / "a.tar").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="must be a whole .tar"):
            list_shards(str(tmp_path))
    (tmp_path / "a.tar").write_bytes(whole[: end + 1024])
    assert len(list_shards(str(tmp_path)).pretrain) == 3


def test_a_flipped_header_is_never_a_smaller_set(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", samples(range(3))).read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        headers = [member.offset for member in tar]
    for at in (begin + byte for begin in headers for byte in range(0, 160, 7)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(ValueError, match="must be a whole .tar"):
            list_shards(str(tmp_path))


def test_links_and_odd_members_are_passed_over(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [*samples(range(4)), ("._000.png", b"mac"), ("x.json", b"{}")])
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("evil.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    found = load(str(tmp_path))
    assert len(found.pretrain) == 4
    assert any(".json 1" in note and "links and other" in note for note in found.notes)


def test_a_damaged_picture_is_left_out_by_name(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [*samples(range(4)), ("bad.png", b"no picture"), ("e.png", b"")])
    found = load(str(tmp_path))
    reasons = {"a.tar/bad.png": "not an image of a known format", "a.tar/e.png": "empty file"}
    assert len(found.pretrain) == 4 and dict(found.skipped) == reasons


@pytest.mark.parametrize("change", ["replaced", "cut", "removed"])
def test_a_shard_that_changes_while_it_is_read_is_noticed(change: str, tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", samples(range(6)))
    images = load(str(tmp_path)).pretrain
    before = images.fetch(torch.arange(6))
    if change == "replaced":
        write_tar(shard, samples([5, 4, 3, 2, 1, 0]))
        os.utime(shard, ns=(1, 1))
    elif change == "cut":
        os.truncate(shard, 2048)
    else:
        shard.unlink()
    with pytest.raises(ValueError, match=r"a.tar/000.png in .* was readable when the run began"):
        images.fetch(torch.tensor([0]))
    write_tar(shard, samples([5, 4, 3, 2, 1, 0]))  # listed anew it is the same set again
    assert load(str(tmp_path)).pretrain.fetch(torch.arange(6)).equal(before)


def test_a_foreign_arrow_file_is_refused(sources: dict[str, Any], tmp_path: Path) -> None:
    saved = Path(sources["saved"])
    names = sorted(p.name for p in saved.iterdir())
    for at in range(0, os.path.getsize(saved / names[0]), 97):  # any damage: a sentence or a set
        for name in names:
            content = bytearray((saved / name).read_bytes())
            if name.startswith("data-00000"):
                content[at % len(content)] ^= 0x55
            (tmp_path / name).write_bytes(content)
        try:
            found = load(str(tmp_path))
        except ValueError as error:
            assert "; " in str(error)
        else:
            assert len(found.pretrain) + len(found.skipped) == COUNT
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../../etc/passwd"}]}')
    with pytest.raises(ValueError, match="names a file elsewhere"):
        load(str(tmp_path))


def test_a_dataset_object_in_an_own_loop() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": np.random.default_rng(0).normal(size=(12, 3)).astype("float32").tolist()}
    dataset = datasets.Dataset.from_dict(rows).shuffle(seed=0).with_format("torch")
    loss_fn, encoder = negchain.EMC2Loss(12), torch.nn.Linear(3, 4)
    position, sample = Indexed(dataset)[5]
    assert position == 5 and sample["x"].equal(dataset[5]["x"])
    for index, batch, request, held in prefetch(loss_fn, dataset, torch.arange(12).split(6)):
        assert batch["x"].equal(dataset[index.tolist()]["x"])
        answered = request.answer(encoder(held["x"]))
        loss_fn(encoder(batch["x"]), encoder(batch["x"]) + 0.1, index, answered).backward()


def test_a_huge_member_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is read whole, so there is a limit to it."""
    huge = png(3) + bytes(10_000)
    write_tar(tmp_path / "a.tar", [*samples(range(3)), ("big.png", huge), ("big.cls", b"cat")])
    monkeypatch.setattr(decode, "LARGEST", len(huge) - 1)
    found = load(str(tmp_path))
    assert len(found.pretrain) == 3
    assert [name for name, _ in found.skipped] == ["a.tar/big.png"]
    assert "at most" in found.skipped[0][1]
