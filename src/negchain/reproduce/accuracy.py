"""Linear probe and 1-NN against samples seen: the paper's figures 3 to 6, and below its batches.

Claims and findings are in docs/results.md. What the paper leaves open, or is ours:

stl10 (Fig. 5)                  i-SIR and informed importance; BatchNorm with Adam 3e-4; b = 8 and
                                16. EMC² has one copy of every other image as proposals, R = b - 1;
                                both, as in the paper, where a setting ends in "-both".
burn-in (Fig. 4)                Of which batch size is not said: here b = 32. The paper's R = 2b - 2
                                proposals, and as last line what our presets have, R = b - 1.
finite-augmentations (Fig. 3)   How many are stored is not said: here 2, 4 and 16, a chain for each,
                                and fresh ones, a chain per image. A pair is two different stored
                                views; the paper's may be the same one twice.
imagenet100 (Fig. 6)            Any image folder; our record is of 35,000 images at 64 px.
"""

import re
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from negchain.methods import reproduced, title_of
from negchain.printable import counted
from negchain.reproduce import pages
from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.pages import colour, distinct, spread, style, where
from negchain.reproduce.runs import train
from negchain.tasks import COLLAPSED
from negchain.train.presets import choose

METHODS = reproduced()
# R = 2b - 2 ("-both") is the paper's, and so are the presets' Adam, rates and beta; "none", no
# normalisation, is the authors' code's, and everything with "batch" ours.
_BATCH32: Row = {"preset": "stl10-b32", "norm": "batch", "lr": 3e-4}
SETTINGS: dict[str, Row] = {
    "b32-none": {"preset": "stl10-b32"},
    "b32-none-both": {"preset": "stl10-b32", "proposal": "both"},
    "b32-batch": _BATCH32,
    "b32-batch-slow": {"preset": "stl10-b32", "norm": "batch"},  # the paper's rate, 1e-4
    "b32-batch-both": {**_BATCH32, "proposal": "both"},
    "b256-none": {"preset": "stl10-b256"},
    "b256-none-both": {"preset": "stl10-b256", "proposal": "both"},
    "b256-batch": {"preset": "stl10-b256", "norm": "batch"},
    "b256-batch-both": {"preset": "stl10-b256", "norm": "batch", "proposal": "both"},
    "b16-batch": {**_BATCH32, "batch_size": 16},
    "b8-batch": {**_BATCH32, "batch_size": 8},
    "b8-batch-both": {**_BATCH32, "batch_size": 8, "proposal": "both"},
    "b8-none": {"preset": "stl10-b32", "batch_size": 8},
}
_SMALL: Row = {"preset": "imagenet100-b256", "image_size": 64, "stem": "large"}
IMAGENET: dict[str, Row] = {
    "b256-batch": {**_SMALL, "norm": "batch"},
    "b256-none": _SMALL,
    "224px-none": {"preset": "imagenet100-b256"},  # at full size, for those who have the images
}
AXES = {"probe": "linear probe accuracy", "knn1": "1-NN accuracy"}
AXES |= {"samples": "samples seen, thousands", "seconds": "seconds of a run alone"}
STORED = (2, 4, 16, 0)  # numbers of stored augmentations, 0: fresh
_NEEDS = ("job.seed", "job.setting", "job.method", "config.epochs", "curve.samples")
QUICK: Row = {"data": "digits", "batch_size": 16, "epochs": 2, "subset": 256, "warmup_epochs": 0.0}


def training_jobs(
    options: Options, settings: dict[str, Row], methods: tuple[str, ...], seeds: int = 3
) -> list[Row]:
    """A run for every seed, setting and method."""
    chosen = [choose("--settings", name, settings) for name in options.settings or settings]
    few: Row = {}  # short runs are measured less often
    if options.quick or options.epochs:
        few["points"] = [0.5, 1.0] if options.quick else [0.25, 0.5, 1.0]
    return [
        {
            "seed": seed,
            "setting": name,
            "method": method,
            "settings": with_options(settings[name], options),
            **few,
        }
        for seed in range(options.seeds or (1 if options.quick else seeds))
        for name in (chosen[:1] if options.quick and not options.settings else chosen)
        for method in options.methods or methods
    ]


