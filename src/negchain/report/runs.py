"""Run folders as they lie on disk, and runs that differ only by seed as one group.

A run folder holds `config.json`, `metrics.jsonl`, and, once there is something to put in them,
`summary.json` (so its absence means: unfinished) and `artifacts.npz`.
Reading accepts what an interrupted run leaves behind (half-written lines of metrics, nulls for
non-finite numbers, steps logged twice around a resume) and refuses other damaged files.
"""

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negchain.files import read_arrays, read_object
from negchain.methods import METHODS, title_of
from negchain.tasks import TASKS, options
from negchain.train.config import RECORDED, hints, setting_of
from negchain.train.run_folder import read_metrics, require_run

from .measures import Shown, shown

FloatArray = NDArray[np.float64]

# Settings that never tell two groups apart: what a run was called and how it ran (but its device).
_BOOKKEEPING = {"method", "seed", "preset", *RECORDED}
_BOOKKEEPING |= {name for name in hints() if setting_of(name).free} - {"device"}
_KINDS = {"test": int, "classes": list, "notes": list, "skipped": list}
_OPTIONS_NAMED = 3  # in a label; the table and each run's settings show the rest


@dataclass(frozen=True)
class Curve:
    """One metric over a run: `samples` [n] and `seconds` [n] at which `values` [n] was read."""

    samples: FloatArray
    seconds: FloatArray
    values: FloatArray

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Run:
    """One run folder in memory; `summary` is None while the run is unfinished."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, float]]
    summary: dict[str, Any] | None
    artifacts: dict[str, NDArray[Any]]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def called(self) -> str | None:
        """What the user called the run, seed left out; None where the tool chose the name.

        >>> [Run(Path(p), {"method": "emc2"}, [], None, {}).called for p in (
        ...     "runs/crops-lr3-seed1", "runs/emc2-seed0", "2026-11-15_143210_emc2_digits_seed0")]
        ['crops-lr3', None, None]
        """
        if isinstance(name := self.config.get("name"), str) and name:
            return name
        stem = re.sub(r"[-_ ]s(eed)?[-_ ]?\d+$", "", self.name)
        ours = re.match(r"\d{4}-\d\d-\d\d_\d{6}_", self.name) or stem == self.config.get("method")
        return None if ours or not re.search(r"[^\W\d]", stem) else stem

    @property
    def seed(self) -> str:
        """The seed as written; a dash where a config names none."""
        return _option(self.config.get("seed", "–"))

    @property
    def method(self) -> str:
        """The method's name as people write it."""
        return title_of(str(self.config.get("method", "unknown")))

    @property
    def task(self) -> str:
        """The task's name; old runs name none and are of images."""
        return str(self.config.get("task", "images"))

    @property
    def shown(self) -> Shown:
        """What is shown of runs of its task."""
        return shown(self.task, bool(self.config.get("pretrained")))

    @property
    def foreign(self) -> set[str]:
        """Settings that belong to other tasks."""
        return options() - set(TASKS[self.task].options) if self.task in TASKS else set()

    @property
    def finished(self) -> bool:
        """Whether the run reached its end."""
        return self.summary is not None

    @property
    def data_info(self) -> dict[str, Any]:
        """What was read: counts, class names, files left out; what has a wrong type is dropped."""
        info = self.config.get("data_info")
        found = info.items() if isinstance(info, dict) else ()
        return {key: value for key, value in found if isinstance(value, _KINDS.get(key, object))}

    @property
    def classes(self) -> list[str]:
        """Class names; empty when the data has no labels."""
        return [str(name) for name in self.data_info.get("classes", [])]

    @property
    def labelled(self) -> bool:
        """Whether there was something to probe."""
        return any(self.final(metric.key) is not None for metric in self.shown.lead)

    @property
    def unprobed(self) -> str:
        """Why nothing was probed; empty where labels exist and no evaluation was recorded."""
        said = self.data_info.get("unprobed") or ("" if self.classes else "the data has no labels")
        return str(said)

    @property
    def query_noun(self) -> str:
        """What the pictures with neighbours are: test images, or those trained on."""
        return "test image" if self.data_info.get("test") else "image"

    def baseline(self, key: str) -> dict[str, float]:
        """What the final value of `key` is compared with: {"untrained": ..., "pixels": ..., ...}.

        From the summary, or of an unfinished run from its first line of metrics.
        """
        first = self.metrics[0] if self.metrics and self.metrics[0].get("step") == 0 else {}
        found = {
            name: self.final(name) if name == "chance" else self.final(f"{name}_{key}")
            for name in self.shown.baselines
        }
        if found.get("untrained") is None:
            found["untrained"] = first.get(key)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def data_name(self) -> str:
        """The data set's name, or the last part of its path."""
        return Path(str(self.config.get("data", "unknown data"))).name or "data"

    @property
    def data_state(self) -> str:
        """Which files the data were when the run read them; empty where that is not known."""
        mark, count = (self.data_info.get(key) for key in ("fingerprint", "num_samples"))
        return f"{count} samples ({str(mark)[:6]})" if mark else ""

    @property
    def passes(self) -> float | None:
        """How often the run saw every sample; None where that is not known."""
        size, seen = self.data_info.get("num_samples"), self.final("samples")
        return seen / size if isinstance(size, int) and size >= 1 and seen is not None else None

    def curve(self, key: str) -> Curve:
        """The finite values of one metric, in order of samples seen (empty if never recorded)."""
        rows = [line for line in self.metrics if key in line and "samples" in line]
        columns = [[r.get(k, math.nan) for r in rows] for k in ("samples", "seconds", key)]
        return Curve(*(np.array(column, dtype=np.float64) for column in columns))

    def final(self, key: str) -> float | None:
        """The summary's number; without one, the last recorded (for throughput, the median)."""
        value = _finite((self.summary or {}).get(key))
        if value is not None:
            return value
        recorded = [line[key] for line in self.metrics if key in line]
        if not recorded:
            return None
        return float(np.median(recorded)) if key == "samples_per_second" else recorded[-1]


