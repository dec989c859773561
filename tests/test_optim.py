"""Optimizers against hand-written updates, the schedule at its corners, settings refused."""

import math
import warnings

import pytest
import torch
from timm.optim.lars import Lars
from torch import nn

from negchain.optim import CapturableLars, build_optimizer, load_optimizer, lr_at, set_lr

OPTIMIZERS = ("sgd", "adam", "adamw", "lars")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for _ in range(count):
        images = torch.randn(4, 1, 4, 4, generator=generator).to(device)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def test_lars_equals_the_hand_written_update() -> None:
    model = nn.Linear(3, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build_optimizer(model, "lars", lr=0.5, weight_decay=0.01)
    velocity_w, velocity_b = torch.zeros_like(weight), torch.zeros_like(bias)
    for step in range(3):
        grad_w, grad_b = torch.full_like(weight, 0.3 + step), torch.full_like(bias, -0.2)
        model.weight.grad, model.bias.grad = grad_w.clone(), grad_b.clone()
        optimizer.step()
        trust = 0.001 * weight.norm() / (grad_w.norm() + 0.01 * weight.norm())
        velocity_w = 0.9 * velocity_w + trust * (grad_w + 0.01 * weight)
        velocity_b = 0.9 * velocity_b + grad_b  # 1-D: neither scaled nor decayed
        weight, bias = weight - 0.5 * velocity_w, bias - 0.5 * velocity_b
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(model.bias.detach(), bias, rtol=1e-5, atol=1e-7)


def test_lars_is_lightlys() -> None:
    """With weight decay: without it theirs is plain SGD."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside lightly's own imports
        from lightly.utils.lars import LARS
    first, second = network(), network()
    thin = {"params": [p for p in second.parameters() if p.ndim < 2], "weight_decay": 0.0}
    wide = {"params": [p for p in second.parameters() if p.ndim > 1]}
    theirs = LARS([wide, thin], lr=0.5, momentum=0.9, weight_decay=1e-2, trust_coefficient=1e-3)
    for model, optimizer in (
        (first, build_optimizer(first, "lars", lr=0.5, weight_decay=1e-2)),
        (second, theirs),
    ):
        take_steps(model, optimizer, 5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_lars_adapts_without_weight_decay_too() -> None:
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full_like(before, 1e4)
    build_optimizer(model, "lars", lr=1.0).step()
    moved = (model.weight.detach() - before).norm()
    assert moved == pytest.approx(0.001 * before.norm().item(), rel=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_capturable_lars_equals_timms(momentum: float, weight_decay: float) -> None:
    first, second = network(), network()
    common = {"momentum": momentum, "weight_decay": weight_decay, "always_adapt": True}
    ours = CapturableLars(first.parameters(), lr=torch.tensor(0.3), **common)
    timms = Lars(second.parameters(), lr=0.3, **common)
    for rate in (0.3, 0.1):
        set_lr(ours, rate)
        set_lr(timms, rate)
        take_steps(first, ours, 3)
        take_steps(second, timms, 3)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_capturable_lars_leaves_zero_weights_unscaled() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    CapturableLars([weight], lr=torch.tensor(0.5), always_adapt=True).step()
    assert torch.equal(weight.detach(), torch.full((2, 2), -0.5))


def test_adam_is_coupled_and_adamw_is_not() -> None:
    moved = {}
    for name in ("adam", "adamw"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 10.0)
        model.weight.grad = torch.full((1, 1), 1.0)
        build_optimizer(model, name, lr=0.1, weight_decay=0.5).step()
        moved[name] = 10.0 - model.weight.item()
    assert moved["adam"] == pytest.approx(0.1, rel=1e-4)  # Adam's first step is lr sign(g + wd w)
    assert moved["adamw"] == pytest.approx(0.1 + 0.1 * 0.5 * 10, rel=1e-4)


def test_lars_does_not_decay_norms_and_biases() -> None:
    model = network()
    optimizer = build_optimizer(model, "lars", lr=0.1, weight_decay=0.1)
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    assert all((decay[p] == 0) == (p.ndim == 1) for p in model.parameters())


def test_everything_is_decayed_otherwise() -> None:
    optimizer = build_optimizer(network(), "adam", lr=0.1, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_save_and_load_in_the_middle_changes_nothing(name: str) -> None:
    straight, broken = network(), network()
    settings = {"lr": 0.01, "weight_decay": 0.1}
    whole = build_optimizer(straight, name, **settings)
    take_steps(straight, whole, 2)
    take_steps(straight, whole, 2)
    first = build_optimizer(broken, name, **settings)
    take_steps(broken, first, 2)
    second = build_optimizer(broken, name, **settings)
    load_optimizer(second, first.state_dict())
    take_steps(broken, second, 2)
    for one, other in zip(straight.parameters(), broken.parameters(), strict=True):
        assert torch.equal(one, other)


def test_loading_keeps_own_settings_and_rate_tensor() -> None:
    model = network()
    saved = CapturableLars(model.parameters(), lr=torch.tensor(0.3), momentum=0.9)
    take_steps(model, saved, 1)
    rate = torch.tensor(0.7)
    fresh = CapturableLars(model.parameters(), lr=rate, momentum=0.5)
    load_optimizer(fresh, saved.state_dict())
    assert fresh.param_groups[0]["lr"] is rate and fresh.param_groups[0]["momentum"] == 0.5
    set_lr(fresh, 0.2)
    assert rate.item() == pytest.approx(0.2)
    assert all("momentum_buffer" in fresh.state[p] for p in model.parameters())


def test_another_models_state_is_refused() -> None:
    saved = build_optimizer(nn.Linear(2, 2), "sgd", lr=0.1).state_dict()
    with pytest.raises(ValueError, match="same parameters"):
        load_optimizer(build_optimizer(network(), "sgd", lr=0.1), saved)


def test_schedule() -> None:
    rates = [lr_at(t, 100, 10, 0.4) for t in range(101)]
    assert rates[0] == 0 and rates[5] == pytest.approx(0.2) and rates[10] == 0.4
    assert rates[55] == pytest.approx(0.2) and rates[100] == 0 and lr_at(200, 100, 10, 0.4) == 0
    assert all(a < b for a, b in zip(rates[:10], rates[1:11], strict=True))
    assert all(a > b for a, b in zip(rates[10:100], rates[11:], strict=True))


def test_schedule_without_warm_up_and_with_nothing_else() -> None:
    assert lr_at(0, 10, 0, 1.0) == 1.0
    assert lr_at(5, 10, 0, 1.0) == pytest.approx((1 + math.cos(math.pi / 2)) / 2)
    assert lr_at(3, 4, 4, 1.0) == 0.75 and lr_at(4, 4, 4, 1.0) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cuda_graph_sees_the_schedule(name: str) -> None:
    """Captured steps with a changing rate equal eager ones."""
    rates = [0.1, 0.02, 0.05]
    eager = network().cuda()
    optimizer = build_optimizer(eager, name, lr=0.0, weight_decay=0.1)
    images = torch.ones(4, 1, 4, 4, device="cuda")
    for rate in rates:
        set_lr(optimizer, rate)
        optimizer.zero_grad()
        eager(images).square().mean().backward()
        optimizer.step()

    captured = network().cuda()
    start = [p.detach().clone() for p in captured.parameters()]
    optimizer = build_optimizer(captured, name, lr=0.0, weight_decay=0.1, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        captured(images).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for parameter, value in zip(captured.parameters(), start, strict=True):
            parameter.copy_(value)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
    for rate in rates:
        set_lr(optimizer, rate)
        graph.replay()
    for one, other in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
