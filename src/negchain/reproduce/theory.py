"""The paper's lemmas and theorem against numbers, on problems whose kernels can be written down.

mixing      Lemma 1, and
lipschitz   Lemma 2, with the joint kernel as a matrix: `negchain.reproduce.kernels`.
bound       the paper's InfoNCE, eq. (2), our DCL: on subsets of B at most the global loss.
rate        Theorem 1: (1/T) sum_t |grad L|^2 falls like T^{-1/2} with steps of c / sqrt(T).
bias        bias and variance of every estimator over batch size and beta, on frozen embeddings.
in-batch    proposals without replacement: how far from p do chains end?
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.diagnostics import estimator_report
from negchain.methods import METHODS, reproduced, title_of
from negchain.reproduce import pages
from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.kernels import lipschitz, mixing, random_similarities
from negchain.reproduce.pages import colour, distinct, where
from negchain.weights import mh_scan

ESTIMATORS = reproduced()
CASE = ("method", "B", "R", "P")


def jobs(options: Options) -> list[Row]:
    """All parts; `--quick` keeps the smallest of each."""
    quick, every = options.quick, itertools.product
    found: list[Row] = [
        {"part": "mixing", "beta": beta, "m": m, "B": batch, "R": steps}
        for beta, (m, batch), steps in every(
            (0.5, 2.0), ((2, 1), (3, 1), (3, 2), (3, 3)), (1, 4, 24)
        )
    ]
    found += [
        {"part": "lipschitz", "beta": beta, "B": batch, "R": steps}
        for beta, batch, steps in every((0.5, 2.0), (1, 2), (1, 2, 4, 8))
    ]
    found += [{"part": "bound", "beta": beta} for beta in (5.0, 14.28)]
    cases = [("full", 0, 0, 0)]
    cases += [("emc2", *case) for case in ((1, 2, 1), (1, 2, 0), (4, 2, 1), (4, 8, 0), (4, 8, 4))]
    cases += [("dcl", *case) for case in ((4, 2, 0), (4, 8, 0))]
    lengths = (64, 128, 256) if quick else (64, 256, 1024, 4096)
    for seed in range(options.seeds or (2 if quick else 8)):
        for numbers, length in every(cases[:3] if quick else cases, lengths):
            if numbers[0] != "full" or seed == 0:  # nothing is drawn for the exact gradient
                named = dict(zip(CASE, numbers, strict=True))
                found.append({"part": "rate", "beta": 5.0, **named, "T": length, "seed": seed})
    shares = (0.05, 0.5) if quick else (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    for beta, share in every((5.0, 14.28), shares):
        found.append({"part": "in-batch", "beta": beta, "share": share, "visits": 40})
    sizes = ((14.28,), (8,)) if quick else ((14.28, 5.0), (8, 32, 4, 16))
    for beta, batch, method in every(*sizes, options.methods or ESTIMATORS):
        chain = "carried" in METHODS[method].options  # they mix slowly, and are noisier for it
        steps = max(1600, (51_200 if chain else 25_600) // batch)
        steps, visits = (20, 5) if quick else (steps, 30 if chain else 10)
        case = {"part": "bias", "b": batch, "beta": beta, "method": method}
        found.append({**case, "steps": steps, "visits": visits})
    return found


def work(job: Row, deadline: float) -> Row:
    """Measure a part."""
    return PARTS[job["part"]](job)


# ---------------------------------------------------------------------- InfoNCE and the global loss


def bound(job: Row) -> Row:
    """The paper's InfoNCE over random subsets of B negatives against the loss over all 100."""
    beta, generator = job["beta"], torch.Generator().manual_seed(0)
    z = normalize(torch.randn(101, 16, generator=generator), dim=-1)
    logits = beta * (z[0] @ z[1:].T)
    whole, curve = float(logits.logsumexp(0)), []
    for size in (1, 2, 4, 8, 16, 32, 64, 100):
        subsets = torch.rand(2000, 100, generator=generator).argsort(1)[:, :size]
        mean = float(logits[subsets].logsumexp(1).mean())
        scaled = mean + math.log(100 / size)
        curve.append({"B": size, "infonce": mean, "scaled": scaled, "global": whole})
    return {"curve": curve}


# ---------------------------------------------------------------------- Theorem 1


