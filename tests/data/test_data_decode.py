"""What comes out of one file: every mode, orientation and kind of damage, against PIL and NumPy."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tvf

from negchain.data import decode
from negchain.data.decode import read_image
from negchain.data.files import check_files, decode_files

RNG = np.random.default_rng(0)


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def smooth(width: int, height: int) -> Image.Image:
    return Image.fromarray(noise(5, 4)).resize((width, height), Image.Resampling.BICUBIC)


def oracle(image: Image.Image, side: int) -> np.ndarray:
    """Torchvision's Resize and CenterCrop of an RGB image, [3,side,side]."""
    small = tvf.center_crop(tvf.resize(image, side), [side, side])
    return np.asarray(small).transpose(2, 0, 1)


# Sizes for which the crop starts at a whole pixel, so that there is nothing to round.
@pytest.mark.parametrize(
    "size", [(20, 20), (40, 20), (20, 40), (30, 30), (10, 10), (6, 6), (4, 12)]
)
def test_equals_torchvision(tmp_path: Path, size: tuple[int, int]) -> None:
    image = Image.fromarray(noise(*size))
    image.save(tmp_path / "a.png")
    difference = read_image(str(tmp_path / "a.png"), 10).astype(int) - oracle(image, 10)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.3  # rounding
    if size[0] == size[1]:
        assert not difference.any()


@pytest.mark.parametrize("size", [(37, 53), (53, 37), (101, 33), (9, 200)])
def test_odd_sizes_are_within_the_half_pixel_torchvision_rounds_away(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    image = smooth(*size)
    image.save(tmp_path / "a.png")
    difference = read_image(str(tmp_path / "a.png"), 16).astype(int) - oracle(image, 16)
    assert np.abs(difference).mean() < 6 and np.abs(difference).max() < 40


def test_a_banner_costs_no_more_than_its_square(tmp_path: Path) -> None:
    Image.fromarray(noise(30_000, 1)).save(tmp_path / "a.png")  # resized first: 138 MB at 40 px
    assert read_image(str(tmp_path / "a.png"), 40).shape == (3, 40, 40)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_opaque_modes_are_what_pil_converts(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tif" if mode in ("CMYK", "YCbCr") else "a.png")
    image = Image.fromarray(noise(20, 20)).convert(mode)
    image.save(path)
    with Image.open(path) as stored:
        assert stored.mode == mode
    expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(read_image(str(path), 20), expected)
    if mode in ("1", "L"):
        assert (expected == expected[:1]).all()


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=100)
    pixels = read_image(str(tmp_path / "a.jpg"), 16)  # no cyan, all magenta and yellow: red
    assert np.abs(pixels.astype(int) - np.array([255, 0, 0])[:, None, None]).max() <= 2


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(noise(20, 20, 4)).convert(mode)
    image.save(tmp_path / "a.png")
    full = np.asarray(image.convert("RGBA")).astype(float)
    colour, alpha = full[..., :3], full[..., 3:] / 255
    expected = (colour * alpha + 255 * (1 - alpha)).transpose(2, 0, 1)
    assert np.abs(read_image(str(tmp_path / "a.png"), 20) - expected).max() <= 1


def test_transparent_palette_and_colour_key(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([0, 0, 0, 200, 10, 30])
    image.paste(1, (4, 0, 8, 8))
    image.save(tmp_path / "a.png", transparency=0)
    image.save(tmp_path / "a.gif", transparency=0)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "key.png", transparency=(9, 9, 9))
    for name in ("a.png", "a.gif"):
        pixels = read_image(str(tmp_path / name), 8)
        assert (pixels[:, :, :4] == 255).all()
        assert pixels[:, 0, 6].tolist() == [200, 10, 30]
    assert (read_image(str(tmp_path / "key.png"), 8) == 255).all()


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    levels = RNG.integers(0, 65536, (20, 20)).astype(np.uint16)
    levels[0, :3] = 0, 257 * 100, 65535
    expected = np.rint(levels / 257).astype(np.uint8)
    for name in ("a.png", "a.tif"):
        Image.fromarray(levels).save(tmp_path / name)
        pixels = read_image(str(tmp_path / name), 20)
        assert np.array_equal(pixels, np.stack([expected] * 3))
    assert expected[0, :3].tolist() == [0, 100, 255]


def test_float_tiff_uses_its_own_range(tmp_path: Path) -> None:
    ramp = np.linspace(-3, 7, 256, dtype=np.float32).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "a.tif")
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "flat.tif")
    assert np.array_equal(read_image(str(tmp_path / "a.tif"), 16)[0].ravel(), np.arange(256))
    assert (read_image(str(tmp_path / "flat.tif"), 8) == 0).all()


