"""`AdamUpdate` gives the steps of torch's Adam and AdamW, in torch and as a Triton kernel.

torch rounds the betas to float32 on a GPU and not on a CPU; the references here, which run on a
CPU, are given rounded ones. Functions named `interpreted_...` run under Triton's interpreter, which
must be chosen before Triton is imported: `test_under_the_interpreter` runs them all in a process of
its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from interpreter import run_under_interpreter
from negchain.fast import adam
from negchain.fast.adam import AdamUpdate, supports
from negchain.optim import build_optimizer, laid_out_as, load_optimizer, set_lr

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "short memory": {"betas": (0.5, 0.9), "weight_decay": 1e-2},
    "no memory": {"betas": (0.0, 0.99), "eps": 1e-3},
    "large eps": {"eps": 0.1, "weight_decay": 1e-4},
}
SHAPES = [(), (1,), (10,), (5, 8, 1, 1), (7, 3, 3, 3), (31, 37)]  # the last takes two blocks
KERNELS = 4  # the place of channels-last kernels among them
STEPS = 50


def parameters_of(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    values[KERNELS] = values[KERNELS].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


def gradients_of(step: int, device: str = "cpu") -> list[Tensor]:
    """bf16, over many orders of magnitude; some numbers never get one."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = []
    for shape in SHAPES:
        size = torch.randn(shape, generator=generator).mul(3).exp()
        gradient = torch.randn(shape, generator=generator) * size
        found.append(torch.where(gradient.abs() > 1e-2, gradient, 0.0).bfloat16().to(device))
    return found


def lr_at(step: int) -> float:
    return 0.02 / (1 + step)


def rounded(settings: dict[str, Any]) -> dict[str, Any]:
    betas = settings.get("betas", (0.9, 0.999))
    return {**settings, "betas": tuple(float(np.float32(beta)) for beta in betas)}


def expected_after(kind: str, settings: dict[str, Any], steps: int) -> torch.optim.Optimizer:
    parameters = parameters_of()
    kwargs = {"lr": 0.0, "foreach": False, **rounded(settings)}
    optimizer: torch.optim.Optimizer = KINDS[kind](parameters, **kwargs)
    for step in range(steps):
        set_lr(optimizer, lr_at(step))
        for parameter, gradient in zip(parameters, gradients_of(step), strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
    return optimizer


def actual_after(kind: str, settings: dict[str, Any], steps: int) -> torch.optim.Optimizer:
    parameters = parameters_of()
    optimizer = KINDS[kind](parameters, lr=torch.tensor(0.0), capturable=True, **settings)
    assert supports(optimizer)
    update = AdamUpdate(optimizer, parameters)
    for step in range(steps):
        set_lr(optimizer, lr_at(step))
        update.begin()
        for one in zip(parameters, gradients_of(step), strict=True):
            update.update(*one)
    return optimizer


def assert_alike(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """Weights, moments and counters, but for what fifty times rounding differently gives.

    A first moment is a sum that may cancel: its error is measured against its numbers' size.
    """
    for own, others in zip(*(o.param_groups[0]["params"] for o in (actual, expected)), strict=True):
        torch.testing.assert_close(own, others, rtol=1e-6, atol=1e-6)
        state, reference = actual.state[own], expected.state[others]
        assert list(state) == list(reference) == ["step", "exp_avg", "exp_avg_sq"]
        for name in state:
            assert state[name].dtype == reference[name].dtype == torch.float32
            assert state[name].stride() == reference[name].stride()
        assert state["step"] == reference["step"]
        torch.testing.assert_close(state["exp_avg_sq"], reference["exp_avg_sq"], rtol=5e-6, atol=0)
        size = reference["exp_avg_sq"].sqrt().clamp(min=1e-12)
        first, second = (of["exp_avg"] / size for of in (state, reference))
        torch.testing.assert_close(first, second, rtol=0, atol=5e-6)


def assert_steps_are_torchs(kind: str, settings: dict[str, Any], steps: int = STEPS) -> None:
    assert_alike(actual_after(kind, settings, steps), expected_after(kind, settings, steps))


# ------------------------------------------------------------------------------ the torch twin


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_of_torch(kind: str, name: str) -> None:
    assert_steps_are_torchs(kind, SETTINGS[name])


def test_float32_gradients() -> None:
    parameters = parameters_of()
    optimizer = torch.optim.Adam(parameters, lr=torch.tensor(lr_at(0)), capturable=True)
    update = AdamUpdate(optimizer, parameters)
    update.begin()
    for parameter, gradient in zip(parameters, gradients_of(0), strict=True):
        update.update(parameter, gradient.float())
    assert_alike(optimizer, expected_after("adam", {}, 1))


def test_another_layout_of_the_gradient() -> None:
    """Kernels of shape [7,3,3,3] channels-last; the gradient comes contiguous."""
    weight = parameters_of()[KERNELS]
    assert not weight.is_contiguous()
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=True)
    update, gradient = AdamUpdate(optimizer, [weight]), torch.rand(weight.shape).bfloat16()
    update.begin()
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "update_torch", lambda weight, gradient, *_: seen.append(gradient))
        update.update(weight, gradient)
    assert seen[0].stride() == weight.stride() and seen[0].equal(gradient)