def rate(job: Row) -> Row:
    """Mean of |grad L|^2 over T steps of Algorithm 1 to the letter, 16 runs at once.

    Mean and median of the runs: where some x theta is nearly 0, normalising it is not smooth.

    phi(x; theta) = normalised x theta, 30 pairs in 6 clusters, one view; steps of 0.5 / sqrt(T).
    The seed draws first states, batches and proposals; data and the 16 theta_0 stay.
    """
    runs, m, dim, out, beta, length = 16, 30, 8, 3, job["beta"], job["T"]
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, dim, generator=generator).repeat(m // 6, 1)
    x = centres + 0.5 * torch.randn(m, dim, generator=generator)
    y = x + 0.3 * torch.randn(m, dim, generator=generator)
    theta = torch.randn(runs, dim, out, generator=generator)
    generator.manual_seed(1 + job["seed"])
    states = (torch.randint(1, m, (runs, m), generator=generator) + torch.arange(m)) % m
    total = torch.zeros(runs)
    for _ in range(length):
        theta = theta.detach().requires_grad_()
        a, b = normalize(x @ theta, dim=-1), normalize(y @ theta, dim=-1)
        s = a @ b.transpose(1, 2)  # [S,m,m]
        logits = (beta * s).masked_fill(torch.eye(m, dtype=torch.bool), -math.inf)
        whole = (logits.logsumexp(2) - beta * s.diagonal(dim1=1, dim2=2)).mean(1)
        (gradient,) = torch.autograd.grad(whole.sum(), theta, retain_graph=True)
        total += gradient.square().sum((1, 2))
        if job["method"] != "full":
            estimate = beta * _drawn(job, s, states, generator)
            (gradient,) = torch.autograd.grad(estimate.sum(), theta)
        theta = theta.detach() - 0.5 / math.sqrt(length) * gradient
    means = (total / length).tolist()
    return {"mean_square": statistics.fmean(means), "median": statistics.median(means)}


def _drawn(job: Row, s: Tensor, states: Tensor, generator: torch.Generator) -> Tensor:
    """Push minus pull of a random batch, [S,m,m] -> [S]; its chains move in `states`, [S,m]."""
    runs, m = states.shape
    lane, shape = torch.arange(runs)[:, None], (runs, job["B"], job["R"])
    index = torch.rand(runs, m, generator=generator).argsort(1)[:, : job["B"]]
    proposals = (torch.randint(1, m, shape, generator=generator) + index[..., None]) % m
    rows = s[lane, index]  # [S,B,m]
    offered, logits = rows.gather(2, proposals), job["beta"] * rows.detach()
    if job["method"] == "dcl":
        push = (logits.gather(2, proposals).softmax(2) * offered).sum(2)
    else:
        held = states[lane, index]
        log_u = torch.rand(shape, generator=generator).clamp(min=1e-30).log()
        scan = mh_scan(
            logits.gather(2, proposals).flatten(0, 1),
            logits.gather(2, held[..., None]).flatten(),
            log_u.flatten(0, 1),
            job["P"],
        )
        start = rows.gather(2, held[..., None])[..., 0]
        push = (scan.weights.view(shape) * offered).sum(2)
        push = push + scan.start_weight.view(shape[:2]) * start
        last = scan.last.view(shape[:2])
        moved = proposals.gather(2, last.clamp(min=0)[..., None])[..., 0]
        states[lane, index] = torch.where(last >= 0, moved, held)
    pull = rows.gather(2, index[..., None])[..., 0]
    drawn: Tensor = (push - pull).mean(1)
    return drawn


# ---------------------------------------------------------------------- estimators


def bias(job: Row) -> Row:
    """`estimator_report` on 64 unit vectors in 16 clusters, two views at cosine 0.87."""
    generator = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(16, 16, generator=generator), dim=-1).repeat(4, 1)
    items = normalize(centres + 0.125 * torch.randn(64, 16, generator=generator), dim=-1)
    found = {}
    for name, noise in (("equal", 0.0), ("differing", 0.1)):
        z = normalize(items + noise * torch.randn(2, 64, 16, generator=generator), dim=-1)
        given = {"batch_size": job["b"], "beta": job["beta"], "methods": [job["method"]]}
        warm_up = job["visits"] * 64 // job["b"]
        report = estimator_report(z, steps=job["steps"], warm_up=warm_up, **given)
        found[name] = report.as_dicts()[0]
    return found


