"""What a step costs (the paper's Table 1), and accuracy against seconds (Fig. 1 and 8).

The paper's claims and what was found are in docs/results.md.

cost    bytes of the loss's state, images encoded per step (with and without gradient), time of the
        trainer's step run alone, its peak of memory, over b; over m with `--data` of other sizes.
        Times are a GPU's, or those of digits and the small encoder on a CPU: with `--data` and
        `--device cpu` there are none.
time    runs of `stl10` share a GPU, so their seconds are not those of a run alone: steps of their
        record times the milliseconds that `cost` measured alone.
"""

import statistics
from typing import Any

import torch

from negchain.methods import LossSettings, named, reproduced, title_of
from negchain.reproduce import accuracy, pages
from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.pages import colour, distinct, where
from negchain.reproduce.runs import peak_memory, time_steps
from negchain.tasks import COLLAPSED
from negchain.train.presets import choose

SIZES = (10_000, 100_000, 1_000_000)  # m of the state's size
DIM = 128
OURS = "emc2"  # whose seconds the others' are compared with
AGAIN = ("burn-in", "finite-augmentations")  # records that hold runs of `stl10` made again


def jobs(options: Options) -> list[Row]:
    """State over m; time and memory of a step over batch sizes (with `--data`, or on digits)."""
    methods = options.methods or accuracy.METHODS
    state = [
        {"kind": "state", "method": method, "m": size, "b": batch}
        for method in methods
        for size in (SIZES[1:2] if options.quick else SIZES)
        for batch in (32, 256)
    ]
    step, memory = [], []
    names = ("b32-none", "b32-batch", "b256-none", "b256-batch")
    for name in options.settings or (names[:2] if options.quick else names):
        settings = accuracy.SETTINGS[choose("--settings", name, accuracy.SETTINGS)]
        if options.data is None and not options.quick:  # digits and the small encoder
            batch = 256 if "256" in name else 32
            plain = {"norm": "none", "proposal": "batch"}  # as the presets
            kept = {k: settings.get(k, v) for k, v in plain.items()}
            settings = {**kept, "batch_size": batch, "device": "cpu"}
        else:  # as in `stl10`, whose steps `time` multiplies with these
            settings = accuracy.with_options(settings, options)
        case = {"setting": name, "seed": 0, "settings": settings}
        memory += [{"kind": "memory", **case, "method": method} for method in methods]
        if options.data is None or options.on_gpu():  # seconds of large encoders are a GPU's
            step += [{"kind": "step", **case, "method": method} for method in methods]
    return state + step + memory


def work(job: Row, deadline: float) -> Row:
    """Measure a step's time or memory, or the state."""
    if job["kind"] == "memory":
        return peak_memory(job)
    if job["kind"] == "step":
        return time_steps(job, 100 if torch.cuda.is_available() else 20)
    keys: Row = {"views": "paired", "symmetric": False} if named(job["method"]).plain_keys else {}
    loss_fn = named(job["method"]).build(LossSettings(job["m"], dim=DIM, layout=keys))
    index, z = torch.arange(job["b"]), torch.randn(job["b"], DIM)
    requests = [loss_fn.request(index), loss_fn.request(index, z, z)]
    wants = [want for request in requests for want in request.wants]
    trained = sum(len(want.ids) for want in wants if want.gradient)
    return {
        "state_bytes": sum(s.numel() * s.element_size() for s in loss_fn.state_tensors()),
        "encodes": 2 * job["b"] + trained,
        "encodes_without_gradient": sum(len(want.ids) for want in wants) - trained,
    }


def milliseconds(rows: list[Row], setting: str, method: str, images: int | None) -> float | None:
    """Median time of a step on so many images; None: of rows that do not say on how many."""
    found = where(rows, kind="step", setting=setting, method=method)
    return next((statistics.median(r["ms"]) for r in found if r.get("images") == images), None)


