# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""`Augmentation.sample` as one Triton kernel: uniforms -> a row of numbers per image.

A program makes the parameters of one image, from uniforms in memory or from `Uniforms`, whose hash
it computes itself: the bits of `Uniforms.made` without the launches that would make them. The rows
are what the kernels of `fused_triton` read; the names below say which field is which. Sums and
products round as torch's do (no fused multiply-add), the exponential may differ in its last bits: a
side of a box that lies on a half then rounds the other way, which the tests count.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from negchain.augment import crop
from negchain.augment.pipeline import Augmentation, Uniforms
from negchain.fast.rng_triton import hash_column, hash_row, uniform, use_key
from negchain.rng import seed_key

# Fields of an image's row of numbers; a step is source pixels per output pixel.
TOP, LEFT, HEIGHT, WIDTH, STEP_Y, STEP_X, FLIP, GREY, SIGMA = map(tl.constexpr, range(9))
PLACES = tl.constexpr(9)  # jitter operations: 4, or 0 if the image is left alone
CONTRAST_PLACE = tl.constexpr(10)
ORDER = tl.constexpr(11)  # 4 fields: the operation at each place
GAINS = tl.constexpr(15)  # 4 fields: the factor at each place
POSITION = tl.constexpr(19)  # of the image in its table: the bits of an int32
NUM_FIELDS = tl.constexpr(20)

CONTRAST = tl.constexpr(1)  # numbered as in `colour`; triton reads only its own constants
HUE = tl.constexpr(3)
NUM_TRIES = tl.constexpr(crop.NUM_TRIES)


@triton.jit
def _rounded(x):
    """x >= 0 to the nearest whole number, halves to the even one, as torch.round."""
    whole = tl.floor(x)
    part = x - whole
    odd = whole - 2.0 * tl.floor(whole * 0.5)
    return whole + tl.where((part > 0.5) | ((part == 0.5) & (odd > 0.5)), 1.0, 0.0)


@triton.jit
def _offset(u, slack, central):
    drawn = tl.minimum(tl.floor(u * (slack + 1.0)), slack)
    return tl.where(central, tl.floor(slack * 0.5), drawn)


@triton.jit
def _uniform(u, row_hash, key, column, HASHED: tl.constexpr):
    """One image's uniforms in `column`, a number or a block: hashed, or read at `u`."""
    if HASHED:
        return uniform(row_hash, hash_column(tl.cast(column, tl.uint32), key))
    else:
        return tl.load(u + column)


@triton.jit
def _box(
    u, row_hash, key, full_height, full_width, scale, scale_span, ratio, ratio_span, ratio_min,
    ratio_max, AT: tl.constexpr, HASHED: tl.constexpr,
):  # fmt: skip
    """`crop.sample_box` for the uniforms from column AT on; `ratio` and its span are logarithms."""
    lane = tl.arange(0, 16)
    attempt = AT + tl.minimum(lane, NUM_TRIES - 1)  # lanes past the last attempt repeat it
    share = scale + scale_span * _uniform(u, row_hash, key, attempt, HASHED)
    area = full_height * full_width * share
    log_aspect = ratio + ratio_span * _uniform(u, row_hash, key, attempt + NUM_TRIES, HASHED)
    aspect = tl.exp(log_aspect)
    heights = _rounded(tl.sqrt_rn(tl.div_rn(area, aspect)))
    widths = _rounded(tl.sqrt_rn(area * aspect))
    fits = (heights > 0.0) & (heights <= full_height) & (widths > 0.0) & (widths <= full_width)
    first = tl.min(tl.where(fits, lane, NUM_TRIES), 0)
    central = first == NUM_TRIES
    shape = tl.div_rn(full_width, full_height)
    last_height = _rounded(tl.div_rn(full_width, ratio_min))
    last_height = tl.where(shape < ratio_min, last_height, full_height)
    last_width = tl.where(shape > ratio_max, _rounded(full_height * ratio_max), full_width)
    height = tl.where(central, last_height, tl.sum(tl.where(lane == first, heights, 0.0), 0))
    width = tl.where(central, last_width, tl.sum(tl.where(lane == first, widths, 0.0), 0))
    for_top = _uniform(u, row_hash, key, AT + 2 * NUM_TRIES, HASHED)
    for_left = _uniform(u, row_hash, key, AT + 2 * NUM_TRIES + 1, HASHED)
    top = _offset(for_top, full_height - height, central)
    left = _offset(for_left, full_width - width, central)
    return top, left, height, width


