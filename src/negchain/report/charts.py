"""Line charts as SVG text, with the numbers a small script needs to answer the pointer.

Drawn by hand, not with matplotlib: so text and colours follow the page's style sheet (dark mode,
narrow screens), pointing at a line reads its values, and a chart takes about 10 kB.

    Chart -> draw(chart, axis) -> (svg, hover)      axis: "samples" | "seconds"
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple

import numpy as np

from negchain.methods import METHODS

from .measures import number, shortened
from .runs import Curve, FloatArray

Axis = Literal["samples", "seconds"]
AXES: tuple[Axis, ...] = ("samples", "seconds")

_Box = tuple[float, float, float, float]  # left, top, right, bottom
_Scale = Callable[[FloatArray], FloatArray]

_DASHES = ("", "7 4", "2 3", "10 3 2 3")
_TOP, _BOTTOM, _LEFT, _RIGHT = 14.0, 38.0, 56.0, 16.0
_LABEL_GAP = 15.0  # px between two direct labels
_MAX_DIRECT_LABELS = 8  # more lines than that are told apart by the legend above the charts


@dataclass(frozen=True)
class Series:
    """One line: a curve, its s.d. over seeds [n] (None: one run), a CSS colour and a dash."""

    label: str
    curve: Curve
    spread: FloatArray | None
    colour: str
    variant: int = 0
    index: int = 0  # what the page's legend calls this line
    chosen: float | None = None  # where on the horizontal axis a point is ringed


@dataclass(frozen=True)
class Chart:
    """A titled set of lines with one unit: "number", "percent" or "count"."""

    key: str
    title: str
    note: str
    unit: str
    series: Sequence[Series]
    width: int = 400
    height: int = 250
    places: Sequence[str] = ()  # names of x = 0.5, 1.5, ... in place of samples or seconds


def method_colour(method: str) -> str:
    """The CSS colour of a method, the same on every page.

    >>> method_colour("emc2")
    'var(--emc2)'
    """
    return f"var(--{method})" if method in METHODS else "var(--other)"


def dash(variant: int) -> str:
    """The dash pattern that tells variants of one method apart, as an SVG attribute."""
    pattern = _DASHES[variant % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def line_key(method: str, variant: int = 0) -> str:
    """A method's line as it looks in the charts."""
    return (
        f'<svg class="key" viewBox="0 0 26 10" style="--c:{method_colour(method)}" '
        f'aria-hidden="true"><path d="M1 5H25"{dash(variant)}/></svg>'
    )


def ticks(low: float, high: float, count: int) -> FloatArray:
    """About `count` round numbers that cover [low, high].

    >>> ticks(0, 9.3, 4).tolist()
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.9)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return np.arange(first, last + 1, dtype=np.float64) * step


class _Line(NamedTuple):
    """A series on an axis: its points [n], finite and in order."""

    series: Series
    x: FloatArray
    y: FloatArray
    spread: FloatArray | None

    def group(self, html: str) -> str:
        """What the page's legend shows and dims."""
        look = f'data-series="{self.series.index}" style="--c:{self.series.colour}"'
        return f'<g class="series" {look}>{html}</g>'


