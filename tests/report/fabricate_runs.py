"""Run folders as the tool writes them, made up in milliseconds: realistic curves, real digits.

`python tests/report/fabricate_runs.py DIR` writes a set to look at.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

# final 1-NN, images per second: orders of magnitude of a digits run
_METHODS = {
    "infonce": (0.951, 9800.0),
    "dcl": (0.957, 9700.0),
    "sogclr": (0.962, 9500.0),
    "negcache": (0.955, 6100.0),
    "emc2": (0.974, 7600.0),
    "isir": (0.971, 8100.0),
}
CHAINED = ("emc2", "isir")


def make_config(method: str = "emc2", seed: int = 0, **options: Any) -> dict[str, Any]:
    config = {
        "method": method, "data": "digits", "batch_size": 32, "epochs": 20, "steps": None,
        "beta": 14.28, "burn_in": 0.5, "carried": "encode", "denominator": "negatives",
        "encoder": "smallcnn", "norm": "none", "optimizer": "adam", "lr": 0.001, "seed": seed,
        "device": "cpu", "preset": None, "out": f"runs/{method}-{seed}",
        "versions": {"python": "3.12.3", "torch": "2.11.0", "negchain": "0.1.0"},
        "hardware": "2 cores, no GPU", "commit": "0123abc",
        "data_info": {"num_samples": 1438, "train": 1438, "test": 359,
                      "classes": [str(i) for i in range(10)], "skipped": []},
    }  # fmt: skip
    return {**config, **options}


def make_metrics(config: dict[str, Any], every: int = 4, steps: int = 900) -> list[dict[str, Any]]:
    method, seed = config["method"], config["seed"]
    top, speed = _METHODS[method]
    draws = np.random.default_rng([seed, sorted(_METHODS).index(method)])
    top += 0.004 * draws.standard_normal()
    rate = 150 * np.exp(0.15 * draws.standard_normal())
    speed *= np.exp(0.05 * draws.standard_normal())
    lines: list[dict[str, Any]] = []
    start = {"knn1": 0.921, "probe": 0.87, "global_loss": 7.4, "embedding_variance": 0.08}
    base = {"chance": 0.1, "pixels_knn1": 0.958, "pixels_probe": 0.93}
    lines.append({"step": 0, "epoch": 0.0, "samples": 0, "seconds": 0.0, **start, **base})
    for step in range(every, steps + 1, every):
        progress = 1 - np.exp(-step / rate)
        samples = step * config["batch_size"]
        noise = 0.1 * draws.standard_normal()
        line = {
            "step": step, "epoch": samples / 1438, "samples": samples, "seconds": samples / speed,
            "loss": 4.2 - 3.1 * progress + noise,
            "lr": 1e-3 * (1 + np.cos(np.pi * step / steps)) / 2,
            "estimated_global_loss_low": 4.9 - 3.3 * progress + noise,
            "samples_per_second": speed * (1 + 0.02 * draws.standard_normal()),
        }  # fmt: skip
        if method in CHAINED:
            line["estimated_global_loss_high"] = 5.2 - 2.6 * progress + noise
            line["carried_mass"] = 0.04 + 0.3 * progress + 0.02 * draws.standard_normal()
            line["effective_negatives"] = 22 - 14 * progress + draws.standard_normal()
        if method == "emc2":
            line["acceptance_rate"] = 0.7 - 0.5 * progress + 0.02 * draws.standard_normal()
        lines.append(line)
        if step % 60 == 0:
            lines.append({
                "step": step, "samples": samples, "seconds": samples / speed,
                "knn1": 0.72 + (top - 0.72) * progress, "probe": 0.66 + (top - 0.68) * progress,
                "global_loss": 5.0 - (2.4 + 9 * (top - 0.95)) * progress,
                "embedding_variance": 0.08 + 0.9 * progress,
            })  # fmt: skip
    return lines


@cache
def digit_artifacts() -> dict[str, NDArray[Any]]:
    digits = load_digits()
    images = (digits.images * 15.9).astype(np.uint8)[:, None]  # [1797,1,8,8]
    flat, labels = digits.data, digits.target
    finder = NearestNeighbors(n_neighbors=8, metric="cosine").fit(flat[:1438])
    distance, near = finder.kneighbors(flat[1500:1516])
    anchors = np.arange(24) * 31
    far = (anchors * 7 + 11) % 1438
    shuffled = np.random.default_rng(0).permutation(1797)[:1200]
    return {
        "neighbour_queries": images[1500:1516], "neighbour_query_labels": labels[1500:1516],
        "neighbour_images": images[near], "neighbour_labels": labels[near],
        "neighbour_similarities": 1 - distance,
        "chain_anchors": images[anchors], "chain_negatives": images[far],
        "chain_similarities": np.linspace(0.91, 0.32, 24),
        "map_xy": PCA(2, random_state=0).fit_transform(flat[shuffled]).astype(np.float32),
        "map_labels": labels[shuffled], "map_thumbs": images[shuffled],
        "map_method": np.array("t-SNE"),
        "views_original": images[:4], "views_augmented": images[4:28].reshape(4, 6, 1, 8, 8),
    }  # fmt: skip


def answers(knn1: float, probe: float, seed: int = 0, count: int = 359) -> dict[str, NDArray[Any]]:
    """What a run of these accuracies answered: the hard images are hard for every run."""
    labels = load_digits().target[-count:]
    draws = np.random.default_rng(seed)
    hard = np.random.default_rng(99).random(count)
    found: dict[str, NDArray[Any]] = {"test_labels": labels}
    for key, accuracy in (("knn1", knn1), ("probe", probe)):
        ease = hard + 0.02 * draws.standard_normal(count)
        wrong = np.argsort(ease)[: round((1 - accuracy) * count)]
        found[f"right_{key}"] = ~np.isin(np.arange(count), wrong)
    found["probe_predicted"] = np.where(found["right_probe"], labels, (labels + 1) % 10)
    return found


def many_classes(count: int, noun: str = "a rather long class name") -> dict[str, Any]:
    """Class names and artifacts of a data set with many classes, some of them large."""
    draws = np.random.default_rng(count)
    labels = draws.choice(count, 1200, p=(w := 1 / np.arange(3, count + 3)) / w.sum())
    centres = 3 * draws.standard_normal((count, 2))
    truth = draws.choice(count, 900)
    said = np.where(draws.random(900) < 0.7, truth, (truth + draws.integers(1, 4, 900)) % count)
    art = digit_artifacts() | {
        "map_xy": (centres[labels] + 0.5 * draws.standard_normal((1200, 2))).astype(np.float32),
        "map_labels": labels, "test_labels": truth, "probe_predicted": said,
        "right_probe": truth == said, "right_knn1": truth == said,
        "neighbour_query_labels": draws.choice(count, 16),
        "neighbour_labels": draws.choice(count, (16, 8)),
    }  # fmt: skip
    return {"classes": [f"{noun}, number {i}" for i in range(count)], "artifacts": art}


def write_run(
    path: Path,
    config: dict[str, Any],
    metrics: list[dict[str, Any]],
    *,
    finished: bool = True,
    artifacts: dict[str, NDArray[Any]] | None = None,
) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if finished:
        summary = {key: value for line in metrics for key, value in line.items()}
        if metrics and "chance" in metrics[0]:
            kept = ("knn1", "probe", "global_loss")
            summary |= {f"untrained_{key}": metrics[0][key] for key in kept}
            summary |= {"knn20": 0.94, "knn200": 0.9, "probe_1pct": 0.53, "probe_10pct": 0.9}
        (path / "summary.json").write_text(json.dumps(summary))
    if artifacts:
        np.savez(path / "artifacts.npz", **artifacts)
    return path


def write_comparison(root: Path, seeds: int = 3) -> list[Path]:
    """All six methods, and EMC² once more with another option, `seeds` runs each."""
    variants = [(method, "encode") for method in _METHODS] + [("emc2", "cached")]
    paths = []
    for method, carried in variants:
        for seed in range(seeds):
            config = make_config(method, seed + 10 * (carried == "cached"), carried=carried)
            lines = make_metrics(config)
            last = {key: value for line in lines for key, value in line.items()}
            art = digit_artifacts() if seed == 0 else {}
            name = method if carried == "encode" else f"{method}-{carried}"
            art = art | answers(last["knn1"], last["probe"], seed)
            paths.append(write_run(root / f"{name}-seed{seed}", config, lines, artifacts=art))
    return paths


def write_many(root: Path, count: int, noun: str = "a rather long class name") -> Path:
    """A finished run with `count` classes of long names."""
    made = many_classes(count, noun)
    info = {
        "num_samples": 9000,
        "train": 9000,
        "test": 900,
        "classes": made["classes"],
        "skipped": [],
    }
    config = make_config("emc2", data="/photos/animals of the world", data_info=info)
    return write_run(root, config, make_metrics(config), artifacts=made["artifacts"])


def write_unlabelled(root: Path) -> Path:
    """A finished run on a heap of pictures without labels."""
    info = {"num_samples": 840, "train": 0, "test": 0, "classes": [], "skipped": []}
    config = make_config("emc2", data="/photos/holidays", data_info=info)
    probed = ("knn1", "probe", "chance", "pixels_knn1", "pixels_probe")
    lines = [{k: v for k, v in line.items() if k not in probed} for line in make_metrics(config)]
    kept = digit_artifacts() | {"map_labels": np.full(1200, -1)}
    art = {k: v for k, v in kept.items() if k not in ("neighbour_labels", "neighbour_query_labels")}
    return write_run(root, config, lines, artifacts=art)


if __name__ == "__main__":
    from negchain.report import write_report

    target = Path(sys.argv[1])
    several = write_comparison(target / "runs")
    one = next(path for path in several if path.name == "emc2-seed0")
    write_report([one], target / "one.html")
    write_report(several, target / "several.html")
    for classes in (2, 10, 37, 200):
        write_report([write_many(target / f"many-{classes}", classes)],
                     target / f"classes-{classes}.html")  # fmt: skip
    write_report([write_unlabelled(target / "unlabelled")], target / "unlabelled.html")
