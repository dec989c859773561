"""benchmarks/released_code.py: without deviations its chain is `EMC2Loss`, and each one bites."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from negchain.methods import METHODS, LossSettings, named
from negchain.reproduce import stationarity
from negchain.reproduce.common import read_rows
from negchain.tasks import COLLAPSED

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "released_code.py"


@pytest.fixture(scope="module")
def code() -> Iterator[ModuleType]:
    known = dict(METHODS)
    spec = importlib.util.spec_from_file_location("released_code", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    METHODS.clear()
    METHODS.update(known)


def walked(loss_fn, drift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of many visits of 12 items by batches of 4, and where the chains end."""
    torch.manual_seed(3)
    views, gradients = torch.randn(12, 2, 6), []
    for _ in range(25):
        views = views + drift * torch.randn(12, 2, 6)
        index = torch.randperm(12)[:4]
        pair = torch.randint(0, 2, (2, 4)).unbind()
        table = views.flatten(0, 1).requires_grad_()
        table.grad = None
        z_a, z_b = (table[index * 2 + view] for view in pair)
        loss_fn(z_a, z_b, index, augmentation=pair, encode=table.__getitem__).backward()
        gradients.append(table.grad)
    chains = loss_fn.chains if hasattr(loss_fn, "chains") else loss_fn
    states = chains.states if chains is loss_fn else chains.ids(0, torch.arange(24))
    return torch.stack(gradients), states


def settings() -> LossSettings:
    return LossSettings(12, 5.0, 6, seed=4, options=stationarity.OPTIONS)


def test_without_deviations_it_is_the_librarys_chain(code: ModuleType) -> None:
    ours, plain = named("emc2").build(settings()), code.Chain(12, 5.0, 4, set())
    (wanted, states), (found, ends) = walked(ours), walked(plain)
    assert torch.equal(states, ends)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["count", "last-column", "stale", "order", "first", "sequence"])
def test_every_deviation_changes_the_gradients(code: ModuleType, name: str) -> None:
    """Embeddings drift, else there were no old scores; beta is large, else starts are forgotten."""
    plain, _ = walked(code.Chain(12, 20.0, 4, set()), drift=0.5)
    found, _ = walked(code.Chain(12, 20.0, 4, {name}), drift=0.5)
    assert not torch.allclose(found, plain, atol=1e-3)


def test_the_released_count_leaves_two_thirds_of_the_negatives(code: ModuleType) -> None:
    """With every similarity 1 the gradient by beta is the sum of the weights less one."""
    chain = code.Chain(12, 5.0, 4, {"count"})
    z, pair = torch.ones(4, 3), (torch.zeros(4, dtype=torch.int64),) * 2
    value = chain(z, z, torch.arange(4), pair, lambda ids: torch.ones(len(ids), 3))
    assert float(value) == pytest.approx(5 * (2 / 3 - 1))


def test_the_released_measure_has_beta_squared_and_the_positive(code: ModuleType) -> None:
    torch.manual_seed(0)
    encoder = torch.nn.Linear(5, 3).double()
    views = torch.randn(2, 4, 5, dtype=torch.float64)
    z = normalize(encoder(views), dim=-1).transpose(0, 1).flatten(0, 1)  # item by item
    logits = (25 * z @ z.T).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    positive = torch.arange(8) ^ 1
    loss = torch.nn.functional.cross_entropy(logits, positive)
    gradient = torch.autograd.grad(loss, tuple(encoder.parameters()))
    numbers = code.measure(encoder, views, 5.0)["by"]
    wanted = float(sum(g.square().sum() for g in gradient))
    assert numbers["both, as released"] == pytest.approx(wanted, rel=1e-5)
    assert numbers["eq. (1)"] == stationarity.exact(encoder, views, 5.0)["gradient"]


def test_the_caches_positive_is_the_anchor_itself(code: ModuleType) -> None:
    """1 - p+ = Z / (Z + e^beta), whatever the positive is."""
    torch.manual_seed(0)
    keys, index = torch.randn(12, 6), torch.arange(4)
    gradients = []
    for positive in (keys[:4], torch.randn(4, 6)):
        loss_fn = code.SelfPositive(
            12, 5.0, 0.1, views="paired", symmetric=False, denominator="all"
        )
        loss_fn.fill(lambda ids: keys[ids])
        z_b = positive.clone().requires_grad_()
        loss_fn(keys[:4], z_b, index, encode=lambda ids: keys[ids]).backward()
        gradients.append(z_b.grad)
    table = normalize(keys, dim=1)
    logits = (5 * table[:4] @ table.T).masked_fill(torch.eye(4, 12, dtype=torch.bool), -torch.inf)
    pull = torch.sigmoid(logits.logsumexp(1) - 5)
    z_b = positive.clone().requires_grad_()
    (-5 * pull * (table[:4] * normalize(z_b, dim=1)).sum(1)).mean().backward()
    torch.testing.assert_close(gradients[1], z_b.grad)


