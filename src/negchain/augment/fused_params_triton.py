# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""`Augmentation.sample` as one Triton kernel: uniforms [N,U] -> a row of numbers per image.

A program draws the parameters of one image. The rows are what the kernels of `fused_triton` read;
the names below say which field is which. Sums and products round as torch's do (no fused
multiply-add), the exponential may differ in its last bits: a side of a box that lies on a half then
rounds the other way, which the tests count.
"""

from __future__ import annotations

import math
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from negchain.augment import crop
from negchain.augment.pipeline import Augmentation

# Fields of an image's row of numbers.
TOP = tl.constexpr(0)
LEFT = tl.constexpr(1)
HEIGHT = tl.constexpr(2)
WIDTH = tl.constexpr(3)
STEP_Y = tl.constexpr(4)  # source pixels per output pixel
STEP_X = tl.constexpr(5)
FLIP = tl.constexpr(6)
GREY = tl.constexpr(7)
SIGMA = tl.constexpr(8)
PLACES = tl.constexpr(9)  # jitter operations: 4, or 0 if the image is left alone
CONTRAST_PLACE = tl.constexpr(10)
ORDER = tl.constexpr(11)  # 4 fields: the operation at each place
GAINS = tl.constexpr(15)  # 4 fields: the factor at each place
NUM_FIELDS = tl.constexpr(19)

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
def _offset(uniform, slack, central):
    drawn = tl.minimum(tl.floor(uniform * (slack + 1.0)), slack)
    return tl.where(central, tl.floor(slack * 0.5), drawn)


@triton.jit
def _box(u, full_height, full_width, last_height, last_width, scale, scale_span, ratio, ratio_span):
    """`crop.sample_box` for the uniforms at `u`."""
    lane = tl.arange(0, 16)
    is_try = lane < NUM_TRIES
    share = scale + scale_span * tl.load(u + lane, mask=is_try, other=0.0)
    area = full_height * full_width * share
    aspect = tl.exp(ratio + ratio_span * tl.load(u + NUM_TRIES + lane, mask=is_try, other=0.0))
    heights = _rounded(tl.sqrt_rn(tl.div_rn(area, aspect)))
    widths = _rounded(tl.sqrt_rn(area * aspect))
    fits = (heights > 0.0) & (heights <= full_height) & (widths > 0.0) & (widths <= full_width)
    first = tl.min(tl.where(fits & is_try, lane, NUM_TRIES), 0)
    central = first == NUM_TRIES
    height = tl.where(central, last_height, tl.sum(tl.where(lane == first, heights, 0.0), 0))
    width = tl.where(central, last_width, tl.sum(tl.where(lane == first, widths, 0.0), 0))
    top = _offset(tl.load(u + 2 * NUM_TRIES), full_height - height, central)
    left = _offset(tl.load(u + 2 * NUM_TRIES + 1), full_width - width, central)
    return top, left, height, width


@triton.jit
def _store_jitter(u, row, probability, low_0, low_1, low_2, low_3, span_0, span_1, span_2, span_3):
    """`colour.sample_jitter` for the uniforms at `u`: order and factors by place."""
    lane = tl.arange(0, 4)
    low = tl.where(lane < 2, tl.where(lane == 0, low_0, low_1), tl.where(lane == 2, low_2, low_3))
    span = tl.where(
        lane < 2, tl.where(lane == 0, span_0, span_1), tl.where(lane == 2, span_2, span_3)
    )
    applied = tl.load(u) < probability
    neutral = tl.where(lane == HUE, 0.0, 1.0)
    factor = tl.where(applied, low + span * tl.load(u + 1 + lane), neutral)
    place = tl.zeros([4], tl.int32)  # how many sort keys come before an operation's own
    key = tl.load(u + 5 + lane)
    for other in tl.static_range(4):
        other_key = tl.load(u + 5 + other)
        before = (other_key < key) | ((other_key == key) & (other < lane))
        place += tl.where(before, 1, 0)
    tl.store(row + PLACES, tl.where(applied, 4.0, 0.0))
    tl.store(row + CONTRAST_PLACE, tl.sum(tl.where(lane == CONTRAST, place, 0), 0).to(tl.float32))
    tl.store(row + ORDER + place, lane.to(tl.float32))
    tl.store(row + GAINS + place, factor)


@triton.jit
def _params_kernel(
    uniforms_ptr,
    params_ptr,
    size,
    full_height,
    full_width,
    last_height,
    last_width,
    scale_low,
    scale_span,
    ratio_low,
    ratio_span,
    jitter_p,
    low_0,
    low_1,
    low_2,
    low_3,
    span_0,
    span_1,
    span_2,
    span_3,
    grey_p,
    blur_p,
    sigma_low,
    sigma_span,
    NUM_UNIFORMS: tl.constexpr,
    CROP_AT: tl.constexpr,  # first column of an operation's uniforms; -1: left out
    FLIP_AT: tl.constexpr,
    JITTER_AT: tl.constexpr,
    GREY_AT: tl.constexpr,
    BLUR_AT: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    u = uniforms_ptr + image * NUM_UNIFORMS
    row = params_ptr + image * NUM_FIELDS
    top, left, height, width = 0.0, 0.0, full_height, full_width
    if CROP_AT >= 0:
        top, left, height, width = _box(
            u + CROP_AT,
            full_height,
            full_width,
            last_height,
            last_width,
            scale_low,
            scale_span,
            ratio_low,
            ratio_span,
        )
    flip, grey, sigma = 0.0, 0.0, 0.0
    if FLIP_AT >= 0:
        flip = tl.where(tl.load(u + FLIP_AT) < 0.5, 1.0, 0.0)
    if GREY_AT >= 0:
        grey = tl.where(tl.load(u + GREY_AT) < grey_p, 1.0, 0.0)
    if BLUR_AT >= 0:
        drawn = sigma_low + sigma_span * tl.load(u + BLUR_AT + 1)
        sigma = tl.where(tl.load(u + BLUR_AT) < blur_p, drawn, 0.0)
    if JITTER_AT >= 0:
        _store_jitter(
            u + JITTER_AT,
            row,
            jitter_p,
            low_0,
            low_1,
            low_2,
            low_3,
            span_0,
            span_1,
            span_2,
            span_3,
        )
    tl.store(row + TOP, top)
    tl.store(row + LEFT, left)
    tl.store(row + HEIGHT, height)
    tl.store(row + WIDTH, width)
    tl.store(row + STEP_Y, tl.div_rn(height, size))
    tl.store(row + STEP_X, tl.div_rn(width, size))
    tl.store(row + FLIP, flip)
    tl.store(row + GREY, grey)
    tl.store(row + SIGMA, sigma)


def fused_params(augment: Augmentation, uniforms: Tensor, height: int, width: int) -> Tensor:
    """Rows of numbers [N,NUM_FIELDS] for N images of height x width: `augment.sample`, as floats.

    Without jitter the fields from PLACES on are not written.
    """
    augment.check_uniforms(uniforms)
    params = uniforms.new_empty(len(uniforms), NUM_FIELDS.value)
    scale, ratio = augment.crop_scale or (1.0, 1.0), augment.crop_ratio
    *strengths, hue = augment.jitter or (0.0,) * 4
    limits = [(max(0.0, 1 - limit), 1 + limit) for limit in strengths] + [(-hue, hue)]
    sigma = augment.blur_sigma or (0.0, 0.0)
    widths = augment.widths()
    first = [
        end - used if used else -1 for end, used in zip(accumulate(widths), widths, strict=True)
    ]
    settings = (
        augment.size,
        height,
        width,
        *crop._central_box(height, width, ratio),
        scale[0],
        scale[1] - scale[0],
        math.log(ratio[0]),
        math.log(ratio[1]) - math.log(ratio[0]),
        augment.jitter_p,
        *(low for low, _ in limits),
        *(high - low for low, high in limits),
        augment.grey_p,
        augment.blur_p,
        sigma[0],
        sigma[1] - sigma[0],
    )
    _params_kernel[(len(uniforms),)](
        uniforms.contiguous(),
        params,
        *(float(number) for number in settings),
        augment.num_uniforms,
        *first,
        num_warps=1,
        enable_fp_fusion=False,  # round as torch does
    )
    return params
