"""Augmentations from Python, and the probe that learns beside the encoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from negchain import tasks, train
from negchain.augment import Pictures, Uniforms
from negchain.tasks.online_probe import OnlineProbe
from negchain.tasks.own_augmentation import OwnAugmentation
from negchain.train import start
from negchain.train.config import ConfigError
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder
from tool_runs import metrics_of, negchain, picture_folder

QUICK = {"encoder": "small-cnn", "recipe": "none", "image_size": 8, "steps": 2, "batch_size": 8,
         "probe_samples": 8, "log_every": 1, "eval_every": 0, "device": "cpu",
         "workers": 0}  # fmt: skip


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


def test_the_online_probe_ignores_what_has_no_label() -> None:
    labels = torch.tensor([0, 1, -1, -1])
    probe = OnlineProbe(labels, dim=2)
    probe.learn(torch.eye(2), torch.tensor([2, 3]))
    assert not probe.weight.any() and float(probe.accuracy) == 0
    for _ in range(20):
        probe.learn(torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 3]))
    assert float(probe.accuracy) > 0.9 and probe.weight.any()


def test_the_online_probe_learns_while_the_encoder_does(tmp_path: Path) -> None:
    config = resolve(None, {"device": "cpu", "subset": 1000})
    run = start.prepare(tasks.load(config), lambda: RunFolder.create(tmp_path / "r", config="{}"))
    found = []
    with run.folder:
        for step in range(40):
            run.step(step, run.order.batch(step))
            found.append(float(run.task.watched["online_probe"]))
        run.done = 40
        run._save()
        again = start.prepare(tasks.load(config), lambda: run.folder)
        again.restore()
    assert found[0] < 0.4 and found[-1] > 0.6
    pairs = zip(run.task.state_tensors(), again.task.state_tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