@triton.jit
def _store_jitter(
    u, row_hash, key, row, probability, low_0, low_1, low_2, low_3, span_0, span_1, span_2, span_3,
    AT: tl.constexpr, HASHED: tl.constexpr,
):  # fmt: skip
    """`colour.sample_jitter` for the uniforms from column AT on: order and factors by place."""
    lane = tl.arange(0, 4)
    low = tl.where(lane < 2, tl.where(lane == 0, low_0, low_1), tl.where(lane == 2, low_2, low_3))
    span = tl.where(
        lane < 2, tl.where(lane == 0, span_0, span_1), tl.where(lane == 2, span_2, span_3)
    )
    applied = _uniform(u, row_hash, key, AT, HASHED) < probability
    neutral = tl.where(lane == HUE, 0.0, 1.0)
    drawn = _uniform(u, row_hash, key, AT + 1 + lane, HASHED)
    factor = tl.where(applied, low + span * drawn, neutral)
    place = tl.zeros([4], tl.int32)  # how many sort keys come before an operation's own
    own = _uniform(u, row_hash, key, AT + 5 + lane, HASHED)
    for other in tl.static_range(4):
        theirs = _uniform(u, row_hash, key, AT + 5 + other, HASHED)
        before = (theirs < own) | ((theirs == own) & (other < lane))
        place += tl.where(before, 1, 0)
    tl.store(row + PLACES, tl.where(applied, 4.0, 0.0))
    tl.store(row + CONTRAST_PLACE, tl.sum(tl.where(lane == CONTRAST, place, 0), 0).to(tl.float32))
    tl.store(row + ORDER + place, lane.to(tl.float32))
    tl.store(row + GAINS + place, factor)