def in_batch(job: Row) -> Row:
    """Total variation between p and chains begun at p, proposals with and without replacement."""
    chains, states, visits = 8_000, 100, job["visits"]
    generator = torch.Generator().manual_seed(0)
    logits = job["beta"] * random_similarities(1, states, seed=1, dim=8)[0].float()
    count, target = max(1, round(job["share"] * states)), logits.softmax(0)
    found: Row = {"R": count}
    for name in ("with", "without"):
        at = torch.multinomial(target, chains, replacement=True, generator=generator)
        share = torch.zeros(states)
        for visit in range(visits):
            if name == "with":
                proposals = torch.randint(0, states, (chains, count), generator=generator)
            else:
                proposals = torch.rand(chains, states, generator=generator).topk(count)[1]
            log_u = torch.rand(chains, count, generator=generator).clamp(min=1e-30).log()
            scan = mh_scan(logits[proposals], logits[at], log_u, count // 2)
            if visit >= visits // 2:
                share.index_add_(0, proposals.flatten(), scan.weights.flatten())
                share.index_add_(0, at, scan.start_weight)
            moved = proposals.gather(1, scan.last.clamp(min=0)[:, None])[:, 0]
            at = torch.where(scan.last >= 0, moved, at)
        share /= share.sum()
        ends = torch.bincount(at, minlength=states) / chains
        found[f"{name}_weights"] = float((share - target).abs().sum() / 2)
        found[f"{name}_ends"] = float((ends - target).abs().sum() / 2)
    return found


PARTS = {
    "mixing": mixing,
    "lipschitz": lipschitz,
    "bound": bound,
    "rate": rate,
    "bias": bias,
    "in-batch": in_batch,
}


# ---------------------------------------------------------------------- what becomes of it


def _cases(rows: list[Row]) -> list[list[list[Row]]]:
    """Runs of Theorem 1 by case, each a list over T of the runs that differ in their seed only."""
    found = []
    for case in distinct(rows, *CASE):
        runs = where(rows, **dict(zip(CASE, case, strict=True)))
        found.append([where(runs, T=length) for length in sorted(distinct(runs, "T"))])
    return found


def slope(lengths: Sequence[int], values: Iterable[float]) -> float:
    """Fitted slope of log mean |grad L|^2 over log T.

    Example:
        >>> round(slope((4, 16, 64), (0.5, 0.25, 0.125)), 6)
        -0.5
    """
    logs = [math.log(length) for length in lengths]
    return statistics.linear_regression(logs, [math.log(value) for value in values]).slope


def _fitted(runs: list[list[Row]]) -> Row:
    """A case of Theorem 1 as a line of the table."""
    lengths = [found[0]["job"]["T"] for found in runs]
    means, medians = (
        [[r[key] for r in found] for found in runs] for key in ("mean_square", "median")
    )
    alone = [slope(lengths, own) for own in zip(*means, strict=False)]  # of a seed
    return {
        **runs[0][0],
        **{"short": lengths[0], "long": lengths[-1], "seeds": len(means[0])},
        **{"first": pages.spread(means[0]), "last": pages.spread(means[-1])},
        "slope": slope(lengths, map(statistics.fmean, means)),
        "alone": pages.spread(alone, 2),
        "median": slope(lengths, map(statistics.fmean, medians)),
    }


TABLES = {
    "mixing": """β|m|B|R|rate (second eigenvalue)|Lemma 1's rate|its assumption|bound holds
        {beta:g}|{m}|{B}|{R}|{rate:.3f}|{bound_rate:.3f}|{assumed}|{holds}""",
    "lipschitz": """β|B|R|largest gradient of P by θ found|Lemma 2's constant|bound holds
        {beta:g}|{B}|{R}|{measured:.3g}|{bound:.3g}|{holds}""",
    "bound": """β|B of 100|log-sum-exp over B|and + log(100 / B)|over all
        {beta:g}|{B}|{infonce:.2f}|{scaled:.2f}|{global:.2f}""",
    "rate": """method|B|R|P|seeds|(1/T)Σ‖∇L‖², T = {short}|T = {long}|slope|of each seed|of medians
        {method}|{B}|{R}|{P}|{seeds}|{first}|{last}|{slope:.2f}|{alone}|{median:.2f}""",
    "bias": """β|b|method|bias, equal views|noise|std per step|bias, cosine 0.87|noise|std per step
        {beta:g}|{b}|{method}|{equal[relative_bias]:.2f}|{equal[noise]:.2f}|\
{equal[relative_std]:.2f}|{differing[relative_bias]:.2f}|{differing[noise]:.2f}|\
{differing[relative_std]:.2f}""",
    "in-batch": """β|R / m_neg|weights, i.i.d.|weights, in batch|ends, i.i.d.|ends, in batch
        {beta:g}|{share:g}|{with_weights:.3f}|{without_weights:.3f}|{with_ends:.3f}|\
{without_ends:.3f}""",
}


def table(rows: list[Row]) -> str:
    """One table per part that was measured."""
    parts = []
    for part, pattern in TABLES.items():
        found = [{**row["job"], **row} for row in where(rows, part=part)]
        if part == "bound":
            found = [{**row, **point} for row in found for point in row["curve"][::3]]
        if part == "bias":
            found.sort(key=lambda row: (row["beta"], row["b"]))
        if part == "rate":
            found = [_fitted(runs) for runs in _cases(found)]
        if found:
            parts.append(pages.filled(pattern, found))
    return "\n\n".join(parts)


def _draw_mixing(axis: Any, rows: list[Row]) -> None:
    shown = [r for r in where(rows, m=3, beta=0.5) if r["job"]["B"] in (1, 3)]
    for number, row in enumerate(shown):
        label = f"B = {row['job']['B']}, R = {row['job']['R']}"
        times = [p["t"] for p in row["curve"]]
        axis.plot(times, [p["measured"] for p in row["curve"]], color=f"C{number}", label=label)
        axis.plot(times, [p["bound"] for p in row["curve"]], color=f"C{number}", ls=":")
    axis.set(yscale="log", ylim=(1e-6, 2), xlabel="t", title="|P - π|, dotted: Lemma 1")


def _draw_rate(axis: Any, rows: list[Row]) -> None:
    """Means over seeds, the range between them shaded."""
    for number, runs in enumerate(_cases(rows)):
        case = [runs[0][0]["job"][key] for key in CASE]
        numbers = " B={} R={} P={}".format(*case[1:]) if case[1] else ""
        at = [found[0]["job"]["T"] for found in runs]
        values = [[row["mean_square"] for row in found] for found in runs]
        means = [statistics.fmean(of) for of in values]
        style = "--" if case[0] == "dcl" else "-"
        label = title_of(case[0]) + numbers
        axis.plot(at, means, style, marker=".", color=f"C{number}", label=label)
        low, high = [min(of) for of in values], [max(of) for of in values]
        axis.fill_between(at, low, high, color=f"C{number}", alpha=0.12)
    axis.plot(at, [means[0] * (t / at[0]) ** -0.5 for t in at], ":", color="grey", label="T^(-1/2)")
    axis.set(yscale="log", xlabel="T", title="(1/T) Σ ‖∇L‖²")


def _draw_bias(axis: Any, rows: list[Row]) -> None:
    for method, style in itertools.product(distinct(rows, "method"), ("-", ":")):
        views, name = ("equal", title_of(method)) if style == "-" else ("differing", None)
        found = where(rows, beta=14.28, method=method)
        points = sorted((r["job"]["b"], r[views]["relative_bias"]) for r in found)
        axis.plot(*zip(*points, strict=True), style, color=colour(method), label=name, marker=".")
    axis.set(xlabel="b", title="bias, β = 14.28; dotted: cosine 0.87")


def _draw_in_batch(axis: Any, rows: list[Row]) -> None:
    for beta, style in zip(distinct(rows, "beta"), ("-", "--"), strict=False):
        found = where(rows, beta=beta)
        for key, label, tint in (("with", "i.i.d.", "C0"), ("without", "in batch", "C1")):
            at, values = [r["job"]["share"] for r in found], [r[f"{key}_weights"] for r in found]
            axis.plot(at, values, style, color=tint, marker=".", label=f"{label}, β = {beta:g}")
    axis.set(xlabel="R / m_neg", title="total variation from p")


DRAWN = {"mixing": _draw_mixing, "rate": _draw_rate, "bias": _draw_bias, "in-batch": _draw_in_batch}


def draw(rows: list[Row]) -> dict[str, Any]:
    """Mixing, the rate of Theorem 1, bias over batch size, and proposals without replacement."""
    parts = {part: found for part in DRAWN if (found := where(rows, part=part))}
    figure, axes = pages.panels(len(parts))
    figure.set_figwidth(9)  # with legends beside the panels
    for axis, (part, found) in zip(axes, parts.items(), strict=True):
        DRAWN[part](axis, found)
        axis.set_xscale("log")
        if part in ("rate", "bias"):  # labels between powers of ten would overlap
            at = sorted(distinct(found, "T" if part == "rate" else "b"))
            axis.set_xticks(at, at)
            axis.xaxis.minorticks_off()
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}  # inside it hides curves
        axis.legend(fontsize=6, handlelength=3.5, **beside)
    return {"theory": figure}


EXPERIMENTS = {"theory": Experiment(table, draw, jobs, work, on_data=False)}
