# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The whole augmentation as four Triton launches: what `Augmentation.sample` and `apply` compute.

    draws --params--> one row of numbers per image
    bytes --crop, jitter before contrast--> pixels and sums of their luminance
    pixels --jitter from contrast on, grey, blur along x--> pixels
    pixels --blur along y, clamp, normalise--> out

A program works on a block of pixels of one image, so what differs between images (the box, the
order of the jitter, the width of the blur) is a scalar of the program and a branch costs nothing.
Contrast needs the mean luminance of all pixels at its place in the order, so one pass ends there:
it leaves one sum per block, which the next adds in a fixed order. Nothing is atomic: equal inputs
give equal bits. In a blur the place of a neighbour is found once for all channels, and four taps
are unrolled: their loads are on their way together, and a program's registers still leave room for
all of a small batch's programs at once.

`Pictures` of their own sizes are read through their offsets and sizes: a program asks for those of
its picture, and averages as many source pixels as its crop needs. Images of one size have theirs
compiled in.

The readable twin, `negchain.augment`, has many more launches, each a pass over memory.
`torch.compile` shortens it but compiles for many seconds, which a short run never earns back. These
kernels compile in seconds, once per shape and machine.

Runs on a GPU, and on a CPU under TRITON_INTERPRET=1 (for tests).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.augment import blur
from negchain.augment.pictures import Images, Pictures
from negchain.augment.pipeline import Augmentation, Uniforms, check_images
from negchain.fast.augment.fused_colour_triton import jitter, luminance, unit
from negchain.fast.augment.fused_params_triton import (
    CONTRAST_PLACE,
    FLIP,
    GREY,
    HEIGHT,
    LEFT,
    NUM_FIELDS,
    PLACES,
    POSITION,
    SIGMA,
    STEP_X,
    STEP_Y,
    TOP,
    WIDTH,
    fused_params,
)
from negchain.fast.backends import on_its_device

PIXELS = 512  # pixels per program: 18 programs for an image of 96 x 96


@triton.jit
def _store(ptr, red, green, blue, inside, CHANNELS: tl.constexpr, NEXT: tl.constexpr):
    """Write the channels of a block of pixels, NEXT apart, in the type of `ptr`."""
    dtype = ptr.dtype.element_ty
    tl.store(ptr, red.to(dtype), mask=inside)
    if CHANNELS == 3:
        tl.store(ptr + NEXT, green.to(dtype), mask=inside)
        tl.store(ptr + 2 * NEXT, blue.to(dtype), mask=inside)


@triton.jit
def _load(ptr, CHANNELS: tl.constexpr, PLANE: tl.constexpr):
    """The channels of a block of planar pixels; thrice the one."""
    red = tl.load(ptr)
    green, blue = red, red
    if CHANNELS == 3:
        green, blue = tl.load(ptr + PLANE), tl.load(ptr + 2 * PLANE)
    return red, green, blue


@triton.jit
def _tap_weight(source, centre, slope, length):
    """The triangle filter of `crop.filter_weights`; `source` counts from the start of the box."""
    weight = 1.0 - tl.abs(source.to(tl.float32) + 0.5 - centre) * slope
    inside = (source >= 0) & (source < length)
    return tl.where(inside, tl.maximum(weight, 0.0), 0.0)


