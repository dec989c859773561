"""EMC² for batches of thousands: the B x B similarities are never stored.

On a GPU tiles of them are computed, scanned and forgotten (`negchain.fast.fused`). Elsewhere a
panel of rows at a time is: its similarities are computed, walked over, differentiated and freed.
Panels are the readable twin of the tiles. Memory grows with B times the panel, not with B^2.

Each panel's gradient is taken at once, as if the upstream gradient were 1. The returned scalar has
that gradient: the upstream one multiplies it when `backward` runs (GradCache, arXiv:2101.06983).

Shapes: `B` batch, `D` embedding.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from negchain.losses.batch import Call, as_embedding, is_traced
from negchain.losses.chains import Arrival, Carried
from negchain.losses.emc2 import EMC2Loss
from negchain.losses.request import Part, Request
from negchain.losses.settings import MH, InBatch, Kernel, Shared
from negchain.losses.state import keep
from negchain.losses.walk import Visit
from negchain.pool import Side
from negchain.weights.metropolis import Backend

PANEL_ELEMENTS = 2**25  # similarities of a panel: 128 MiB in float32


class LargeBatchEMC2Loss(EMC2Loss):
    """`EMC2Loss` for large batches; proposals are the batch.

    Args:
        num_samples, beta, carried, views, symmetric, denominator, normalize, seed, gather,
            shard_state, chain_file, dim, backend: as for `EMC2Loss`.
        kernel: with `count_every` a multiple of 128 (or `ISIR()`) in tiles on a GPU; every other
            one in panels of rows. With shared views the value (and 1 - p+ of denominator="all")
            counts one copy of every item.

    Example:
        >>> loss_fn = LargeBatchEMC2Loss(100, kernel=MH(count_every=128))
        >>> z_a, z_b = torch.randn(2, 8, 4).requires_grad_().unbind()
        >>> encode = lambda ids: torch.randn(len(ids), 4)
        >>> loss_fn(z_a, z_b, torch.arange(8), encode=encode).backward()
    """

    large_batch = True

    def __init__(
        self,
        num_samples: int,
        beta: float | Tensor = 14.28,
        kernel: Kernel | Literal["mh", "isir"] = MH(count_every=128),  # noqa: B008 frozen
        *,
        carried: Carried = "encode",
        chain_file: str | os.PathLike[str] | None = None,
        backend: Backend | Literal["fused"] = "auto",
        **shared: Unpack[Shared],
    ) -> None:
        if any(shared.get(name) is not None for name in ("num_keys", "augmentations")):
            raise ValueError(
                "LargeBatchEMC2Loss proposes the batch alone, which reaches only keys that are "
                "somebody's positive, to one chain per item; for a corpus (num_keys=) or stored "
                "views (augmentations=) use EMC2Loss"
            )
        super().__init__(
            num_samples, beta, kernel, proposals=InBatch(), carried=carried, chain_file=chain_file,
            backend=backend, **shared,
        )  # fmt: skip

    def _begin(self, *given: Any, **layout: Any) -> list[Side]:
        """Tiles meet one copy of every item, and so do their readable twins."""
        return [dataclasses.replace(s, hidden_keys=None) for s in super()._begin(*given, **layout)]

    def visit(self, call: Call, requests: Sequence[Request], items: slice = slice(None)) -> Visit:
        """The visit of the whole batch, panel by panel; `total` carries the gradient."""
        if is_traced(call.z_a) or is_traced(call.z_b):  # torch.func has no leaves to cut at
            return super().visit(call, requests)
        tracks = torch.is_grad_enabled()
        given: list[Tensor] = []  # what wants a gradient
        leaves: list[Tensor] = []  # what stands for it in the panels

        def cut(z: Tensor) -> Tensor:
            if not (z.requires_grad and tracks):
                return z
            given.append(as_embedding(z, False))  # half precision cannot add up panels
            leaves.append(given[-1].detach().requires_grad_())
            return leaves[-1]

        inner = dataclasses.replace(call, z_a=cut(call.z_a), z_b=cut(call.z_b))
        answers = _cut_answers(requests, cut)
        if isinstance(self.beta, Tensor) and self.beta.requires_grad and tracks:
            given.append(self.beta)
            leaves.append(self.beta)
        panels, grads = self._panels(inner, answers, leaves)
        whole = _joined(panels)
        total = _sum(whole.total) / len(whole.total)
        for z, grad in zip(given, grads, strict=True):
            surrogate = torch.dot(z.flatten(), grad.flatten())
            total = total + (surrogate - surrogate.detach())
        whole.total = [total]
        return whole

    def _panels(
        self, call: Call, requests: Sequence[Request], leaves: list[Tensor]
    ) -> tuple[list[Visit], list[Tensor]]:
        """Visits of the panels, numbers times their share of the batch; gradients of the leaves."""
        size, panels = len(call.z_a), []
        grads = [torch.zeros_like(z) for z in leaves]
        step = max(1, PANEL_ELEMENTS // max(2 * size, 1))
        for begin in range(0, max(size, 1), step):  # an empty batch has one too, which refuses it
            items = slice(begin, min(begin + step, size))
            visit = super().visit(call, requests, items)
            share = (items.stop - begin) / size
            value = torch.stack(visit.total).mean() * share
            if leaves:
                for total, grad in zip(grads, torch.autograd.grad(value, leaves), strict=True):
                    total += grad
            visit.total, visit.sides = [v.detach() * share for v in visit.total], []
            for name, numbers in visit.report.items():  # now: they hold on to the panel
                visit.report[name] = [keep(number() * share) for number in numbers]
            panels.append(visit)
        return panels, grads


def _cut_answers(requests: Sequence[Request], cut: Callable[[Tensor], Tensor]) -> list[Request]:
    """Requests whose answers are leaves: the caller's may share a graph."""

    def leaf(part: Part) -> Part:
        return dataclasses.replace(part, embeddings=cut(part.embeddings))  # type: ignore[arg-type]

    return [dataclasses.replace(one, parts=[*map(leaf, one.parts)]) for one in requests]


def _joined(panels: list[Visit]) -> Visit:
    """Panels as one visit: chains in the batch's order, sums of the panels' shares."""
    whole = Visit(panels[0].batch, [])
    for parts in zip(*(panel.arrivals for panel in panels), strict=True):
        columns: Any = zip(*parts, strict=True)  # field by field
        whole.arrivals.append(
            Arrival._make(f[0] if f[0] is None else torch.cat(f) for f in columns)
        )
    whole.total = [_sum(values) for values in zip(*(p.total for p in panels), strict=True)]
    for name in panels[0].report:
        numbers = zip(*(panel.report[name] for panel in panels), strict=True)
        whole.report[name] = [keep(_sum([n() for n in parts])) for parts in numbers]
    return whole


def _sum(values: Sequence[Tensor]) -> Tensor:
    return sum(values[1:], values[0])
