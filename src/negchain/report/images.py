"""What the report shows of runs on images: probes, neighbours, what is mistaken, a map."""

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .embedding_map import embedding_map
from .galleries import chains, class_name, neighbours, views
from .measures import Metric, Shown, shortened
from .runs import Run


def _accuracy(key: str, name: str, note: str, short: str = "") -> Metric:
    return Metric(key, name, "percent", note, higher=True, short=short)


KNN1 = _accuracy("knn1", "1-NN accuracy", "Nearest neighbour among the training images", "1-NN")
KNN20 = _accuracy("knn20", "20-NN", "Votes of 20 neighbours, weighted by exp(cosine / 0.07)")
KNN200 = _accuracy("knn200", "200-NN", "Votes of 200 neighbours, weighted by exp(cosine / 0.07)")
PROBE = _accuracy("probe", "Linear probe", "Logistic regression on frozen features", "probe")
FEW10 = _accuracy("probe_10pct", "Probe, 10 % of labels", "Mean of 3 draws of the labels")
FEW1 = _accuracy(
    "probe_1pct", "Probe, 1 % of labels", "Mean of 3 draws of the labels, at least one per class"
)
PAPERS = _accuracy("probe_paper", "Probe, the authors’", "100 epochs of plain SGD, untuned")
VALIDATED = _accuracy(
    "probe_validation", "Probe, validation",
    "On a fifth of the labelled training images, left out of its fit"
)  # fmt: skip
KNN20_TOP5 = _accuracy("knn20_top5", "20-NN, top 5", "The class is among the five with most votes")
PROBE_TOP5 = _accuracy("probe_top5", "Probe, top 5", "The class is among the five most likely")
EUCLIDEAN = _accuracy("knn1_euclidean", "1-NN, Euclidean", "Features not normalised")


def _pictures(run: Run, small: bool) -> list[tuple[str, str, Any]]:
    """Neighbours, confusions, chains, views and map."""
    titled = [
        ("Nearest neighbours", neighbours(run, 4 if small else 16)),
        ("What is mistaken for what", "" if small else confusion(run)),
        ("What the chains hold", chains(run, 8 if small else 24)),
        ("What the encoder sees", "" if small else views(run)),
    ]
    found = [(title, html, None) for title, html in titled]
    placed = embedding_map(run, thumbs=not small)
    return found if placed is None else [*found, ("Map of the embeddings", *placed)]


SHOWN = Shown(
    noun="images",
    tested="test images",
    lead=(KNN1, PROBE),
    secondary=(VALIDATED, KNN20, KNN200, KNN20_TOP5, PROBE_TOP5, FEW1, FEW10, EUCLIDEAN, PAPERS),
    columns=(KNN1, KNN20, PROBE, FEW10),
    baselines={"untrained": "Untrained encoder", "pixels": "Raw pixels", "chance": "Chance"},
    explained="Raw pixels: the images themselves as features, averaged to at most 16 × 16. "
    "Chance: always the commonest class of the test images. Test images only report: "
    "encoders and settings are chosen without them.",
    pictures=_pictures,
)


_NAMED = 40  # classes that fit with their names; of more, those with most mistakes are shown
_NUMBERED = 12  # classes up to which cells carry counts
_MISTAKES = 12
_SIDE, _CELL = 560.0, 96.0  # px: the square and a cell of it at most
_LETTERS = 22  # of a name beside the matrix
_LETTER = 7.2  # px: the mean advance of a 13 px system font, widest case