def test_loaded_moments_lie_as_their_weight_and_are_not_replaced() -> None:
    """A capture restores the moments it found: another tensor in their place would be lost."""
    weight = parameters_of()[KERNELS]
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=True)
    moments = {name: torch.rand(weight.shape) for name in ("exp_avg", "exp_avg_sq")}
    state = {0: {"step": torch.tensor(3.0), **moments}}
    load_optimizer(optimizer, {**optimizer.state_dict(), "state": state})
    held = dict(optimizer.state[weight])
    assert held["exp_avg"].stride() == weight.stride()
    assert all(held[name].equal(moment) for name, moment in moments.items())
    AdamUpdate(optimizer, [weight]).begin()
    assert all(optimizer.state[weight][name] is tensor for name, tensor in held.items())
    assert held["step"] == 4


def test_a_1x1_kernel_is_not_copied() -> None:
    weight = torch.empty_strided((5, 8, 1, 1), (8, 1, 8, 8))  # channels-last
    gradient = torch.zeros(5, 8, 1, 1)
    assert weight.stride() != gradient.stride()
    assert laid_out_as(weight, gradient) is gradient


def test_only_the_parameters_given_are_counted() -> None:
    first, second = parameters_of()[:2]
    optimizer = torch.optim.Adam([first, second], lr=torch.tensor(0.1), capturable=True)
    AdamUpdate(optimizer, [first]).begin()
    assert optimizer.state[first]["step"] == 1 and second not in optimizer.state


def test_checkpoints_are_torchs() -> None:
    """A run of five steps here goes on in torch's optimizer, and the other way round."""
    optimizer = actual_after("adamw", SETTINGS["decay"], 5)
    reference = expected_after("adamw", SETTINGS["decay"], 5)
    saved, usual = optimizer.state_dict(), reference.state_dict()
    assert saved["state"].keys() == usual["state"].keys()
    assert saved["param_groups"][0].keys() == usual["param_groups"][0].keys()

    model = nn.ParameterList(copy.deepcopy(optimizer.param_groups[0]["params"]))
    onwards = build_optimizer(model, "adamw", lr=0.0, weight_decay=0.1)
    load_optimizer(onwards, copy.deepcopy(saved))
    own = optimizer.param_groups[0]["params"]
    load_optimizer(optimizer, copy.deepcopy(saved))
    update = AdamUpdate(optimizer, own)
    update.begin()
    for step_of in (onwards, optimizer):
        set_lr(step_of, lr_at(5))
    for parameter, mine, gradient in zip(model, own, gradients_of(5), strict=True):
        parameter.grad = gradient.float()
        update.update(mine, gradient)
    onwards.step()
    for parameter, mine in zip(model, own, strict=True):
        torch.testing.assert_close(mine, parameter, rtol=1e-6, atol=1e-6)
        assert optimizer.state[mine]["step"] == onwards.state[parameter]["step"] == 6