def load_run(path: Path) -> Run:
    """Read a run folder.

    >>> load_run(Path("/no/such/run"))
    Traceback (most recent call last):
    negchain.train.presets.ConfigError: /no/such/run holds no run (no config.json); give a folder \
negchain train made
    """
    path = Path(path)
    require_run(path)
    config = read_object(path / "config.json")
    summary = read_object(path / "summary.json") if os.path.lexists(path / "summary.json") else None
    file = path / "artifacts.npz"
    artifacts = read_arrays(file) if os.path.lexists(file) else {}
    return Run(path, config, _read_metrics(path), summary, artifacts)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """A line for each step: what training and evaluation logged of it, a repeat as it was last."""
    merged: dict[Any, dict[str, float]] = {}
    for line in read_metrics(path):
        numbers = {key: value for key in line if (value := _finite(line[key])) is not None}
        merged.setdefault(line["step"], {}).update(numbers)
    return [merged[step] for step in sorted(merged)]


@dataclass(frozen=True)
class Group:
    """Runs of one method with equal options: the seeds behind one mean."""

    label: str
    method: str  # the config's key, which fixes the colour
    variant: int  # 0, 1, ... among the groups of that method, which fixes the dash
    settings: dict[str, Any]  # options that differ anywhere among the runs compared
    runs: list[Run]

    @property
    def shown(self) -> Shown:
        """What is shown of its runs' task."""
        return self.runs[0].shown

    @property
    def counted(self) -> list[Run]:
        """Runs behind means and curves: one a seed, of the finished ones if any has finished.

        A seed run again gives the same numbers, which say nothing about other seeds.
        """
        runs = [run for run in self.runs if run.finished] or self.runs
        return list({run.seed: run for run in runs}.values())

    @property
    def finished(self) -> bool:
        """Whether any run has finished."""
        return any(run.finished for run in self.runs)

    @property
    def repeated(self) -> int:
        """How many of its runs have the seed of another one."""
        return len(self.runs) - len({run.seed for run in self.runs})

    def finals(self, key: str) -> FloatArray:
        """The final value of `key` of every counted run that has one."""
        values = [run.final(key) for run in self.counted]
        return np.array([value for value in values if value is not None], dtype=np.float64)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs that differ only by seed together, each group under what its runs were called.

    Where the tool named them a group is its method; names that would be equal get the options in
    which they differ, or which state of the data each group read.
    """
    differing = _differing_options(runs)
    buckets: dict[str, list[Run]] = {}
    for run in runs:
        options = {key: _option(run.config.get(key)) for key in ("method", *differing)}
        buckets.setdefault(json.dumps([options, run.data_state]), []).append(run)
    names = [_called(bucket) for bucket in buckets.values()]
    labels = list(names)
    for name in {name for name in names if names.count(name) > 1}:
        alike = [i for i, other in enumerate(names) if other == name]
        members = [list(buckets.values())[i] for i in alike]
        keys = _differing_options([run for bucket in members for run in bucket])
        told = [[f"{k}={_option(bucket[0].config.get(k))}" for k in keys] for bucket in members]
        for i, bucket, said in zip(alike, members, told, strict=True):
            if told.count(said) > 1:
                said = [bucket[0].data_state, *said]
            more = [f"{len(said) - _OPTIONS_NAMED} more"] if len(said) > _OPTIONS_NAMED else []
            labels[i] = " · ".join([name, *said[:_OPTIONS_NAMED], *more])
    groups: list[Group] = []
    for label, bucket in zip(labels, buckets.values(), strict=True):
        method = str(bucket[0].config.get("method", "unknown"))
        variant = sum(group.method == method for group in groups)
        settings = {key: bucket[0].config.get(key) for key in differing}
        groups.append(Group(label, method, variant, settings, bucket))
    return groups


def _called(runs: Sequence[Run]) -> str:
    """One name for the seeds of a group."""
    names = list(dict.fromkeys(name for run in runs if (name := run.called)))
    if not names:
        return runs[0].method
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _differing_options(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _BOOKKEEPING)
    return [key for key in keys if _tells_apart(runs, key)]


def _tells_apart(runs: Sequence[Run], key: str) -> bool:
    """Whether a setting differs among runs of one method, or among methods that have it."""
    values = {(str(run.config.get("method")), _option(run.config.get(key))) for run in runs}
    own = {value for method, value in values if has_setting(method, key)}
    return len(own) > 1 or len(values) > len({method for method, _ in values})


def has_setting(method: str, key: str) -> bool:
    """Whether a setting means anything to a method: DCL has no `proposal`."""
    if method not in METHODS or key in METHODS[method].options:
        return True
    return not any(key in other.options for other in METHODS.values())


def _option(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def mean_curve(runs: Sequence[Run], key: str, points: int) -> tuple[Curve, FloatArray]:
    """Mean over runs at equal samples seen, and the standard deviation over runs [n].

    Seconds are averaged at equal samples too: the curve against time is the mean run's, and ends
    at the mean time with the mean final value.
    """
    curves = [thinned(curve, points) for run in runs if len(curve := run.curve(key))]
    if len(curves) < 2:
        curve = curves[0] if curves else Curve(*[np.empty(0)] * 3)
        return curve, np.zeros(len(curve))
    grid = np.unique(np.concatenate([curve.samples for curve in curves]))
    if len(grid) > points:
        grid = np.linspace(grid[0], grid[-1], points)
    ends = {"left": math.nan, "right": math.nan}
    values = np.ma.masked_invalid([np.interp(grid, c.samples, c.values, **ends) for c in curves])
    seconds = np.ma.masked_invalid([np.interp(grid, c.samples, c.seconds, **ends) for c in curves])
    here = ~np.ma.getmaskarray(values).all(axis=0)  # two curves may leave a gap between them
    means = (rows[:, here].mean(axis=0).filled(math.nan) for rows in (seconds, values))
    return Curve(grid[here], *means), values[:, here].std(axis=0, ddof=1).filled(0.0)


def thinned(curve: Curve, points: int) -> Curve:
    """At most `points` points: the mean of each of equal stretches, placed at the stretch's end.

    >>> line = np.arange(6.0)
    >>> thinned(Curve(line, line, line), 3).values.tolist()
    [0.5, 2.5, 4.5]
    """
    if len(curve) <= points:
        return curve
    stretches = np.array_split(np.arange(len(curve)), points)
    ends = np.array([part[-1] for part in stretches])
    means = np.array([curve.values[part].mean() for part in stretches])
    return Curve(curve.samples[ends], curve.seconds[ends], means)