def with_options(settings: Row, options: Options) -> Row:
    """A setting with what the user gave laid over it; --quick: digits, small and short."""
    if options.quick:
        kept = {k: v for k, v in settings.items() if k in ("norm", "proposal", "beta")}
        settings = {"norm": "none", "proposal": "batch", **kept, **QUICK}
    elif options.data is None:
        raise ValueError(
            "--data must name the images: a folder with train/, test/ and unlabeled/, or "
            "stl10-unlabeled, which --download fetches"
        )
    given = {"device": options.device, "data": options.data, "epochs": options.epochs}
    return {**settings, **{k: v for k, v in given.items() if v is not None}}


def burn_in(options: Options) -> list[Row]:
    """A run for every P, seed by seed; P is a number of steps."""
    settings = {name: SETTINGS[name] for name in ("b32-none", "b32-batch")}
    size, found = 16 if options.quick else 32, []
    for job in training_jobs(replace(options, methods=("emc2",)), settings, ()):
        for steps in (0, size // 2, size, 3 * size // 2):
            chain = {"burn_in": min(steps, 2 * size - 3), "copies": 2}
            found.append({**job, "burn-in": f"P = {steps}", "chain": chain})
        found.append({**job, "burn-in": "ours"})
    return found


def finite_augmentations(options: Options) -> list[Row]:
    """Every number of stored augmentations, seed by seed."""
    cases = {name: SETTINGS[name] for name in ("b256-none", "b256-batch")}
    found = []
    for job in training_jobs(options, cases, reproduced(small=False)):
        for count in STORED:
            label = f"{title_of(job['method'])}, {count or 'fresh'}"
            settings = {**job["settings"], "augmentations": count}
            if count:  # the presets' proposals are those of fresh views
                settings.pop("proposal", None)
            found.append({**job, "augmentations": label, "settings": settings})
    return found


def imagenet100(options: Options) -> list[Row]:
    """The methods of the figure and DCL, seed by seed."""
    settings = IMAGENET if options.settings else dict(list(IMAGENET.items())[:2])
    return training_jobs(options, settings, reproduced(small=False), seeds=2)


def in_order(label: str, rows: list[Row]) -> list[Row]:
    """Runs by setting, length, and method or what else `label` names."""
    settings = [*SETTINGS, *IMAGENET]

    def place(row: Row) -> tuple[int, int, int, int]:
        job, name = row["job"], row["job"][label]
        number = re.search(r"\d+", name)  # of "P = 16"; what has none comes last
        method = METHODS.index(name) if name in METHODS else len(METHODS)
        length = row["config"]["epochs"]
        return settings.index(job["setting"]), length, method, int(number[0]) if number else 99

    return sorted(rows, key=place)


def table(label: str, rows: list[Row]) -> str:
    """Last measurements of every setting, length and method, mean and deviation over seeds."""
    lines, ended = [], [row for row in in_order(label, rows) if row.get("complete", True)]
    cases = [(r["job"]["setting"], r["config"]["epochs"], r["job"][label]) for r in ended]
    for case in dict.fromkeys(cases):
        setting, epochs, name = case
        last = [r["curve"][-1] for r, its in zip(ended, cases, strict=True) if its == case]
        collapsed = sum(point["embedding_variance"] < COLLAPSED for point in last)
        keys = ("probe", "knn1", "global_loss", "probe_paper")
        means = [spread(p.get(key) for p in last) for key in keys]
        lines.append([setting, title_of(name), epochs, len(last), *means, collapsed or ""])
    heads = ["setting", label, "epochs", "seeds", "probe", "1-NN", "exact loss", "probe, authors'"]
    return pages.markdown([*heads, "collapsed"], lines)


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs by setting and number of epochs."""
    found = dict[str, list[Row]]()
    for row in rows:
        length = counted(row["config"]["epochs"], "epoch", "epochs")
        case = f"{row['job']['setting']}, {length}"
        found.setdefault(case, []).append(row)
    return found


def beside(row: Row) -> Row:
    """A run of a setting that ends in "-both" as a method of its own in the setting itself.

    Example:
        >>> beside({"job": {"setting": "b32-none-both", "method": "emc2"}})["job"]
        {'setting': 'b32-none', 'method': 'emc2, both'}
    """
    job = row["job"]
    setting = job["setting"].removesuffix("-both")
    if setting == job["setting"]:
        return row
    return {**row, "job": {**job, "setting": setting, "method": job["method"] + pages.BOTH}}


def figure(label: str, rows: list[Row], measure: str, against: str = "samples") -> Any:
    """A panel per setting and length, a line per method: accuracy against samples or seconds."""
    from matplotlib import colormaps

    cases = by_case(in_order(label, [beside(row) for row in rows]))
    drawn, axes = pages.panels(len(cases))
    for axis, (case, own) in zip(axes, cases.items(), strict=True):
        for number, name in enumerate(distinct(own, label)):
            found = where(own, **{label: name})
            method = found[0]["job"]["method"]
            tint: Any = colour(method)
            if label == "burn-in" and name != "ours":  # the more steps the darker
                tint = colormaps["Blues"](0.4 + 0.2 * number)
            title = pages.label_of(str(name))
            pages.plot_curves(axis, found, against, measure, title, tint, method)
        axis.set(title=case, xlabel=AXES[against], ylabel=AXES[measure])
        if against == "samples":
            axis.xaxis.set_major_formatter(lambda samples, _: f"{samples / 1e3:g}")
    return _with_legend(drawn, axes)


def _with_legend(drawn: Any, axes: Any) -> Any:
    """One legend for all panels."""
    named = dict[str, Any]()
    for axis in axes:
        named |= {text: line for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    across = len(named) if len(named) <= 5 else 4
    drawn.legend(named.values(), named, fontsize=7, loc="outside lower center", ncols=across)
    return drawn


def by_number(rows: list[Row], measure: str) -> Any:
    """A panel per setting and length: where runs end over the number of stored augmentations.

    A line goes through the means, a dot is a seed.
    """
    cases = by_case(in_order("method", [row for row in rows if row.get("complete", True)]))
    drawn, axes = pages.panels(len(cases))
    for axis, (case, own) in zip(axes, cases.items(), strict=True):
        for number, method in enumerate(distinct(own, "method")):
            ends, aside = dict[int, list[float]](), 0.05 * number
            for row in where(own, method=method):
                place = STORED.index(row["job"]["settings"]["augmentations"])
                ends.setdefault(place, []).append(row["curve"][-1][measure])
            means = [fmean(ends[place]) for place in sorted(ends)]
            places = [place + aside for place in sorted(ends)]
            look = {**style(method), "color": colour(method)}
            axis.plot(places, means, **{**look, "marker": ""}, label=title_of(method))
            for place, values in ends.items():
                axis.plot([place + aside] * len(values), values, **{**look, "linestyle": ""})
        axis.set_xticks(range(len(STORED)), [str(count or "fresh") for count in STORED])
        axis.set(title=case, xlabel="augmentations", ylabel=AXES[measure])
    return _with_legend(drawn, axes)


def draw(name: str, label: str, rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against samples, or over numbers of augmentations, where measured."""
    pictured = by_number if label == "augmentations" else partial(figure, label)
    found = {}
    for file, key in (("probe", "probe"), ("1nn", "knn1")):
        shown = [row for row in rows if row["curve"][-1].get(key) is not None]
        if label == "augmentations":  # their ends are drawn
            shown = [row for row in shown if row.get("complete", True)]
        if shown:
            found[f"{name}-{file}"] = pictured(shown, key)
    return found


EXPERIMENTS = {
    name: Experiment(
        partial(table, label),
        partial(draw, name, label),
        jobs,
        train,
        needs=(*_NEEDS, f"job.{label}"),
    )
    for name, jobs, label in (
        ("stl10", partial(training_jobs, settings=SETTINGS, methods=METHODS), "method"),
        ("burn-in", burn_in, "burn-in"),
        ("finite-augmentations", finite_augmentations, "augmentations"),
        ("imagenet100", imagenet100, "method"),
    )
}
