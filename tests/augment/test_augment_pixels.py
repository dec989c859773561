"""Pixels: for given parameters the batched code equals torchvision, image by image."""

import doctest
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torchvision.transforms.v2.functional as ops
from augment_reference import reference_apply
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from negchain.augment import RECIPES, Augmentation, Params, augmentation, finite_views
from negchain.augment.colour import HUE, jitter, shift_hue, to_grey
from negchain.augment.crop import Box, resample

TOLERANCE = 2e-5  # float32 rounding; the promise is 2/255
ALONE = {
    "crop": Augmentation(size=24, crop_scale=(0.08, 1.0)),
    "flip": Augmentation(size=24, flip=True),
    "jitter": Augmentation(size=24, jitter=(0.8, 0.8, 0.8, 0.2), jitter_p=0.8),
    "wild jitter": Augmentation(size=24, jitter=(2.0, 2.0, 2.0, 0.5), jitter_p=1.0),
    "grey": Augmentation(size=24, grey_p=0.5),
    "blur": Augmentation(size=30, blur_sigma=(0.1, 2.0), blur_p=0.5),
    "normalize": Augmentation(size=24, normalize=((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(count: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise around a gradient, with flat, black, white and saturated images among them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (count, channels, height, width), generator=generator)
    ramp = torch.linspace(0, 255, width).expand(height, width)
    images = torch.where(torch.arange(count).view(-1, 1, 1, 1) % 2 == 0, noise, (noise + ramp) / 2)
    images[0], images[1], images[2] = 0, 255, 128
    images[3, 1:] = 0
    return images.to(torch.uint8)


def draws(augment: Augmentation, count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, augment.num_uniforms, generator=torch.Generator().manual_seed(seed))


def assert_equals_torchvision(augment: Augmentation, images: Tensor) -> None:
    params = augment.sample(draws(augment, len(images)), *images.shape[2:])
    actual = augment.apply(images, params)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual, reference_apply(augment, images, params), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("height, width", [(33, 57), (24, 24), (11, 9)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ALONE)
def test_each_operation_alone(name: str, channels: int, height: int, width: int) -> None:
    augment = ALONE[name]
    if augment.normalize is not None:
        augment = replace(augment, normalize=tuple(part[:channels] for part in augment.normalize))
    assert_equals_torchvision(augment, batch(16, channels, height, width))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("height, width, size", [(33, 57, 32), (96, 96, 96), (57, 41, 80)])
def test_whole_recipes(name: str, channels: int, height: int, width: int, size: int) -> None:
    augment = augmentation(name, size=size)
    if channels == 1:
        augment = replace(augment, normalize=None)
    assert_equals_torchvision(augment, batch(12, channels, height, width))


def test_imagenet_size() -> None:
    assert_equals_torchvision(augmentation("simclr-imagenet", size=224), batch(4, 3, 180, 260))


@pytest.mark.parametrize("size", [5, 32, 97])
def test_resample_of_chosen_boxes(size: int) -> None:
    """Boxes of one pixel, of one row, at the edges and of the whole image; up and down."""
    images = batch(6, 3, 33, 57)
    boxes = [
        (0, 0, 33, 57),
        (32, 56, 1, 1),
        (0, 10, 1, 47),
        (7, 3, 20, 11),
        (0, 0, 5, 5),
        (3, 0, 30, 57),
    ]
    flip = torch.tensor([False, True, True, False, True, True])
    box = Box(*torch.tensor(boxes, dtype=torch.float32).unbind(1))
    actual = resample(images, box, flip, size=size)
    for n, (top, left, height, width) in enumerate(boxes):
        cut = images[n].float()[:, top : top + height, left : left + width] / 255
        expected = ops.resize(cut, [size, size], antialias=True)
        expected = expected.flip(-1) if flip[n] else expected
        torch.testing.assert_close(actual[n], expected, rtol=0, atol=TOLERANCE)


def test_hue_and_grey_directly() -> None:
    pixels = batch(9, 3, 8, 9).float() / 255
    shift = torch.linspace(-0.5, 0.5, 9)
    for n, actual in enumerate(shift_hue(pixels, shift)):
        expected = ops.adjust_hue(pixels[n], shift[n].item())
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    chosen = torch.arange(9) % 2 == 0
    mixed = to_grey(pixels, chosen)
    assert mixed[~chosen].equal(pixels[~chosen])
    expected = ops.rgb_to_grayscale(pixels[chosen], num_output_channels=3)
    torch.testing.assert_close(mixed[chosen], expected, rtol=0, atol=1e-6)


def test_pixel_check_sees_a_wrong_order() -> None:
    """Saboteur: the reversed order of operations is far outside the tolerance."""
    augment = ALONE["wild jitter"]
    images = batch(16, 3, 24, 24)
    params = augment.sample(draws(augment, 16), 24, 24)
    pixels = images.float() / 255
    right = jitter(pixels, params.order, params.factors)
    wrong = jitter(pixels, params.order.flip(1), params.factors)
    assert (right - wrong).abs().amax(dim=(1, 2, 3)).median() > 2 / 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("height, width", [(33, 57), (96, 96), (8, 8)])
def test_plain_is_torchvision_resize(channels: int, height: int, width: int) -> None:
    images = batch(4, channels, height, width)
    augment = augmentation("simclr-stl10", size=32)
    expected = ops.resize(images.float() / 255, [32, 32], antialias=True)
    torch.testing.assert_close(augment.plain(images), expected, rtol=0, atol=1e-6)


def test_plain_normalises_as_apply() -> None:
    images = batch(4, 3, 32, 32)
    augment = augmentation("cifar", size=32)
    assert augment.normalize is not None
    mean, std = (list(values) for values in augment.normalize)
    expected = ops.normalize(images.float() / 255, mean, std)
    torch.testing.assert_close(augment.plain(images), expected)


@pytest.mark.parametrize("name", RECIPES)
def test_same_uniforms_same_pixels_in_the_unit_interval(name: str) -> None:
    augment = replace(augmentation(name, size=24), normalize=None)
    images, uniforms = batch(8, 3, 33, 29), draws(augment, 8)
    kept = images.clone(), uniforms.clone()
    first, second = augment(images, uniforms), augment(images, uniforms)
    assert first.equal(second)
    assert images.equal(kept[0]) and uniforms.equal(kept[1])
    assert first.shape == (8, 3, 24, 24) and 0 <= first.min() and first.max() <= 1


def test_images_of_a_batch_are_independent() -> None:
    augment = augmentation("simclr-stl10", size=32)
    images, uniforms = batch(10, 3, 40, 36), draws(augment, 10)
    whole = augment(images, uniforms)
    for n in (0, 4, 9):
        alone = augment(images[n : n + 1], uniforms[n : n + 1])[0]
        torch.testing.assert_close(whole[n], alone, rtol=0, atol=1e-6)  # other matmul tiling
        others = batch(10, 3, 40, 36, seed=7), draws(augment, 10, seed=8)
        others[0][n], others[1][n] = images[n], uniforms[n]
        assert augment(*others)[n].equal(whole[n])


def test_images_in_another_order_of_memory() -> None:
    augment, images = augmentation("simclr-stl10", size=24), batch(4, 3, 40, 30)
    expected = augment(images, draws(augment, 4))
    for same in (
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert augment(same, draws(augment, 4)).equal(expected)


def test_autocast_does_not_reach_the_pixels() -> None:
    augment = augmentation("simclr-stl10", size=32)
    images, uniforms = batch(4, 3, 40, 36), draws(augment, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = augment(images, uniforms)
    assert inside.equal(augment(images, uniforms))


class NoSync(TorchDispatchMode):
    """Fail on what a CUDA graph cannot capture: host reads, host constants, data-made shapes."""

    BANNED = (
        "_local_scalar_dense",
        "lift_fresh",
        "nonzero",
        "masked_select",
        "_unique2",
        "is_nonzero",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.BANNED:
            raise RuntimeError(f"{name} cannot be captured in a CUDA graph")
        masks = args[1] if name in ("index", "index_put_") else ()
        if any(mask is not None and mask.dtype == torch.bool for mask in masks):
            raise RuntimeError("a boolean index cannot be captured in a CUDA graph")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_nothing_synchronises(name: str, channels: int) -> None:
    augment = augmentation(name, size=24)
    if channels == 1:
        augment = replace(augment, normalize=None)
    images, uniforms = batch(4, channels, 33, 29), draws(augment, 4)
    with NoSync():
        augment(images, uniforms)
        augment.plain(images)


@pytest.mark.parametrize(
    "planted",
    [
        lambda pixels: pixels.sum().item(),
        lambda pixels: pixels * torch.tensor([0.3, 0.6, 0.1]).view(3, 1, 1),
        lambda pixels: pixels[pixels.mean(dim=(1, 2, 3)) > 0.5],
    ],
)
def test_sync_check_catches_planted_syncs(planted) -> None:
    pixels = batch(4, 3, 8, 8).float()
    with pytest.raises(RuntimeError, match="CUDA graph"), NoSync():
        planted(pixels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_cuda_graph_replays_torchvision_pixels(name: str) -> None:
    augment = augmentation(name, size=96)
    images, uniforms = batch(16, 3, 96, 80).cuda(), draws(augment, 16).cuda()
    augment(images, uniforms)  # cuBLAS workspaces are made outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pixels = augment(images, uniforms)
    uniforms.copy_(draws(augment, 16, seed=5))
    graph.replay()
    params = augment.sample(uniforms, 96, 80)
    on_host = Params(*(field.cpu() for field in params))
    expected = reference_apply(augment, images.cpu(), on_host)
    torch.testing.assert_close(pixels.cpu(), expected, rtol=0, atol=1e-4)


def test_finite_views() -> None:
    images = batch(5, 3, 33, 29)
    augment = augmentation("cifar", size=24)
    views = finite_views(images, augment, 3, seed=4)
    assert views.shape == (5, 3, 3, 24, 24) and views.dtype == torch.uint8
    assert views.equal(finite_views(images, augment, 3, seed=4))
    assert not views.equal(finite_views(images, augment, 3, seed=5))
    uniforms = torch.rand(5, 3, augment.num_uniforms, generator=torch.Generator().manual_seed(4))
    raw = replace(augment, normalize=None)
    for n in range(5):
        expected = raw(images[n].expand(3, -1, -1, -1), uniforms[n]) * 255
        assert (views[n] - expected).abs().max() <= 0.5 + 1e-3


def test_finite_views_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    images = batch(7, 3, 20, 20)
    augment = augmentation("simclr-stl10", size=16)
    whole = finite_views(images, augment, 2, seed=0)
    monkeypatch.setattr("negchain.augment.pipeline._CHUNK_PIXELS", 2 * 2 * 3 * 20 * 20)
    parts = finite_views(images, augment, 2, seed=0)
    assert (whole.int() - parts.int()).abs().max() <= 1  # a tie may round either way


def test_user_errors() -> None:
    augment = augmentation("cifar", size=32)
    with pytest.raises(ValueError, match=f"needs {augment.num_uniforms} uniforms"):
        augment(batch(4, 3, 32, 32), torch.rand(4, 3))
    for images in (batch(4, 3, 8, 8).float(), batch(4, 2, 8, 8), batch(4, 3, 8, 8)[0]):
        with pytest.raises(ValueError, match="uint8 of shape"):
            augment.plain(images)


def test_every_field_has_one_row_per_image() -> None:
    for name in RECIPES:
        augment = augmentation(name, size=32)
        params = augment.sample(draws(augment, 6), 40, 50)
        assert all(len(field) == 6 for field in params)
        assert params.order.sort(dim=1).values.equal(torch.arange(4).expand(6, 4))
        assert params.factors[:, HUE].abs().max() <= 0.2 + 1e-6
        assert not any(math.isnan(value) for value in params.sigma.tolist())


@pytest.mark.parametrize("module", ["crop", "colour", "blur", "pipeline"])
def test_doctests(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"negchain.augment.{module}"))
    assert results.attempted > 0 and results.failed == 0
