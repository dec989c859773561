"""Linear probe and 1-NN on STL-10 against samples seen (the paper's Fig. 5), and below its batches.

Paper   b = 32, β = 14.28, Adam 1e-4 and b = 256, β = 5, Adam 1e-3; 100 epochs of 100,000 images;
        ResNet-18. "EMC² consistently outperforms the other algorithms".
Code    (the authors') no normalisation layers, 10 epochs of warm-up, cosine decay.
Ours    DCL (eq. (2) without the positive) beside InfoNCE (with it): both readings of "SimCLR";
        i-SIR; BatchNorm with Adam 3e-4; b = 8 and 16.
"""

from __future__ import annotations

from typing import Any

from negchain.reproduce.common import (
    Experiment,
    Options,
    Row,
    colour,
    distinct,
    markdown,
    panels,
    plot_curves,
    spread,
    title,
    where,
)
from negchain.reproduce.runs import train

METHODS = ("infonce", "dcl", "sogclr", "negcache", "emc2", "isir", "informed")
SETTINGS: dict[str, Row] = {
    "b32-none": {"preset": "stl10-b32"},
    "b32-batch": {"preset": "stl10-b32", "norm": "batch", "lr": 3e-4},
    "b256-none": {"preset": "stl10-b256"},
    "b256-batch": {"preset": "stl10-b256", "norm": "batch"},
    "b16-batch": {"preset": "stl10-b32", "norm": "batch", "lr": 3e-4, "batch_size": 16},
    "b8-batch": {"preset": "stl10-b32", "norm": "batch", "lr": 3e-4, "batch_size": 8},
    "b8-none": {"preset": "stl10-b32", "batch_size": 8},
}
QUICK: Row = {"data": "digits", "batch_size": 16, "epochs": 2, "subset": 256, "warmup_epochs": 0.0}


def training_jobs(
    options: Options, settings: dict[str, Row], methods: tuple[str, ...], seeds: int = 3
) -> list[Row]:
    """A run for every seed, setting and method."""
    chosen = options.settings or tuple(settings)
    if unknown := set(chosen) - set(settings):
        raise ValueError(f"--settings must be among {', '.join(settings)}, got {min(unknown)}")
    few = {"points": [0.5, 1.0]} if options.quick else {}
    return [
        {
            "seed": seed,
            "setting": name,
            "method": method,
            "settings": with_options(settings[name], options),
            **few,
        }
        for seed in range(options.seeds or (1 if options.quick else seeds))
        for name in (chosen[:1] if options.quick else chosen)
        for method in options.methods or methods
    ]


def with_options(settings: Row, options: Options) -> Row:
    """A setting with what the user gave laid over it; --quick: digits, small and short."""
    if options.quick:
        kept = {k: v for k, v in settings.items() if k in ("norm", "augmentations", "beta")}
        return {**kept, **QUICK, "device": options.device}
    if options.data is None:
        raise ValueError("--data must name the folder of images (train/, test/, unlabeled/)")
    given = {"epochs": options.epochs, "device": options.device, "data": options.data}
    return {**settings, **{k: v for k, v in given.items() if v is not None}}


def jobs(options: Options) -> list[Row]:
    """All methods in all settings, seed by seed."""
    return training_jobs(options, SETTINGS, METHODS)


def accuracy_table(rows: list[Row], label: str = "method") -> str:
    """Last measurements of every setting and method, mean and deviation over seeds."""
    lines = []
    for setting, name in distinct(rows, "setting", label):
        found = where(rows, setting=setting, **{label: name})
        last = [row["curve"][-1] for row in found if row.get("complete", True)]
        collapsed = sum(point["embedding_variance"] < 0.05 for point in last)
        lines.append(
            [
                setting,
                title(name),
                f"{found[0]['config']['epochs']}",
                len(last),
                *(spread(p.get(key) for p in last) for key in ("probe", "knn1", "global_loss")),
                spread(p.get("probe_paper") for p in last),
                collapsed or "",
            ]
        )
    heads = ["setting", label, "epochs", "seeds", "probe", "1-NN", "exact loss", "probe, authors'"]
    return markdown([*heads, "collapsed"], lines)


def accuracy_figure(rows: list[Row], measure: str, label: str = "method") -> Any:
    """A panel per setting, a line per method: accuracy against samples seen."""
    settings = distinct(rows, "setting")
    figure, axes = panels(len(settings))
    for axis, setting in zip(axes, settings, strict=True):
        for number, name in enumerate(distinct(where(rows, setting=setting), label)):
            found = where(rows, setting=setting, **{label: name})
            tint = colour(name) if label == "method" else f"C{number}"
            plot_curves(axis, found, "samples", measure, title(str(name)), tint)
        axis.set(title=setting, xlabel="samples seen", xscale="log")
    axes[0].set_ylabel({"probe": "linear probe", "knn1": "1-NN"}.get(measure, measure))
    axes[-1].legend(fontsize=7)
    return figure


def draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against samples."""
    return {
        "stl10-probe": accuracy_figure(rows, "probe"),
        "stl10-1nn": accuracy_figure(rows, "knn1"),
    }


EXPERIMENT = Experiment("stl10", jobs, train, accuracy_table, draw)
