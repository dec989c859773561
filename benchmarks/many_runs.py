"""Many small training runs on one GPU, in slices: tuned on validation, resumed, told as a table.

A run is a dict: `method`, `batch`, `seed`, the tuned settings (`TUNED`), `stage`, and what `train`
adds to it: `validation`, `test`, `per_query` (of every test query, for paired tests), `wall`. Every
method is tried with the whole grid (seed 0), and its other seeds run with what validation chose.
Rows are written to a file as JSON lines; given back with --resume they are not run again. Nothing
is begun that would not end within --seconds, going by runs like it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
TUNED = ("beta", "lr")


def options(text: str) -> argparse.ArgumentParser:
    """What every such script takes."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--betas", type=float, nargs="+")
    parser.add_argument("--lrs", type=float, nargs="+")
    parser.add_argument("--at-once", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=530.0)
    parser.add_argument("--longest", type=float, default=150.0, help="of a run like none before")
    parser.add_argument("--resume", nargs="*", default=[], help="files of earlier slices")
    parser.add_argument("--alone", action="store_true", help="time steps, one run at a time")
    parser.add_argument("--equal-time", metavar="METHOD", help="run all as long as this one takes")
    parser.add_argument("--against", help="the method that others are held against")
    parser.add_argument("--show", action="store_true", help="print the tables of --resume only")
    return parser


def read(files: Sequence[str]) -> list[Row]:
    """Rows of earlier slices, the last of its kind; failed runs are left out, to be tried again."""
    found = {}
    for file in files:
        for line in Path(file).read_text().splitlines():
            row = json.loads(line)
            if "error" not in row:
                found[_key(row)] = row
    return list(found.values())


def _key(row: Row) -> tuple[Any, ...]:
    names = ("method", "batch", "seed", *TUNED)
    return (*(row.get(name) for name in names), row.get("stage", "steps"))


def _group(row: Row) -> tuple[Any, ...]:
    return row["method"], row["batch"], row.get("stage", "steps")


def chosen(rows: Sequence[Row], method: str, batch: int, grid: Sequence[Row]) -> Row | None:
    """What validation chose for a method; None until the whole grid is there."""
    tried = [r for r in rows if _group(r) == (method, batch, "steps") and r["seed"] == 0]
    tried = [r for r in tried if {n: r.get(n) for n in TUNED} in grid]
    if len(tried) < len(grid):
        return None
    done = [r for r in tried if "validation" in r]
    return max(done, key=lambda r: r["validation"]) if done else None


def step_time(rows: Sequence[Row], method: str, batch: int) -> float | None:
    """Milliseconds of a step of a method alone on the device."""
    found = [r["ms"] for r in rows if _group(r) == (method, batch, "alone")]
    return found[0] if found else None


def _due(rows: Sequence[Row], given: argparse.Namespace, grid: Sequence[Row]) -> list[Row]:
    """Runs that can begin now, in the order of their worth."""
    tasks: list[Row] = []
    cells = [(m, b) for b in given.batches for m in given.methods]
    for method, batch in cells:
        task = {"method": method, "batch": batch}
        if given.alone:
            tasks.append({**task, **grid[0], "seed": 0, "stage": "alone"})
            continue
        best = chosen(rows, method, batch, grid)
        if best is None:
            tasks += (
                [{**task, **tried, "seed": 0} for tried in grid] if not given.equal_time else []
            )
            continue
        task |= {name: best[name] for name in TUNED if name in best}
        if not given.equal_time:
            tasks += [{**task, "seed": seed} for seed in range(1, given.seeds)]
            continue
        own, other = (step_time(rows, m, batch) for m in (method, given.equal_time))
        if own and other:
            scaled = {**task, "stage": "time", "scale": other / own}
            tasks += [{**scaled, "seed": seed} for seed in range(given.seeds)]
    known = {_key(r) for r in rows}
    return [t for t in tasks if _key(t) not in known]


def run(train: Callable[[Row], Row], given: argparse.Namespace, fixed: Row, name: str) -> list[Row]:
    """Run what is missing; `fixed` goes into every task, rows into $OUT/`name`."""
    begin, out = time.perf_counter(), Path(os.environ.get("OUT", ".")) / name
    rows = read(given.resume)
    if given.show:
        return rows
    grid = [{"beta": beta, "lr": lr} for beta in given.betas for lr in given.lrs]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    old, at_once = len(rows), 1 if given.alone else given.at_once
    flying: list[tuple[Row, Any]] = []
    with mp.get_context("spawn").Pool(at_once) as pool, out.open("a") as file:
        while True:
            left = given.seconds - (time.perf_counter() - begin)
            flown = {_key(task) for task, _ in flying}
            for task in _due(rows, given, grid):
                if len(flying) == at_once or _key(task) in flown:
                    continue
                if 1.15 * _expected(rows, task, given.longest) < left:
                    flying.append((task, pool.apply_async(train, ({**fixed, **task},))))
            ready = [pair for pair in flying if pair[1].ready()]
            flying = [pair for pair in flying if pair not in ready]
            for _, result in ready:
                rows.append(result.get())
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
            if left < 0 or not (flying or ready):
                break
            time.sleep(0.1)
        pool.terminate()
    if given.equal_time:
        cells = [(m, b) for b in given.batches for m in {*given.methods, given.equal_time}]
        untimed = [f"{m} at {b}" for m, b in cells if step_time(rows, m, b) is None]
        print(f"not timed by --alone, so not run: {', '.join(untimed)}" if untimed else "all timed")
    missing = len(_due(rows, given, grid))
    seconds = time.perf_counter() - begin
    print(f"{len(rows) - old} runs in {seconds:.0f} s, {missing} known to be missing")
    for row in rows[old:]:
        if "error" in row:
            print(_key(row), row["error"][-500:])
    return rows