def test_supports() -> None:
    weights = parameters_of()[:2]

    def is_supported(kind: Callable[..., torch.optim.Optimizer], **changed: Any) -> bool:
        return supports(kind(weights, **{"lr": torch.tensor(0.1), "capturable": True, **changed}))

    assert is_supported(torch.optim.Adam) and is_supported(torch.optim.AdamW, weight_decay=0.1)
    assert not is_supported(torch.optim.Adam, lr=0.1)
    assert not is_supported(torch.optim.Adam, capturable=False)
    assert not is_supported(torch.optim.AdamW, amsgrad=True)
    assert not is_supported(torch.optim.AdamW, maximize=True)
    assert not is_supported(torch.optim.NAdam)
    assert not is_supported(type("Derived", (torch.optim.Adam,), {}))
    assert not supports(torch.optim.SGD(weights, lr=torch.tensor(0.1)))
    half = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    assert not supports(torch.optim.Adam(half, lr=torch.tensor(0.1), capturable=True))


def _count_from_zero(self: AdamUpdate) -> None:
    REAL_BEGIN(self)
    for parameter in self.parameters:
        self.optimizer.state[parameter]["step"].clamp_(min=2).sub_(1)


def _swap_decay(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    other = {**group, "decoupled_weight_decay": not group["decoupled_weight_decay"]}
    REAL_UPDATE(weight, gradient, state, other)


REAL_BEGIN, REAL_UPDATE = AdamUpdate.begin, adam.update_torch


@pytest.mark.parametrize("kind", KINDS)
def test_planted_bugs_are_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(AdamUpdate, "begin", _count_from_zero)
        assert_steps_are_torchs(kind, {}, 3)
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(adam, "update_torch", _swap_decay)
        assert_steps_are_torchs(kind, SETTINGS["decay"], 3)


# ----------------------------------------------------------------------- under the interpreter


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AdamUpdate` takes the kernel on a CPU as well."""
    monkeypatch.setattr("negchain.fast.backends.prefers_triton", lambda like: True)
    monkeypatch.setattr(adam, "update_torch", None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def interpreted_steps_of_torch(kind: str, name: str) -> None:
    assert_steps_are_torchs(kind, SETTINGS[name], 5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def interpreted_fifty_steps_of_torch(kind: str) -> None:
    assert_steps_are_torchs(kind, SETTINGS["decay"])


@pytest.mark.usefixtures("kernels")
def interpreted_float32_gradients() -> None:
    test_float32_gradients()


@pytest.mark.usefixtures("kernels")
def interpreted_nothing_beyond_the_end_is_written() -> None:
    """A tensor that ends in the middle of a block, inside a longer one."""
    room = torch.full((3, 100), 7.0)
    weight = nn.Parameter(room[1])
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=True)
    update = AdamUpdate(optimizer, [weight])
    update.begin()
    update.update(weight, torch.ones(100))
    assert (room[[0, 2]] == 7).all() and (room[1] < 7).all()


def test_under_the_interpreter() -> None:
    run_under_interpreter(__file__)


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_graph_of_steps_is_torchs(kind: str, name: str) -> None:
    """Captured, with gradients from the graph's memory; against torch's own fused kernel."""
    parameters, references = parameters_of("cuda"), parameters_of("cuda")
    optimizer, torchs = (
        KINDS[kind](p, lr=torch.zeros((), device="cuda"), fused=True, capturable=True,
                    **SETTINGS[name])
        for p in (parameters, references)
    )  # fmt: skip
    update, inputs = AdamUpdate(optimizer, parameters), gradients_of(0, "cuda")

    def run() -> None:
        update.begin()
        for parameter, gradient in zip(parameters, inputs, strict=True):
            update.update(parameter, gradient * 1)

    graph = torch.cuda.CUDAGraph()
    for step in range(STEPS):
        for given, gradient in zip(inputs, gradients_of(step, "cuda"), strict=True):
            given.copy_(gradient)
        for parameter, given in zip(references, inputs, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(given)
        for step_of in (optimizer, torchs):
            set_lr(step_of, lr_at(step))
        torchs.step()
        if step == 0:
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
        else:
            graph.replay()
    assert_alike(optimizer, torchs)