def draw(chart: Chart, axis: Axis) -> tuple[str, dict[str, Any]] | None:
    """The chart's SVG and its hover numbers; None where no line has a point on this axis."""
    lines = [line for series in chart.series if len((line := _line(series, axis)).x)]
    if not lines:
        return None
    named = 1 < len(lines) <= _MAX_DIRECT_LABELS
    # 7.2 px: the mean advance of a bold 12 px system font, widest case
    room = min(170.0, 7.2 * max(len(line.series.label) for line in lines)) if named else 0.0
    box = (_LEFT, _TOP, chart.width - (_RIGHT + room), chart.height - _BOTTOM)
    left, top, right, bottom = box
    y_ticks = _y_ticks(chart.unit, lines)
    x_ticks, x_text, x_name = _x_ticks(axis, max(line.x[-1] for line in lines))
    if count := len(chart.places):
        x_ticks, x_name = np.append(np.arange(count) + 0.5, count), chart.title
        x_text = [*map(escape, _apart(chart.places, (right - left) / count)), ""]
    x_limits, y_limits = (0.0, float(x_ticks[-1])), (float(y_ticks[0]), float(y_ticks[-1]))
    to_x, to_y = _scale(x_limits, (left, right)), _scale(y_limits, (bottom, top))
    parts = [
        f'<svg class="chart" data-chart="{chart.key}-{axis}" role="img" '
        f'viewBox="0 0 {chart.width} {chart.height}" '
        f'style="--crop:{chart.width / (right + _RIGHT):.3f}" '
        f'aria-label="{escape(chart.title)} against {escape(x_name)}"><g class="frame">',
        *(
            f'<path d="M{left:.0f} {place:.1f}H{right:.0f}"/>'
            f'<text x="{left - 8:.0f}" y="{place + 4:.1f}" text-anchor="end">{text}</text>'
            for place, text in zip(to_y(y_ticks), _y_text(chart.unit, y_ticks), strict=True)
        ),
        *(
            f'<text x="{place:.1f}" y="{bottom + 17:.0f}" text-anchor="middle">{text}</text>'
            for place, text in zip(to_x(x_ticks), x_text, strict=True)
        ),
        f'<text class="axis" x="{(left + right) / 2:.0f}" y="{bottom + 34:.0f}" '
        f'text-anchor="middle">{escape(x_name)}</text></g>',
        *(
            line.group(_drawn(line, to_x, to_y, dots=len(lines) <= 3 or bool(chart.places)))
            for line in lines
        ),
        *(
            line.group(_lone(*at, number(line.y[0], chart.unit) * (len(lines) == 1)))
            for line in lines
            for at in zip(to_x(line.x), to_y(line.y), strict=True)
            if len(line.x) == 1
        ),
        _direct_labels(lines, to_x, to_y, box) if named else "",
        '<g class="cursor"></g></svg>',
    ]
    hover = {
        "box": box, "x": x_limits, "y": y_limits, "unit": chart.unit, "axis": axis,
        "places": [*chart.places],
        "series": [
            {"label": series.label, "index": series.index, "colour": series.colour,
             "x": _rounded(x), "y": _rounded(y), "sd": None if sd is None else _rounded(sd)}
            for series, x, y, sd in lines
        ],
    }  # fmt: skip
    return "".join(parts), hover


def _line(series: Series, axis: Axis) -> _Line:
    x = series.curve.samples if axis == "samples" else series.curve.seconds
    good = np.isfinite(x) & np.isfinite(series.curve.values)
    order = np.flatnonzero(good)[np.argsort(x[good], kind="stable")]
    spread = None if series.spread is None else series.spread[order]
    return _Line(series, x[order], series.curve.values[order], spread)


def _scale(limits: tuple[float, float], pixels: tuple[float, float]) -> _Scale:
    """Data to pixels; what is beyond the limits is drawn at them."""
    (low, high), (first, last) = limits, pixels
    return lambda values: first + (np.clip(values, low, high) - low) / (high - low) * (last - first)


def _rounded(values: FloatArray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _y_ticks(unit: str, lines: Sequence[_Line]) -> FloatArray:
    bands = [(y, 0.0 if spread is None else spread) for _, _, y, spread in lines]
    low = float(min(np.min(y - spread) for y, spread in bands))
    high = float(max(np.max(y + spread) for y, spread in bands))
    if unit == "count":
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1.0):
        pad = 0.05 if unit == "percent" else max(abs(high) * 0.1, 1e-3)
        low, high = high - pad, high + pad
    if unit == "percent":
        low, high = max(low, 0.0), min(high, 1.0)
    return ticks(low, high, 4)