STORED = {  # what a camera stores for an upright picture, by EXIF orientation
    1: lambda u: u,
    2: lambda u: u[:, ::-1],
    3: lambda u: u[::-1, ::-1],
    4: lambda u: u[::-1],
    5: lambda u: u.transpose(1, 0, 2),
    6: lambda u: np.rot90(u, 1),
    7: lambda u: u[::-1, ::-1].transpose(1, 0, 2),
    8: lambda u: np.rot90(u, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = noise(30, 20)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(STORED[orientation](upright))
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(stored).save(tmp_path / "a.jpg", exif=exif, quality=100, subsampling=0)
    expected = upright[:, 5:25].transpose(2, 0, 1)
    assert np.array_equal(read_image(str(tmp_path / "a.png"), 20), expected)
    jpeg = read_image(str(tmp_path / "a.jpg"), 20).astype(int)
    assert np.abs(jpeg - expected).mean() < 2


def test_large_jpegs_decoded_small_look_the_same(tmp_path: Path) -> None:
    image = smooth(1600, 1200)
    image.save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as stored:
        expected = oracle(stored.convert("RGB"), 96).astype(int)
    difference = np.abs(read_image(str(tmp_path / "a.jpg"), 96).astype(int) - expected)
    assert difference.mean() < 0.6 and difference.max() <= 4


def test_bombs_are_refused_and_large_photos_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in (10, 12, 20):
        Image.fromarray(noise(side, side)).save(tmp_path / f"{side}.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL warns above, refuses above twice
    paths = [str(tmp_path / f"{side}.png") for side in (10, 12, 20)]
    images, failed = decode_files(paths, 8, workers=2)
    assert list(failed) == [2] and "decompression bomb" in failed[2]
    assert len(images) == 2


def test_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    whole = io.BytesIO()
    smooth(64, 64).save(whole, "JPEG")
    (tmp_path / "half.jpg").write_bytes(whole.getvalue()[:-200])
    assert try_read(str(tmp_path / "empty.jpg"), 8) == "empty file"
    assert try_read(str(tmp_path / "text.jpg"), 8) == "not an image of a known format"
    assert try_read(str(tmp_path / "script.jpg"), 8) == "not an image of a known format"
    assert "truncated" in str(try_read(str(tmp_path / "half.jpg"), 8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_damaged_files_never_raise_and_resident_agrees_with_streamed(
    tmp_path: Path, kind: str
) -> None:
    """Cut short and with flipped bytes, a file is readable at 1 px exactly when it is at 16 px."""
    whole = io.BytesIO()
    smooth(48, 40).save(whole, kind)
    data = whole.getvalue()
    variants = [data[:cut] for cut in np.linspace(0, len(data) - 1, 25).astype(int)]
    for _ in range(25):
        flipped = bytearray(data)
        for place in RNG.integers(0, len(data), 3):
            flipped[place] ^= int(RNG.integers(1, 256))
        variants.append(bytes(flipped))
    paths = []
    for number, variant in enumerate(variants):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(variant)
        paths.append(str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PIL's warnings must not reach the user
        images, failed = decode_files(paths, 16, workers=2)
        assert check_files(paths, workers=2).keys() == failed.keys()
    assert 0 in failed and len(images) == len(paths) - len(failed)


def test_gaps_are_closed_in_order(tmp_path: Path) -> None:
    paths = []
    for number in range(50):
        path = tmp_path / f"{number}.png"
        if number % 3:
            Image.new("L", (4, 4), number).save(path)
        paths.append(str(path))
    images, failed = decode_files(paths, 4, workers=2)
    assert images[:, 0, 0, 0].tolist() == [n for n in range(50) if n % 3]
    assert sorted(failed) == [n for n in range(50) if n % 3 == 0]
    rows = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)
    keep = [n for n in range(40) if n not in (0, 7, 8, 39)]
    assert decode._close_gaps(rows.clone(), keep, chunk=3).flatten().tolist() == keep


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    decode_files([str(tmp_path / "a.png")], 4, workers=1, title="decoding pets")
    decode_files([str(tmp_path / "a.png")], 4, workers=1, title=None)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("decoding pets") == 1


def test_common_short_side(tmp_path: Path) -> None:
    for number, size in enumerate([(20, 30), (20, 20), (45, 20), (21, 30)]):
        Image.new("L", size).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_text("no")
    paths = [str(tmp_path / f"{n}.png") for n in ("broken", 0, 1, 2, 3)]
    assert common_short_side(paths[:4]) == 20
    assert common_short_side(paths) is None
