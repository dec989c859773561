"""`reproduce stationarity`: the descent is SGD on what it says, and figures tell how runs ended."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from negchain.methods import METHODS
from negchain.reproduce import stationarity
from negchain.reproduce.common import FULL, Options, Row

JOB = {"encoder": "mlp", "size": 8, "images": 12, "batch": 4, "data": "digits", "steps": 3,
       "seed": 0, "beta": 7.0, "lr": 1.0, "method": FULL}  # fmt: skip


class Seen:
    """The encoder of a run, how it began, what it encoded, and the stored views [2,M,C,H,W]."""

    encoder: nn.Module
    start: list[Tensor]
    views: Tensor

    def __init__(self) -> None:
        self.encoded: list[Tensor] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, build, exact = Seen(), stationarity.build, stationarity.exact

    def spy_build(*given: Any) -> nn.Module:
        found.encoder = build(*given)
        found.start = [p.detach().double() for p in found.encoder.parameters()]
        found.encoder.register_forward_pre_hook(lambda _, args: found.encoded.append(args[0]))
        return found.encoder

    def spy_exact(encoder: nn.Module, views: Tensor, beta: float) -> Row:
        found.views = views
        return exact(encoder, views, beta)

    monkeypatch.setattr(stationarity, "build", spy_build)
    monkeypatch.setattr(stationarity, "exact", spy_exact)
    return found


def run(**given: Any) -> Row:
    return stationarity.work({**JOB, **given}, time.time() + 60)


def equation_1(theta: list[Tensor], views: Tensor, beta: float) -> Tensor:
    """The mean over D_pos of the loss of "mlp", by the whole table of similarities."""
    first, second, third, fourth = theta
    hidden = (views.flatten(0, 1).flatten(1).double() @ first.T + second).relu()
    z = normalize(hidden @ third.T + fourth, dim=-1)
    logits, item = beta * z @ z.T, torch.arange(len(z)) % views.shape[1]
    own = item[:, None] == item
    positives = (logits * own).sum(1) / 2  # of two views, the anchor's own among them
    return (logits.masked_fill(own, -torch.inf).logsumexp(1) - positives).mean()


def test_full_descent_is_sgd_by_hand(seen: Seen) -> None:
    """Weight decay 1e-4, and each step has the gradient of where it stands."""
    curve = run()["curve"]
    theta = seen.start
    for point in curve[:3]:
        theta = [p.detach().requires_grad_() for p in theta]
        loss = equation_1(theta, seen.views, JOB["beta"])
        gradient = torch.autograd.grad(loss, theta)
        assert point["exact_loss"] == pytest.approx(loss.item(), rel=1e-5)
        theta = [p - JOB["lr"] * (g + 1e-4 * p) for p, g in zip(theta, gradient, strict=True)]
    for found, wanted in zip(seen.encoder.parameters(), theta, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6)


def test_a_run_has_its_jobs_beta_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss has its β, and every seed begins with another encoder, alike for all methods."""
    given, dcl = [], METHODS["dcl"]

    def spy(settings: Any) -> Any:
        given.append(settings)
        return dcl.build(settings)

    monkeypatch.setitem(METHODS, "dcl", replace(dcl, build=spy))
    cases = [("dcl", 0), ("dcl", 1), (FULL, 0), (FULL, 1)]
    began = [run(method=m, seed=s, steps=1)["curve"][0]["weights"] for m, s in cases]
    assert began[:2] == began[2:] and began[0] != began[1]
    assert [(settings.beta, settings.seed) for settings in given] == [(7.0, 0), (7.0, 1)]


@pytest.mark.parametrize("method", ["negcache", "informed"])
def test_a_table_is_of_first_stored_views(method: str, seen: Seen) -> None:
    """So a tenth of it is a tenth of the images, and docs/results.md says what that leaves out."""
    run(method=method, images=50)
    apart = [rows for rows in seen.encoded[1:] if len(rows) not in (8, 100)]  # batch, measurement
    assert [len(rows) for rows in apart].count(5) == 3  # steps
    for rows in apart:
        assert (rows[:, None] == seen.views[0]).flatten(2).all(2).any(1).all()


def test_a_job_names_a_device_that_is_not_its_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """--quick with a GPU ran on the CPU, and the record's header named the GPU."""
    assert all("device" not in job for job in stationarity.jobs(Options(quick=True, device="cpu")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {job["device"] for job in stationarity.jobs(Options(quick=True))} == {"cuda"}
    jobs = stationarity.jobs(Options())
    assert {job["encoder"] for job in jobs} == {"resnet18"}
    assert all("device" not in job for job in jobs)  # as the records have them


def test_work_is_on_the_device_that_its_job_names(seen: Seen) -> None:
    run(encoder="resnet18", images=4, steps=0, device="cpu")
    assert seen.views.device.type == "cpu"


def test_an_unfinished_collapsed_run_is_dotted_too() -> None:
    """It was drawn as a line like those of runs that learn."""
    points = [{"step": n, "exact_loss": 6.9, "gradient": 1.0, "variance": v}
              for n, v in ((0, 0.5), (10, 1e-6))]  # fmt: skip
    row = {"job": {**JOB, "method": "dcl"}, "complete": False, "curve": points}
    for axis in stationarity.draw([row])["stationarity"].axes:
        assert [line.get_linestyle() for line in axis.lines] == [":"]
