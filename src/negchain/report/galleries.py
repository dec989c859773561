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


def figure(pixels: Pixels, alt: str, caption: str | None = None, look: str = "") -> str:
    """A picture with HTML below it; `look`: attributes."""
    below = "" if caption is None else f"<figcaption>{caption}</figcaption>"
    return f"<figure{look}>{picture(pixels, alt)}{below}</figure>"


def row(query: str, figures: Sequence[str]) -> str:
    """What was asked, and what was found beside it."""
    return f'<div class="row" style="--n:{len(figures)}">{query}{"".join(figures)}</div>'


def block(lead: str, cards: Iterable[str], look: str = "neighbours") -> str:
    """A sentence or two, and cards below them; empty without cards."""
    shown = "".join(cards)
    return f'<p class="lead">{lead}</p><div class="{look}">{shown}</div>' if shown else ""


def kept(run: Run, rows: int | None, *names: str) -> list[tuple[Any, ...]]:
    """The first rows of arrays that a run kept side by side; none where it lacks one."""
    if not set(names) <= run.artifacts.keys():
        return []
    return list(zip(*(run.artifacts[name][:rows] for name in names), strict=True))


VERDICTS = {True: ("same", "✓ ", ", same label"), False: ("other", "✗ ", ", other label"),
            None: ("unknown", "", "")}  # fmt: skip


class _Near(NamedTuple):
    """A run's pictures Q of queries and N neighbours each; labels -1 where there are none."""

    queries: Pixels  # [Q,C,H,W]
    images: Pixels  # [Q,N,C,H,W]
    wanted: NDArray[Any]  # [Q]
    labels: NDArray[Any]  # [Q,N]
    scores: NDArray[Any]  # [Q,N], NaN: unknown


def _near(run: Run, rows: int | None, columns: int) -> _Near | None:
    """The nearest neighbours a run kept, at most `columns` of each; None without any."""
    art = run.artifacts
    if not {"neighbour_queries", "neighbour_images"} <= art.keys():
        return None
    images = art["neighbour_images"]
    unknown = np.full(images.shape[:2], -1)
    wanted = art.get("neighbour_query_labels", unknown[:, 0]).astype(int)
    labels = art.get("neighbour_labels", unknown).astype(int)
    scores = art.get("neighbour_similarities", np.full(images.shape[:2], np.nan))
    beside = (part[:rows, :columns] for part in (images, labels, scores))
    return _Near(art["neighbour_queries"][:rows], next(beside), wanted[:rows], *beside)


def neighbours(run: Run, rows: int) -> str:
    """Test images, each with its nearest neighbours; empty where the run kept none."""
    if (near := _near(run, rows, 8)) is None:
        return ""
    cards = [row(_query(run, near, q), _found(run, near, q)) for q in range(len(near.queries))]
    known = (near.labels >= 0) & (near.wanted >= 0)[:, None]
    share = ""
    if known.any():
        agree = (near.labels == near.wanted[:, None])[known]
        number = int(agree.sum())
        have = "has" if number == 1 else "have"
        share = (
            f" {number} of the {agree.size} neighbours shown {have} the label of their "
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
    look = f' class="query" title="{escape(name)}"'
    return figure(near.queries[q], alt, escape(shortened(name, 36)), look)


def _found(run: Run, near: _Near, q: int) -> list[str]:
    """Neighbours of one image, each with a mark and its similarity."""
    figures, wanted = [], near.wanted[q]
    for image, label, score in zip(near.images[q], near.labels[q], near.scores[q], strict=True):
        known = wanted >= 0 and label >= 0
        verdict, mark, said = VERDICTS[bool(label == wanted) if known else None]
        text = class_name(run.classes, label) if known else ""
        # a right label is the query's own, so only a wrong one needs its name
        name = f"<small>{escape(shortened(text, 24))}</small>" if verdict == "other" else ""
        similarity = f"{score:.2f}" if np.isfinite(score) else ""
        look = f' class="{verdict}" title="{escape(text)}"'
        figures.append(figure(image, f"neighbour {text}{said}", mark + similarity + name, look))
    return figures


def side_by_side(runs: Sequence[tuple[str, str, Run]]) -> str:
    """The same images with the neighbours each run finds: (label, colour, run); "" without any."""
    shown = [(*entry, near) for entry in runs if (near := _near(entry[2], None, 6)) is not None]
    if not shown:
        return ""
    _, _, first, nearest = shown[0]
    alike = [entry for entry in shown if np.array_equal(entry[3].queries, nearest.queries)]
    count, cards = len(nearest.queries), []
    for q in np.linspace(0, count - 1, min(6, count)).astype(int):
        lines = "".join(
            f'<div class="line" style="--c:{colour}"><span title="{escape(label)}">'
            f"{escape(label)}</span>{''.join(_found(run, near, q))}</div>"
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
    recipe = run.config.get("recipe")
    named = f" (recipe {escape(str(recipe))})" if recipe else ""
    return block(
        f"Training images and views as the encoder gets them{named}, before any normalisation of "
        "the colours. Two views of an image must still show you the same thing; if not, choose a "
        "gentler recipe.",
        (
            row(
                figure(image, "training image", "as stored", ' class="query"'),
                [figure(view, "augmented view") for view in augmented],
            )
            for image, augmented in kept(run, None, "views_original", "views_augmented")
        ),
    )


def chains(run: Run, rows: int) -> str:
    """Training images, each with the negative its chain now holds; empty without chains."""
    pairs = kept(run, rows, "chain_anchors", "chain_negatives")
    scores = run.artifacts.get("chain_similarities", np.full(len(pairs), np.nan))[: len(pairs)]
    return block(
        "Each training image and the negative its Markov chain holds now. Chains prefer negatives "
        "that the encoder confuses with the image.",
        (
            f'<figure>{picture(anchor, "training image")}<span aria-hidden="true">→</span>'
            f"{picture(negative, 'the negative its chain holds')}"
            + (f"<figcaption>similarity {score:.2f}</figcaption>" if np.isfinite(score) else "")
            + "</figure>"
            for (anchor, negative), score in zip(pairs, scores, strict=True)
        ),
        "chains",
    )
