"""Adam's step of one tensor at a time, from bf16 gradients.

    g <- g + wd w                   Adam: the decay is coupled
    w <- w - lr wd w                AdamW: it is decoupled
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    w <- w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

The result is that of `torch.optim.Adam` and `AdamW` (fused, capturable), and the state is theirs:
`state_dict` and checkpoints do not change. What is won: one pass over memory instead of two
(gradients to float32, the step), and a tensor can be stepped as soon as its own gradient is there.
A launch takes the gradient's address as an argument, so gradients may lie anywhere, also in the
memory of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from negchain.fast import backends
from negchain.fast.layers.weight_gradients import WeightGradients
from negchain.fast.streams import forked, join, new_stream
from negchain.optim import laid_out_as, lies_as


def supports(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `AdamUpdate` gives this optimizer's steps.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> supports(torch.optim.AdamW([weight], lr=torch.tensor(0.1), capturable=True))
        True
        >>> supports(torch.optim.AdamW([weight], lr=0.1))
        False
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(_is_supported(group) for group in optimizer.param_groups)


def _is_supported(group: Mapping[str, Any]) -> bool:
    lr, parameters = group["lr"], group["params"]
    return (
        isinstance(lr, Tensor)
        and group["capturable"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and not any(isinstance(beta, Tensor) for beta in group["betas"])
        and all(p.dtype == torch.float32 and p.device == lr.device for p in parameters)
    )


class AdamUpdate:
    """The steps of an optimizer, tensor by tensor.

    Args:
        optimizer: one that `supports` accepts.
        parameters: those of its parameters that are stepped here; each of them in every step. The
            others are left to `optimizer.step`, which skips those of here: they have no `grad`.

    A step is `begin`, then `update` for every parameter, in any order and on any stream that waits
    for `begin`. State is created by the first `begin`: run one step before capturing.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.25), capturable=True)
        >>> update = AdamUpdate(optimizer, [weight])
        >>> update.begin()
        >>> update.update(weight, torch.full((3,), 2.0, dtype=torch.bfloat16))
        >>> weight.tolist()
        [0.75, 0.75, 0.75]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        self.optimizer = optimizer
        self.parameters = dict.fromkeys(parameters)
        self._group_of: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Count the step; create the state where there is none, as torch does."""
        # Loading a state replaces groups, moments and counters: nothing of them is kept here.
        self._group_of = {p: g for g in self.optimizer.param_groups for p in g["params"]}
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        for parameter, state in zip(self.parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            # as `load_optimizer` left them: one replaced here would escape a capture's restore
            assert all(lies_as(parameter, state[name]) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1)

    @torch.no_grad()
    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Step one parameter.

        Args:
            parameter: float32, any shape.
            gradient: of the same shape, bf16 or float32.
        """
        gradient = laid_out_as(parameter, gradient)
        state, group = self.optimizer.state[parameter], self._group_of[parameter]
        if backends.prefers_triton(parameter):
            from negchain.fast.adam_triton import update_triton

            update_triton(parameter, gradient, state, group)
        else:
            update_torch(parameter, gradient, state, group)


class OverlappedAdam:
    """Steps weights while the backward pass goes on, as soon as their gradients are there.

    Args:
        optimizer: one that `supports` accepts.
        gradients: where the gradients of the weights' copies come from.
        device: of the weights.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: WeightGradients, device: torch.device
    ) -> None:
        if not supports(optimizer):
            raise ValueError(
                f"only capturable Adam and AdamW can be overlapped, got {type(optimizer).__name__} "
                f"with {optimizer.defaults}; give no optimizer"
            )
        self.optimizer = optimizer
        self.gradients = gradients
        self._stream = new_stream(device)
        self._update: AdamUpdate | None = None  # known after a first step: what has gradients
        self._weight_of: dict[Tensor, Tensor] = {}
        self._kept: list[Tensor] = []

    def begin(self, weight_of: dict[Tensor, Tensor]) -> None:
        """Count a step in which the weights have these copies."""
        self._weight_of = weight_of
        if self._update is not None:
            with forked(self.gradients.stream):
                self._update.begin()

    def _take(self, copy: Tensor, grad: Tensor) -> bool:
        """Step a weight beside the backward pass, if it is one that may be."""
        assert self._update is not None
        weight = self._weight_of[copy]
        if weight not in self._update.parameters:
            return False
        self._kept.append(grad)
        with forked(self._stream):
            self._update.update(weight, grad)
        return True

    def not_stepped(
        self, answered: dict[Tensor, Tensor], others: set[Tensor]
    ) -> dict[Tensor, Tensor]:
        """End the backward pass; of the gradients found beside, those the optimizer has to use."""
        if self._kept:
            join(self._stream)
            self._kept = []
        if self._update is None:
            early = [self._weight_of[copy] for copy in answered if copy not in others]
            self._update = AdamUpdate(self.optimizer, early)
            self.gradients.then = self._take
            return answered
        left = {}
        for copy, grad in answered.items():
            weight = self._weight_of[copy]
            if weight in self._update.parameters:  # an embedding was not used: a part is missing
                self._update.update(weight, grad)
            else:
                left[copy] = grad
        return left


def update_torch(
    parameter: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> None:
    """The formula above, in place.

    Args:
        parameter: w.
        gradient: g.
        state: torch's of this parameter: `exp_avg` (m), `exp_avg_sq` (v) and `step` (t, from 1).
        group: torch's parameter group with the settings.
    """
    beta1, beta2 = rounded_betas(group)
    lr, decay, step = group["lr"], group["weight_decay"], state["step"].double()
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    gradient = gradient.float()
    if group["decoupled_weight_decay"]:
        parameter.mul_(1 - lr * decay)
    else:
        gradient = gradient + decay * parameter
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.lerp_(gradient.square(), 1 - beta2)
    correction1, correction2 = (1 - beta1**step).float(), (1 - beta2**step).float()
    deviation = exp_avg_sq.sqrt() / correction2.sqrt() + group["eps"]
    parameter.sub_(lr / correction1 * exp_avg / deviation)


def rounded_betas(group: Mapping[str, Any]) -> tuple[float, float]:
    """The betas as torch's CUDA kernel takes them, rounded to float32.

    At 0.999 this changes 1 - beta by 1e-5 of itself, in v and in its correction alike.
    """
    beta1, beta2 = (float(np.float32(beta)) for beta in group["betas"])
    return beta1, beta2
