"""Do the released scripts' deviations from the paper make its gap of two orders of magnitude?

Claim    Fig. 7: EMC²'s squared gradient norm is a hundredth of the others' (500 images, two stored
         views, b = 4, beta 5, SGD). The authors' scripts differ from the paper; each difference
         that can reach this figure is a variant here, alone and with the others.
Measure  their "exact" gradient has beta² for beta and the positive in the denominator: every run is
         judged by eq. (1), by either change and by both. What multiplies a measure by a constant
         (sums for means) leaves ratios as they are and is no variant.
Scale    their SogCLR's loss is 2 / beta of EMC²'s; under SGD a scale is a step size. Also the
         scale that would be needed, and steps that fall to 0, where noise is gone and bias stays.
Chain    counts from step P + 1 on and divides by R - P; what is still at the carried state pulls at
         the batch's last column; old scores; columns in the batch's order; a first proposal is
         always accepted; one chain for both views, one after the other.
Cache    1 - p+ with the anchor's similarity to itself in the place of the positive's.
Prints   for each variant how many times EMC²'s ||grad L||² the others end with.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/released_code.py --out FILE.jsonl

The same command goes on with what is missing; `--redraw` only prints.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from negchain import NegativeCacheLoss, rng
from negchain.chunked import Chunked
from negchain.exact import global_loss
from negchain.methods import METHODS, LossSettings, Method, named, register
from negchain.reproduce.common import Options, Row, append, provenance, read_rows
from negchain.reproduce.pages import markdown, where
from negchain.reproduce.stationarity import CHUNK, OPTIONS, exact, powers, work
from negchain.tasks import COLLAPSED

BURN_IN = OPTIONS["burn_in"]  # P
DEVIATIONS = ("count", "last-column", "stale", "order", "first", "sequence")


class Chain(nn.Module):
    """EMC² on two stored views, without options: `EMC2Loss` if nothing deviates.

    `B` batch, `K` = 2B columns and rows, states are ids `item * 2 + view`.
    """

    ids_per_item = 2

    def __init__(self, num_samples: int, beta: float, seed: int, deviations: set[str]) -> None:
        super().__init__()
        self.beta, self.seed, self.deviations = beta, seed, deviations
        self.step = torch.tensor(0)
        own = torch.arange(2 * num_samples)
        u = rng.uniform(seed, self.step, rng.FOR_INIT, own, 1, torch.float64)[:, 0]
        others = (u * (2 * num_samples - 2)).long()
        self.states = others + 2 * (others >= own // 2 * 2)
        self.scores = torch.full((2 * num_samples,), math.nan)  # nan: never visited
        self.at_carried = 0.0  # share of the counted states that were carried ones, last call

    def fill(self, encode: Any) -> None:
        """No table."""

    def forward(self, z_a: Tensor, z_b: Tensor, index: Tensor, augmentation: Any, encode: Any):  # type: ignore[no-untyped-def]
        z, items, size = normalize(torch.cat([z_a, z_b]), dim=1), index.repeat(2), len(index)
        ids = items * 2 + torch.cat(augmentation)
        chains = items * 2 if "sequence" in self.deviations else ids
        similarity, to_carried = z @ z.T, (z * normalize(encode(self.states[chains]), dim=1)).sum(1)
        logits = (self.beta * similarity.detach()).masked_fill(items[:, None] == items, -math.inf)
        current, seen = self.beta * to_carried.detach(), ~self.scores[chains].isnan()
        if "stale" in self.deviations:
            current = torch.where(seen, self.scores[chains], current)
        if "first" in self.deviations:
            current = current.masked_fill(~seen, -math.inf)
        at = torch.full_like(items, 2 * size)  # column; the one after the last: the carried state
        visits, rows = logits.new_zeros(2 * size, 2 * size + 1), torch.arange(2 * size)
        if "sequence" in self.deviations:
            first, second = rows.chunk(2)
            self._walk(logits, current, at, visits, first)
            current[second], at[second] = current[first], at[first]
            self._walk(logits, current, at, visits, second)
        else:
            self._walk(logits, current, at, visits, rows)
        weights = visits / (2 * size - 2 - BURN_IN)
        self.at_carried = float(weights[:, -1].mean())
        if "last-column" in self.deviations:
            weights[:, -2] += weights[:, -1]
            weights[:, -1] = 0
        self._store(chains, at, ids, current)
        negative = (weights[:, :-1] * similarity).sum(1) + weights[:, -1] * to_carried
        return self.beta * (negative - (z[:size] * z[size:]).sum(1).repeat(2)).mean()

    def _walk(
        self, logits: Tensor, current: Tensor, at: Tensor, visits: Tensor, rows: Tensor
    ) -> None:
        """Move the chains of some rows over all columns; the rest is changed in place."""
        width = logits.shape[1]
        order = rng.permutation(self.seed, self.step, rng.FOR_ORDER, width)
        if "order" in self.deviations:
            order = torch.arange(width)
        where_to = (self.seed, self.step, rng.FOR_ACCEPT)
        log_u = rng.log_uniform(*where_to, rows, width, logits.dtype)
        done, from_step = torch.zeros_like(rows), BURN_IN + ("count" in self.deviations)
        for r, column in enumerate(order):
            proposal = logits[rows, column]
            moves = proposal - log_u[:, r] > current[rows]
            at[rows] = torch.where(moves, column, at[rows])
            current[rows] = torch.where(moves, proposal, current[rows])
            is_step = proposal > -math.inf
            visits[rows, at[rows]] += (is_step & (done >= from_step)).to(visits.dtype)
            done += is_step

    def _store(self, chains: Tensor, at: Tensor, ids: Tensor, current: Tensor) -> None:
        size = len(ids) // 2
        row = torch.arange(len(ids))
        if "sequence" in self.deviations:
            row = row[size:].repeat(2)
        else:  # views of one augmentation have one chain: a coin says whose state it takes
            key = (self.seed, self.step, rng.FOR_VIEW)
            coin = rng.bits(*key, row[:size], 1)[:, 0] % 2 == 0
            row[:size] += size * ((chains[:size] == chains[size:]) & ~coin)
        moved = at[row] < len(ids)
        new = torch.where(moved, ids[at[row] % len(ids)], self.states[chains])
        for half in (slice(size, None), slice(0, size)):  # the first view's decides
            self.states[chains[half]] = new[half]
            self.scores[chains[half]] = current[row][half]
        self.step += 1


class SelfPositive(NegativeCacheLoss):
    """1 - p+ with s(x, x) = 1 instead of s(x, y)."""

    def _value(self, side: Any, similarity: Tensor, estimate: Any) -> Tensor:
        shift = self.beta * (side.to_positives.detach() - 1)
        estimate = estimate._replace(log_saturation=estimate.log_partition + shift)
        return super()._value(side, similarity, estimate)


class Scaled(nn.Module):
    """A loss times a factor, which falls to 0 over some steps if these are given."""

    def __init__(self, loss_fn: Any, factor: float, over: int | None = None) -> None:
        super().__init__()
        self.loss_fn, self.factor, self.over, self.calls = loss_fn, factor, over, 0
        self.ids_per_item, self.fill = loss_fn.ids_per_item, loss_fn.fill

    def forward(self, *given: Any, **named: Any) -> Tensor:
        left = 1 - self.calls / self.over if self.over else 1.0
        self.calls += 1
        return self.factor * left * self.loss_fn(*given, **named)


def _chain(deviations: set[str], s: LossSettings) -> Any:
    return Chain(s.num_samples, float(s.beta), s.seed, deviations)


def _scaled(method: str, factor: float, over: int | None, s: LossSettings) -> Any:
    return Scaled(named(method).build(s), factor, over)


def _cache(s: LossSettings) -> Any:
    refresh = s.option("refresh", 0.1)
    return SelfPositive(s.num_samples, s.beta, refresh, **{**s.chosen, "denominator": "all"})


BETA, LONG = 5.0, 10_000
OURS = next(name for name, method in METHODS.items() if "burn_in" in method.options)
OTHERS = ("infonce", "dcl", "sogclr", "negcache")
FACTORS = {"tenth": 0.1, "ten": 10.0, "hundred": 100.0}
BUILDS = {f"chain-{name}": partial(_chain, {name}) for name in DEVIATIONS}
BUILDS["chain-released"] = partial(_chain, set(DEVIATIONS))
BUILDS["cache-released"] = _cache
for _m in (*OTHERS, OURS):
    BUILDS[f"{_m}-released-scale"] = partial(_scaled, _m, 2 / BETA, None)
    BUILDS[f"{_m}-falling"] = partial(_scaled, _m, 10.0, LONG)
    BUILDS |= {f"{_m}-{n}": partial(_scaled, _m, f, None) for n, f in FACTORS.items()}
for _name, _build in BUILDS.items():
    register(Method(_name, _name, ("#888", "#888"), _build))

MEASURES = {  # beta, denominator
    "eq. (1)": (1, "negatives"),
    "the positive kept in": (1, "all"),
    "β²": (2, "negatives"),
    "both, as released": (2, "all"),
}


def measure(encoder: nn.Module, views: Tensor, beta: float) -> Row:
    """`exact`, and squared gradient norms by every measure."""
    norms = {}
    for name, (power, denominator) in list(MEASURES.items())[1:]:
        z = normalize(Chunked(encoder, CHUNK)(views.flatten(0, 1)).double(), dim=-1)
        loss = global_loss(*z.chunk(2), beta**power, denominator=denominator)  # type: ignore[arg-type]
        encoder.zero_grad()
        torch.autograd.backward(loss)
        norms[name] = sum(p.grad.double().square().sum().item() for p in encoder.parameters())
    numbers = exact(encoder, views, beta)
    return {**numbers, "by": {"eq. (1)": numbers["gradient"], **norms}}


PAPER, LARGER = 1e-3, 1e-2
SETUP = {"encoder": "mlp", "size": 8, "images": 500, "batch": 4, "data": "digits", "beta": BETA}


def runs() -> list[Row]:
    """Method or variant, step size and number of steps."""
    chains = (*(f"chain-{name}" for name in DEVIATIONS), "chain-released")
    both = (*OTHERS, OURS, *chains, "cache-released", "sogclr-released-scale")
    scaled = [f"{m}-released-scale" for m in OTHERS if m != "sogclr"]
    scaled += [f"{m}-{n}" for m in ("infonce", "dcl", OURS) for n in FACTORS]
    found = [{"method": name, "lr": lr, "steps": 1250} for lr in (LARGER, PAPER) for name in both]
    found += [{"method": name, "lr": LARGER, "steps": 1250} for name in scaled]
    falling = [f"{m}-falling" for m in (*OTHERS, OURS)]
    return found + [{"method": name, "lr": LARGER, "steps": LONG} for name in falling]


TOLD = {
    "count": "counts from step P + 1, divides by R − P",
    "last-column": "what is carried pulls at the last column",
    "stale": "scores of the last visit",
    "order": "columns in the batch's order",
    "first": "a first proposal is always accepted",
    "sequence": "one chain for both views, in sequence",
    "released": "all six",
}
Line = tuple[str, float, str, str, dict[str, str]]


def released() -> list[Line]:
    """What deviates, step size, measure, which run stands for EMC² and which for the others."""
    plain, (eq1, *_, theirs) = {m: m for m in OTHERS}, MEASURES
    sogclr, cache = {"sogclr": "sogclr-released-scale"}, {"negcache": "cache-released"}
    everything = {**plain, **sogclr, **cache}
    found: list[Line] = []
    for lr, few in ((PAPER, True), (LARGER, False)):
        names = (eq1, theirs) if few else MEASURES
        found += [("nothing, or the measure alone", lr, name, OURS, plain) for name in names]
        if not few:
            found += [(f"chain: {TOLD[d]}", lr, eq1, f"chain-{d}", plain) for d in DEVIATIONS]
            found += [("SogCLR: loss × 2/β", lr, eq1, OURS, sogclr)]
            found += [("Negative Cache: 1 − p⁺ with s(x, x)", lr, eq1, OURS, cache)]
        found += [(f"chain: {TOLD['released']}", lr, eq1, "chain-released", plain)]
        found += [("**everything, as released**", lr, theirs, "chain-released", everything)]
    return found


def others() -> list[Line]:
    """What is not in the scripts: scales that would be needed, and the end of a long descent."""
    eq1, few, label = next(iter(MEASURES)), ("infonce", "dcl"), f"{LONG:,} steps, × 10 falling to 0"
    ten, hundred = f"{OURS}-ten", f"{OURS}-hundred"
    changed = {n: {m: f"{m}-{n}" for m in OTHERS} for n in ("released-scale", "falling")}
    changed |= {n: {m: f"{m}-{n}" for m in few} for n in FACTORS}
    plain = {m: m for m in OTHERS}
    return [
        ("every loss but EMC²'s × 2/β", LARGER, eq1, OURS, changed["released-scale"]),
        ("EMC²'s loss × 10", LARGER, eq1, ten, plain),
        ("EMC²'s loss × 100", LARGER, eq1, hundred, plain),
        ("EMC²'s × 100, the others' / 10", LARGER, eq1, hundred, changed["tenth"]),
        ("all losses × 10", LARGER, eq1, ten, changed["ten"]),
        ("all losses × 100", LARGER, eq1, hundred, changed["hundred"]),
        (f"all losses: {label}", LARGER, eq1, f"{OURS}-falling", changed["falling"]),
    ]


def ended(rows: list[Row], method: str | None, lr: float, by: str) -> dict[int, float]:
    """Squared gradient norms by seed, of runs that did not collapse."""
    last = {r["job"]["seed"]: r["curve"][-1] for r in where(rows, method=method, lr=lr)}
    return {seed: end["by"][by] for seed, end in last.items() if end["variance"] >= COLLAPSED}


def ratios(rows: list[Row], line: Line, method: str) -> list[float]:
    """A method's squared gradient norm over EMC²'s, seed by seed."""
    _, lr, by, ours, theirs = line
    own, other = (ended(rows, name, lr, by) for name in (ours, theirs.get(method)))
    return [other[seed] / own[seed] for seed in sorted(own) if seed in other]


def table(rows: list[Row]) -> str:
    """Squared gradient norms over EMC²'s: geometric mean, and the factor by which seeds differ."""
    grid = []
    for line in (*released(), *others()):
        label, lr, by, ours, _ = line
        own = ended(rows, ours, lr, by)
        lost = len(where(rows, method=ours, lr=lr)) - len(own)
        norm = powers(list(own.values())) + (f", {lost} collapsed" if lost else "")
        cells = [powers(ratios(rows, line, method)) for method in OTHERS]
        grid.append([label, f"{lr:g}", by, norm, *cells])
    titles = [f"{METHODS[m].title} / EMC²" for m in OTHERS]
    return markdown(["what deviates", "step size", "measure", "EMC²: ‖∇L‖²", *titles], grid)


def main() -> None:
    """Run what is missing and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = Path("records/2026-11-16_released-code_cpu.jsonl")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="methods with this in their name")
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.redraw:
        append(given.out, {"record": "released-code", **provenance(Options(device="cpu"))})
        done = [row["job"] for row in read_rows(given.out)]
        jobs = [{"seed": seed, **run, **SETUP} for seed in range(given.seeds) for run in runs()]
        for job in jobs:
            if job in done or given.only not in job["method"]:
                continue
            begin = time.process_time()
            found = work(job, time.time() + 1e6, measure)
            cpu = round(time.process_time() - begin, 1)
            append(given.out, {"job": job, **found, "cpu": cpu})
            last = found["curve"][-1]
            print(job["seed"], job["method"], job["lr"], last["exact_loss"], last["by"], cpu)
    print(table(read_rows(given.out)))


if __name__ == "__main__":
    main()
