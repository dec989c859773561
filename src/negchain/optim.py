"""Optimizers and the learning-rate schedule of the recipes.

    sgd    torch.optim.SGD      v <- mu v + (g + wd w);  w <- w - lr v
    adam   torch.optim.Adam     weight decay is coupled: g + wd w enters both moments
    adamw  torch.optim.AdamW    weight decay is decoupled: w <- w - lr wd w
    lars   timm.optim.Lars      as sgd, each tensor's step scaled by 0.001 |w| / (|g| + wd |w|)

The paper names Adam, LARS and a weight decay; that Adam's is coupled is the authors' code's.

Inside a CUDA graph a Python number is frozen at capture, so there the learning rate is a tensor on
the device that `set_lr` fills in place. Fused SGD, Adam and AdamW read such a tensor without
asking the host; timm's Lars passes it as a Python scalar, which synchronises and is refused during
capture. `CapturableLars` is timm's optimizer with that one line changed.

State is created at an optimizer's first step: run one step before capturing. Zeroing every state
tensor in place afterwards gives back the fresh state, for all four.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.optim.lars import Lars
from torch import Tensor, nn

LARS_TRUST = 1e-3  # the authors' code's, for ImageNet-100


class CapturableLars(Lars):
    """timm's Lars whose learning rate is a tensor: no host synchronisation, safe in a CUDA graph.

    Equal to timm's for equal settings (dampening 0, no Nesterov, no trust clipping), with the same
    state, so a checkpoint moves between the two.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 2))
        >>> optimizer = CapturableLars([weight], lr=torch.tensor(1.0), always_adapt=True)
        >>> weight.grad = torch.ones(2, 2)
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4)
        0.999
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                update = weight.grad
                if group["weight_decay"] != 0 or group["always_adapt"]:
                    update = _trust_scaled(weight, group)
                if group["momentum"] != 0:
                    state = self.state[weight]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(weight)
                    update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
                weight.addcmul_(update, group["lr"], value=-1)


def _trust_scaled(weight: Tensor, group: dict[str, Any]) -> Tensor:
    """trust |w| / (|g| + wd |w|) times (g + wd w); the factor is 1 where either norm is 0."""
    decay = group["weight_decay"]
    weight_norm, grad_norm = weight.norm(), weight.grad.norm()  # type: ignore[union-attr]
    ratio = group["trust_coeff"] * weight_norm / (grad_norm + weight_norm * decay + group["eps"])
    ratio = torch.where((weight_norm > 0) & (grad_norm > 0), ratio, 1.0)
    return torch.add(weight.grad, weight, alpha=decay).mul_(ratio)  # type: ignore[arg-type]


def build_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """Return sgd, adam, adamw or lars over the model's trainable parameters.

    They are already where they will be trained. `momentum` is for sgd and lars. `capturable`: for a
    step inside a CUDA graph; the learning rate is then a device tensor.

    Example:
        >>> optimizer = build_optimizer(nn.Linear(2, 2), "adam", lr=1e-4, weight_decay=1e-4)
        >>> set_lr(optimizer, 5e-5)
        >>> optimizer.param_groups[0]["lr"]
        5e-05
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    on_cuda = all(p.is_cuda for p in parameters)
    assert on_cuda or not capturable
    rate = torch.tensor(lr, device=parameters[0].device) if capturable else lr
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": weight_decay}]
    # None: torch's own choice, on the CPU or where some are sharded; no kernel takes both kinds
    fused = (on_cuda and len({type(p) for p in parameters}) == 1) or None
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=fused)
    if name == "adam":
        return torch.optim.Adam(groups, lr=rate, fused=fused, capturable=capturable)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=rate, fused=fused, capturable=capturable)
    assert name == "lars"
    lars: type[Lars] = CapturableLars if capturable else Lars
    # kernels are adapted even at weight decay 0, where timm's default would be plain SGD; norms and
    # biases are neither decayed nor adapted (the authors' code's recipe)
    wide, thin = ([p for p in parameters if (p.ndim > 1) == many] for many in (True, False))
    kernels = {"params": wide, "weight_decay": weight_decay, "always_adapt": True}
    groups = [kernels, {"params": thin, "weight_decay": 0.0, "always_adapt": False}]
    groups = [group for group in groups if group["params"]]
    return lars(groups, lr=rate, momentum=momentum, trust_coeff=LARS_TRUST)


def set_lr(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group, in place where it is a tensor a CUDA graph reads.

    Filling is asynchronous: the host is never synchronised.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the moments of a `state_dict`, keeping this optimizer's own settings.

    `Optimizer.load_state_dict` would also take the saved run's `fused`, `capturable` and learning
    rate objects, so that a GPU checkpoint could not go on on a CPU, and a CUDA graph would read a
    learning rate that nobody sets any more. Call it before capturing: the moments are new tensors.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> first = build_optimizer(model, "sgd", lr=0.1)
        >>> second = build_optimizer(model, "sgd", lr=0.2)
        >>> load_optimizer(second, first.state_dict())
        >>> second.param_groups[0]["lr"]
        0.2
    """
    own = optimizer.state_dict()
    if [len(g["params"]) for g in own["param_groups"]] != [
        len(g["params"]) for g in saved["param_groups"]
    ]:
        raise ValueError(
            "the saved optimizer must hold the same parameters as this one, got another number of "
            "them; resume with the encoder and optimizer settings of that run"
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": own["param_groups"]})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # A run of a CPU that goes on on a GPU: moments lie in memory as their parameters do.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def lr_at(step: int, total_steps: int, warmup_steps: int, base_lr: float) -> float:
    """Learning rate of `step` (from 0): linear warm-up from 0, then a cosine that ends at 0.

        lr(t) = base t / w                               for t < w
                base (1 + cos(pi (t - w) / (T - w))) / 2   for w <= t <= T;  0 beyond

    Example:
        >>> [round(lr_at(t, total_steps=6, warmup_steps=2, base_lr=1.0), 3) for t in range(7)]
        [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return base_lr * step / warmup_steps
    if step >= total_steps:
        return 0.0
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return base_lr * (1 + math.cos(math.pi * progress)) / 2
