"""The numbers of a run: names in the files and on the page, units, which way is better."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric's name in `metrics.jsonl`, on the page, its unit, and whether higher is better."""

    key: str
    name: str
    unit: str
    note: str = ""
    higher: bool = False


def _accuracy(key: str, name: str, note: str) -> Metric:
    return Metric(key, name, "percent", note, higher=True)


KNN1 = _accuracy("knn1", "1-NN accuracy", "Nearest neighbour among the training images")
KNN20 = _accuracy("knn20", "20-NN", "Votes of 20 neighbours, weighted by exp(cosine / 0.07)")
KNN200 = _accuracy("knn200", "200-NN", "Votes of 200 neighbours, weighted by exp(cosine / 0.07)")
PROBE = _accuracy("probe", "Linear probe", "Logistic regression on frozen features")
FEW10 = _accuracy("probe_10pct", "Probe, 10 % of labels", "Mean of 3 draws of the labels")
FEW1 = _accuracy(
    "probe_1pct", "Probe, 1 % of labels", "Mean of 3 draws of the labels, at least one per class"
)
PAPERS = _accuracy("probe_paper", "Probe, the paper’s", "100 epochs of plain SGD, untuned")
KNN20_TOP5 = _accuracy("knn20_top5", "20-NN, top 5", "The class is among the five with most votes")
PROBE_TOP5 = _accuracy("probe_top5", "Probe, top 5", "The class is among the five most likely")
EUCLIDEAN = _accuracy("knn1_euclidean", "1-NN, Euclidean", "Features not normalised")

LOSS = Metric("loss", "Training loss", "number", "What each step minimised")
GLOBAL_LOSS = Metric("global_loss", "Global loss, exact", "number", "On a fixed probe set")
VARIANCE = Metric(
    "embedding_variance", "Embedding variance", "number", "1: spread over the sphere, 0: collapsed"
)
ESTIMATED = Metric(
    "estimated_global_loss", "Global loss, from batches", "number",
    "An estimate from the batches seen, on another scale than the exact loss"
)  # fmt: skip
LOW = Metric("estimated_global_loss_low", "", "number")
HIGH = Metric("estimated_global_loss_high", "", "number")
ACCEPTANCE = Metric(
    "acceptance_rate", "Acceptance rate", "percent", "Share of proposals the chains accept"
)
CARRIED = Metric(
    "carried_mass", "Carried mass", "percent", "Weight on negatives kept from earlier steps"
)
EFFECTIVE = Metric(
    "effective_negatives", "Effective negatives", "count", "Per row, 1 / Σ of squared weights"
)
THROUGHPUT = Metric("images_per_second", "Throughput", "count", "Images per second", higher=True)
RATE = Metric("lr", "Learning rate", "number", "Of the optimizer")
TIME = Metric("seconds", "Time", "seconds")

SECONDARY = (KNN20, KNN200, KNN20_TOP5, PROBE_TOP5, FEW1, FEW10, EUCLIDEAN, PAPERS)
"""Shown in a table below the headline numbers, where they were measured."""

BASELINES = {"untrained": "Untrained encoder", "pixels": "Raw pixels", "chance": "Chance"}
"""What a result is held against, by the prefix of its keys."""
