"""What comes out of one file: every mode, orientation and kind of damage, against PIL and NumPy."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tvf

from negchain.data import decode, from_files
from negchain.data.decode import decoded
from negchain.data.from_files import decode_files, read_sizes

RNG = np.random.default_rng(0)


def read_image(path: str, side: int, short: int = 0) -> np.ndarray:
    with decoded(path, max(side, short)) as found:
        return found.square(side)


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
    images, _, failed = decode_files(paths, 8, workers=2)
    assert list(failed) == [2] and "decompression bomb" in failed[2]
    assert len(images) == 2


def test_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "script.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    whole = io.BytesIO()
    smooth(64, 64).save(whole, "JPEG")
    (tmp_path / "half.jpg").write_bytes(whole.getvalue()[:-200])
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ("empty", "text", "script", "pipe", "half")
    *_, failed = decode_files([str(tmp_path / f"{name}.jpg") for name in names], 8, workers=1)
    assert failed[0] == "empty file" and failed[3] == "not a regular file"
    assert failed[1] == failed[2] == "not an image of a known format"
    assert "truncated" in failed[4]


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
        images, _, failed = decode_files(paths, 16, workers=2)
        assert decode_files(paths, 1, workers=2)[2].keys() == failed.keys()
    assert 0 in failed and len(images) == len(paths) - len(failed)


def test_gaps_are_closed_in_order(tmp_path: Path) -> None:
    paths = []
    for number in range(50):
        path = tmp_path / f"{number}.png"
        if number % 3:
            Image.new("L", (4, 4), number).save(path)
        paths.append(str(path))
    images, _, failed = decode_files(paths, 4, workers=2)
    assert images[:, 0, 0, 0].tolist() == [n for n in range(50) if n % 3]
    assert sorted(failed) == [n for n in range(50) if n % 3 == 0]
    rows = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1)
    keep = [n for n in range(40) if n not in (0, 7, 8, 39)]
    moved = from_files._close_gaps(rows.clone(), torch.tensor(keep), chunk=3)
    assert moved.flatten().tolist() == keep


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    decode_files([str(tmp_path / "a.png")], 4, workers=1, title="decoding pets")
    decode_files([str(tmp_path / "a.png")], 4, workers=1, title=None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [f"decoding pets: {n}/1 file" for n in (0, 1)]


def test_sizes_come_from_headers(tmp_path: Path) -> None:
    Image.new("L", (20, 30)).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_text("no")
    os.mkfifo(tmp_path / "pipe.png")
    paths = [str(tmp_path / f"{n}.png") for n in ("a", "broken", "pipe")]
    assert read_sizes(paths, workers=2) == [(20, 30), (0, 0), (0, 0)]


def test_a_title_is_text_and_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    decode_files([str(tmp_path / "a.png")], 4, workers=1, title="decoding [/] pets[red]")
    assert "decoding [/] pets[red]" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bit_files_are_scaled_by_the_bits_they_use(
    tmp_path: Path, bits: int, name: str
) -> None:
    white = 2**bits - 1
    levels = np.linspace(0, white, 400).round().astype(np.uint16).reshape(20, 20)
    Image.fromarray(levels).save(tmp_path / name)
    expected = np.rint(levels * (255 / white)).astype(np.uint8)
    assert np.array_equal(read_image(str(tmp_path / name), 20)[0], expected)
    assert expected.max() == 255


def test_float_tiff_with_values_that_are_no_numbers(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.float32).reshape(8, 8)
    ramp[0, 0], ramp[7, 6] = np.nan, -np.inf
    Image.fromarray(ramp).save(tmp_path / "a.tif")
    pixels = read_image(str(tmp_path / "a.tif"), 8)[0]
    assert pixels[7, 7] == 255 and pixels[0, 0] == pixels[7, 6] == 0 and pixels[0, 1] <= 4


@pytest.mark.parametrize("mode", ["P", "RGBA", "L", "CMYK", "F", "I;16"])
def test_large_pictures_are_converted_in_strips(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.tif")
    if mode in ("F", "I;16"):
        values = RNG.uniform(0, 60_000, (31, 20))
        Image.fromarray(values.astype(np.float32 if mode == "F" else np.uint16)).save(path)
    else:
        Image.fromarray(noise(20, 31)).convert(mode).save(path)
    expected = read_image(path, 20)
    monkeypatch.setattr(decode, "_STRIP_PIXELS", 100)
    assert np.array_equal(read_image(path, 20), expected)


MEASURE = """
import resource, sys
from negchain.data.from_files import decode_files
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
images, _, failed = decode_files(sys.argv[1:], 16, workers=6)
assert not failed, failed
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_huge_pictures_are_decoded_within_a_bound(tmp_path: Path) -> None:
    """Three float TIFFs of 60 megapixels in threads: took 3 x 1.8 GB, may take 1.2 in all."""
    image = Image.new("F", (10_000, 6_000), 0.5)
    image.putpixel((0, 0), 1.0)
    image.save(tmp_path / "0.tif", compression="tiff_adobe_deflate")
    paths = [str(tmp_path / f"{n}.tif") for n in range(3)]
    for path in paths[1:]:
        os.link(paths[0], path)
    assert os.path.getsize(paths[0]) < 2**20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1200


@pytest.mark.parametrize("orientation", [1, 6])
def test_whole_pictures_keep_their_proportions(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth(300, 200).save(tmp_path / "a.jpg", exif=exif, quality=95)
    smooth(3000, 2000).save(tmp_path / "large.jpg", exif=exif, quality=95)
    noisy = noise(40, 30)
    Image.fromarray(noisy).save(tmp_path / "small.png", exif=exif)
    for name in ("a.jpg", "large.jpg"):
        with decoded(str(tmp_path / name), 64) as found:
            square, picture = found.square(16), found.whole(64)
        assert picture.shape == ((3, 64, 96) if orientation == 1 else (3, 96, 64))
        assert np.array_equal(square, read_image(str(tmp_path / name), 16, 64))
    with decoded(str(tmp_path / "small.png"), 64) as found:
        picture = found.whole(64)  # small ones are not enlarged
    upright = noisy if orientation == 1 else np.rot90(noisy, -1)
    assert np.array_equal(picture, upright.transpose(2, 0, 1))


@pytest.mark.parametrize("name", ["a.png", "a.webp"])
def test_a_damaged_exif_block_takes_no_picture_away(tmp_path: Path, name: str) -> None:
    Image.fromarray(noise(8, 8)).save(tmp_path / name, exif=b"no TIFF header", lossless=True)
    with Image.open(tmp_path / name) as opened:
        expected = np.asarray(opened.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(read_image(str(tmp_path / name), 8), expected)


def test_a_sixteen_bit_pgm_is_scaled_as_a_png(tmp_path: Path) -> None:
    levels = np.arange(30000, 30064, dtype=np.uint16).reshape(8, 8)  # little contrast, and stays so
    (tmp_path / "a.pgm").write_bytes(b"P5 8 8 65535 " + levels.astype(">u2").tobytes())
    Image.fromarray(levels).save(tmp_path / "a.png")
    grey, expected = (read_image(str(tmp_path / name), 8) for name in ("a.pgm", "a.png"))
    assert np.array_equal(grey, expected) and expected.max() < 120
