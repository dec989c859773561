# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The whole augmentation as five Triton launches: what `Augmentation.sample` and `apply` compute.

    uniforms --params--> one row of numbers per image
    bytes --resample, jitter up to contrast--> sums of luminance     (left out without contrast)
    bytes --resample, jitter, grey--> pixels --blur along x--> --blur along y, normalise--> out

A program works on a block of pixels of one image, so what differs between images (the box, the
order of the jitter, the width of the blur) is a scalar of the program and a branch costs nothing.
Contrast needs the mean luminance of all pixels at its place in the order: a pass of its own redoes
crop and jitter up to there (the bytes are still in the cache) and leaves one sum per block, which
the next pass adds in a fixed order. Nothing is atomic: equal inputs give equal bits.

The readable twin is the torch code of this package: many more launches, each a pass over memory.
`torch.compile` shortens it but compiles for many seconds, which a short run never earns back: hence
kernels by hand, which compile in seconds, once per shape and machine.

Runs on a GPU, and on a CPU under TRITON_INTERPRET=1 (for tests).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.augment.fused_blur_triton import PIXELS, blur_fused, unit
from negchain.augment.fused_params_triton import (
    CONTRAST,
    CONTRAST_PLACE,
    FLIP,
    GAINS,
    GREY,
    HEIGHT,
    HUE,
    LEFT,
    NUM_FIELDS,
    ORDER,
    PLACES,
    STEP_X,
    STEP_Y,
    TOP,
    WIDTH,
    fused_params,
)
from negchain.augment.pipeline import Augmentation, check_images

SATURATION = tl.constexpr(2)


@triton.jit
def _tap_weight(source, centre, slope, length):
    """The triangle filter of `crop.filter_weights`; `source` counts from the start of the box."""
    weight = 1.0 - tl.abs(source.to(tl.float32) + 0.5 - centre) * slope
    inside = (source >= 0) & (source < length)
    return tl.where(inside, tl.maximum(weight, 0.0), 0.0)


