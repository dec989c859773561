"""The fused path equals its readable twin (taxonomy 12), and the comparison would notice if not.

Without a GPU the kernels run under Triton's interpreter, all in one process of its own; see
`fused_cases` for the cases, and `fused_play` for what may differ and the share of rows near a tie.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from interpreter import interpreted

pytest.importorskip("triton")

from fused_cases import (  # noqa: E402
    ASYMMETRIC,
    CASES,
    FAULTS,
    INVALID,
    PLANTED,
    PROMISES,
    SLOW,
    TILES,
    emc2,
    streaming,
)
from fused_play import Case, build, compare, invalid_row  # noqa: E402
from kernel_cases import draw_bits, draw_logarithms, thinned_scan  # noqa: E402

from negchain import EMC2Loss, InfoNCELoss, SogCLRLoss  # noqa: E402
from negchain.fast.fused import function  # noqa: E402


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def cases_found(which: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        interpreted(Path(__file__).with_name("fused_cases.py"), which)
    )
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return cases_found("fast")


@pytest.mark.parametrize("name", names(CASES))
def test_a_small_batch_equals_its_twin(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("name", names(TILES))
def test_tiles_equal_panels(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", names(INVALID))
def test_a_bad_row_changes_no_state(found, name, fault) -> None:
    assert found[f"{fault}: {name}"] == []


@pytest.mark.parametrize("name", [promise.__name__ for promise in PROMISES])
def test_promises(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(found, name) -> None:
    told = found[f"planted: {name}"]
    assert told and "Traceback" not in "".join(told)


@pytest.mark.slow
def test_every_combination() -> None:
    told = cases_found("slow")
    assert told.keys() == set(names(SLOW))
    assert {name: text for name, text in told.items() if text} == {}


# ---------------------------------------------------------------------------- on a GPU


LARGE = [
    emc2("256", size=256, num_samples=300, dim=100, beta=12.0, repeats=True, learned=True),
    emc2("256-all", size=256, num_samples=300, views="paired", denominator="all", dim=64),
    emc2("1000", size=1000, num_samples=1500, dim=128, beta=12.0, carried="score"),
    emc2("1000-cached", size=1000, num_samples=1500, **ASYMMETRIC, carried="cached", dim=128),
    emc2("1000-isir", kernel="isir", size=1000, num_samples=1500, dim=70, denominator="all"),
    Case("256-infonce", {}, loss="infonce", size=256, num_samples=300, dim=64, learned=True),
    Case("1000-sogclr", {"denominator": "all"}, loss="sogclr", size=1000, num_samples=1500, dim=64),
    streaming("1100-stream", size=1100, dim=100, beta=12.0, repeats=True, carried="score"),
    # unit length comes before rounding to half precision: given as it is, both twins see the same
    streaming(
        "4096-stream-bfloat16", size=4096, dim=128, beta=0.1, dtype=torch.bfloat16,
        normalize=False, carried="cached", tolerance=2e-2,
    ),
    streaming(
        "4096-stream-isir-bfloat16", kernel="isir", size=4096, dim=128, beta=0.1,
        dtype=torch.bfloat16, normalize=False, carried="score", tolerance=2e-2,
    ),
    streaming(
        "4096-stream-isir-groups-bfloat16", kernel="isir", count_every=256, size=4096, dim=128,
        beta=0.1, dtype=torch.bfloat16, normalize=False, carried="score", tolerance=2e-2,
    ),
    streaming(
        "1100-stream-isir-groups", kernel="isir", count_every=128, size=1100, dim=100, beta=12.0,
        repeats=True, denominator="all",
    ),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *TILES, *SLOW, *LARGE], ids=lambda case: case.name)
def test_on_a_gpu_equals_its_twin(case) -> None:
    assert compare(case, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_on_a_gpu_a_bad_row_changes_no_state(case, fault) -> None:
    assert invalid_row(case, fault, "cuda") == []


@pytest.mark.gpu
def test_draws_on_a_gpu() -> None:
    assert draw_bits("cuda") == []
    assert draw_logarithms("cuda") == []


@pytest.mark.gpu
def test_a_thinned_scan_on_a_gpu() -> None:
    assert thinned_scan("cuda") == []


@pytest.mark.gpu
def test_half_precision_at_unit_length_stays_close() -> None:
    """Rows rounded to bfloat16 after normalising: values agree to its rounding."""
    values = []
    for backend in ("torch", "fused"):
        case = streaming("close", size=4096, dim=128, beta=14.28, dtype=torch.bfloat16)
        loss_fn = build(case, "cuda", backend=backend, carried="score")
        z = torch.randn(2, 4096, 128, generator=torch.manual_seed(1)).cuda().bfloat16()
        values.append(float(loss_fn(z[0], z[0] + z[1], torch.arange(4096, device="cuda"))))
    assert values[0] == pytest.approx(values[1], abs=2e-2)


STEPS = [
    emc2("rows", size=64, num_samples=80),
    emc2("rows-paired-all", size=64, num_samples=80, views="paired", denominator="all"),
    emc2("rows-isir", kernel="isir", size=64, num_samples=80, carried="cached"),
    streaming("tiles", size=300, denominator="all", carried="cached"),
    streaming("tiles-given-order", size=1100, **ASYMMETRIC),
    streaming("tiles-isir", kernel="isir", size=300),
    streaming("tiles-isir-groups", kernel="isir", count_every=128, size=300),
    Case("infonce", {}, loss="infonce", size=64, num_samples=80),
    Case("sogclr", {"views": "paired"}, loss="sogclr", size=64, num_samples=80),
]


class Trainer:
    """A loss, and inputs that stay where they are."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(8)
        self.loss_fn = build(case, "cuda")
        self.table = torch.randn(case.num_samples, case.dim, generator=generator).cuda()
        self.index = torch.arange(case.size, device="cuda")
        self.z = torch.randn(2, case.size, case.dim, generator=generator).cuda().requires_grad_()

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        call = {}
        if isinstance(self.loss_fn, EMC2Loss) and self.loss_fn.carried_mode == "encode":
            ids = self.loss_fn.carried(self.index)
            pair = isinstance(ids, tuple)
            call["carried"] = tuple(self.table[i] for i in ids) if pair else self.table[ids]
        value = self.loss_fn(self.z[0], self.z[1], self.index, **call)
        grad = torch.autograd.grad(value, self.z)[0]
        return value.detach(), grad  # a graph that is kept alive would be replayed on two streams

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.loss_fn.state_dict().items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in self.loss_fn.state_dict().items():
            value.copy_(state[name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_a_step_never_waits_for_the_device(case, no_synchronisation) -> None:
    trainer = Trainer(case)
    trainer.step()  # compiles
    torch.cuda.synchronize()
    no_synchronisation(True)
    trainer.step()
    no_synchronisation(False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_a_captured_step_replays_as_if_run(case) -> None:
    """Three replays of a CUDA graph, with new inputs each, equal three steps run one by one."""
    trainer = Trainer(case)
    begin = trainer.state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            trainer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, grad = trainer.step()
    seen = []
    for captured in (False, True):
        trainer.restore(begin)
        results = []
        for number in range(3):
            noise = torch.randn(trainer.z.shape, generator=torch.manual_seed(number))
            with torch.no_grad():
                trainer.z.copy_(noise)
                trainer.index.copy_((torch.arange(case.size) * 3 + number) % case.num_samples)
            if captured:
                graph.replay()
                results.append((value.clone(), grad.clone(), trainer.state()))
            else:
                results.append((*(x.detach().clone() for x in trainer.step()), trainer.state()))
        seen.append(results)
    for (value_a, grad_a, state_a), (value_b, grad_b, state_b) in zip(*seen, strict=True):
        assert torch.allclose(value_a, value_b, atol=1e-6)
        assert torch.allclose(grad_a, grad_b, atol=1e-6)  # tiles add in no fixed order
        for name, tensor in state_a.items():
            a, b = tensor.double(), state_b[name].double()
            assert torch.allclose(a, b, rtol=0, atol=1e-6, equal_nan=True), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_auto_takes_the_fused_path(case, monkeypatch) -> None:
    fused_loss, calls = function.fused_loss, []

    def spy(*args):
        calls.append(args)
        return fused_loss(*args)

    monkeypatch.setattr(function, "fused_loss", spy)
    Trainer(case).step()
    assert len(calls) == build(case).num_sides
    calls.clear()
    plain = dataclasses.replace(case, options={**case.options, "backend": "torch"})
    Trainer(plain).step()
    assert calls == []


@pytest.mark.gpu
def test_a_learned_beta_trains() -> None:
    for kind in (InfoNCELoss, lambda beta: EMC2Loss(90, beta, carried="score"), SogCLRLoss):
        beta = torch.nn.Parameter(torch.tensor(5.0))
        loss_fn = (kind(90, beta) if kind is SogCLRLoss else kind(beta)).cuda()
        z = torch.randn(2, 64, 8, device="cuda")
        loss_fn(z[0], z[1], torch.arange(64, device="cuda")).backward()
        assert torch.isfinite(loss_fn.beta.grad) and loss_fn.beta.grad != 0