@triton.jit
def _params_kernel(
    source_ptr,  # uniforms float32 [N,NUM_UNIFORMS], or the step [] if HASHED
    index_ptr,  # int64 [N] positions of the images, if INDEXED; else image n is at n
    sizes_ptr,  # int32 [M,2] height and width of every picture, if RAGGED
    params_ptr, seed_key, first_row, size, full_height, full_width, scale_low, scale_span,
    ratio_low, ratio_span, ratio_min, ratio_max, jitter_p, low_0, low_1, low_2, low_3, span_0,
    span_1, span_2, span_3, grey_p, blur_p, sigma_low, sigma_span, HASHED: tl.constexpr,
    USE: tl.constexpr, INDEXED: tl.constexpr, RAGGED: tl.constexpr, NUM_UNIFORMS: tl.constexpr,
    CROP_AT: tl.constexpr,  # first column of an operation's uniforms; -1: left out
    FLIP_AT: tl.constexpr, JITTER_AT: tl.constexpr, GREY_AT: tl.constexpr, BLUR_AT: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    u, row_hash, key = source_ptr, 0, 0
    if HASHED:
        key = use_key(seed_key, tl.load(source_ptr), USE)
        row_hash = hash_row(first_row + image, key)
    else:
        u += image * NUM_UNIFORMS
    row = params_ptr + image * NUM_FIELDS
    position = image.to(tl.int32)
    if INDEXED:
        position = tl.load(index_ptr + image).to(tl.int32)
    tl.store(row + POSITION, position.to(tl.float32, bitcast=True))
    top, left, height, width = 0.0, 0.0, full_height, full_width
    if RAGGED:
        own = sizes_ptr + 2 * position.to(tl.int64)
        full_height = tl.load(own).to(tl.float32)
        full_width = tl.load(own + 1).to(tl.float32)
        height = tl.minimum(full_height, full_width)  # the central square, unless there is a crop
        width = height
        top = tl.floor((full_height - height) * 0.5)
        left = tl.floor((full_width - width) * 0.5)
    if CROP_AT >= 0:
        top, left, height, width = _box(
            u, row_hash, key, full_height, full_width, scale_low, scale_span, ratio_low, ratio_span,
            ratio_min, ratio_max, CROP_AT, HASHED,
        )  # fmt: skip
    flip, grey, sigma = 0.0, 0.0, 0.0
    if FLIP_AT >= 0:
        flip = tl.where(_uniform(u, row_hash, key, FLIP_AT, HASHED) < 0.5, 1.0, 0.0)
    if GREY_AT >= 0:
        grey = tl.where(_uniform(u, row_hash, key, GREY_AT, HASHED) < grey_p, 1.0, 0.0)
    if BLUR_AT >= 0:
        drawn = sigma_low + sigma_span * _uniform(u, row_hash, key, BLUR_AT + 1, HASHED)
        sigma = tl.where(_uniform(u, row_hash, key, BLUR_AT, HASHED) < blur_p, drawn, 0.0)
    if JITTER_AT >= 0:
        _store_jitter(
            u, row_hash, key, row, jitter_p, low_0, low_1, low_2, low_3, span_0, span_1, span_2,
            span_3, JITTER_AT, HASHED,
        )  # fmt: skip
    tl.store(row + TOP, top)
    tl.store(row + LEFT, left)
    tl.store(row + HEIGHT, height)
    tl.store(row + WIDTH, width)
    tl.store(row + STEP_Y, tl.div_rn(height, size))
    tl.store(row + STEP_X, tl.div_rn(width, size))
    tl.store(row + FLIP, flip)
    tl.store(row + GREY, grey)
    tl.store(row + SIGMA, sigma)


def fused_params(
    augment: Augmentation,
    drawn: Tensor | Uniforms,  # uniforms float32 [N,U], or where to hash them
    count: int,
    sizes: tuple[int, int] | Tensor,  # height and width of all images, or of each picture [M,2]
    index: Tensor | None = None,  # positions in the table [N]
) -> Tensor:
    """Rows of numbers [N,NUM_FIELDS] for N images: `augment.sample`, as floats.

    Without jitter the fields from PLACES to GAINS are not written.
    """
    if isinstance(drawn, Uniforms):
        source, seed, row, use = drawn.step, seed_key(drawn.seed), drawn.first_row, drawn.use
    else:
        augment.check_uniforms(drawn)
        source, seed, row, use = drawn.contiguous(), 0, 0, 0
    params = torch.empty(count, NUM_FIELDS.value, device=source.device)
    ragged = isinstance(sizes, Tensor)
    height, width = (0, 0) if isinstance(sizes, Tensor) else sizes
    widths = augment.widths()
    first = [
        end - used if used else -1 for end, used in zip(accumulate(widths), widths, strict=True)
    ]
    _params_kernel[(count,)](
        source, source if index is None else index.contiguous(), sizes if ragged else source,
        params, seed, row, *_settings(augment, height, width), isinstance(drawn, Uniforms), use,
        index is not None, ragged, augment.num_uniforms, *first, num_warps=1,
        enable_fp_fusion=False,  # round as torch does
    )  # fmt: skip
    return params


def _settings(augment: Augmentation, height: int, width: int) -> list[float]:
    """The kernel's numbers, in the order of its arguments."""
    scale, ratio = augment.crop_scale or (1.0, 1.0), augment.crop_ratio
    *strengths, hue = augment.jitter or (0.0,) * 4
    limits = [(max(0.0, 1 - limit), 1 + limit) for limit in strengths] + [(-hue, hue)]
    sigma = augment.blur_sigma or (0.0, 0.0)
    numbers = (
        augment.size,
        height,
        width,
        scale[0],
        scale[1] - scale[0],
        math.log(ratio[0]),
        math.log(ratio[1]) - math.log(ratio[0]),
        *ratio,
        augment.jitter_p,
        *(low for low, _ in limits),
        *(high - low for low, high in limits),
        augment.grey_p,
        augment.blur_p,
        sigma[0],
        sigma[1] - sigma[0],
    )
    return [float(number) for number in numbers]
