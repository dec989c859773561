"""What the report shows of runs on images: probes, neighbours, what is mistaken, a map."""

from __future__ import annotations

from typing import Any

from .confusion import confusion
from .embedding_map import embedding_map
from .galleries import chains, neighbours, views
from .measures import Metric, Shown
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
PAPERS = _accuracy("probe_paper", "Probe, the paper’s", "100 epochs of plain SGD, untuned")
KNN20_TOP5 = _accuracy("knn20_top5", "20-NN, top 5", "The class is among the five with most votes")
PROBE_TOP5 = _accuracy("probe_top5", "Probe, top 5", "The class is among the five most likely")
EUCLIDEAN = _accuracy("knn1_euclidean", "1-NN, Euclidean", "Features not normalised")


def _pictures(run: Run, small: bool) -> list[tuple[str, str, Any]]:
    """Neighbours, confusions, chains, views and map."""
    near = neighbours(run, rows=4) if small else neighbours(run)
    held = chains(run, limit=8) if small else chains(run)
    titled = [("Nearest neighbours", near), ("What the chains hold", held)]
    if not small:
        titled.insert(1, ("What is mistaken for what", confusion(run)))
        titled.append(("What the encoder sees", views(run)))
    found = [(title, html, None) for title, html in titled]
    placed = embedding_map(run, thumbs=not small)
    return found if placed is None else [*found, ("Map of the embeddings", *placed)]


SHOWN = Shown(
    noun="images",
    tested="test images",
    lead=(KNN1, PROBE),
    secondary=(KNN20, KNN200, KNN20_TOP5, PROBE_TOP5, FEW1, FEW10, EUCLIDEAN, PAPERS),
    columns=(KNN1, KNN20, PROBE, FEW10),
    baselines={"untrained": "Untrained encoder", "pixels": "Raw pixels", "chance": "Chance"},
    explained="Raw pixels: the images themselves as features, averaged to at most 16 × 16. "
    "Chance: always the commonest class.",
    pictures=_pictures,
)