def test_its_command_runs_what_is_missing(
    code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a TypeError: `work` took no measure any more."""
    cases = [{"method": name, "lr": 0.01, "steps": 2} for name in ("dcl", "emc2")]
    monkeypatch.setattr(code, "runs", lambda: cases)
    out = tmp_path / "record.jsonl"
    monkeypatch.setattr(sys, "argv", ["released_code.py", "--seeds", "1", "--out", str(out)])
    for _ in range(2):
        code.main()
        rows = read_rows(out)
        assert [row["job"]["method"] for row in rows] == ["dcl", "emc2"]
        assert all(set(row["curve"][-1]["by"]) == set(code.MEASURES) for row in rows)
    assert len(out.read_text().splitlines()) == 4  # two headers, two runs


ROOT = FILE.parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return read_rows(ROOT / "records" / "2026-11-16_released-code_cpu.jsonl")


def test_the_page_shows_what_the_record_says(code: ModuleType, rows: list) -> None:
    assert code.table(rows) in PAGE


def test_the_records_plain_runs_are_those_of_reproduce(rows: list) -> None:
    """Another measure beside changes nothing: the same descent as by `work` alone."""
    found = next(r for r in rows if r["job"]["method"] == "emc2" and r["job"]["lr"] == 0.01)
    end = stationarity.work({**found["job"], "steps": 8}, time.time() + 60)["curve"][-1]
    (known,) = (point for point in found["curve"] if point["step"] == 8)
    assert end["gradient"] == pytest.approx(known["gradient"], rel=1e-3)


def test_what_is_said_of_the_deviations_is_in_the_record(code: ModuleType, rows: list) -> None:
    page = " ".join(PAGE.split())

    def least_and_most(lines: list[Any]) -> list[str]:
        means = [statistics.geometric_mean(found) for line in lines for method in code.OTHERS
                 if (found := code.ratios(rows, line, method))]  # fmt: skip
        return [f"{min(means):.1f}", f"{max(means):.1f}"]

    plain = {m: m for m in code.OTHERS}
    cases = [(lr, by) for by in ("both, as released", "eq. (1)") for lr in (0.001, 0.01)]
    told = [least_and_most([("", lr, by, "emc2", plain)]) for lr, by in cases]
    assert "at 0.7 to 1.4 times EMC²'s norm, by eq. (1) at 0.7 to 2.7 times." in page
    assert told == [["0.7", "1.4"], ["0.8", "1.4"], ["0.7", "0.9"], ["0.7", "2.7"]]
    assert "0.4 to 0.9 times at the paper's step size, and at 0.9 to 2.5 times with ten" in page
    for lr, wanted in ((0.001, ["0.4", "0.9"]), (0.01, ["0.9", "2.5"])):
        kept_in = ("", lr, "the positive kept in", "emc2", plain)
        assert least_and_most([kept_in]) == wanted
    assert "*Everything at once* ends at 1.0 to 2.2 times" in page
    everything = [line for line in code.released() if line[0].startswith("**everything")]
    assert least_and_most(everything) == ["1.0", "2.2"]
    assert "against the others' (180 to 660 times;" in page
    (hundred,) = (line for line in code.others() if line[0] == "EMC²'s loss × 100")
    assert [round(float(n), -1) for n in least_and_most([hundred])] == [180, 660]
    assert "exact losses end at 3.27 (Negative Cache)" in page
    ends = [row["curve"][-1]["exact_loss"] for row in rows
            if row["job"]["method"] == "negcache-falling"]  # fmt: skip
    assert round(statistics.mean(ends), 2) == 3.27


def test_no_deviation_of_the_released_code_makes_one_order_of_magnitude(
    code: ModuleType, rows: list
) -> None:
    """The verdict of docs/results.md; what does make two is a scale of 100, and collapse."""
    for line in code.released():
        found = [code.ratios(rows, line, method) for method in code.OTHERS]
        assert all(len(ratios) in (0, 3) for ratios in found) and any(found)
        assert all(0.1 < ratio < 10 for ratios in found for ratio in ratios)
    (hundred,) = (line for line in code.others() if line[0] == "EMC²'s loss × 100")
    assert min(code.ratios(rows, hundred, "infonce")) > 100
    lost = [r["curve"][-1] for r in rows if r["curve"][-1]["variance"] < COLLAPSED]
    assert lost and all(end["gradient"] < 1e-3 < 6 < end["exact_loss"] for end in lost)
