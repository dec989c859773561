# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""`blur.blur`, clamp and normalisation in Triton: two passes, one per axis.

A program works on a block of pixels of one image, so their kernel is the same and ends where this
image's Gaussian does, and the place of a neighbour is found once for all channels. The second pass
writes the type and memory format asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.augment import blur
from negchain.augment.fused_params_triton import NUM_FIELDS, SIGMA
from negchain.augment.pipeline import Augmentation

PIXELS = 512  # pixels per program: 18 programs for an image of 96 x 96


@triton.jit
def unit(x):
    """Clamp to [0,1]."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _finished(blurred, total, mean, std, FINISH: tl.constexpr, NORMALIZE: tl.constexpr):
    value = blurred * (1.0 / total)
    if FINISH:
        value = unit(value)
    if NORMALIZE:
        value = (value - mean) / std
    return value


@triton.jit
def _blur_kernel(
    pixels_ptr,
    out_ptr,
    params_ptr,
    mean_0,
    mean_1,
    mean_2,
    std_0,
    std_1,
    std_2,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    RADIUS: tl.constexpr,
    ALONG_Y: tl.constexpr,  # the second pass, which also clamps
    NORMALIZE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,  # of `out`; `pixels` is planar
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blur a block of pixels along one axis, edges reflected."""
    PLANE: tl.constexpr = SIZE * SIZE
    STRIDE: tl.constexpr = SIZE if ALONG_Y else 1
    program = tl.program_id(0)
    image = program // BLOCKS
    base = image.to(tl.int64) * (CHANNELS * PLANE)
    pixel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < PLANE
    within = tl.minimum(pixel, PLANE - 1)
    centre = within // SIZE if ALONG_Y else within % SIZE
    line = within - centre * STRIDE

    sigma = tl.load(params_ptr + image * NUM_FIELDS + SIGMA)
    # past 6.5 sigma a neighbour weighs less than 1e-9
    radius = tl.minimum((6.5 * sigma).to(tl.int32) + 1, RADIUS)
    radius = tl.where(sigma > 0.0, radius, 0)
    sharpness = -0.5 / (tl.maximum(sigma, 0.01) * tl.maximum(sigma, 0.01))
    total = 0.0
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for tap in range(0, 2 * radius + 1):
        distance = tap - radius
        weight = tl.exp((distance * distance).to(tl.float32) * sharpness)
        total += weight
        place = centre + distance
        place = tl.minimum(tl.maximum(place, -place), 2 * (SIZE - 1) - place)
        source = pixels_ptr + base + (line + place * STRIDE)
        red += weight * tl.load(source)
        if CHANNELS == 3:
            green += weight * tl.load(source + PLANE)
            blue += weight * tl.load(source + 2 * PLANE)

    out = out_ptr + base + (pixel * CHANNELS if CHANNELS_LAST else pixel)
    NEXT: tl.constexpr = 1 if CHANNELS_LAST else PLANE
    dtype = out_ptr.dtype.element_ty
    red = _finished(red, total, mean_0, std_0, ALONG_Y, NORMALIZE)
    tl.store(out, red.to(dtype), mask=inside)
    if CHANNELS == 3:
        green = _finished(green, total, mean_1, std_1, ALONG_Y, NORMALIZE)
        blue = _finished(blue, total, mean_2, std_2, ALONG_Y, NORMALIZE)
        tl.store(out + NEXT, green.to(dtype), mask=inside)
        tl.store(out + 2 * NEXT, blue.to(dtype), mask=inside)


def blur_fused(
    augment: Augmentation, pixels: Tensor, params: Tensor, dtype: torch.dtype, channels_last: bool
) -> Tensor:
    """Blur, clamp and normalise planar float32 `pixels` [N,C,size,size] into a new tensor."""
    count, channels, size, _ = pixels.shape
    radius = blur.kernel_size(size) // 2 if augment.blur_sigma is not None else 0
    mean, std = augment.normalize or ((0.0,) * channels, (1.0,) * channels)
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"normalize must have one mean and one deviation per channel, got {len(mean)} and "
            f"{len(std)} for {channels} channels; give {channels} of each"
        )
    padding = (1.0,) * (3 - channels)
    blocks = triton.cdiv(size * size, PIXELS)

    def launch(source: Tensor, out: Tensor, along_y: bool) -> None:
        _blur_kernel[(count * blocks,)](
            source,
            out,
            params,
            *(float(number) for number in (*mean, *padding, *std, *padding)),
            CHANNELS=channels,
            SIZE=size,
            RADIUS=radius,
            ALONG_Y=along_y,
            NORMALIZE=along_y and augment.normalize is not None,
            CHANNELS_LAST=along_y and channels_last,
            BLOCKS=blocks,
            BLOCK=PIXELS,
            enable_fp_fusion=True,
        )

    if radius:
        across = torch.empty_like(pixels)
        launch(pixels, across, along_y=False)
        pixels = across
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=layout)
    launch(pixels, out, along_y=True)
    return out
