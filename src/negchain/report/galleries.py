"""Pictures for the report: neighbours, chains, augmented views.

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

from .charts import shortened
from .runs import Run

Pictures = NDArray[Any]  # uint8 [..., C, H, W]

_TINY = 40  # px: up to here PNG and hard pixels, beyond JPEG
_LARGEST = 112  # px: twice what the page shows, for dense screens


def as_image(pixels: Pictures) -> Image.Image:  # uint8 [C,H,W]
    """The pixels as a PIL image: grey, RGB, or the first channel of anything else."""
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


def picture(pixels: Pictures, alt: str) -> str:
    """An <img> with the pixels inside."""
    image = as_image(pixels)
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
        f'<div class="row" style="--n:{images.shape[1]}">'
        + _query(run, queries[q], int(wanted[q]))
        + _found(run.classes, int(wanted[q]), images[q], labels[q], scores[q])
        + "</div>"
        for q in range(len(queries))
    ]
    known = (labels >= 0) & (wanted >= 0)[:, None]
    share = ""
    if known.any():
        agree = (labels == wanted[:, None])[known]
        share = (
            f" {int(agree.sum())} of the {agree.size} neighbours shown have the label of their "
            f"{run.query_noun} (✓ in a solid frame); ✗ in a dashed frame marks another label."
        )
    return (
        f'<p class="lead">Each {run.query_noun}, then the images whose embeddings are most '
        f"similar to its own, with the cosine similarity.{share}</p>"
        f'<div class="neighbours">{"".join(cards)}</div>'
    )


def _query(run: Run, query: Pictures, wanted: int) -> str:
    name = class_name(run.classes, wanted) if wanted >= 0 else ""
    alt = ", ".join(text for text in (run.query_noun, name) if text)
    return (
        f'<figure class="query" title="{escape(name)}">{picture(query, alt)}'
        f"<figcaption>{escape(name)}</figcaption></figure>"
    )


def _found(
    classes: Sequence[str],
    wanted: int,
    images: Pictures,
    labels: NDArray[Any],
    scores: NDArray[Any],
) -> str:
    """Neighbours of one image, each with a mark and its similarity."""
    cells = []
    for image, label, score in zip(images, labels, scores, strict=True):
        known = wanted >= 0 and label >= 0
        verdict = ("same" if label == wanted else "other") if known else "unknown"
        text = class_name(classes, int(label)) if known else ""
        said = {"same": ", same label", "other": ", other label", "unknown": ""}[verdict]
        # a right label is the query's own, so only a wrong one needs its name
        mark = {"same": "✓ ", "other": "✗ ", "unknown": ""}[verdict]
        name = f"<small>{escape(shortened(text, 24))}</small>" if verdict == "other" else ""
        similarity = f"{score:.2f}" if np.isfinite(score) else ""
        cells.append(
            f'<figure class="{verdict}" title="{escape(text)}">'
            f"{picture(image, f'neighbour {text}{said}')}"
            f"<figcaption>{mark}{similarity}{name}</figcaption></figure>"
        )
    return "".join(cells)


def side_by_side(runs: Sequence[tuple[str, str, Run]], *, rows: int = 6, columns: int = 6) -> str:
    """The same images with the neighbours each run finds: (label, colour, run); "" without any."""
    needed = {"neighbour_queries", "neighbour_images"}
    shown = [entry for entry in runs if needed <= entry[2].artifacts.keys()]
    if not shown:
        return ""
    queries = shown[0][2].artifacts["neighbour_queries"]
    alike = [e for e in shown if np.array_equal(e[2].artifacts["neighbour_queries"], queries)]
    places = np.linspace(0, len(queries) - 1, min(rows, len(queries))).astype(int)
    cards = []
    for q in places:
        lines = []
        for label, colour, run in alike:
            art = run.artifacts
            images = art["neighbour_images"][q][:columns]
            unknown = np.full(len(images), -1)
            labels = art["neighbour_labels"][q] if "neighbour_labels" in art else unknown
            wanted = art["neighbour_query_labels"][q] if "neighbour_query_labels" in art else -1
            scores = art["neighbour_similarities"][q] if "neighbour_similarities" in art else (
                np.full(len(images), np.nan)
            )  # fmt: skip
            found = _found(run.classes, int(wanted), images, labels[:columns], scores[:columns])
            lines.append(
                f'<div class="line" style="--c:{colour}"><span title="{escape(label)}">'
                f"{escape(label)}</span>{found}</div>"
            )
        first = alike[0][2]
        known = first.artifacts.get("neighbour_query_labels")
        head = _query(first, queries[q], -1 if known is None else int(known[q]))
        cards.append(f'<div class="side">{head}<div>{"".join(lines)}</div></div>')
    left = len(runs) - len(alike)
    more = f" Runs without these pictures are left out ({left})." if left else ""
    return (
        f'<p class="lead">The same {alike[0][2].query_noun}s and the nearest neighbours that the '
        f"first seed of each finds, with the cosine similarity.{more}</p>"
        f'<div class="sides">{"".join(cards)}</div>'
    )


def views(run: Run) -> str:
    """Training images and the augmented views the loss is computed on; empty where none is kept."""
    art = run.artifacts
    if not {"views_original", "views_augmented"} <= art.keys():
        return ""
    rows = [
        f'<div class="row" style="--n:{len(augmented)}"><figure class="query">'
        f"{picture(image, 'training image')}"
        "<figcaption>as stored</figcaption></figure>"
        + "".join(f"<figure>{picture(view, 'augmented view')}</figure>" for view in augmented)
        + "</div>"
        for image, augmented in zip(art["views_original"], art["views_augmented"], strict=True)
    ]
    recipe = run.config.get("recipe")
    named = f" (recipe {escape(str(recipe))})" if recipe else ""
    return (
        f'<p class="lead">Training images and views as the encoder gets them{named}, before any '
        "normalisation of the colours. Two views of an image must still show you the same thing; "
        "if not, choose a gentler recipe.</p>"
        f'<div class="neighbours">{"".join(rows)}</div>'
    )


def chains(run: Run, *, limit: int = 24) -> str:
    """Training images, each with the negative its chain now holds; empty without chains."""
    art = run.artifacts
    if not {"chain_anchors", "chain_negatives"} <= art.keys():
        return ""
    anchors, negatives = art["chain_anchors"][:limit], art["chain_negatives"][:limit]
    scores = art.get("chain_similarities", np.full(len(anchors), np.nan))[:limit]
    pairs = [
        f'<figure>{picture(anchor, "training image")}<span aria-hidden="true">→</span>'
        f"{picture(negative, 'the negative its chain holds')}"
        + (f"<figcaption>similarity {score:.2f}</figcaption>" if np.isfinite(score) else "")
        + "</figure>"
        for anchor, negative, score in zip(anchors, negatives, scores, strict=True)
    ]
    return (
        '<p class="lead">Each training image and the negative its Markov chain holds now. '
        "Chains prefer negatives that the encoder confuses with the image.</p>"
        f'<div class="chains">{"".join(pairs)}</div>'
    )
