"""Images as a task: the data a config names, and augmentations from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from negchain import train
from negchain.augment import Pictures, Uniforms
from negchain.tasks.images import OwnAugmentation, load_images
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve
from tool_runs import metrics_of, negchain, picture_folder

QUICK = {"encoder": "small-cnn", "recipe": "none", "image_size": 8, "steps": 2, "batch_size": 8,
         "probe_samples": 8, "log_every": 1, "eval_every": 0, "device": "cpu",
         "workers": 0}  # fmt: skip


def test_a_subset_says_which_classes_it_leaves_out(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / ("cat" if number < 6 else "dog") / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (number * 20, 0, 0)).save(path)
    given = {"data": str(tmp_path), "image_size": 16, "batch_size": 2, "encoder": "small-cnn"}
    some, most = (load_images(resolve(None, {**given, "subset": n})).notes for n in (3, 8))
    assert any("--subset 3 takes the first" in note and "1 of 2 classes" in note for note in some)
    assert not any("--subset" in note for note in most)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(picture_folder(tmp_path_factory.mktemp("data") / "pictures"))


def noisy(images: Tensor) -> Tensor:
    pixels = torch.nn.functional.interpolate(images.float() / 255, 8)
    return pixels + 0.1 * torch.rand(pixels.shape)


def test_a_run_is_augmented_by_a_function_of_the_users(pictures: str, tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def watched(images: Tensor) -> Tensor:
        seen.append(images.dtype)
        return noisy(images)

    settings = {**QUICK, "data": pictures}
    folders = [train.run(augment=watched, out=tmp_path / name, **settings) for name in ("a", "b")]
    assert len(seen) > 4 and {*seen} == {torch.uint8}
    assert metrics_of(folders[0]) == metrics_of(folders[1])  # its draws are the step's
    plain = train.run(out=tmp_path / "recipe", **settings)
    assert metrics_of(plain) != metrics_of(folders[0])
    record = json.loads((folders[0] / "config.json").read_text())["data_info"]
    assert "watched" in record["augment"]
    assert json.loads((plain / "config.json").read_text())["data_info"]["augment"] is None
    with pytest.raises(ConfigError, match="leave out --augmentations"):
        train.run(augment=noisy, augmentations=2, out=tmp_path / "c", **settings)


def test_the_command_line_does_not_go_on_with_another_augmentation(
    pictures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train.run(augment=noisy, data=pictures, out=tmp_path / "a", **QUICK)
    assert negchain("train --resume --quiet --out", folder) == 2
    assert "augments by a function of Python (noisy)" in " ".join(capsys.readouterr().err.split())


def test_what_it_must_return_is_said() -> None:
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    drawn = Uniforms(seed=0, step=torch.tensor(0), use=1)
    with pytest.raises(ConfigError, match=r"\[2, 1, 4, 4\], got \[2, 1, 8, 8\]"):
        OwnAugmentation(size=4, function=lambda x: x)(images, drawn)
    with pytest.raises(ConfigError, match="got list"):
        OwnAugmentation(size=4, function=lambda x: [])(images, drawn)  # type: ignore[arg-type,return-value]
    for unscaled in (torch.float32, torch.int64):  # a ToDtype without scale=True
        with pytest.raises(ConfigError, match=r"floats in \[0, 1\], got .* up to 51; divide"):
            own = OwnAugmentation(size=8, function=lambda x, kind=unscaled: x.to(kind))
            own(images + 51, drawn)


def test_pictures_of_their_own_sizes_come_as_squares_with_detail() -> None:
    shapes = []

    def half(images: Tensor) -> Tensor:
        shapes.append(images.shape)
        return images[:, :, ::2, ::2]

    pictures = Pictures.pack([torch.zeros(3, 20, 30).byte(), torch.zeros(3, 40, 25).byte()])
    found = OwnAugmentation(size=8, function=half)(pictures, torch.rand(2, 1))
    assert found.shape == (2, 3, 8, 8) and shapes == [torch.Size([2, 3, 16, 16])]
