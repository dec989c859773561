"""On disk: the pixels of the resident set, in the order asked for, from any step on."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from negchain.augment import Pictures
from negchain.data import DataBundle, ImageSet, load_batches, load_data
from negchain.data.decode import stored_size
from negchain.data.from_files import Storage, choose_storage

POSITIONS = torch.tensor([[5, 0, 5], [1, 2, 3], [6, 6, 6], [4, 0, 1]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    for number in range(7):
        size = (20 + 5 * number, 30, 3)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(tmp_path / f"{number}.jpg")
    return tmp_path


def load(folder: Path, budget: int) -> DataBundle:
    return load_data(str(folder), image_size=16, resident_bytes=budget, progress=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_streamed_equals_resident(folder: Path, workers: int, start: int) -> None:
    resident, on_disk = load(folder, 8 << 30).pretrain, load(folder, 0).pretrain
    state = torch.get_rng_state()
    batches = list(load_batches(on_disk, POSITIONS[start:], workers, pin=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(batches) == len(POSITIONS) - start
    again = list(load_batches(resident, POSITIONS[start:], workers))
    for row, batch, kept in zip(POSITIONS[start:], batches, again, strict=True):
        assert isinstance(batch, Pictures) and batch.sizes.equal(kept.sizes)
        for other in (kept, on_disk.pictures(row), resident.pictures(row)):
            assert all(a.equal(b) for a, b in zip(batch, other, strict=True))
        assert torch.equal(on_disk.fetch(row), resident.fetch(row))


def test_squares_of_the_size_asked_for_are_all_there_is(tmp_path: Path) -> None:
    pixels = torch.randint(256, (3, 16, 16, 3), dtype=torch.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image.numpy()).save(tmp_path / f"{number}.png")
    for budget in (8 << 30, 0):
        images = load(tmp_path, budget).pretrain
        assert images.whole is None and not images.short
        (batch,) = load_batches(images, torch.tensor([[2, 0]]), 0)
        assert isinstance(batch, Tensor) and batch.equal(pixels[[2, 0]].permute(0, 3, 1, 2))


def test_budget_decides(folder: Path) -> None:
    """The pictures are 30 wide and 20 to 50 high: three, two, and no more than no times 16 px."""
    shapes = [(h, 30) for h in range(20, 51, 5)]
    twice = [stored_size(shape, 32) for shape in shapes]
    thrice = [stored_size(shape, 48) for shape in shapes]
    assert twice == thrice == shapes  # none is larger
    exact = sum(3 * h * w for h, w in shapes)
    kept = load(folder, exact)
    assert isinstance(kept.pretrain.whole, Pictures)
    assert kept.pretrain.whole.sizes.tolist() == [list(shape) for shape in shapes]
    assert "shorter sides up to 48 px" in kept.notes[0]
    on_disk = load(folder, exact - 1).pretrain
    assert not on_disk.resident and on_disk.images is None and on_disk.short == 48
    assert (on_disk.channels, on_disk.size, len(on_disk)) == (3, (16, 16), 7)


def test_a_smaller_budget_keeps_smaller_pictures() -> None:
    photos = [(3000, 2000), (2000, 3000), (100, 100)]
    three, two = (3 * 2 * 432 * 288 + 30_000, 3 * 2 * 288 * 192 + 30_000)
    chosen = [choose_storage(photos, 96, budget) for budget in (three, three - 1, two, two - 1)]
    assert [(s.short, s.resident) for s in chosen] == [
        (288, True),
        (192, True),
        (192, True),
        (288, False),
    ]
    assert "in the 2 that are large enough those of 25 % of the area" in chosen[1].note
    assert "decoded anew for every crop" in chosen[3].note
    assert choose_storage([(96, 96), (0, 0)], 96, 3 * 96 * 96) == Storage(96, 0, True)


@pytest.mark.parametrize("workers", [0, 1])
def test_file_that_vanishes_stops_the_run_with_its_name(folder: Path, workers: int) -> None:
    on_disk = load(folder, 0).pretrain
    (folder / "3.jpg").unlink()
    batches = load_batches(on_disk, POSITIONS, workers)
    assert len(next(batches)) == 3
    with pytest.raises(ValueError, match="3.jpg was readable when the run began and is not now"):
        next(batches)
    with pytest.raises(ValueError, match="3.jpg was readable"):
        on_disk.fetch(torch.tensor([3]))


def test_stopping_early_and_nothing_to_do(folder: Path) -> None:
    on_disk = load(folder, 0).pretrain
    for batch in load_batches(on_disk, POSITIONS.repeat(50, 1), 2):
        assert len(batch) == 3
        break
    assert list(load_batches(on_disk, POSITIONS[4:], 2)) == []
    assert on_disk.fetch(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 16, 16)


def test_select_shares_memory_only_when_it_can() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    whole = ImageSet(tuple("abcde"), torch.tensor([0, 1, -1, 1, 0]), images)
    middle = whole.select(torch.tensor([1, 2, 3]))
    assert middle.names == ("b", "c", "d") and middle.labels is not None
    assert middle.labels.tolist() == [1, -1, 1]
    assert middle.images is not None and middle.images.data_ptr() == images[1].data_ptr()
    ends = whole.select(torch.tensor([0, 4]))
    assert ends.images is not None and ends.images.flatten().tolist() == [0, 4]


@pytest.mark.parametrize("change", ["replaced", "cut", "a pipe", "removed"])
def test_a_file_that_changes_on_disk_is_noticed(folder: Path, change: str) -> None:
    """Also another picture under the same name, which could be decoded as well as the first."""
    on_disk, file = load(folder, 0).pretrain, folder / "3.jpg"
    if change == "replaced":
        size = file.stat().st_size
        Image.new("RGB", (30, 35)).save(file)
        os.truncate(file, size)  # zeros behind a JPEG belong to it
        os.utime(file, ns=(1, 1))
    elif change == "cut":
        os.truncate(file, 100)
    else:
        file.unlink()
        if change == "a pipe":
            os.mkfifo(file)
    with pytest.raises(ValueError, match=r"3.jpg in .*3.jpg was readable when the run began"):
        on_disk.pictures(torch.tensor([3]))
    assert len(on_disk.pictures(torch.tensor([2]))) == 1