def confusion(run: Run) -> str:
    """Which class the probe takes for which: a matrix and a list; "" where no answers were kept."""
    art = run.artifacts
    if not {"test_labels", "probe_predicted"} <= art.keys() or not len(art["test_labels"]):
        return ""
    truth, said = art["test_labels"].astype(int), art["probe_predicted"].astype(int)
    shown = np.unique(np.concatenate([truth, said]))
    counts = np.zeros((len(shown), len(shown)), dtype=int)
    np.add.at(counts, (np.searchsorted(shown, truth), np.searchsorted(shown, said)), 1)
    names = [class_name(run.classes, int(label)) for label in shown]
    wrong = int(len(truth) - np.trace(counts))
    some = ""
    if len(names) > _NAMED:
        some = f" The {_NAMED} of {len(names)} classes with most mistakes."
    return (
        '<p class="lead">The linear probe on the test images. Rows are true classes, columns the '
        f"answers; the stronger the colour, the larger the share of the row.{some} "
        f"{wrong} of {len(truth)} answers {'is' if wrong == 1 else 'are'} wrong.</p>"
        f'<div class="confusion"><div class="card">{_matrix(counts, names)}</div>'
        f'<div class="card"><h3>Commonest mistakes</h3>{_mistakes(counts, names)}</div></div>'
    )


def _matrix(counts: NDArray[np.int_], names: list[str]) -> str:
    totals = np.maximum(counts.sum(1), 1)
    mistakes = counts.sum(0) + counts.sum(1) - 2 * np.diag(counts)
    shown = np.sort(np.argsort(-mistakes, kind="stable")[:_NAMED])
    counts, totals, names = counts[np.ix_(shown, shown)], totals[shown], [names[i] for i in shown]
    number = len(names)
    side = min(_SIDE, _CELL * number)  # two classes fit on a phone
    cell = side / number
    longest = _LETTER * min(_LETTERS, max(map(len, names)))
    margin, upright = 14 + longest, longest > cell
    top = margin if upright else 24.0
    parts = [
        f'<svg viewBox="0 0 {margin + side:.0f} {top + side:.0f}" role="img" '
        f'style="--w:{margin + side:.0f}px" aria-label="confusion matrix of {number} classes">'
        f'<path class="edge" d="M{margin:.1f} {top:.1f}h{side:.0f}v{side:.0f}h-{side:.0f}z"/>'
    ]
    for row, column in zip(*np.nonzero(counts), strict=True):
        count, share = counts[row, column], counts[row, column] / totals[row]
        x, y = margin + column * cell, top + row * cell
        look = "right" if row == column else "wrong"
        parts.append(
            f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}" '
            f'fill-opacity="{0.12 + 0.88 * share:.2f}"><title>{escape(names[row])} → '
            f"{escape(names[column])}: {count} of {totals[row]}</title></rect>"
        )
        if number <= _NUMBERED:
            strong = " strong" if share > 0.5 else ""
            parts.append(
                f'<text class="count{strong}" x="{x + cell / 2:.1f}" y="{y + cell / 2 + 5:.1f}" '
                f'text-anchor="middle">{count}</text>'
            )
    size = min(13.0, 0.9 * cell)
    for i, name in enumerate(names):
        short = escape(shortened(name, _LETTERS))
        across, down = margin + (i + 0.5) * cell, top + (i + 0.5) * cell
        look = f'class="name" font-size="{size:.1f}"'
        above = f'x="{across:.1f}" y="{top - 6:.1f}" text-anchor="middle"'
        if upright:
            above = f'transform="translate({across + size / 3:.1f} {top - 6:.1f}) rotate(-90)"'
        parts.append(
            f'<text {look} x="{margin - 6:.1f}" y="{down + size / 3:.1f}" '
            f'text-anchor="end">{short}</text><text {look} {above}>{short}</text>'
        )
    return "".join(parts) + "</svg>"


def _mistakes(counts: NDArray[np.int_], names: list[str]) -> str:
    off = counts - np.diag(np.diag(counts))
    order = np.argsort(-off, axis=None, kind="stable")[:_MISTAKES]
    totals = counts.sum(1)
    rows = [
        f"<tr><th>{escape(names[row])} <small>taken for</small> {escape(names[column])}</th>"
        f"<td>{off[row, column]} of {totals[row]} "
        f"<small>({100 * off[row, column] / totals[row]:.0f} %)</small></td></tr>"
        for row, column in zip(*np.unravel_index(order, off.shape), strict=True)
        if off[row, column]
    ]
    if not rows:
        return "<p>None.</p>"
    return f'<table class="settings mistakes">{"".join(rows)}</table>'
