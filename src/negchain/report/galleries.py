"""Pixels for the report: neighbours, chains, augmented views.

Every picture travels inside the page as a data URI: PNG for tiny images (shown with hard pixels),
JPEG for photographs. Limits keep a typical page under 3 MB.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .measures import shortened
from .runs import Run

Pixels = NDArray[Any]  # pictures, uint8 [..., C, H, W]

_TINY = 40  # px: up to here PNG and hard pixels, beyond JPEG
_LARGEST = 112  # px: twice what the page shows, for dense screens


def as_image(pixels: Pixels) -> Image.Image:  # uint8 [C,H,W]
    """The pixels as a PIL image: RGB, or the first channel of anything else."""
    if len(pixels) not in (3, 4):
        return Image.fromarray(np.ascontiguousarray(pixels[0]))
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).convert("RGB")


def data_uri(image: Image.Image, *, tiny: bool) -> str:
    """The picture as a data URI: PNG when tiny (JPEG would blur it), else JPEG.

    >>> data_uri(Image.new("L", (8, 8)), tiny=True)[:22]
    'data:image/png;base64,'
    """
    buffer, kind = io.BytesIO(), "png" if tiny else "jpeg"
    image.save(buffer, kind, quality=80, optimize=True)  # a PNG has no quality
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture(pixels: Pixels, alt: str) -> str:
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


def block(lead: str, cards: Iterable[str], look: str = "neighbours") -> str:
    """A sentence or two, and cards below them."""
    return f'<p class="lead">{lead}</p><div class="{look}">{"".join(cards)}</div>'


class _Near(NamedTuple):
    """A run's pictures Q of queries and N neighbours each; labels -1 where there are none."""

    queries: Pixels  # [Q,C,H,W]
    images: Pixels  # [Q,N,C,H,W]
    wanted: NDArray[Any]  # [Q]
    labels: NDArray[Any]  # [Q,N]
    scores: NDArray[Any]  # [Q,N], NaN: unknown


def _near(run: Run, columns: int) -> _Near | None:
    """The nearest neighbours a run kept, at most `columns` of each; None without any."""
    art = run.artifacts
    if not {"neighbour_queries", "neighbour_images"} <= art.keys():
        return None
    images = art["neighbour_images"][:, :columns]
    unknown = np.full(images.shape[:2], -1)
    wanted = art.get("neighbour_query_labels", unknown[:, 0]).astype(int)
    labels = art.get("neighbour_labels", unknown)[:, :columns].astype(int)
    scores = art.get("neighbour_similarities", np.full(images.shape[:2], np.nan))[:, :columns]
    return _Near(art["neighbour_queries"], images, wanted, labels, scores)


def neighbours(run: Run, *, rows: int = 16) -> str:
    """Test images, each with its nearest neighbours; empty where the run kept none."""
    if (near := _near(run, 8)) is None:
        return ""
    near = _Near(*(part[:rows] for part in near))
    cards = [
        f'<div class="row" style="--n:{near.images.shape[1]}">{_query(run, near, q)}'
        f"{_found(run, near, q)}</div>"
        for q in range(len(near.queries))
    ]
    known = (near.labels >= 0) & (near.wanted >= 0)[:, None]
    share = ""
    if known.any():
        agree = (near.labels == near.wanted[:, None])[known]
        share = (
            f" {int(agree.sum())} of the {agree.size} neighbours shown have the label of their "
            f"{run.query_noun} (✓ in a solid frame); ✗ in a dashed frame marks another label."
        )
    return block(
        f"Each {run.query_noun}, then the images whose embeddings are most similar to its own, "
        f"with the cosine similarity.{share}",
        cards,
    )


def _query(run: Run, near: _Near, q: int) -> str:
    name = class_name(run.classes, near.wanted[q]) if near.wanted[q] >= 0 else ""
    alt = ", ".join(text for text in (run.query_noun, name) if text)
    return (
        f'<figure class="query" title="{escape(name)}">{picture(near.queries[q], alt)}'
        f"<figcaption>{escape(shortened(name, 36))}</figcaption></figure>"
    )


_VERDICTS = {"same": ("✓ ", ", same label"), "other": ("✗ ", ", other label"), "unknown": ("", "")}


def _found(run: Run, near: _Near, q: int) -> str:
    """Neighbours of one image, each with a mark and its similarity."""
    cells, wanted = [], near.wanted[q]
    for image, label, score in zip(near.images[q], near.labels[q], near.scores[q], strict=True):
        known = wanted >= 0 and label >= 0
        verdict = ("same" if label == wanted else "other") if known else "unknown"
        text = class_name(run.classes, label) if known else ""
        # a right label is the query's own, so only a wrong one needs its name
        mark, said = _VERDICTS[verdict]
        name = f"<small>{escape(shortened(text, 24))}</small>" if verdict == "other" else ""
        similarity = f"{score:.2f}" if np.isfinite(score) else ""
        cells.append(
            f'<figure class="{verdict}" title="{escape(text)}">'
            f"{picture(image, f'neighbour {text}{said}')}"
            f"<figcaption>{mark}{similarity}{name}</figcaption></figure>"
        )
    return "".join(cells)


def side_by_side(runs: Sequence[tuple[str, str, Run]]) -> str:
    """The same images with the neighbours each run finds: (label, colour, run); "" without any."""
    shown = [(*entry, near) for entry in runs if (near := _near(entry[2], 6)) is not None]
    if not shown:
        return ""
    _, _, first, nearest = shown[0]
    alike = [entry for entry in shown if np.array_equal(entry[3].queries, nearest.queries)]
    count, cards = len(nearest.queries), []
    for q in np.linspace(0, count - 1, min(6, count)).astype(int):
        lines = "".join(
            f'<div class="line" style="--c:{colour}"><span title="{escape(label)}">'
            f"{escape(label)}</span>{_found(run, near, q)}</div>"
            for label, colour, run, near in alike
        )
        cards.append(f'<div class="side">{_query(first, nearest, q)}<div>{lines}</div></div>')
    left = len(runs) - len(alike)
    more = f" Runs without these pictures are left out ({left})." if left else ""
    return block(
        f"The same {first.query_noun}s and the nearest neighbours that the first seed of each "
        f"finds, with the cosine similarity.{more}",
        cards,
        "sides",
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
    return block(
        f"Training images and views as the encoder gets them{named}, before any normalisation of "
        "the colours. Two views of an image must still show you the same thing; if not, choose a "
        "gentler recipe.",
        rows,
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
    return block(
        "Each training image and the negative its Markov chain holds now. Chains prefer negatives "
        "that the encoder confuses with the image.",
        pairs,
        "chains",
    )
