"""What a step costs (the paper's Table 1), measured.

Paper   memory beside the encoder: SimCLR none, SogCLR and EMC² m numbers, Negative Cache m d.
        Computation: EMC² as SimCLR, and B R comparisons. Its +B encodes of carried states are not
        in the table.
Ours    bytes of the loss's state, images encoded per step (with and without gradient), time of the
        trainer's step run alone, peak of GPU memory, over b and m.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from negchain.methods import LossSettings, build_loss, named
from negchain.reproduce.accuracy import METHODS, SETTINGS, with_options
from negchain.reproduce.common import (
    Experiment,
    Options,
    Row,
    colour,
    distinct,
    markdown,
    panels,
    title,
    where,
)
from negchain.reproduce.runs import time_steps

SIZES = (10_000, 100_000, 1_000_000)  # m of the state's size
DIM = 128


def jobs(options: Options) -> list[Row]:
    """Steps over batch sizes (with `--data`, or on digits), and state over m."""
    methods = options.methods or METHODS
    state = [
        {"kind": "state", "method": method, "m": size, "b": batch}
        for method in methods
        for size in (SIZES[1:2] if options.quick else SIZES)
        for batch in (32, 256)
    ]
    step = []
    names = ("b32-none", "b32-batch", "b256-none", "b256-batch")
    for name in options.settings or (names[:2] if options.quick else names):
        settings = SETTINGS[name]
        if options.data is None:  # digits and the small encoder
            batch = 256 if "256" in name else 32
            settings = {"norm": settings.get("norm", "none"), "batch_size": batch, "device": "cpu"}
        else:
            settings = with_options(settings, options)
        step += [
            {"kind": "step", "setting": name, "method": m, "seed": 0, "settings": settings}
            for m in methods
        ]
    return state + step


def work(job: Row, deadline: float) -> Row:
    """Measure a step, or the state."""
    if job["kind"] == "step":
        return time_steps(job, 200 if torch.cuda.is_available() else 20)
    keys: Row = {"views": "paired", "symmetric": False} if named(job["method"]).plain_keys else {}
    loss_fn = build_loss(job["method"], LossSettings(job["m"], dim=DIM, layout=keys))
    index, z = torch.arange(job["b"]), torch.randn(job["b"], DIM)
    requests = [loss_fn.request(index), loss_fn.request(index, z, z)]
    wants = [want for request in requests for want in request.wants]
    trained = sum(len(want.ids) for want in wants if want.gradient)
    return {
        "state_bytes": sum(s.numel() * s.element_size() for s in loss_fn.state_tensors()),
        "encodes": 2 * job["b"] + trained,
        "encodes_without_gradient": sum(len(want.ids) for want in wants) - trained,
    }


def table(rows: list[Row]) -> str:
    """State and encodes, then time and memory of a step."""
    lines = []
    for row in where(rows, kind="state", m=SIZES[1]):
        per_item = f"{row['state_bytes'] / SIZES[1]:.3g}"
        encodes = [row["encodes"], row["encodes_without_gradient"]]
        lines.append([title(row["job"]["method"]), row["job"]["b"], per_item, *encodes])
    heads = ["method", "b", "state, bytes per item (d = 128)", "encodes per step"]
    first = markdown([*heads, f"encodes without gradient, m = {SIZES[1]:,}"], lines)
    return f"{first}\n\n{_steps(where(rows, kind='step'))}"


def milliseconds(rows: list[Row], setting: str, method: str) -> float | None:
    """Median time of a step."""
    found = where(rows, kind="step", setting=setting, method=method)
    return statistics.median(found[0]["ms"]) if found else None


def _steps(rows: list[Row]) -> str:
    lines = []
    for setting, method in distinct(rows, "setting", "method"):
        (row,) = where(rows, setting=setting, method=method)
        ms, base = statistics.median(row["ms"]), milliseconds(rows, setting, "infonce")
        ratio = f"{ms / base:.2f}" if base else "–"
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "–"
        lines.append([setting, title(method), f"{ms:.2f}", ratio, peak])
    heads = ["setting", "method", "ms per step", "against InfoNCE", "peak GPU memory, GiB"]
    return markdown(heads, lines)


def draw(rows: list[Row]) -> dict[str, Any]:
    """State against m; time of a step."""
    figure, (left, right) = panels(2)
    state, step = where(rows, kind="state", b=32), where(rows, kind="step")
    for method in distinct(state, "method"):
        found = where(state, method=method)
        label, size = title(method), [row["state_bytes"] for row in found]
        left.plot([r["job"]["m"] for r in found], size, ".-", color=colour(method), label=label)
    left.set(xscale="log", yscale="log", ylim=(10, None), xlabel="m", ylabel="state, bytes")
    left.legend(fontsize=7)
    for at, setting in enumerate(distinct(step, "setting")):
        names = distinct(step, "method")
        for number, method in enumerate(names):
            ms = milliseconds(step, setting, method)
            if ms is not None:
                place = at + (number - (len(names) - 1) / 2) / (len(names) + 1)
                right.bar(place, ms, 0.9 / (len(names) + 1), color=colour(method))
    right.set_xticks(range(len(distinct(step, "setting"))), distinct(step, "setting"), fontsize=7)
    right.set(ylabel="ms per step")
    return {"cost": figure}


EXPERIMENTS = {"cost": Experiment("cost", table, draw, jobs, work, alone=True)}
