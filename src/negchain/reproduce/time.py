"""Accuracy against seconds (the paper's Fig. 1 and 8).

Paper   b = 32 on a Tesla T4 (Negative Cache on four): "EMC² is around 2x faster than SimCLR and
        SogCLR, and 3x faster than Negative Caching".
Ours    runs of `stl10` share a GPU, so their seconds are not those of a run alone: steps of their
        record times the milliseconds that `cost` measured alone.
"""

from __future__ import annotations

import statistics
from typing import Any

from negchain.methods import reproduced
from negchain.reproduce.common import (
    Experiment,
    Row,
    colour,
    distinct,
    markdown,
    panels,
    plot_curves,
    title,
    where,
)
from negchain.reproduce.cost import milliseconds


def timed(rows: list[Row]) -> list[Row]:
    """Runs of `stl10` whose curves have the seconds of a run alone."""
    cost = [row for row in rows if row["record"] == "cost"]
    found = []
    for row in rows:
        if row["record"] != "stl10" or not row.get("complete", True):
            continue
        ms = milliseconds(cost, row["job"]["setting"], row["job"]["method"])
        if ms is not None:
            curve = [{**p, "seconds": p["step"] * ms / 1e3} for p in row["curve"]]
            found.append({**row, "curve": curve})
    return found


def reached(rows: list[Row], target: float, measure: str = "probe") -> float | None:
    """Mean over seeds of the seconds after which a target is reached, on straight lines between
    measurements; None if a seed never reaches it.

    Example:
        >>> curve = [{"seconds": 0.0, "probe": 0.25}, {"seconds": 10.0, "probe": 0.75}]
        >>> reached([{"curve": curve}], 0.5)
        5.0
    """
    seconds = []
    for row in rows:
        points = row["curve"]
        for before, after in zip(points, points[1:], strict=False):
            if before[measure] >= target:
                seconds.append(before["seconds"])
                break
            if after[measure] >= target:
                share = (target - before[measure]) / (after[measure] - before[measure])
                between = after["seconds"] - before["seconds"]
                seconds.append(before["seconds"] + share * between)
                break
        else:
            return None
    return statistics.fmean(seconds) if seconds else None


def table(rows: list[Row]) -> str:
    """Seconds until the accuracy that the slowest of EMC², SimCLR and SogCLR reaches in the end."""
    lines, runs = [], timed(rows)
    for setting in distinct(runs, "setting"):
        ends = {
            method: [
                row["curve"][-1]["probe"] for row in where(runs, setting=setting, method=method)
            ]
            for method in distinct(where(runs, setting=setting), "method")
        }
        main = [ends[method] for method in reproduced(small=False) if method in ends]
        if not main:
            continue
        target = 0.98 * min(min(values) for values in main)
        ours = reached(where(runs, setting=setting, method="emc2"), target)
        for method in ends:
            seconds = reached(where(runs, setting=setting, method=method), target)
            ratio = f"{seconds / ours:.2f}" if seconds and ours else "–"
            shown = "not reached" if seconds is None else f"{seconds:.1f}"
            lines.append([setting, f"{target:.3f}", title(method), shown, ratio])
    heads = ["setting", "probe accuracy", "method", "seconds until then", "against EMC²"]
    return markdown(heads, lines)


def draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against seconds, a panel per setting."""
    figures, runs = {}, timed(rows)
    for measure, label in (("probe", "linear probe"), ("knn1", "1-NN")):
        settings = distinct(runs, "setting")
        figure, axes = panels(max(1, len(settings)))
        for axis, setting in zip(axes, settings, strict=False):
            for method in distinct(where(runs, setting=setting), "method"):
                found = where(runs, setting=setting, method=method)
                plot_curves(axis, found, "seconds", measure, title(method), colour(method))
            axis.set(title=setting, xlabel="seconds alone on the GPU")
        axes[0].set_ylabel(label)
        axes[-1].legend(fontsize=7)
        figures[f"time-{measure}"] = figure
    return figures


EXPERIMENTS = {"time": Experiment("time", table, draw, reads=("stl10", "cost"))}
