"""Every loss and option of the core as one interface: build it, call it with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from negchain import DCLLoss, Draw, EMC2Loss, InfoNCELoss, NegativeCacheLoss, SogCLRLoss
from negchain.losses.base import ContrastiveLoss

M, DIM = 24, 5


@dataclass(frozen=True)
class Method:
    """A loss with its options; `items` has a row per item (or per stored augmentation)."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ("views", "denominator")  # the battery's axes it has

    def build(
        self, beta: float | Tensor = 5.0, num_samples: int = M, **more: Any
    ) -> ContrastiveLoss:
        options = {**self.options, **more}
        if self.name == "infonce":
            return InfoNCELoss(beta, num_samples=num_samples, **options)
        if self.name == "dcl":
            return DCLLoss(beta, num_samples=num_samples, **options)
        if self.name == "sogclr":
            return SogCLRLoss(num_samples, beta, **options)
        if self.name == "negcache":
            return NegativeCacheLoss(num_samples, DIM, beta, refresh=0.2, **options)
        return EMC2Loss(num_samples, beta, **options)


def _pairs(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and not isinstance(value, Draw):
        return tuple(function(v) for v in value)
    return function(value)


def arguments(
    loss_fn: ContrastiveLoss,
    encode: Callable[[Tensor], Tensor],  # ids -> [.., D] embeddings
    z_a: Tensor,
    z_b: Tensor,
    index: Tensor,
    known: Tensor | None = None,
) -> dict[str, Any]:
    """What else a call of this loss needs: carried, draws and their embeddings."""
    call: dict[str, Any] = {}
    if known is not None:
        call["known"] = known
    augmentation = None
    if isinstance(loss_fn, EMC2Loss):
        if loss_fn.augmentations:
            first = index % loss_fn.augmentations
            augmentation = (first, (first + 1) % loss_fn.augmentations)
            call["augmentation"] = augmentation
        if loss_fn.carried_mode == "encode":
            held = (
                loss_fn.carried(index)
                if augmentation is None
                else loss_fn.carried(index, augmentation)
            )
            call["carried"] = _pairs(held, encode)
        if loss_fn.proposal == "draw":
            ids = (index[:, None] * 7 + torch.arange(1, 10, device=index.device)[None, :]) % M
            draw = Draw(ids.repeat(2 if loss_fn.views == "shared" else 1, 1))
            call["draw"] = (draw, draw) if loss_fn.num_sides == 2 else draw
    if isinstance(loss_fn, NegativeCacheLoss) or (
        isinstance(loss_fn, EMC2Loss) and loss_fn.proposal == "cache"
    ):
        call["draw"] = loss_fn.propose(z_a.detach(), index, z_b.detach(), known=known)
    if "draw" in call:
        call["drawn"] = _pairs(call["draw"], lambda draw: encode(draw.ids))
    return call


def run(
    loss_fn: ContrastiveLoss,
    net: nn.Module,
    items: Tensor,
    index: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    """One call, as a training loop makes it."""
    per_item = getattr(loss_fn, "augmentations", None) or 1
    first = index * per_item + (index % per_item)
    second = index * per_item + ((index % per_item) + 1) % per_item
    z_a = net(items[first])
    z_b = net(items[second] + 0.05)
    call = arguments(loss_fn, lambda ids: net(items[ids]), z_a, z_b, index, known)
    return loss_fn(z_a, z_b, index, **call)


METHODS = {
    "infonce": Method("infonce", takes=("views",)),
    "dcl": Method("dcl", takes=("views",)),
    "sogclr": Method("sogclr"),
    "negcache": Method("negcache"),
    "mh": Method("emc2"),
    "mh-cached": Method("emc2", {"carried": "cached"}),
    "mh-score": Method("emc2", {"carried": "score"}),
    "mh-sequential": Method("emc2", {"walk": "sequential"}),
    "mh-draw": Method("emc2", {"proposal": "draw"}),
    "mh-cache": Method("emc2", {"proposal": "cache"}),
    "mh-augmentations": Method("emc2", {"augmentations": 2}, takes=("denominator",)),
    "isir": Method("emc2", {"kernel": "isir"}),
    "isir-cached": Method("emc2", {"kernel": "isir", "carried": "cached"}),
    "isir-draw": Method("emc2", {"kernel": "isir", "proposal": "draw"}),
    "isir-cache": Method("emc2", {"kernel": "isir", "proposal": "cache"}),
}


def battery() -> list[tuple[str, dict[str, str]]]:
    """Every method x views x denominator it offers."""
    cases = []
    for name, method in METHODS.items():
        for views in ("shared", "paired") if "views" in method.takes else ("shared",):
            for denominator in ("negatives", "all") if "denominator" in method.takes else ("",):
                options = {"views": views}
                if denominator:
                    options["denominator"] = denominator
                cases.append((name, options))
    return cases


def case_name(case: tuple[str, dict[str, str]]) -> str:
    return "-".join([case[0], *case[1].values()])


def data(per_item: int = 2) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    items = torch.randn(M * per_item, 7, generator=generator)
    net = nn.Linear(7, DIM)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return net, items


def snapshot(loss_fn: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in loss_fn.state_dict().items()}


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, with NaN equal to NaN (a slot never written)."""
    return a.keys() == b.keys() and all(
        a[k].shape == b[k].shape
        and a[k].dtype == b[k].dtype
        and torch.equal(torch.nan_to_num(a[k], nan=-7.5), torch.nan_to_num(b[k], nan=-7.5))
        for k in a
    )