@triton.jit
def _resample(
    image_ptr,
    pixel,
    row,
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
):
    """`crop.resample` of the output pixels `pixel`: red, green, blue; thrice grey for 1 channel."""
    y = tl.minimum(pixel // SIZE, SIZE - 1)  # pixels past the end are computed and not stored
    x = pixel % SIZE
    x = tl.where(tl.load(row + FLIP) > 0.5, SIZE - 1 - x, x)
    step_y, step_x = tl.load(row + STEP_Y), tl.load(row + STEP_X)
    support_y, support_x = tl.maximum(step_y, 1.0), tl.maximum(step_x, 1.0)
    slope_y, slope_x = 1.0 / support_y, 1.0 / support_x
    centre_y = (y.to(tl.float32) + 0.5) * step_y
    centre_x = (x.to(tl.float32) + 0.5) * step_x
    first_y = tl.floor(centre_y - support_y + 0.5).to(tl.int32)
    first_x = tl.floor(centre_x - support_x + 0.5).to(tl.int32)
    height, width = tl.load(row + HEIGHT).to(tl.int32), tl.load(row + WIDTH).to(tl.int32)
    origin = tl.load(row + TOP).to(tl.int32) * W + tl.load(row + LEFT).to(tl.int32)
    total = tl.zeros_like(centre_y)
    red = tl.zeros_like(centre_y)
    green = tl.zeros_like(centre_y)
    blue = tl.zeros_like(centre_y)
    for tap_y in range(TAPS_Y):
        weight_y = _tap_weight(first_y + tap_y, centre_y, slope_y, height)
        line = origin + tl.minimum(tl.maximum(first_y + tap_y, 0), height - 1) * W
        for tap_x in range(TAPS_X):
            weight = weight_y * _tap_weight(first_x + tap_x, centre_x, slope_x, width)
            total += weight
            # what lies outside the box weighs nothing; a load without a mask is cheaper
            column = tl.minimum(tl.maximum(first_x + tap_x, 0), width - 1)
            source = image_ptr + (line + column)
            red += weight * tl.load(source).to(tl.float32)
            if CHANNELS == 3:
                green += weight * tl.load(source + H * W).to(tl.float32)
                blue += weight * tl.load(source + 2 * H * W).to(tl.float32)
    scale = 1.0 / (255.0 * total)
    if CHANNELS == 1:
        green, blue = red, red
    return red * scale, green * scale, blue * scale


@triton.jit
def _luminance(red, green, blue, CHANNELS: tl.constexpr):
    if CHANNELS == 1:
        return red
    else:
        return 0.2989 * red + 0.587 * green + 0.114 * blue


@triton.jit
def _turned(hue, largest, spread):
    turned = hue - 6.0 * tl.floor(hue * (1.0 / 6.0))
    return largest - spread * unit(tl.minimum(turned, 4.0 - turned))


@triton.jit
def _shift_hue(red, green, blue, shift):
    """`colour.shift_hue`, where the formula is explained."""
    largest = tl.maximum(tl.maximum(red, green), blue)
    spread = largest - tl.minimum(tl.minimum(red, green), blue)
    opposed = tl.where(green == largest, blue - red, red - green)
    sector = tl.where(green == largest, 2.0, 4.0)
    opposed = tl.where(red == largest, green - blue, opposed)
    sector = tl.where(red == largest, 0.0, sector)
    hue = opposed / tl.maximum(spread, 1e-30) + sector + 6.0 * shift
    return (
        _turned(hue + 5.0, largest, spread),
        _turned(hue + 3.0, largest, spread),
        _turned(hue + 1.0, largest, spread),
    )


@triton.jit
def _jitter(red, green, blue, row, num_places, mean, CHANNELS: tl.constexpr):
    """`colour.jitter`, the first `num_places` of the order; one channel has no hue to turn."""
    for place in range(0, num_places):
        operation = tl.load(row + ORDER + place)
        gain = tl.load(row + GAINS + place)
        if operation == HUE:
            red, green, blue = _shift_hue(red, green, blue, gain)
        else:
            share = tl.where(operation == SATURATION, 1.0 - gain, 0.0)
            constant = tl.where(operation == CONTRAST, (1.0 - gain) * mean, 0.0)
            reference = share * _luminance(red, green, blue, CHANNELS) + constant
            red = unit(gain * red + reference)
            green = unit(gain * green + reference)
            blue = unit(gain * blue + reference)
    return red, green, blue


@triton.jit
def _bytes(images_ptr, index_ptr, image, INDEXED: tl.constexpr, BYTES: tl.constexpr):
    """Where the bytes of the batch's image number `image` begin."""
    position = image.to(tl.int64)
    if INDEXED:
        position = tl.load(index_ptr + image).to(tl.int64)
    return images_ptr + position * BYTES


@triton.jit
def _luminance_kernel(
    images_ptr,
    index_ptr,
    params_ptr,
    sums_ptr,
    INDEXED: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of the luminance that contrast sees, over one block of an image's pixels."""
    program = tl.program_id(0)
    image = program // BLOCKS
    row = params_ptr + image * NUM_FIELDS
    place = tl.load(row + CONTRAST_PLACE).to(tl.int32)
    if tl.load(row + GAINS + place) != 1.0:
        bytes_ptr = _bytes(images_ptr, index_ptr, image, INDEXED, CHANNELS * H * W)
        pixel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        red, green, blue = _resample(bytes_ptr, pixel, row, H, W, CHANNELS, SIZE, TAPS_Y, TAPS_X)
        red, green, blue = _jitter(red, green, blue, row, place, 0.0, CHANNELS)
        luminance = _luminance(red, green, blue, CHANNELS)
        tl.store(sums_ptr + program, tl.sum(tl.where(pixel < SIZE * SIZE, luminance, 0.0), 0))


@triton.jit
def _colour_kernel(
    images_ptr,
    index_ptr,
    params_ptr,
    sums_ptr,
    pixels_ptr,
    INDEXED: tl.constexpr,
    JITTER: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    BLOCKS: tl.constexpr,
    SUMS: tl.constexpr,  # power of two, at least BLOCKS
    BLOCK: tl.constexpr,
):
    """Crop, flip, jitter and grey of one block: float32 [N,C,SIZE,SIZE]."""
    program = tl.program_id(0)
    image = program // BLOCKS
    row = params_ptr + image * NUM_FIELDS
    bytes_ptr = _bytes(images_ptr, index_ptr, image, INDEXED, CHANNELS * H * W)
    pixel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    red, green, blue = _resample(bytes_ptr, pixel, row, H, W, CHANNELS, SIZE, TAPS_Y, TAPS_X)
    if JITTER:
        gain = tl.load(row + GAINS + tl.load(row + CONTRAST_PLACE).to(tl.int32))
        written = tl.where(gain != 1.0, BLOCKS, 0)  # a gain of 1 wrote no sums and needs none
        lane = tl.arange(0, SUMS)
        sums = tl.load(sums_ptr + image * BLOCKS + lane, mask=lane < written, other=0.0)
        mean = tl.sum(sums, 0) / (SIZE * SIZE)
        num_places = tl.load(row + PLACES).to(tl.int32)
        red, green, blue = _jitter(red, green, blue, row, num_places, mean, CHANNELS)
    out = pixels_ptr + image.to(tl.int64) * (CHANNELS * SIZE * SIZE) + pixel
    inside = pixel < SIZE * SIZE
    if CHANNELS == 3:
        is_grey = tl.load(row + GREY) > 0.5
        luminance = _luminance(red, green, blue, CHANNELS)
        tl.store(out, tl.where(is_grey, luminance, red), mask=inside)
        tl.store(out + SIZE * SIZE, tl.where(is_grey, luminance, green), mask=inside)
        tl.store(out + 2 * SIZE * SIZE, tl.where(is_grey, luminance, blue), mask=inside)
    else:
        tl.store(out, red, mask=inside)


def augment_fused(
    augment: Augmentation,
    images: Tensor,  # uint8 [N,C,H,W], or [M,C,H,W] with `index`
    uniforms: Tensor,  # float32 [N,num_uniforms]
    *,
    index: Tensor | None = None,  # int64 [N]: which of M images; not checked on the device
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Tensor:
    """Augment as `augment(images[index], uniforms)`: [N,C,size,size] of `dtype`.

    The gather, the rounding to `dtype` and the memory format that an encoder wants are parts of
    the first and the last pass instead of passes of their own.
    """
    check_images(images)
    count = len(images if index is None else index)
    if len(uniforms) != count:
        raise ValueError(
            f"there must be one row of uniforms per image, got {len(uniforms)} for {count} images; "
            "draw uniforms of shape [N, num_uniforms]"
        )
    (_, channels, height, width), size = images.shape, augment.size
    images = images.contiguous()
    params = fused_params(augment, uniforms, height, width)
    blocks = triton.cdiv(size * size, PIXELS)
    sums = params.new_empty(count, blocks)
    pixels = params.new_empty(count, channels, size, size)
    resampling = {
        "INDEXED": index is not None,
        "H": height,
        "W": width,
        "CHANNELS": channels,
        "SIZE": size,
        "TAPS_Y": math.ceil(2 * max(1.0, height / size)),  # source pixels under the triangle
        "TAPS_X": math.ceil(2 * max(1.0, width / size)),
        "BLOCKS": blocks,
        "BLOCK": PIXELS,
        "enable_fp_fusion": True,
    }
    source = (images, images if index is None else index.contiguous(), params, sums)
    if augment.jitter is not None and augment.jitter[1] > 0:
        _luminance_kernel[(count * blocks,)](*source, **resampling)
    _colour_kernel[(count * blocks,)](
        *source,
        pixels,
        JITTER=augment.jitter is not None,
        SUMS=triton.next_power_of_2(blocks),
        **resampling,
    )
    return blur_fused(augment, pixels, params, dtype, channels_last)