def _y_text(unit: str, values: FloatArray) -> list[str]:
    """The labels of ticks [n], with as many digits as the step between them needs."""
    suffix = " %" if unit == "percent" else ""
    if unit == "percent":
        values = values * 100
    step = float(values[-1] - values[0]) / (len(values) - 1)
    if unit == "count" and values[-1] >= 1000:
        return [number(float(value), "count") for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += round(step, decimals) != round(step, decimals + 2)
    if np.abs(values).max() < 0.01:
        texts = [_power(value, decimals) + suffix * bool(value) for value in values]
    else:
        texts = [f"{value + 0.0:.{decimals}f}{suffix}" for value in values]
    return [text.replace("-", "−") for text in texts]


def _power(value: float, decimals: int) -> str:
    """A small number to some decimals, as a multiple of a power of ten.

    >>> _power(0.00123410, 8), _power(-0.002, 4), _power(0.0, 4)
    ('1.2341e-3', '-2e-3', '0')
    """
    if value == 0:
        return "0"
    digits = max(0, decimals + math.floor(math.log10(abs(value)) + 1e-9))
    multiple, power = f"{value:.{digits}e}".split("e")
    return f"{multiple.rstrip('0').rstrip('.') if digits else multiple}e{int(power)}"


def _x_ticks(axis: Axis, end: float) -> tuple[FloatArray, list[str], str]:
    end = end if end > 0 else 1.0
    size, name = 1.0, "samples seen"
    text: Callable[[float], str] = lambda value: number(value, "count")  # noqa: E731
    if axis == "seconds":
        units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
        size, unit = next((u for u in units if end >= 2 * u[0]), units[-1])
        name, text = f"wall-clock time [{unit}]", lambda value: f"{value:.3g}"
    places = ticks(0.0, end / size, 6)
    inner = places[places <= end / size * 1.001]
    labels = [text(float(value)) for value in inner]
    # the frame ends with the data, not at the next round number
    return np.append(inner, end / size) * size, [*labels, ""], name


def _apart(names: Sequence[str], room: float) -> list[str]:
    """Names of places that have `room` px each, shortened or left out so that they do not overlap.

    >>> _apart(["0.0001", "0.0003", "0.0005"], 35), _apart(["models/a-long-name"], 100)
    (['0.0001', '', '0.0005'], ['model…name'])
    """
    size = 9.5  # px of a character on a narrow page, where text is larger
    every = math.ceil(min(10, max(map(len, names))) * size / room)
    fits = int(every * room / size)
    return [shortened(name, fits) if k % every == 0 else "" for k, name in enumerate(names)]


def _path(x: FloatArray, y: FloatArray) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _drawn(line: _Line, to_x: _Scale, to_y: _Scale, *, dots: bool) -> str:
    """A band of one s.d. where there is one, the line, and dots where points and lines are few."""
    x, y, parts = to_x(line.x), to_y(line.y), []
    if line.spread is not None and np.any(line.spread > 0):
        upper, lower = to_y(line.y + line.spread), to_y(line.y - line.spread)
        outline = _path(np.append(x, x[::-1]), np.append(upper, lower[::-1]))
        parts.append(f'<path class="band" d="{outline}Z"/>')
    if len(x) > 1:
        parts.append(f'<path class="line" d="{_path(x, y)}"{dash(line.series.variant)}/>')
    if 1 < len(x) <= 24 and dots:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in zip(x, y, strict=True)]
    for at in np.flatnonzero(line.x == line.series.chosen):
        parts.append(f'<circle class="chosen" cx="{x[at]:.1f}" cy="{y[at]:.1f}" r="6"/>')
    return "".join(parts)


def _lone(x: float, y: float, value: str) -> str:
    """The one point of a curve, with its value: a small dot alone looks like a speck."""
    place, anchor = (x - 9, "end") if x > 100 else (x + 9, "start")
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{place:.1f}" y="{y + 1:.1f}" text-anchor="{anchor}">{value}</text>'
    )


def _direct_labels(lines: Sequence[_Line], to_x: _Scale, to_y: _Scale, box: _Box) -> str:
    """Each line's name right of its end, pushed apart where lines end together."""
    _, top, right, bottom = box
    ends = [to_y(line.y)[-1] for line in lines]
    parts = []
    for line, y, place in zip(lines, ends, spaced(ends, _LABEL_GAP, top, bottom), strict=True):
        x, label = to_x(line.x)[-1], line.series.label
        parts.append(
            f'<g data-series="{line.series.index}" style="--c:{line.series.colour}">'
            f'<path d="M{x + 3:.1f} {y:.1f}H{right + 3:.0f}L{right + 9:.0f} {place:.1f}"/>'
            f'<text x="{right + 13:.0f}" y="{place + 4:.1f}">'
            f"<title>{escape(label)}</title>{escape(shortened(label, 24))}</text></g>"
        )
    return f'<g class="labels">{"".join(parts)}</g>'


def spaced(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to the wanted ones as a gap between neighbours allows, in the same order.

    Labels that crowd become a stack centred on the mean of what they want.

    >>> spaced([10, 11, 50], 10, 0, 100)
    [5.5, 15.5, 50.0]
    """
    from sklearn.isotonic import isotonic_regression  # type: ignore[import-untyped,unused-ignore]

    order, steps = np.argsort(wanted, kind="stable"), gap * np.arange(len(wanted))
    free = np.array(wanted, dtype=np.float64)[order] - steps  # places that must not fall
    places = isotonic_regression(free, y_min=low, y_max=max(low, high - steps[-1])) + steps
    return [float(place) for place in places[np.argsort(order)]]


def strip(values: FloatArray, limits: tuple[float, float], colour: str) -> str:
    """One dot per seed on a line from `limits[0]` to `limits[1]`, with a tick at the mean."""
    span = max(limits[1] - limits[0], 1e-9)
    places = 6 + (values - limits[0]) / span * 108
    dots = "".join(f'<circle cx="{x:.1f}" cy="9" r="4"/>' for x in places)
    mean = "" if len(places) < 2 else f'<path class="mean" d="M{places.mean():.1f} 1V17"/>'
    return (
        f'<svg class="strip" viewBox="0 0 120 18" style="--c:{colour}" aria-hidden="true">'
        f'<path d="M2 9H118"/>{dots}{mean}</svg>'
    )
