"""Pictures for the report: neighbours, chains, and the map of the embeddings.

Every picture travels inside the page as a data URI: PNG for tiny images (shown with hard pixels),
JPEG for photographs. Limits keep a typical page under 3 MB.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .runs import Run

Pictures = NDArray[Any]  # uint8 [..., C, H, W]

_TINY = 40  # px: up to here PNG and hard pixels, beyond JPEG
_LARGEST = 112  # px: twice what the page shows, for dense screens
_MAX_POINTS = 3000
_MAX_THUMBS = 1500
_THUMB = 28  # px
_SHEET_COLUMNS = 40
_CLASS_COLOURS = (  # Petroff's 10 colours, ordered for accessibility (arXiv:2107.02270)
    "#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6",
    "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip


def _image(pixels: Pictures) -> Image.Image:  # uint8 [C,H,W]
    channels = pixels.shape[0]
    if channels not in (1, 3, 4):
        pixels, channels = pixels[:1], 1
    if channels == 1:
        return Image.fromarray(np.ascontiguousarray(pixels[0]))
    image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    return image.convert("RGB") if channels == 4 else image


def data_uri(image: Image.Image, *, tiny: bool) -> str:
    """The picture as a data URI: PNG when tiny (JPEG would blur it), else JPEG.

    >>> data_uri(Image.new("L", (8, 8)), tiny=True)[:22]
    'data:image/png;base64,'
    """
    buffer = io.BytesIO()
    if tiny:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=80, optimize=True)
    kind = "png" if tiny else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _img(pixels: Pictures, alt: str) -> str:
    image = _image(pixels)
    tiny = max(image.size) <= _TINY
    image.thumbnail((_LARGEST, _LARGEST))
    look = ' class="tiny"' if tiny else ""
    return f'<img{look} src="{data_uri(image, tiny=tiny)}" alt="{escape(alt)}">'


def class_name(classes: Sequence[str], label: int) -> str:
    """The class's name; "unlabelled" for -1; the number where the list does not reach.

    >>> class_name(["cat", "dog"], 1), class_name([], 7), class_name([], -1)
    ('dog', '7', 'unlabelled')
    """
    if label < 0:
        return "unlabelled"
    return classes[label] if label < len(classes) else str(label)


def neighbours(run: Run, *, rows: int = 16, columns: int = 8) -> str:
    """Test images, each with its nearest neighbours; empty where the run kept none."""
    art = run.artifacts
    if not {"neighbour_queries", "neighbour_images"} <= art.keys():
        return ""
    queries = art["neighbour_queries"][:rows]
    images = art["neighbour_images"][:rows, :columns]
    shown = images.shape[:2]
    unknown = np.full(shown, -1)
    labels = art.get("neighbour_labels", unknown)[:rows, :columns].astype(int)
    wanted = art.get("neighbour_query_labels", unknown[:, 0])[:rows].astype(int)
    scores = art.get("neighbour_similarities", np.full(shown, np.nan))[:rows, :columns]
    cards = [
        _neighbour_row(run.classes, queries[q], int(wanted[q]), images[q], labels[q], scores[q])
        for q in range(len(queries))
    ]
    known = (labels >= 0) & (wanted >= 0)[:, None]
    share = ""
    if known.any():
        agree = (labels == wanted[:, None])[known]
        share = (
            f" {int(agree.sum())} of the {agree.size} neighbours shown have the label of their "
            "test image (✓ in a solid frame); ✗ in a dashed frame marks another label."
        )
    return (
        '<p class="lead">Each test image, then the images whose embeddings are most similar to '
        f"its own, with the cosine similarity.{share}</p>"
        f'<div class="neighbours">{"".join(cards)}</div>'
    )


def _neighbour_row(
    classes: Sequence[str],
    query: Pictures,
    wanted: int,
    images: Pictures,
    labels: NDArray[Any],
    scores: NDArray[Any],
) -> str:
    name = class_name(classes, wanted)
    cells = [
        f'<figure class="query">{_img(query, f"test image, {name}")}'
        f"<figcaption>{escape(name)}</figcaption></figure>"
    ]
    for image, label, score in zip(images, labels, scores, strict=True):
        known = wanted >= 0 and label >= 0
        verdict = ("same" if label == wanted else "other") if known else "unknown"
        text = class_name(classes, int(label)) if known else ""
        said = {"same": ", same label", "other": ", other label", "unknown": ""}[verdict]
        # a right label is the test image's own, so only a wrong one needs its name
        mark = {"same": "✓", "other": f"✗ {text}", "unknown": ""}[verdict]
        similarity = f"<small>{score:.2f}</small>" if np.isfinite(score) else ""
        cells.append(
            f'<figure class="{verdict}" title="{escape(text)}">'
            f"{_img(image, f'neighbour {text}{said}')}"
            f"<figcaption>{escape(mark)} {similarity}</figcaption></figure>"
        )
    return f'<div class="row">{"".join(cells)}</div>'


def chains(run: Run, *, limit: int = 24) -> str:
    """Training images, each with the negative its chain now holds; empty without chains."""
    art = run.artifacts
    if not {"chain_anchors", "chain_negatives"} <= art.keys():
        return ""
    anchors, negatives = art["chain_anchors"][:limit], art["chain_negatives"][:limit]
    scores = art.get("chain_similarities", np.full(len(anchors), np.nan))[:limit]
    pairs = [
        f'<figure>{_img(anchor, "training image")}<span aria-hidden="true">→</span>'
        f"{_img(negative, 'the negative its chain holds')}"
        + (f"<figcaption>similarity {score:.2f}</figcaption>" if np.isfinite(score) else "")
        + "</figure>"
        for anchor, negative, score in zip(anchors, negatives, scores, strict=True)
    ]
    return (
        '<p class="lead">Each training image and the negative its Markov chain holds now. '
        "Chains prefer negatives that the encoder confuses with the image.</p>"
        f'<div class="chains">{"".join(pairs)}</div>'
    )


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
    present = sorted({int(label) for label in labels}, key=lambda label: (label < 0, label))
    colours = {label: _class_colour(label) for label in present}
    dots = "".join(
        _class_dots(label, places[labels == label], colours[label], len(labels))
        for label in present
    )
    names = "".join(
        _class_label(class_name(run.classes, label), label, places[labels == label])
        for label in present
        if label >= 0 and len(present) <= 24
    )
    legend = "".join(
        f'<button type="button" data-class="{label}" style="--c:{colours[label]}">'
        f"{escape(class_name(run.classes, label))} <small>{int((labels == label).sum())}</small>"
        "</button>"
        for label in present
    )
    sheet, size = "", 0
    if thumbs and "map_thumbs" in art:
        sheet, size = _thumb_sheet(art["map_thumbs"][keep])
    style = f' style="--sheet:url({sheet})"' if sheet else ""
    html = (
        f'<div class="map"{style}><svg viewBox="0 0 720 520" role="img" '
        f'aria-label="map of {len(labels)} embeddings in two dimensions">{dots}{names}'
        f'<g class="cursor"></g></svg><div class="legend">{legend}</div></div>'
    )
    hover = {
        "xy": places.round(1).tolist(), "labels": labels.tolist(), "thumb": size,
        "names": {str(label): class_name(run.classes, label) for label in present},
        "columns": _SHEET_COLUMNS, "thumbs": min(len(labels), _MAX_THUMBS) if size else 0,
    }  # fmt: skip
    return html, hover


def _fitted(points: NDArray[Any]) -> NDArray[Any]:
    """Points [P,2] moved and scaled, one scale for both axes, into the 720 x 520 view."""
    low, high = points.min(axis=0), points.max(axis=0)
    span = np.maximum(high - low, 1e-9)
    scale = float(min(690 / span[0], 490 / span[1]))
    centred = (points - (low + high) / 2) * (scale if np.isfinite(scale) else 1.0)
    fitted: NDArray[Any] = centred + np.array([360.0, 260.0])
    return fitted


def _class_colour(label: int) -> str:
    if label < 0:
        return "var(--muted)"
    if label < len(_CLASS_COLOURS):
        return _CLASS_COLOURS[label]
    return f"hsl({label * 137.5 % 360:.0f} 55% {45 + 12 * (label % 3)}%)"  # golden angle


def _class_dots(label: int, places: NDArray[Any], colour: str, total: int) -> str:
    # a zero-length stroke with round caps is a dot: a tenth of the bytes of a <circle>
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    size = 7 if total <= 800 else 5
    return (
        f'<path class="dots" data-class="{label}" d="{dots}" stroke="{colour}" '
        f'stroke-width="{size}"/>'
    )


def _class_label(name: str, label: int, places: NDArray[Any]) -> str:
    x, y = np.median(places, axis=0)
    short = name if len(name) <= 18 else name[:17] + "…"
    return (
        f'<text class="class" data-class="{label}" x="{x:.0f}" y="{y + 5:.0f}" '
        f'text-anchor="middle">{escape(short)}</text>'
    )


def _thumb_sheet(thumbs: Pictures) -> tuple[str, int]:
    """All thumbnails [P,C,h,w] as one picture of 40 a row, and the side of each in pixels."""
    thumbs = thumbs[:_MAX_THUMBS]
    side = min(_THUMB, max(thumbs.shape[-2:]))
    rows = -(-len(thumbs) // _SHEET_COLUMNS)
    sheet = Image.new("RGB", (_SHEET_COLUMNS * side, rows * side))
    for i, thumb in enumerate(thumbs):
        place = (i % _SHEET_COLUMNS * side, i // _SHEET_COLUMNS * side)
        sheet.paste(_image(thumb).convert("RGB").resize((side, side)), place)
    return data_uri(sheet, tiny=side <= 12), side
