"""Streaming: the pixels of the resident set, in the order asked for, from any step on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from negchain.data import DataBundle, ImageSet, load_data, stream_batches

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
    resident, streamed = load(folder, 8 << 30).pretrain, load(folder, 0).pretrain
    state = torch.get_rng_state()
    batches = list(stream_batches(streamed, POSITIONS[start:], workers, pin=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(batches) == len(POSITIONS) - start
    for row, batch in zip(POSITIONS[start:], batches, strict=True):
        assert torch.equal(batch, resident.fetch(row))
        assert torch.equal(batch, streamed.fetch(row))
    again = list(stream_batches(resident, POSITIONS[start:], workers))
    assert all(torch.equal(a, b) for a, b in zip(again, batches, strict=True))


def test_budget_decides(folder: Path) -> None:
    exact = 7 * 3 * 16 * 16
    assert load(folder, exact).pretrain.resident
    streamed = load(folder, exact - 1).pretrain
    assert not streamed.resident and streamed.images is None
    assert (streamed.channels, streamed.size, len(streamed)) == (3, (16, 16), 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_file_that_vanishes_stops_the_run_with_its_name(folder: Path, workers: int) -> None:
    streamed = load(folder, 0).pretrain
    (folder / "3.jpg").unlink()
    batches = stream_batches(streamed, POSITIONS, workers)
    assert next(batches).shape == (3, 3, 16, 16)
    with pytest.raises(ValueError, match="3.jpg was readable when the run began and is not now"):
        next(batches)
    with pytest.raises(ValueError, match="3.jpg was readable"):
        streamed.fetch(torch.tensor([3]))


def test_stopping_early_and_nothing_to_do(folder: Path) -> None:
    streamed = load(folder, 0).pretrain
    for batch in stream_batches(streamed, POSITIONS.repeat(50, 1), 2):
        assert batch.dtype == torch.uint8
        break
    assert list(stream_batches(streamed, POSITIONS[4:], 2)) == []
    assert streamed.fetch(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 16, 16)


def test_select_shares_memory_only_when_it_can() -> None:
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    whole = ImageSet(tuple("abcde"), torch.tensor([0, 1, -1, 1, 0]), images)
    middle = whole.select(torch.tensor([1, 2, 3]))
    assert middle.names == ("b", "c", "d") and middle.labels is not None
    assert middle.labels.tolist() == [1, -1, 1]
    assert middle.images is not None and middle.images.data_ptr() == images[1].data_ptr()
    ends = whole.select(torch.tensor([0, 4]))
    assert ends.images is not None and ends.images.flatten().tolist() == [0, 4]
