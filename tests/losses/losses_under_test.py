"""Every loss and option as one interface: build it, call it with an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from negchain import (
    MH,
    ContrastiveLoss,
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    ImportanceLoss,
    InBatch,
    InfoNCELoss,
    Informed,
    LargeBatchEMC2Loss,
    NegativeCacheLoss,
    SogCLRLoss,
    TopKLoss,
    Uniform,
)

M, DIM = 24, 5


@dataclass(frozen=True)
class Method:
    """A loss with its options."""

    loss_class: type[Any]
    options: dict[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ("views", "denominator")  # the battery's axes it has

    def build(
        self, beta: float | Tensor = 5.0, num_samples: int = M, **more: Any
    ) -> ContrastiveLoss:
        loss_fn: ContrastiveLoss = self.loss_class(num_samples, beta, **{**self.options, **more})
        return loss_fn


def extras(
    loss_fn: ContrastiveLoss, encode: Callable[[Tensor], Tensor], index: Tensor
) -> dict[str, Any]:
    """What a call of this loss needs beside the batch and `encode`."""
    call: dict[str, Any] = {}
    if loss_fn.num_keys is not None:
        call["key_index"] = (3 * index + 1) % loss_fn.num_keys
    if loss_fn.ids_per_item > 1:
        first = index % loss_fn.ids_per_item
        call["augmentation"] = (first, (first + 1) % loss_fn.ids_per_item)
    if isinstance(loss_fn.proposals, Given):
        ids = (index[:, None] * 7 + torch.arange(1, 10, device=index.device)[None, :]) % M
        draw = Draw(ids.repeat(2 if loss_fn.views == "shared" else 1, 1))
        drawn = encode(draw.ids)
        two = loss_fn.num_sides == 2
        call |= {"draw": (draw, draw) if two else draw, "drawn": (drawn, drawn) if two else drawn}
    return call


def towers(loss_fn: ContrastiveLoss, encode: Callable[[Tensor], Tensor]) -> Any:
    """`encode=` of a loss where one function encodes everything."""
    return (encode, encode) if loss_fn.num_sides == 2 else encode


def run(
    loss_fn: ContrastiveLoss,
    net: nn.Module,
    items: Tensor,
    index: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    """One call, as a training loop makes it; `items` has a row per id."""
    per_item = loss_fn.ids_per_item
    first = index * per_item + (index % per_item)
    second = index * per_item + ((index % per_item) + 1) % per_item

    def encode(ids: Tensor) -> Tensor:
        return net(items[ids])

    more = extras(loss_fn, encode, index)
    z_a, z_b = net(items[first]), net(items[second] + 0.05)
    return loss_fn(z_a, z_b, index, encode=towers(loss_fn, encode), known=known, **more)


def _emc2(takes: tuple[str, ...] = ("views", "denominator"), **options: Any) -> Method:
    return Method(EMC2Loss, options, takes)


METHODS = {
    "infonce": Method(InfoNCELoss, takes=("views",)),
    "dcl": Method(DCLLoss, takes=("views",)),
    "dcl-uniform": Method(DCLLoss, {"proposals": Uniform(4)}, takes=("views",)),
    "sogclr": Method(SogCLRLoss),
    "sogclr-informed": Method(SogCLRLoss, {"proposals": Informed(4)}, takes=("views",)),
    "negcache": Method(NegativeCacheLoss, {"refresh": 0.2}),
    "importance": Method(ImportanceLoss, {"proposals": Informed(4, alone=True)}),
    "importance-rows": Method(ImportanceLoss, {"proposals": Informed(2, alone=True, per_row=True)}),
    "logq": Method(ImportanceLoss, {"proposals": Uniform(4)}),
    "topk": Method(TopKLoss, {"num": 2, "top": 6}),
    "mh": _emc2(),
    "mh-cached": _emc2(carried="cached"),
    "mh-uniform": _emc2(proposals=Uniform()),
    "mh-alone": _emc2(("views",), proposals=Uniform(alone=True)),
    "mh-given": _emc2(proposals=Given()),
    "mh-informed": _emc2(proposals=Informed()),
    "mh-rows": _emc2(("views",), proposals=Informed(3, per_row=True)),
    "mh-augmentations": _emc2(("denominator",), augmentations=2, proposals=InBatch(2)),
    "mh-corpus": _emc2(("denominator",), num_keys=2 * M, views="paired"),
    "isir": _emc2(kernel="isir"),
    "isir-cached": _emc2(kernel="isir", carried="cached"),
    "isir-one-copy": _emc2(("denominator",), kernel="isir", proposals=InBatch(1)),
    "isir-given": _emc2(kernel="isir", proposals=Given()),
    "isir-informed": _emc2(kernel="isir", proposals=Informed()),
    "isir-corpus": _emc2(("denominator",), kernel="isir", num_keys=2 * M, views="paired"),
    "large batch": Method(LargeBatchEMC2Loss, {"kernel": MH()}),
}
Case = tuple[str, dict[str, str]]


def battery() -> list[Case]:
    """Every method with both views and both denominators; the four main ones with all pairs."""
    cases: list[Case] = []
    for name, method in METHODS.items():
        layouts = [("shared", "negatives"), ("paired", "all")]
        if name in ("sogclr", "negcache", "mh", "isir"):
            layouts += [("shared", "all"), ("paired", "negatives")]
        for views, denominator in layouts:
            options = {"views": views, "denominator": denominator}
            case = (name, {key: options[key] for key in method.takes})
            if case not in cases:
                cases.append(case)
    return cases


def case_name(case: Case) -> str:
    return "-".join([case[0], *case[1].values()])


def has_chains(case: Case) -> bool:
    return issubclass(METHODS[case[0]].loss_class, EMC2Loss)


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
