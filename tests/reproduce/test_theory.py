"""`negchain reproduce theory` against formulas typed in again and a literal loop of Algorithm 1."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from negchain.reproduce import theory


def test_lemma_1_is_the_papers() -> None:
    """The bound, without its factor 2, was never asserted: the lemma held all the same."""
    found = theory.mixing({"beta": 0.5, "m": 3, "B": 2, "R": 4})
    rate = 1 - 2 * 4 / (2 * 3 * 3 * math.exp(2 * 0.5))
    assert found["bound_rate"] == pytest.approx(rate)
    assert [p["bound"] for p in found["curve"]] == pytest.approx(
        [rate ** p["t"] for p in found["curve"]]
    )


@pytest.mark.parametrize(("beta", "batch"), [(0.5, 1), (0.5, 2), (2.0, 2)])
def test_lemma_2_is_the_papers(beta: float, batch: int) -> None:
    """For unit vectors in the plane L_P is the square root of 2: two sides turn by a sine of 1."""
    found = theory.lipschitz({"beta": beta, "B": batch, "R": 2})
    assert found["L_P"] == pytest.approx(math.sqrt(2), rel=1e-3)
    slope = found["L_P"] * math.exp(2 * beta) * beta
    assert found["bound"] == pytest.approx(2**3 * batch * slope)
    assert found["holds"] and 0.27 < found["measured"] < found["bound"]  # by secants it was 0.16


@pytest.mark.parametrize("beta", [5.0, 14.28])
def test_the_papers_infonce_is_at_most_the_global_loss(beta: float) -> None:
    *less, last = theory.bound({"beta": beta})["curve"]
    for point in less:
        assert point["infonce"] < point["scaled"] < point["global"]
    assert last["B"] == 100
    assert last["infonce"] == pytest.approx(last["global"], rel=1e-6)


def literal(job: dict) -> list[float]:
    """Algorithm 1 as the paper prints it, sample by sample and proposal by proposal."""
    beta, length, size, steps = (job[key] for key in ("beta", "T", "B", "R"))
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 8, generator=draw).repeat(5, 1)
    x = (centres + 0.5 * torch.randn(30, 8, generator=draw)).double()
    y = (x + 0.3 * torch.randn(30, 8, generator=draw)).double()
    thetas = list(torch.randn(16, 8, 3, generator=draw).double())
    draw.manual_seed(1 + job["seed"])
    chains = ((torch.randint(1, 30, (16, 30), generator=draw) + torch.arange(30)) % 30).tolist()
    totals = [0.0] * 16
    for _ in range(length):
        batch = torch.rand(16, 30, generator=draw).argsort(1)[:, :size]
        ahead = torch.randint(1, 30, (16, size, steps), generator=draw)
        proposed = ((ahead + batch[..., None]) % 30).tolist()
        if job["method"] == "emc2":
            chance = torch.rand(16, size, steps, generator=draw).tolist()
        for lane, theta in enumerate(thetas):
            theta.requires_grad_()
            s = normalize(x @ theta, dim=1) @ normalize(y @ theta, dim=1).T
            others = torch.exp(beta * s) * (1 - torch.eye(30))
            loss = (others.sum(1).log() - beta * s.diagonal()).mean()
            (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
            totals[lane] += float((gradient**2).sum()) / length
            at, share = s.tolist(), torch.zeros(30, 30).double()
            for k, i in enumerate(batch[lane].tolist()):
                share[i, i] -= 1
                if job["method"] == "dcl":
                    e = [math.exp(beta * at[i][z]) for z in proposed[lane][k]]
                    for z, weight in zip(proposed[lane][k], e, strict=True):
                        share[i, z] += weight / sum(e)
                    continue
                for r, z in enumerate(proposed[lane][k]):
                    if chance[lane][k][r] < math.exp(beta * (at[i][z] - at[i][chains[lane][i]])):
                        chains[lane][i] = z
                    if r >= job["P"]:
                        share[i, chains[lane][i]] += 1 / (steps - job["P"])
            (gradient,) = torch.autograd.grad((beta * share * s).sum() / size, theta)
            thetas[lane] = theta.detach() - 0.5 / math.sqrt(length) * gradient
    return totals


@pytest.mark.parametrize(("method", "burn_in"), [("emc2", 4), ("emc2", 0), ("dcl", 0)])
def test_theorem_1_is_measured_on_algorithm_1(method: str, burn_in: int) -> None:
    job = {"beta": 5.0, "method": method, "B": 4, "R": 8, "P": burn_in, "T": 8, "seed": 3}
    found, runs = theory.rate(job), literal(job)
    assert found["mean_square"] == pytest.approx(statistics.fmean(runs), rel=1e-4)
    assert found["median"] == pytest.approx(statistics.median(runs), rel=1e-4)
    other = theory.rate({**job, "seed": 5})["mean_square"]
    assert other != pytest.approx(found["mean_square"], rel=1e-3)


def test_slopes_are_those_of_means_over_seeds() -> None:
    """One seed's outlier was the steepest slope of the table (-0.63 where others have -0.3)."""
    case = {"part": "rate", "beta": 5.0, "method": "emc2", "B": 4, "R": 2, "P": 1}
    rows = [
        {
            "job": {**case, "T": t, "seed": seed},
            "mean_square": (1 + seed) * t**-0.5,
            "median": 1 / t,
        }
        for seed in (0, 1)
        for t in (64, 4, 16)
    ]
    line = theory.table(rows).split("\n")[-1]
    assert (
        line
        == "| EMC² | 4 | 2 | 1 | 2 | 0.750 ± 0.354 | 0.188 ± 0.088 | -0.50 | -0.50 ± 0.00 | -1.00 |"
    )
    assert theory.draw(rows)["theory"].axes[0].lines[0].get_ydata() == pytest.approx(
        [0.75, 0.375, 0.1875]
    )


def test_every_negative_proposed_once_moves_chains_from_p() -> None:
    found = theory.in_batch({"beta": 14.28, "share": 1.0, "visits": 2})
    assert found["R"] == 100
    assert found["without_weights"] > 3 * found["with_weights"]


def test_equal_views_stand_under_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(z: torch.Tensor, **given: object) -> SimpleNamespace:
        row = {"cosine": float((z[0] * z[1]).sum(1).mean()), **given}
        return SimpleNamespace(as_dicts=lambda: [row])

    monkeypatch.setattr(theory, "estimator_report", report)
    found = theory.bias({"b": 8, "beta": 5.0, "method": "emc2", "steps": 7, "visits": 3})
    assert found["equal"]["cosine"] == pytest.approx(1)
    assert found["differing"]["cosine"] == pytest.approx(0.87, abs=0.01)
    assert found["equal"]["warm_up"] == 24 and found["equal"]["steps"] == 7
