"""The paper's lemmas and theorem against numbers, on problems whose kernels can be written down.

mixing      Lemma 1: |P(xi_t = z) - pi(z)| <= (1 - BR / (2 m m_neg e^{2 beta}))^t, the joint kernel
            of m chains built as a matrix and worst start and state taken.
lipschitz   Lemma 2: |P_theta - P_theta'| <= 2^{R+1} B L_P e^{2 beta} beta |theta - theta'|.
bound       InfoNCE on subsets of size B is at most the global loss.
rate        Theorem 1: (1/T) sum_t |grad L|^2 falls like T^{-1/2} with steps of c / sqrt(T).
bias        bias and variance of every estimator over batch size and beta, on frozen embeddings.
in-batch    proposals without replacement: how far from p do chains end?
"""

import functools
import itertools
import math
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain.diagnostics import estimator_report
from negchain.methods import METHODS, reproduced, title_of
from negchain.reproduce import pages
from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.pages import colour, distinct, where
from negchain.weights import mh_scan

ESTIMATORS = reproduced()
CASE = ("method", "B", "R", "P")
TIMES = (1, 2, 4, 8, 16, 32, 64, 128)


def jobs(options: Options) -> list[Row]:
    """All parts; `--quick` keeps the smallest of each."""
    quick, every = options.quick, itertools.product
    found: list[Row] = [
        {"part": "mixing", "beta": beta, "m": m, "B": batch, "R": steps}
        for beta, (m, batch), steps in every(
            (0.5, 2.0), ((2, 1), (3, 1), (3, 2), (3, 3)), (1, 4, 24)
        )
    ]
    found += [{"part": "lipschitz", "beta": 2.0, "R": r} for r in (1, 2, 4, 8)]
    found += [{"part": "bound", "beta": beta} for beta in (5.0, 14.28)]
    cases = [("full", 0, 0, 0)]
    cases += [("emc2", *case) for case in ((1, 2, 1), (1, 2, 0), (4, 2, 1), (4, 8, 0), (4, 8, 4))]
    cases += [("dcl", *case) for case in ((4, 2, 0), (4, 8, 0))]
    for case, length in every(
        cases[:3] if quick else cases, (64, 128, 256) if quick else (64, 256, 1024)
    ):
        named = dict(zip(CASE, case, strict=True))
        found.append({"part": "rate", "beta": 5.0, **named, "T": length})
    shares = (0.05, 0.5) if quick else (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    for beta, share in every((5.0, 14.28), shares):
        found.append({"part": "in-batch", "beta": beta, "share": share, "visits": 40})
    sizes = ((14.28,), (8,)) if quick else ((14.28, 5.0), (8, 32, 4, 16))
    for beta, batch, method in every(*sizes, options.methods or ESTIMATORS):
        visits = 30 if "carried" in METHODS[method].options else 10  # chains mix slowly
        steps = {"steps": 20, "visits": 5} if quick else {"steps": 400, "visits": visits}
        found.append({"part": "bias", "b": batch, "beta": beta, "method": method, **steps})
    return found


def work(job: Row, deadline: float) -> Row:
    """Measure a part."""
    return PARTS[job["part"]](job)


# ---------------------------------------------------------------------- kernels as matrices


def mh_kernel(logits: Tensor) -> Tensor:  # [K] -> [K,K]
    """One Metropolis-Hastings step with uniform proposals: row = from, column = to.

    Example:
        >>> logits = torch.tensor([0.0, 1.0])
        >>> torch.allclose(logits.softmax(0) @ mh_kernel(logits), logits.softmax(0))
        True
    """
    kernel = torch.exp((logits[None, :] - logits[:, None]).clamp(max=0)) / len(logits)
    kernel.fill_diagonal_(0)
    return kernel + torch.diag(1 - kernel.sum(1))


def joint_kernel(logits: Tensor, batch: int, steps: int) -> Tensor:  # [m,K] -> [K^m,K^m]
    """The kernel of all chains: B of m, drawn without replacement, make R steps each."""
    moved = [torch.linalg.matrix_power(mh_kernel(row), steps) for row in logits]
    still = torch.eye(logits.shape[1], dtype=logits.dtype)
    parts = [
        functools.reduce(torch.kron, [k if i in some else still for i, k in enumerate(moved)])
        for some in itertools.combinations(range(len(moved)), batch)
    ]
    return torch.stack(parts).mean(0)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _similarities(m: int, states: int, seed: int, dim: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, z = (_randn(generator, count, dim) for count in (m, states))
    return normalize(x, dim=-1) @ normalize(z, dim=-1).T


def mixing(job: Row) -> Row:
    """Largest |P(xi_t = z) - pi(z)| over starts and states, against Lemma 1's bound."""
    m, batch, steps, beta, states = job["m"], job["B"], job["R"], job["beta"], 3
    logits = beta * _similarities(m, states, seed=0)
    kernel = joint_kernel(logits, batch, steps)
    target = functools.reduce(torch.kron, logits.softmax(1))
    share = batch * steps / (m * states * math.exp(2 * beta))
    curve = []
    for t in TIMES:
        worst = float((torch.linalg.matrix_power(kernel, t) - target).abs().max())
        curve.append({"t": t, "measured": worst, "bound": max(0.0, 1 - share / 2) ** t})
    second = float(torch.linalg.eigvals(kernel).abs().sort().values[-2])
    # Lemma 1 assumes BR <= m m_neg e^{2 beta} (its proof's last line).
    holds = all(p["measured"] <= p["bound"] + 1e-9 for p in curve)
    found = {"curve": curve, "rate": second, "bound_rate": 1 - share / 2}
    return {**found, "assumed": share <= 1, "holds": holds}


def lipschitz(job: Row) -> Row:
    """Largest change of a transition probability per change of theta and of similarities."""
    steps, beta, m, states = job["R"], job["beta"], 2, 3
    generator = torch.Generator().manual_seed(0)
    worst = slope = 0.0

    def kernel(theta: Tensor) -> tuple[Tensor, Tensor]:
        x, z = normalize(theta[:m], dim=-1), normalize(theta[m:], dim=-1)
        return joint_kernel(beta * x @ z.T, 1, steps), x @ z.T

    for _ in range(300):
        theta = normalize(_randn(generator, m + states, 2), dim=-1)
        step = 1e-4 * _randn(generator, *theta.shape)
        (before, s), (after, s_after) = kernel(theta), kernel(theta + step)
        worst = max(worst, float((after - before).abs().max() / step.norm()))
        slope = max(slope, float((s_after - s).abs().max() / step.norm()))
    bound = 2 ** (steps + 1) * slope * math.exp(2 * beta) * beta
    return {"measured": worst, "bound": bound, "L_P": slope}


def bound(job: Row) -> Row:
    """The loss over random subsets of B negatives against the loss over all 100."""
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

    phi(x; theta) = normalised x theta, 30 pairs in 6 clusters, one view; steps of 0.5 / sqrt(T).
    """
    runs, m, dim, out, beta, length = 16, 30, 8, 3, job["beta"], job["T"]
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, dim, generator=generator).repeat(m // 6, 1)
    x = centres + 0.5 * torch.randn(m, dim, generator=generator)
    y = x + 0.3 * torch.randn(m, dim, generator=generator)
    theta = torch.randn(runs, dim, out, generator=generator)
    states = (torch.randint(1, m, (runs, m), generator=generator) + torch.arange(m)) % m
    lane, total = torch.arange(runs)[:, None], 0.0
    for _ in range(length):
        theta = theta.detach().requires_grad_()
        a, b = normalize(x @ theta, dim=-1), normalize(y @ theta, dim=-1)
        s = a @ b.transpose(1, 2)  # [S,m,m]
        logits = (beta * s).masked_fill(torch.eye(m, dtype=torch.bool), -math.inf)
        whole = (logits.logsumexp(2) - beta * s.diagonal(dim1=1, dim2=2)).mean(1)
        (gradient,) = torch.autograd.grad(whole.sum(), theta, retain_graph=True)
        total += float(gradient.square().sum((1, 2)).mean())
        if job["method"] != "full":
            index = torch.rand(runs, m, generator=generator).argsort(1)[:, : job["B"]]
            shape = (runs, job["B"], job["R"])
            proposals = (torch.randint(1, m, shape, generator=generator) + index[..., None]) % m
            rows = s[lane, index]  # [S,B,m]
            offered = rows.gather(2, proposals)
            if job["method"] == "dcl":
                weights = (beta * offered).softmax(2).detach()
                push = (weights * offered).sum(2)
            else:
                held = states[lane, index]
                start = rows.gather(2, held[..., None])[..., 0]
                log_u = torch.rand(shape, generator=generator).clamp(min=1e-30).log()
                scan = mh_scan(
                    (beta * offered).detach().flatten(0, 1),
                    (beta * start).detach().flatten(),
                    log_u.flatten(0, 1),
                    job["P"],
                )
                weights = scan.weights.view(shape)
                push = (weights * offered).sum(2) + scan.start_weight.view(shape[:2]) * start
                last = scan.last.view(shape[:2])
                moved = proposals.gather(2, last.clamp(min=0)[..., None])[..., 0]
                states[lane, index] = torch.where(last >= 0, moved, held)
            pull = rows.gather(2, index[..., None])[..., 0]
            (gradient,) = torch.autograd.grad((beta * (push - pull)).mean(1).sum(), theta)
        theta = theta.detach() - 0.5 / math.sqrt(length) * gradient
    return {"mean_square": total / length}


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
    logits = job["beta"] * _similarities(1, states, seed=1, dim=8)[0].float()
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


def _cases(rows: list[Row]) -> list[list[Row]]:
    """Runs of Theorem 1 that differ in T only."""
    return [where(rows, **dict(zip(CASE, case, strict=True))) for case in distinct(rows, *CASE)]


def slope(rows: list[Row]) -> float:
    """Fitted slope of log mean |grad L|^2 over log T.

    Example:
        >>> row = lambda t: {"job": {"T": t}, "mean_square": t**-0.5}
        >>> round(slope([row(4), row(16), row(64)]), 6)
        -0.5
    """
    lengths = [math.log(row["job"]["T"]) for row in rows]
    return statistics.linear_regression(
        lengths, [math.log(row["mean_square"]) for row in rows]
    ).slope


TABLES = {
    "mixing": """β|m|B|R|rate (second eigenvalue)|Lemma 1's rate|its assumption|bound holds
        {beta:g}|{m}|{B}|{R}|{rate:.3f}|{bound_rate:.3f}|{assumed}|{holds}""",
    "lipschitz": """R|largest change of P per change of θ found|Lemma 2's constant
        {R}|{measured:.3g}|{bound:.3g}""",
    "bound": """β|B of 100|log-sum-exp over B|and + log(100 / B)|over all
        {beta:g}|{B}|{infonce:.2f}|{scaled:.2f}|{global:.2f}""",
    "rate": """method|B|R|P|(1/T)Σ‖∇L‖², T = {first[job][T]}|T = {last[job][T]}|slope
        {method}|{B}|{R}|{P}|{first[mean_square]:.3g}|{last[mean_square]:.3g}|{slope:.2f}""",
    "bias": """β|b|method|bias, equal views|std per step|bias, cosine 0.87|std per step
        {beta:g}|{b}|{method}|{equal[relative_bias]:.2f}|{equal[relative_std]:.2f}|\
{differing[relative_bias]:.2f}|{differing[relative_std]:.2f}""",
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
            runs = _cases(found)
            found = [{**r[0], "first": r[0], "last": r[-1], "slope": slope(r)} for r in runs]
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
    at: list[int] = []
    values: list[float] = []
    for number, found in enumerate(_cases(rows)):
        case = [found[0]["job"][key] for key in CASE]
        numbers = " B={} R={} P={}".format(*case[1:]) if case[1] else ""
        at, values = [r["job"]["T"] for r in found], [r["mean_square"] for r in found]
        style = "--" if case[0] == "dcl" else "-"
        label = title_of(case[0]) + numbers
        axis.plot(at, values, style, marker=".", color=f"C{number}", label=label)
    axis.plot(
        at, [values[0] * (t / at[0]) ** -0.5 for t in at], ":", color="grey", label="T^(-1/2)"
    )
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
    for axis, (part, found) in zip(axes, parts.items(), strict=True):
        DRAWN[part](axis, found)
        axis.set_xscale("log")
        if part in ("rate", "bias"):  # labels between powers of ten would overlap
            at = sorted(distinct(found, "T" if part == "rate" else "b"))
            axis.set_xticks(at, at)
            axis.xaxis.minorticks_off()
        axis.legend(fontsize=6)
    return {"theory": figure}


EXPERIMENTS = {"theory": Experiment(table, draw, jobs, work, on_data=False)}
