"""The map of the embeddings: a dot per image, names where there is room, a legend."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from negchain.printable import counted

from .galleries import Pixels, as_image, class_name, data_uri
from .measures import shortened
from .runs import Run

_WIDTH, _HEIGHT = 720, 520
_MAX_POINTS = 3000
_MAX_THUMBS = 1500
_THUMB = 28  # px
_SHEET_COLUMNS = 40
_MOST_NAMES = 20  # on the map: more would hide the dots
_LETTER = 0.7  # advance of a bold letter per font size, widest case
_MANY = 30  # classes: from here on the legend can be searched
_CLASS_COLOURS = (  # Petroff's 10 colours, ordered for accessibility (arXiv:2107.02270)
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6",
    "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
_METHODS = {
    "t-SNE": "Placed by t-SNE (of the first 50 principal components of the unit features): near "
    "dots have similar embeddings, distances between far groups mean nothing.",
    "PCA": "Placed by PCA: the two directions in which the unit features vary most.",
}


class _Class(NamedTuple):
    """A class on the map: its dots [P,2] in the view."""

    label: int
    name: str
    colour: str
    dots: NDArray[Any]


def embedding_map(run: Run, *, thumbs: bool = True) -> tuple[str, dict[str, Any]] | None:
    """The 2-D map as SVG with a legend, and its hover numbers; None where the run kept none."""
    art = run.artifacts
    if "map_xy" not in art:
        return None
    finite = np.flatnonzero(np.isfinite(art["map_xy"]).all(axis=1))
    if not len(finite):
        return None
    keep = finite[np.linspace(0, len(finite) - 1, min(len(finite), _MAX_POINTS)).astype(int)]
    places = _fitted(art["map_xy"][keep].astype(np.float64))
    labels = art.get("map_labels", np.full(len(art["map_xy"]), -1))[keep].astype(int)
    named = np.unique(labels[labels >= 0]).tolist()
    colours = [*zip(named, class_colours(len(named)), strict=True), (-1, "var(--muted)")]
    every = [
        _Class(label, class_name(run.classes, label), colour, dots)
        for label, colour in colours
        if len(dots := places[labels == label if label >= 0 else labels < 0])
    ]
    # a zero-length stroke with round caps is a dot: a tenth of the bytes of a <circle>
    dots = "".join(
        f'<path class="dots" data-class="{one.label}" '
        f'd="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in one.dots)}" '
        f'stroke="{one.colour}" stroke-width="{7 if len(labels) <= 800 else 5}"/>'
        for one in every
    )
    texts = "".join(
        f'<g class="names{look}">{_class_labels(every[: len(named)], size)}</g>'
        for look, size in (("", 15.0), (" large", 26.0))
    )
    legend = _legend(every) if named else ""
    sheet, size = "", 0
    if thumbs and "map_thumbs" in art:
        sheet, size = _thumb_sheet(art["map_thumbs"][keep])
    style = f' style="--sheet:url({sheet})"' if sheet else ""
    html = (
        f'<p class="lead">{_explained(run, bool(named), len(named))}</p>'
        f'<div class="map{"" if legend else " bare"}"{style}><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="map of {counted(len(labels), "embedding", "embeddings")} in two '
        f'dimensions">{dots}{texts}'
        f'<g class="cursor"></g></svg>{legend}</div>'
    )
    hover = {
        "xy": places.round(1).tolist(), "labels": labels.tolist(), "thumb": size,
        "names": {str(one.label): one.name if named else "" for one in every},
        "columns": _SHEET_COLUMNS, "thumbs": min(len(labels), _MAX_THUMBS) if size else 0,
    }  # fmt: skip
    return html, hover


def _fitted(points: NDArray[Any]) -> NDArray[Any]:
    """Points [P,2] moved and scaled, one scale for both axes, into the view."""
    low, high, view = points.min(axis=0), points.max(axis=0), np.array([_WIDTH, _HEIGHT])
    scale = ((view - 30) / np.maximum(high - low, 1e-9)).min()
    fitted: NDArray[Any] = (points - (low + high) / 2) * scale + view / 2
    return fitted


def _explained(run: Run, labelled: bool, count: int) -> str:
    method = str(run.artifacts.get("map_method", ""))
    how = _METHODS.get(method, "Near dots have similar embeddings.")
    choose = " Choose a class to see it alone." if labelled else ""
    if count > 2 * len(_CLASS_COLOURS):
        choose = (
            f" {count} colours cannot all be told apart: choose a class to see it alone, or point "
            "at a dot to read its name."
        )
    return f"Each dot is an image. {how}{choose}"


def class_colours(count: int) -> list[str]:
    """A CSS colour per class: Petroff's ten, beyond that hues by the golden angle.

    Neighbours in the list differ in hue and lightness; all keep contrast on light and dark.

    >>> class_colours(2), len(set(class_colours(200)))
    (['#3f90da', '#ffa90e'], 200)
    """
    if count <= len(_CLASS_COLOURS):
        return list(_CLASS_COLOURS[:count])
    return [
        f"oklch({(58, 72, 47)[i % 3]}% {(0.15, 0.12, 0.13)[i % 3]} {i * 137.508 % 360:.1f})"
        for i in range(count)
    ]


def _legend(classes: Sequence[_Class]) -> str:
    buttons = "".join(
        f'<button type="button" data-class="{label}" style="--c:{colour}" '
        f'title="{escape(name)}"><span>{escape(shortened(name, 22))}</span> '
        f"<small>{len(dots)}</small></button>"
        for label, name, colour, dots in classes
    )
    search = (
        '<input type="search" placeholder="Find a class" aria-label="Find a class">'
        if len(classes) > _MANY
        else ""
    )
    return f'<div class="choices">{search}<div class="legend">{buttons}</div></div>'


def _class_labels(classes: Sequence[_Class], size: float) -> str:
    """Names in the middle of their dots, largest class first; what finds no room is left out."""
    texts, taken = [], list[NDArray[Any]]()
    for label, name, _, dots in sorted(classes, key=lambda one: -len(one.dots))[:_MOST_NAMES]:
        short = shortened(name, 16)
        half = np.array([_LETTER * size * len(short), 1.25 * size]) / 2
        middle = np.clip(np.median(dots, axis=0), half, (_WIDTH, _HEIGHT) - half)
        box = np.array([middle - half, middle + half])  # left and top, right and bottom
        if any((box[0] < other[1]).all() and (other[0] < box[1]).all() for other in taken):
            continue
        taken.append(box)
        texts.append(
            f'<text class="class" data-class="{label}" x="{middle[0]:.0f}" '
            f'y="{box[1, 1] - 0.3 * size:.0f}" text-anchor="middle">{escape(short)}</text>'
        )
    return "".join(texts)


def _thumb_sheet(thumbs: Pixels) -> tuple[str, int]:
    """All thumbnails [P,C,h,w] as one picture of 40 a row, and the side of each in pixels."""
    thumbs = thumbs[:_MAX_THUMBS]
    side = min(_THUMB, max(thumbs.shape[-2:]))
    rows = -(-len(thumbs) // _SHEET_COLUMNS)
    sheet = Image.new("RGB", (_SHEET_COLUMNS * side, rows * side))
    for i, thumb in enumerate(thumbs):
        place = (i % _SHEET_COLUMNS * side, i // _SHEET_COLUMNS * side)
        sheet.paste(as_image(thumb).convert("RGB").resize((side, side)), place)
    return data_uri(sheet, tiny=side <= 12), side