def table(rows: list[Row]) -> str:
    """State and encodes, then memory and time of a step."""
    state = [
        {**row["job"], **row, "bytes": row["state_bytes"] / SIZES[1]}
        for row in where(rows, kind="state", m=SIZES[1])
    ]
    unknown, step = {"images": "–"}, []  # rows have had their number since 2026-11-19
    for row in where(rows, kind="step"):
        base = milliseconds(rows, row["job"]["setting"], "infonce", row.get("images"))
        ms = statistics.median(row["ms"])
        ratio = f"{ms / base:.2f}" if base else "–"
        step.append({**unknown, **row["job"], **row, "median": ms, "ratio": ratio})
    memory = []
    for row in where(rows, kind="memory"):
        least = where(rows, **{**row["job"], "method": "infonce"})
        ratio = f"{row['peak_bytes'] / least[0]['peak_bytes']:.2f}" if least else "–"
        peak = {"peak": row["peak_bytes"] / 2**20, "ratio": ratio}
        memory.append({**unknown, **row["job"], **row, **peak})
    first = (
        "method|b|state, bytes per item (d = 128)|encodes|"
        "without gradient, m = 100,000, refresh = .01\n"
        "{method}|{b}|{bytes:.3g}|{encodes}|{encodes_without_gradient}"
    )
    second = """setting|m|method|peak of a step, MiB|against InfoNCE|device
        {setting}|{images}|{method}|{peak:.4g}|{ratio}|{device}"""
    third = """setting|m|method|ms per step|against InfoNCE
        {setting}|{images}|{method}|{median:.2f}|{ratio}"""
    parts = (first, state), (second, memory), (third, step)
    return "\n\n".join(pages.filled(*part) for part in parts if part[1])


def draw(rows: list[Row]) -> dict[str, Any]:
    """State against m; time of a step by setting, and against m."""
    figure, (left, middle, right) = pages.panels(3)
    state = where(rows, kind="state", b=32)
    timed = [accuracy.beside(row) for row in where(rows, kind="step")]
    counted = [row for row in timed if row.get("images")]
    sizes = [row.get("images") for row in timed]
    step = [row for row in timed if row.get("images") == statistics.mode(sizes)]
    for method in distinct(state, "method"):
        found = where(state, method=method)
        label, size = title_of(method), [row["state_bytes"] for row in found]
        left.plot([r["job"]["m"] for r in found], size, ".-", color=colour(method), label=label)
    left.set(xscale="log", yscale="log", ylim=(10, None), xlabel="m", ylabel="state, bytes")
    figure.legend(fontsize=7, loc="outside lower center", ncols=7)
    settings, names = distinct(step, "setting"), distinct(step, "method")
    for row in step:
        number = names.index(row["job"]["method"]) - (len(names) - 1) / 2
        place = settings.index(row["job"]["setting"]) + number / (len(names) + 1)
        method, ms = row["job"]["method"], statistics.median(row["ms"])
        look = {"color": colour(method), "hatch": "///" if method.endswith(pages.BOTH) else None}
        middle.bar(place, ms, 0.9 / (len(names) + 1), **look)
    narrow = [name.replace("-", "\n", 1) for name in settings]
    middle.set_xticks(range(len(settings)), narrow, fontsize=7)
    usual = step[0].get("images") if step else None
    hatched = "; hatched: both views" if any(m.endswith(pages.BOTH) for m in names) else ""
    middle.set(ylabel="ms per step", title=f"m = {usual:,} images{hatched}" if usual else None)
    for method in names:
        own = where(counted, method=method, setting=settings[0])
        found = sorted(own, key=lambda row: row["images"])
        times = [statistics.median(row["ms"]) for row in found]
        right.plot([row["images"] for row in found], times, ".-", color=colour(method))
    if settings:
        right.set(xscale="log", xlabel="m", ylabel="ms per step", title=settings[0], ylim=(0, None))
    return {"cost": figure}


# ---------------------------------------------------------------------- accuracy against seconds


