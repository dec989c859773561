"""Images as a task: the data a config names."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from negchain.tasks.images import load_images
from negchain.train.resolve import resolve


def test_a_subset_says_which_classes_it_leaves_out(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / ("cat" if number < 6 else "dog") / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (number * 20, 0, 0)).save(path)
    given = {"data": str(tmp_path), "image_size": 16, "batch_size": 2, "encoder": "small-cnn"}
    some, most = (load_images(resolve(None, {**given, "subset": n})).notes for n in (3, 8))
    assert any("--subset 3 takes the first" in note and "1 of 2 classes" in note for note in some)
    assert not any("--subset" in note for note in most)