@triton.jit
def _resample(
    image_ptr, y, x, row,
    stride,  # between rows of the source
    plane,  # between its channels
    taps_y,  # source pixels under the triangle, at most
    taps_x, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`crop.resample` before the flip: red, green, blue of pixels (y, x); thrice grey for one."""
    step_y, step_x = tl.load(row + STEP_Y), tl.load(row + STEP_X)
    support_y, support_x = tl.maximum(step_y, 1.0), tl.maximum(step_x, 1.0)
    slope_y, slope_x = 1.0 / support_y, 1.0 / support_x
    centre_y = (y.to(tl.float32) + 0.5) * step_y
    centre_x = (x.to(tl.float32) + 0.5) * step_x
    first_y = tl.floor(centre_y - support_y + 0.5).to(tl.int32)
    first_x = tl.floor(centre_x - support_x + 0.5).to(tl.int32)
    height, width = tl.load(row + HEIGHT).to(tl.int32), tl.load(row + WIDTH).to(tl.int32)
    origin = tl.load(row + TOP).to(tl.int32) * stride + tl.load(row + LEFT).to(tl.int32)
    total = tl.zeros_like(centre_y)
    red, green, blue = total, total, total
    for tap_y in tl.range(0, taps_y, loop_unroll_factor=2):
        weight_y = _tap_weight(first_y + tap_y, centre_y, slope_y, height)
        line = origin + tl.minimum(tl.maximum(first_y + tap_y, 0), height - 1) * stride
        for tap_x in tl.range(0, taps_x, loop_unroll_factor=2):
            weight = weight_y * _tap_weight(first_x + tap_x, centre_x, slope_x, width)
            total += weight
            # what lies outside the box weighs nothing; a load without a mask is cheaper
            column = tl.minimum(tl.maximum(first_x + tap_x, 0), width - 1)
            source = image_ptr + (line + column)
            red += weight * tl.load(source).to(tl.float32)
            if CHANNELS == 3:
                green += weight * tl.load(source + plane).to(tl.float32)
                blue += weight * tl.load(source + 2 * plane).to(tl.float32)
    scale = 1.0 / (255.0 * total)
    if CHANNELS == 1:
        green, blue = red, red
    return red * scale, green * scale, blue * scale


@triton.jit
def _taps(step):
    """Source pixels that one output pixel averages, `step` of them to a pixel."""
    return tl.ceil(2.0 * tl.maximum(step, 1.0)).to(tl.int32)


@triton.jit
def _crop_kernel(
    images_ptr,
    offsets_ptr,  # int64 [M] and int32 [M,2] of `Pictures`, if RAGGED
    sizes_ptr, params_ptr, pixels_ptr, sums_ptr, JITTER: tl.constexpr, RAGGED: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Crop, flip and the jitter before contrast: float32 [N,C,SIZE,SIZE], luminance [N,BLOCKS]."""
    PLANE: tl.constexpr = SIZE * SIZE
    program = tl.program_id(0)
    image = program // BLOCKS
    row = params_ptr + image * NUM_FIELDS
    position = tl.load(row + POSITION).to(tl.int32, bitcast=True)
    pixel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < PLANE
    y = tl.minimum(pixel // SIZE, SIZE - 1)  # pixels past the end are computed and not stored
    x = pixel % SIZE
    place = position.to(tl.int64)
    if RAGGED:
        bytes_ptr = images_ptr + tl.load(offsets_ptr + place)
        stride = tl.load(sizes_ptr + 2 * place + 1)
        plane = tl.load(sizes_ptr + 2 * place) * stride
        taps_y, taps_x = _taps(tl.load(row + STEP_Y)), _taps(tl.load(row + STEP_X))
        red, green, blue = _resample(bytes_ptr, y, x, row, stride, plane, taps_y, taps_x, CHANNELS)
    else:
        bytes_ptr = images_ptr + place * (CHANNELS * H * W)
        red, green, blue = _resample(bytes_ptr, y, x, row, W, H * W, TAPS_Y, TAPS_X, CHANNELS)
    if JITTER:
        contrast = tl.load(row + CONTRAST_PLACE).to(tl.int32)
        last = tl.minimum(contrast, tl.load(row + PLACES).to(tl.int32))
        red, green, blue = jitter(red, green, blue, row, 0, last, 0.0, CHANNELS)
        grey = luminance(red, green, blue, CHANNELS)
        tl.store(sums_ptr + program, tl.sum(tl.where(inside, grey, 0.0), 0))
    # the flip is in the address: that also keeps Triton from giving a thread four pixels in a row,
    # which it would do for the stores' sake, with exchanges between threads around every load
    x = tl.where(tl.load(row + FLIP) > 0.5, SIZE - 1 - x, x)
    out = pixels_ptr + image.to(tl.int64) * (CHANNELS * PLANE) + (y * SIZE + x)
    _store(out, red, green, blue, inside, CHANNELS, PLANE)


@triton.jit
def _blurred(
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
        red, green, blue = red * scale, green * scale, blue * scale
    return red, green, blue


@triton.jit
def _colour_kernel(
    params_ptr, pixels_ptr, sums_ptr, across_ptr, JITTER: tl.constexpr, CHANNELS: tl.constexpr,
    SIZE: tl.constexpr, RADIUS: tl.constexpr,
    SUM_BLOCKS: tl.constexpr,  # sums per image
    SUMS: tl.constexpr,  # power of two, at least SUM_BLOCKS
    BLOCKS: tl.constexpr,
    PIXELS: tl.constexpr,  # whole rows of the image
    BLOCK: tl.constexpr,  # power of two, at least PIXELS
):  # fmt: skip
    """The jitter from contrast on and grey, in place; then the blur along x into `across`."""
    PLANE: tl.constexpr = SIZE * SIZE
    program = tl.program_id(0)
    image = program // BLOCKS
    row = params_ptr + image * NUM_FIELDS
    base = pixels_ptr + image.to(tl.int64) * (CHANNELS * PLANE)
    lane = tl.arange(0, BLOCK)
    # right to left, so that neighbouring threads, not one thread, hold neighbouring pixels: read
    # forwards, Triton gives a thread four in a row, and the blur's loads take four times as long
    x = SIZE - 1 - lane % SIZE
    line = (program % BLOCKS) * PIXELS + (lane // SIZE) * SIZE
    inside = (lane < PIXELS) & (line < PLANE)
    line = tl.minimum(line, PLANE - SIZE)
    own = base + (line + x)
    red, green, blue = _load(own, CHANNELS, PLANE)
    if JITTER:
        block = tl.arange(0, SUMS)
        sums = tl.load(sums_ptr + image * SUM_BLOCKS + block, mask=block < SUM_BLOCKS, other=0.0)
        first = tl.load(row + CONTRAST_PLACE).to(tl.int32)
        last = tl.load(row + PLACES).to(tl.int32)
        mean = tl.sum(sums, 0) / PLANE
        red, green, blue = jitter(red, green, blue, row, first, last, mean, CHANNELS)
    if CHANNELS == 3:
        is_grey = tl.load(row + GREY) > 0.5
        grey = luminance(red, green, blue, CHANNELS)
        red = tl.where(is_grey, grey, red)
        green = tl.where(is_grey, grey, green)
        blue = tl.where(is_grey, grey, blue)
    if RADIUS > 0:
        _store(own, red, green, blue, inside, CHANNELS, PLANE)
        tl.debug_barrier()  # the blur reads what other threads of this program have stored
        sigma = tl.load(row + SIGMA)
        red, green, blue = _blurred(
            red, green, blue, base, line, x, sigma, CHANNELS, SIZE, 1, RADIUS
        )
    out = across_ptr + image.to(tl.int64) * (CHANNELS * PLANE) + (line + x)
    _store(out, red, green, blue, inside, CHANNELS, PLANE)


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
    red, green, blue = _load(own, CHANNELS, PLANE)
    y, x = within // SIZE, within % SIZE
    red, green, blue = _blurred(
        red, green, blue, pixels_ptr + base, x, y, sigma, CHANNELS, SIZE, SIZE, RADIUS
    )
    red = _finished(red, mean_0, std_0, NORMALIZE)
    green = _finished(green, mean_1, std_1, NORMALIZE)
    blue = _finished(blue, mean_2, std_2, NORMALIZE)
    out = out_ptr + base + (pixel * CHANNELS if CHANNELS_LAST else pixel)
    _store(out, red, green, blue, inside, CHANNELS, 1 if CHANNELS_LAST else PLANE)


@on_its_device
def augment_fused(
    augment: Augmentation,
    images: Images,  # N uint8 images, or M with `index`
    drawn: Tensor | Uniforms,  # uniforms float32 [N,num_uniforms]
    *,
    index: Tensor | None = None,  # int64 [N]: which of M images; not checked
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Tensor:
    """Augment as `augment(images[index], drawn)`: [N,C,size,size] of `dtype`.

    The gather, the rounding to `dtype` and the memory format that an encoder wants are parts of
    the first and the last pass instead of passes of their own.
    """
    check_images(images)
    count = len(images if index is None else index)
    if isinstance(drawn, Tensor) and len(drawn) != count:
        raise ValueError(
            f"there must be one row of uniforms per image, {count}, got {len(drawn)}; "
            "draw uniforms of shape [N, num_uniforms]"
        )
    size, radius = augment.size, 0
    if augment.blur_sigma is not None:  # past 6.5 sigma a neighbour weighs below 1e-9
        radius = min(blur.kernel_size(size) // 2, int(6.5 * augment.blur_sigma[1]) + 1)
    if isinstance(images, Pictures):
        channels, height, width = images.channels, size, size
        params = fused_params(augment, drawn, count, images.sizes.contiguous(), index)
        source = (images.pixels, images.offsets.contiguous(), images.sizes.contiguous())
    else:
        _, channels, height, width = images.shape
        params = fused_params(augment, drawn, count, (height, width), index)
        source = (images.contiguous(), params, params)
    mean, std = augment.normalize or ((0.0,) * channels, (1.0,) * channels)
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"normalize must have one mean and one deviation per channel, {channels} of each, got "
            f"{len(mean)} and {len(std)}; give as many as there are channels"
        )
    blocks = triton.cdiv(size * size, PIXELS)
    sums = params.new_empty(count, blocks)
    pixels = params.new_empty(count, channels, size, size)
    shared = {"CHANNELS": channels, "SIZE": size, "enable_fp_fusion": True}
    _crop_kernel[(count * blocks,)](
        *source, params, pixels, sums, JITTER=augment.jitter is not None,
        RAGGED=isinstance(images, Pictures), H=height, W=width,
        TAPS_Y=math.ceil(2 * max(1.0, height / size)),  # source pixels under the triangle
        TAPS_X=math.ceil(2 * max(1.0, width / size)), BLOCKS=blocks, BLOCK=PIXELS, **shared,
    )  # fmt: skip
    rows = max(1, PIXELS // size)
    across = torch.empty_like(pixels) if radius else pixels
    _colour_kernel[(count * triton.cdiv(size, rows),)](
        params, pixels, sums, across, JITTER=augment.jitter is not None, RADIUS=radius,
        SUM_BLOCKS=blocks, SUMS=triton.next_power_of_2(blocks), BLOCKS=triton.cdiv(size, rows),
        PIXELS=rows * size, BLOCK=triton.next_power_of_2(rows * size), **shared,
    )  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=layout)
    padding = (1.0,) * (3 - channels)
    _finish_kernel[(count * blocks,)](
        across, out, params, *(float(number) for number in (*mean, *padding, *std, *padding)),
        RADIUS=radius, NORMALIZE=augment.normalize is not None, CHANNELS_LAST=channels_last,
        BLOCKS=blocks, BLOCK=PIXELS, **shared,
    )  # fmt: skip
    return out