def _expected(rows: Sequence[Row], task: Row, longest: float) -> float:
    like = [r for r in rows if _group(r)[:2] == _group(task)[:2] and "wall" in r]
    like = [r for r in like if r.get("stage") == task.get("stage")]
    known = max((r["wall"] for r in like), default=longest)
    return 10.0 if task.get("stage") == "alone" else known


# ------------------------------------------------------------------------------ tables


def show(rows: Sequence[Row], given: argparse.Namespace, columns: Sequence[str]) -> None:
    """Mean and spread over seeds of what validation chose, and paired differences."""
    grid = [{"beta": beta, "lr": lr} for beta in given.betas for lr in given.lrs]
    for batch in given.batches:
        for stage in ("steps", "time"):
            best = {m: chosen(rows, m, batch, grid) for m in given.methods}
            runs = {m: _of_seeds(rows, m, batch, stage, b) for m, b in best.items() if b}
            if not any(runs.values()):
                continue
            equal = "equal steps" if stage == "steps" else f"the time {given.equal_time} takes"
            heads = [f"b = {batch}, {equal}", *TUNED, "validation", "test", "s.d.", "seeds"]
            heads += [*columns, "ms a step, alone", f"minus {given.against}", "p"]
            print("\n| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
            for method, own in runs.items():
                if own:
                    print(_line(rows, method, batch, own, runs.get(given.against, []), columns))


def _of_seeds(rows: Sequence[Row], method: str, batch: int, stage: str, best: Row) -> list[Row]:
    same = [r for r in rows if _group(r) == (method, batch, stage) and "test" in r]
    return [r for r in same if all(r.get(n) == best.get(n) for n in TUNED)]


def _line(
    rows: Sequence[Row], method: str, batch: int, own: list[Row], other: list[Row],
    columns: Sequence[str],
) -> str:  # fmt: skip
    test = np.array([r["test"] for r in own])
    spread = f"{test.std(ddof=1):.3f}" if len(test) > 1 else ""
    cells = [method, *(f"{own[0].get(n):g}" if own[0].get(n) else "" for n in TUNED)]
    cells += [f"{np.mean([r['validation'] for r in own]):.3f}", f"{test.mean():.3f}", spread]
    cells += [str(len(own))]
    for name in columns:
        values = [r[name] for r in own if r.get(name) is not None]
        cells.append(f"{np.mean(values):.3g}" if values else "")
    alone = step_time(rows, method, batch)
    cells.append("" if alone is None else f"{alone:.1f}")
    difference = paired(own, other) if other and own[0]["method"] != other[0]["method"] else None
    if difference is None:
        return "| " + " | ".join([*cells, "", ""]) + " |"
    mean, low, high, p = difference
    return "| " + " | ".join([*cells, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", f"{p:.3g}"]) + " |"


def paired(own: list[Row], other: list[Row]) -> tuple[float, float, float, float] | None:
    """Mean difference, its 95 % interval over queries and seeds, p of flipped signs of queries.

    >>> a = [{"seed": s, "per_query": [1.0, 0.5, 0.7]} for s in range(2)]
    >>> b = [{"seed": s, "per_query": [0.5, 0.5, 0.7]} for s in range(2)]
    >>> [round(x, 2) for x in paired(a, b)][0]
    0.17
    """
    theirs = {r["seed"]: r["per_query"] for r in other}
    rows = [np.subtract(r["per_query"], theirs[r["seed"]]) for r in own if r["seed"] in theirs]
    if not rows:
        return None
    d, rng = np.stack(rows), np.random.default_rng(0)  # [seeds, queries]
    seeds, queries = (rng.multinomial(n, np.full(n, 1 / n), 5000) / n for n in d.shape)
    means = ((seeds @ d) * queries).sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    one = d.mean(0)
    flipped = (rng.choice([-1.0, 1.0], (5000, len(one))) @ one) / len(one)
    p = (np.sum(np.abs(flipped) >= abs(one.mean()) - 1e-12) + 1) / 5001
    return float(one.mean()), float(low), float(high), float(p)
