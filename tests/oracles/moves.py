"""One visit of one chain, as a law: weights are expectations, only the next state is drawn.

A state is a column (id, address), or None: the one the chain started in. Columns of several kinds
are met kind by kind, draws from beyond the batch first; in each, levels are logits minus log q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from oracles.exact import log_sum_exp

Column = tuple[int, int]  # id, address


@dataclass
class Kind:
    """Columns that were drawn in one way."""

    columns: list[Column]
    count: int  # draws they stand for
    log_q: np.ndarray | None = None  # [ids] log(q m); None: uniform, 0
    is_set: bool = False  # a batch: in no order, and every item at most once per copy
    copies: int = 1
    log_held: float = 0.0  # log of how often a held item counts beside a set


State = Column | None
Law = dict[State, float]


def move(
    kinds: list[Kind],
    logits: dict[Column, float],
    start: Column,
    start_logit: float,
    kernel: Any,
    rng: np.random.Generator,
) -> tuple[Law, State]:
    """Weights of the states, and where the chain ends; `logits` of the columns it may use."""
    isir = kernel == "isir" or type(kernel).__name__ == "ISIR"
    burn_in = getattr(kernel, "burn_in", 0.5)
    steps = [sum(z in logits for z in kind.columns) for kind in kinds]
    left = int(burn_in) if burn_in >= 1 else int(sum(steps) * burn_in + 1e-3)
    total: Law = {}
    at: State = None
    for kind, number in reversed(list(zip(kinds, steps, strict=True))):

        def level(z: Column, logit: float, kind: Kind = kind) -> float:
            return logit - (0.0 if kind.log_q is None else float(kind.log_q[z[0]]))

        levels: Law = {z: level(z, logits[z]) for z in kind.columns if z in logits}
        levels[at] = level(start, start_logit) if at is None else level(at, logits[at])
        if at is None and start_logit == -math.inf:
            levels[at] = -math.inf
        columns = [z if math.isfinite(levels.get(z, math.inf)) else None for z in kind.columns]
        if isir:
            weights = ends = resample(kind, columns, levels, at, start)
            counted = kind.count
        else:
            skipped = min(left, number)
            weights, ends = scan(columns, levels, at, skipped, kernel, rng)
            counted, left = number - skipped, left - skipped
        for z, weight in weights.items():
            total[z] = total.get(z, 0.0) + weight * (counted if len(kinds) > 1 else 1)
        states, chances = zip(*ends.items(), strict=True)
        at = states[int(rng.choice(len(states), p=np.array(chances) / sum(chances)))]
    share = sum(total.values())
    return ({z: w / share for z, w in total.items()} if share else {at: 1.0}), at


def resample(kind: Kind, columns: list[State], levels: Law, at: State, start: Column) -> Law:
    """i-SIR: the softmax over the held state and the columns; a set holds every item once."""
    if levels[at] == math.inf:  # never proposed here, so never left
        return {at: 1.0}
    offered: list[State] = [at]
    if kind.is_set:
        offered = [] if (at or start)[0] in [name for name, _ in kind.columns] else [at]
    width = len(columns) // kind.copies if kind.is_set else len(columns)
    for first in range(0, len(columns), max(width, 1)):
        seen = set()
        for z in columns[first : first + width]:
            if z is not None and not (kind.is_set and z[0] in seen):
                seen.add(z[0])
                offered.append(z)
    level = np.array([levels[z] for z in offered])
    if offered[:1] == [at]:
        level[0] += kind.log_held
    if not len(level) or level.max() == -math.inf:
        return {at: 1.0}
    weights: Law = {}
    for z, p in zip(offered, np.exp(level - log_sum_exp(level)), strict=True):
        weights[z] = weights.get(z, 0.0) + float(p)
    return weights


def scan(
    columns: list[State],
    levels: Law,
    at: State,
    skipped: int,
    kernel: Any,
    rng: np.random.Generator,
) -> tuple[Law, Law]:
    """Metropolis-Hastings over the columns in a random order: mean weights, law of the end."""
    every, burn_in = getattr(kernel, "count_every", 1), getattr(kernel, "burn_in", 0.5)
    first = int(burn_in if burn_in >= 1 else len(columns) * burn_in + 1e-3)
    first = min(first, len(columns) - 1)
    now: Law = {at: 1.0}
    weights: Law = {}
    step = counted = 0
    for place, number in enumerate(rng.permutation(len(columns))):
        column = columns[number]
        if column is not None:
            for z, chance in list(now.items()):
                if z != column:
                    accept = math.exp(min(0.0, levels[column] - levels[z]))
                    now[z] = chance * (1 - accept)
                    now[column] = now.get(column, 0.0) + chance * accept
            step += 1
        counts = column is not None and step > skipped
        if every > 1:
            counts = place >= first and ((place + 1) % every == 0 or place + 1 == len(columns))
        if counts:
            counted += 1
            for z, chance in now.items():
                weights[z] = weights.get(z, 0.0) + chance
    return ({z: w / counted for z, w in weights.items()}, now) if counted else (now, now)