def in_seconds(rows: list[Row]) -> list[Row]:
    """Runs of `stl10` whose curves have the seconds of a run alone, where there are two methods.

    The same runs made again, as "ours" of burn-in and as fresh augmentations, count as more seeds:
    on a GPU they end apart. Those with the same curve to the last digit, as on a CPU, count once.
    Chains that were offered both views are methods of their own among the others of the setting.
    """
    cost = [row for row in rows if row["record"] == "cost"]
    found: list[Row] = []
    for row in rows:
        job = row["job"]
        fresh = job.get("settings", {}).get("augmentations", 0) == 0
        ours = job.get("burn-in", "ours") == "ours"
        if row["record"] == "cost" or not (row.get("complete", True) and fresh and ours):
            continue
        if row["curve"][-1].get("probe") is None:  # its images have no labels
            continue
        case, images = (job["setting"], job["method"]), row["config"]["images"]
        ms = milliseconds(cost, *case, images) or milliseconds(cost, *case, None)
        if ms is not None:
            curve = [{**p, "seconds": p["step"] * ms / 1e3} for p in row["curve"]]
            run = accuracy.beside({**row, "curve": curve})
            keys = {key: run["job"][key] for key in ("setting", "method", "seed")}
            if all(curve != other["curve"] for other in where(found, **keys)):
                found.append(run)
    cases = accuracy.by_case(accuracy.in_order("method", found)).values()
    return [row for own in cases if len(distinct(own, "method")) > 1 for row in own]


def reached(rows: list[Row], target: float, key: str = "seconds") -> list[float]:
    """Seconds until the probe reaches a target, on straight lines between measurements, of every
    run that reaches it.

    Example:
        >>> curve = [{"seconds": 0.0, "probe": 0.25}, {"seconds": 10.0, "probe": 0.75}]
        >>> reached([{"curve": curve}], 0.5), reached([{"curve": curve}], 0.8)
        ([5.0], [])
    """
    found = []
    for row in rows:
        at = next((i for i, p in enumerate(row["curve"]) if p["probe"] >= target), None)
        if at is not None:
            after, before = row["curve"][at], row["curve"][max(at - 1, 0)]
            rise = after["probe"] - before["probe"]
            share = (target - before["probe"]) / rise if rise else 0.0
            found.append(before[key] + share * (after[key] - before[key]))
    return found


def target_of(runs: dict[str, list[Row]]) -> float | None:
    """98 % of the lowest mean probe with which a method of the figures ends, collapsed runs out."""
    ends, figured = [], reproduced(small=False)
    for found in (rows for m, rows in runs.items() if m.removesuffix(pages.BOTH) in figured):
        last = [row["curve"][-1] for row in found]
        spread_out = [p["probe"] for p in last if p["embedding_variance"] >= COLLAPSED]
        ends += [statistics.fmean(spread_out)] if spread_out else []
    return 0.98 * min(ends) if ends else None


def time_table(rows: list[Row]) -> str:
    """Seconds until a probe that the figures' methods reach: mean and deviation over runs."""
    lines = []
    for case, here in accuracy.by_case(in_seconds(rows)).items():
        of = {method: where(here, method=method) for method in distinct(here, "method")}
        target = target_of(of)
        if target is None:
            continue
        ours = reached(of.get(OURS) or of.get(OURS + pages.BOTH) or [], target)
        for method, found in of.items():
            seconds = reached(found, target)
            ratio = "–"
            if seconds and ours:
                ratio = f"{statistics.fmean(seconds) / statistics.fmean(ours):.2f}"
            count = f"{len(seconds)} of {len(found)}"
            shown = pages.spread(seconds, 1)
            lines.append([case, f"{target:.3f}", pages.label_of(method), count, shown, ratio])
    heads = ["setting", "probe", "method", "runs that reach it", "seconds until then"]
    return pages.markdown([*heads, "against EMC²"], lines) if lines else ""


def time_draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against seconds, a panel per setting."""
    runs = in_seconds(rows)
    keys = ("probe", "knn1") if runs else ()
    return {f"time-{key}": accuracy.figure("method", runs, key, "seconds") for key in keys}


EXPERIMENTS = {
    "cost": Experiment(table, draw, jobs, work, alone=True),
    "time": Experiment(time_table, time_draw, reads=("stl10", "cost"), also=AGAIN),
}
