"""Crops of a folder of photographs hold what torchvision's hold when cut from the originals."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as tvf

from negchain.augment import Augmentation, Pictures, augmentation
from negchain.data import ImageSet, load_data
from negchain.data.from_files import choose_storage

FALSE_ALARM = 1e-3
PHOTOS, CROPS, SIDE = 200, 8, 24
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 cuts of two photographs, 60 to 640 px wide, upright, lying and some very narrow.

    NEGCHAIN_PHOTOS names a folder of 200 photographs to take instead.
    """
    if "NEGCHAIN_PHOTOS" in os.environ:
        return Path(os.environ["NEGCHAIN_PHOTOS"])
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(PHOTOS):
        width, height = int(rng.integers(60, 641)), int(rng.integers(60, 428))
        left, top = int(rng.integers(0, 641 - width)), int(rng.integers(0, 428 - height))
        cut = photos[number % 2].crop((left, top, left + width, top + height))
        cut.save(folder / f"{number:03d}.png", compress_level=0)
    return folder


@functools.cache
def load(originals: Path, budget: int = 8 << 30) -> ImageSet:
    return load_data(
        str(originals), image_size=SIDE, resident_bytes=budget, progress=False
    ).pretrain


def detail(views: Tensor) -> dict[str, np.ndarray]:
    """Per view: squared differences of neighbours, and energy of the upper half of frequencies."""
    across, down = views.diff(dim=3), views.diff(dim=2)
    frequency = torch.fft.fftfreq(SIDE).abs()
    upper = torch.maximum(frequency[:, None], frequency[None]) > 0.25
    power = torch.fft.fft2(views.mean(1)).abs().square() / SIDE**4
    return {
        "differences": (across.square().mean((1, 2, 3)) + down.square().mean((1, 2, 3))).numpy(),
        "high frequencies": (power * upper).sum((1, 2)).numpy(),
    }


@pytest.fixture(scope="module")
def theirs(originals: Path) -> tuple[dict[str, np.ndarray], Tensor]:
    """Torchvision on the originals: detail of its views, and its boxes as shares of the picture."""
    views, boxes = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for path in sorted(originals.iterdir()):
            with Image.open(path) as image:
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
            _, height, width = pixels.shape
            for _ in range(CROPS):
                box = RandomResizedCrop.get_params(pixels, SCALE, RATIO)
                views.append(tvf.resized_crop(pixels, *box, size=[SIDE, SIDE], antialias=True))
                boxes.append([*box, height, width])
    return detail(torch.stack(views)), shares(torch.tensor(boxes, dtype=torch.float64))


def shares(boxes: Tensor) -> Tensor:
    """top, left, height, width, H, W -> place, height and width as shares, area, log ratio.

    A place is 0 at one border of the picture and 1 at the other.
    """
    top, left, height, width, full_height, full_width = boxes.unbind(1)
    return torch.stack(
        [
            top / (full_height - height).clamp_min(1),
            left / (full_width - width).clamp_min(1),
            height / full_height,
            width / full_width,
            height * width / (full_height * full_width),
            (width / height).log(),
        ],
        dim=1,
    )


def views_of(table: Pictures | Tensor) -> Tensor:
    augment = Augmentation(size=SIDE, crop_scale=SCALE, crop_ratio=RATIO)
    rows = torch.arange(PHOTOS).repeat_interleave(CROPS)
    uniforms = torch.rand(len(rows), 22, generator=torch.Generator().manual_seed(1))
    return augment(table[rows], uniforms)


def p_values(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[float]:
    return [float(stats.ks_2samp(ours[name], theirs[name]).pvalue) for name in ours]


@pytest.mark.parametrize("budget", [8 << 30, 0], ids=["resident", "on disk"])
def test_detail_is_torchvisions(
    originals: Path, theirs: tuple[dict[str, np.ndarray], Tensor], budget: int
) -> None:
    images = load(originals, budget)
    assert images.resident == (budget > 0)
    found = detail(views_of(images.pictures(torch.arange(PHOTOS))))
    assert min(p_values(found, theirs[0])) > FALSE_ALARM
    for name, values in found.items():
        assert values.mean() == pytest.approx(theirs[0][name].mean(), rel=0.05)


def test_detail_test_sees_thumbnails(
    originals: Path, theirs: tuple[dict[str, np.ndarray], Tensor]
) -> None:
    """Saboteur: crops of squares shrunk beforehand, as it once was."""
    found = detail(views_of(load(originals).fetch(torch.arange(PHOTOS))))
    assert max(p_values(found, theirs[0])) < 1e-20
    assert found["differences"].mean() < 0.6 * theirs[0]["differences"].mean()


def test_boxes_are_torchvisions(
    originals: Path, theirs: tuple[dict[str, np.ndarray], Tensor]
) -> None:
    table = load(originals).table
    assert isinstance(table, Pictures)
    pictures = table[torch.arange(PHOTOS).repeat_interleave(CROPS)]
    augment = Augmentation(size=SIDE, crop_scale=SCALE, crop_ratio=RATIO)
    uniforms = torch.rand(len(pictures), 22, generator=torch.Generator().manual_seed(2))
    sizes = pictures.sizes.float()
    params = augment.sample(uniforms, sizes[:, 0], sizes[:, 1])
    boxes = torch.cat([torch.stack(params[:4], dim=1), sizes], dim=1)
    assert (boxes[:, 0] + boxes[:, 2] <= boxes[:, 4]).all()
    assert (boxes[:, 1] + boxes[:, 3] <= boxes[:, 5]).all() and (boxes[:, :2] >= 0).all()
    ours = shares(boxes.double())
    for mine, other in zip(ours.unbind(1), theirs[1].unbind(1), strict=True):
        assert stats.ks_2samp(mine.numpy(), other.numpy()).pvalue > FALSE_ALARM


def test_the_evaluation_view_is_still_resize_and_centre_crop(originals: Path) -> None:
    images, plain = load(originals), augmentation("none", size=SIDE).plain
    squares = images.fetch(torch.arange(PHOTOS))
    apart = []
    for path, square in zip(sorted(originals.iterdir()), squares, strict=True):
        with Image.open(path) as image:
            expected = tvf.center_crop(tvf.resize(image, SIDE), [SIDE, SIDE])
            apart.append(np.abs(np.asarray(expected).transpose(2, 0, 1) - square.numpy() * 1.0))
    assert np.mean(apart) < 5  # the half pixel that torchvision rounds away
    assert plain(squares).equal(squares / 255)
    from_whole = plain(images.pictures(torch.arange(PHOTOS)))
    assert (from_whole - squares / 255).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([(48, 60)] * 3, "of the area and more are not enlarged"),
        ([(48, 60), (24, 24)], "in the 1 that is large enough those of 11 %"),
        ([(24, 24)] * 3, "none is that large, so small crops are enlarged"),
    ],
)
def test_what_is_said_of_enlarged_crops(sizes: list[tuple[int, int]], says: str) -> None:
    assert says in choose_storage(sizes, side=16, budget=1 << 30).note
