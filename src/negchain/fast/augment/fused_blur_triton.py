# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""`blur.blur` along one axis in Triton, and the last pass: blur along y, clamp, normalise.

A program works on a block of pixels of one image, so their kernel is the same, and the place of a
neighbour is found once for all channels. Four taps are unrolled: their loads are on their way
together, and a program's registers still leave room for all of a small batch's programs at once.
The last pass writes the type and memory format asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.augment import blur
from negchain.augment.pipeline import Augmentation
from negchain.fast.augment.fused_params_triton import NUM_FIELDS, SIGMA

PIXELS = 512  # pixels per program: 18 programs for an image of 96 x 96


@triton.jit
def unit(x):
    """Clamp to [0,1]."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def store(ptr, red, green, blue, inside, CHANNELS: tl.constexpr, NEXT: tl.constexpr):
    """Write the channels of a block of pixels, NEXT apart, in the type of `ptr`."""
    dtype = ptr.dtype.element_ty
    tl.store(ptr, red.to(dtype), mask=inside)
    if CHANNELS == 3:
        tl.store(ptr + NEXT, green.to(dtype), mask=inside)
        tl.store(ptr + 2 * NEXT, blue.to(dtype), mask=inside)


@triton.jit
def blurred(
    red,  # the pixels themselves
    green, blue,
    image_ptr,  # planar float32 [C,SIZE,SIZE]
    line,  # where the pixels' lines along the axis begin
    centre,  # the pixels' places on their lines
    sigma, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr,  # between neighbours on a line
    RADIUS: tl.constexpr,
):  # fmt: skip
    """Red, green and blue blurred along one axis, edges reflected; one channel in `red`."""
    PLANE: tl.constexpr = SIZE * SIZE
    if sigma > 0.0:
        sharpness = -0.5 / (tl.maximum(sigma, 0.01) * tl.maximum(sigma, 0.01))
        total = 1.0
        for distance in tl.range(1, RADIUS + 1, loop_unroll_factor=2):
            weight = tl.exp(sharpness * (distance * distance))
            total += 2.0 * weight
            place = tl.maximum(centre - distance, distance - centre)
            before = image_ptr + (line + place * STRIDE)
            place = tl.minimum(centre + distance, 2 * (SIZE - 1) - distance - centre)
            after = image_ptr + (line + place * STRIDE)
            red += weight * (tl.load(before) + tl.load(after))
            if CHANNELS == 3:
                green += weight * (tl.load(before + PLANE) + tl.load(after + PLANE))
                blue += weight * (tl.load(before + 2 * PLANE) + tl.load(after + 2 * PLANE))
        scale = 1.0 / total
        red *= scale
        green *= scale
        blue *= scale
    return red, green, blue


@triton.jit
def _finished(value, mean, std, NORMALIZE: tl.constexpr):
    value = unit(value)
    if NORMALIZE:
        value = (value - mean) / std
    return value


@triton.jit
def _finish_kernel(
    pixels_ptr, out_ptr, params_ptr, mean_0, mean_1, mean_2, std_0, std_1, std_2,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, RADIUS: tl.constexpr, NORMALIZE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,  # of `out`; `pixels` is planar
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blur a block of pixels along y, clamp and normalise."""
    PLANE: tl.constexpr = SIZE * SIZE
    program = tl.program_id(0)
    image = program // BLOCKS
    base = image.to(tl.int64) * (CHANNELS * PLANE)
    pixel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < PLANE
    within = tl.minimum(pixel, PLANE - 1)
    sigma = tl.load(params_ptr + image * NUM_FIELDS + SIGMA)
    own = pixels_ptr + base + within
    red = tl.load(own)
    green, blue = red, red
    if CHANNELS == 3:
        green, blue = tl.load(own + PLANE), tl.load(own + 2 * PLANE)
    y, x = within // SIZE, within % SIZE
    red, green, blue = blurred(
        red, green, blue, pixels_ptr + base, x, y, sigma, CHANNELS, SIZE, SIZE, RADIUS
    )
    red = _finished(red, mean_0, std_0, NORMALIZE)
    green = _finished(green, mean_1, std_1, NORMALIZE)
    blue = _finished(blue, mean_2, std_2, NORMALIZE)
    out = out_ptr + base + (pixel * CHANNELS if CHANNELS_LAST else pixel)
    store(out, red, green, blue, inside, CHANNELS, 1 if CHANNELS_LAST else PLANE)


def blur_radius(augment: Augmentation) -> int:
    """Neighbours on each side that the blur can reach; past 6.5 sigma one weighs below 1e-9."""
    if augment.blur_sigma is None:
        return 0
    return min(blur.kernel_size(augment.size) // 2, int(6.5 * augment.blur_sigma[1]) + 1)


def finish_fused(
    augment: Augmentation, pixels: Tensor, params: Tensor, dtype: torch.dtype, channels_last: bool
) -> Tensor:
    """Blur along y, clamp and normalise planar float32 `pixels` [N,C,size,size]: a new tensor."""
    count, channels, size, _ = pixels.shape
    mean, std = augment.normalize or ((0.0,) * channels, (1.0,) * channels)
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"normalize must have one mean and one deviation per channel, got {len(mean)} and "
            f"{len(std)} for {channels} channels; give {channels} of each"
        )
    padding = (1.0,) * (3 - channels)
    blocks = triton.cdiv(size * size, PIXELS)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=layout)
    _finish_kernel[(count * blocks,)](
        pixels, out, params, *(float(number) for number in (*mean, *padding, *std, *padding)),
        CHANNELS=channels, SIZE=size, RADIUS=blur_radius(augment),
        NORMALIZE=augment.normalize is not None, CHANNELS_LAST=channels_last, BLOCKS=blocks,
        BLOCK=PIXELS, enable_fp_fusion=True,
    )  # fmt: skip
    return out
