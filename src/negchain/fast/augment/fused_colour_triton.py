# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Colours of a block of pixels, channel by channel: what `negchain.augment.colour` computes."""

from __future__ import annotations

import triton
import triton.language as tl

from negchain.fast.augment.fused_params_triton import CONTRAST, GAINS, HUE, ORDER

SATURATION = tl.constexpr(2)


@triton.jit
def unit(x):
    """Clamp to [0,1]."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def luminance(red, green, blue, CHANNELS: tl.constexpr):
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
def jitter(red, green, blue, row, first, last, mean, CHANNELS: tl.constexpr):
    """`colour.jitter`, places `first` to `last` - 1; one channel has no hue to turn."""
    for place in range(first, last):
        operation = tl.load(row + ORDER + place)
        gain = tl.load(row + GAINS + place)
        if operation == HUE:
            red, green, blue = _shift_hue(red, green, blue, gain)
        else:
            share = tl.where(operation == SATURATION, 1.0 - gain, 0.0)
            constant = tl.where(operation == CONTRAST, (1.0 - gain) * mean, 0.0)
            reference = share * luminance(red, green, blue, CHANNELS) + constant
            red = unit(gain * red + reference)
            green = unit(gain * green + reference)
            blue = unit(gain * blue + reference)
    return red, green, blue
