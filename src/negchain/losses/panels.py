"""Large batches on any device: the rows of a few items at a time against all columns.

The readable twin of `negchain.fast.fused`'s tiles: a panel's similarities are computed, walked
over, differentiated and forgotten, so that memory grows with B times the panel and not with B^2.
The gradient of the loss is linear in what comes after it, so each panel's gradient can be taken at
once and handed to the encoder later (GradCache, arXiv:2101.06983).

Shapes: `B` batch, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from negchain.losses.batch import Batch, Drawn, Draws
from negchain.losses.chains import Arrival
from negchain.pool import Side

PANEL_ELEMENTS = 2**25  # similarities of a panel: 128 MiB in float32


class Call(NamedTuple):
    """The arguments of one call of the loss."""

    z_a: Tensor
    z_b: Tensor
    positions: Tensor
    key_index: Tensor | None
    known: Tensor | None
    augmentation: tuple[Tensor, Tensor] | None
    carried: Tensor | tuple[Tensor, Tensor] | None
    draw: Draws | None
    drawn: Drawn | None


@dataclass
class Visit:
    """What a call found, before anything is stored."""

    batch: Batch
    sides: list[Side]
    encoded: list[tuple[Tensor, ...] | None]
    total: list[Tensor] = field(default_factory=list)
    report: dict[str, list[Tensor]] = field(default_factory=dict)
    arrivals: list[tuple[int, Tensor, Arrival]] = field(default_factory=list)
    runnings: list[tuple[int, Tensor]] = field(default_factory=list)

    def add(
        self,
        side: int,
        value: Tensor,
        arrivals: Iterator[tuple[Tensor, Arrival]],
        running: Tensor | None,
    ) -> None:
        """The result of one side."""
        self.total.append(value)
        self.arrivals += [(side, *arrival) for arrival in arrivals]
        if running is not None:
            self.runnings.append((side, running))

    def note(self, numbers: dict[str, Tensor]) -> None:
        """Numbers of one side for `info`."""
        for name, number in numbers.items():
            self.report.setdefault(name, []).append(number)


class Visitor(Protocol):
    """A loss whose rows can be visited a few items at a time."""

    beta: float | Tensor

    def visit(self, call: Call, items: slice = ...) -> Visit:
        """Loss and arrivals of the rows of some items against all columns."""


def in_panels(loss_fn: Visitor, call: Call) -> Visit:
    """`loss_fn.visit` of the whole batch, panel by panel; `total` carries the gradient."""
    size = len(call.z_a)
    inputs = {
        name: value
        for name, value in _tensors(call, loss_fn.beta).items()
        if value.requires_grad and torch.is_grad_enabled()
    }
    grads = {name: torch.zeros_like(value) for name, value in inputs.items()}
    panels, shares = [], []
    step = max(1, PANEL_ELEMENTS // (2 * size))
    for begin in range(0, size, step):
        items = slice(begin, min(begin + step, size))
        share = (items.stop - begin) / size
        visit = loss_fn.visit(call, items)
        value = torch.stack(visit.total).mean() * share
        if inputs:
            for name, grad in zip(
                inputs, torch.autograd.grad(value, [*inputs.values()]), strict=True
            ):
                grads[name] += grad
        panels.append(_detached(visit))
        shares.append(share)
    whole = _joined(panels, shares)
    whole.total = [sum(whole.total[1:], whole.total[0]) / len(whole.total)]
    for name, value in inputs.items():
        surrogate = torch.dot(value.flatten(), grads[name].flatten())
        whole.total[0] = whole.total[0] + (surrogate - surrogate.detach())
    return whole


def _tensors(call: Call, beta: float | Tensor) -> dict[str, Tensor]:
    carried = call.carried if isinstance(call.carried, tuple) else (call.carried,)
    named: dict[str, object] = {"z_a": call.z_a, "z_b": call.z_b, "beta": beta}
    named |= {f"carried {number}": z for number, z in enumerate(carried)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _detached(visit: Visit) -> Visit:
    """The panel without its graph and its rows."""
    return Visit(
        batch=visit.batch,
        sides=[],
        encoded=[],
        total=[value.detach() for value in visit.total],
        report=visit.report,
        arrivals=visit.arrivals,
        runnings=visit.runnings,
    )


def _joined(panels: list[Visit], shares: list[float]) -> Visit:
    """Panels as one visit: chains in the batch's order, means weighted by the panels' sizes."""
    first = panels[0]
    arrivals = []
    for number, (side, _, _) in enumerate(first.arrivals):
        chains = torch.cat([panel.arrivals[number][1] for panel in panels])
        parts = [panel.arrivals[number][2] for panel in panels]
        arrivals.append((side, chains, _joined_arrivals(parts)))
    runnings = []
    for number, (side, value) in enumerate(first.runnings):
        views = value.shape[0] // len(first.arrivals[0][1])
        values = [panel.runnings[number][1].view(views, -1) for panel in panels]
        runnings.append((side, torch.cat(values, 1).flatten()))
    return Visit(
        batch=first.batch,
        sides=[],
        encoded=[],
        total=[_mean(values, shares) for values in zip(*(p.total for p in panels), strict=True)],
        report={
            name: [_mean([p.report[name][side] for p in panels], shares) for side in range(len(v))]
            for name, v in first.report.items()
        },
        arrivals=arrivals,
        runnings=runnings,
    )


def _joined_arrivals(parts: list[Arrival]) -> Arrival:
    # Streaming takes uniform proposals only: there is no correction to keep.
    moved, ids, similarity, key = (
        torch.cat([part[column] for part in parts])  # type: ignore[misc]
        for column in range(4)
    )
    return Arrival(moved, ids, similarity, key, correction=None)


def _mean(values: list[Tensor] | tuple[Tensor, ...], shares: list[float]) -> Tensor:
    weighted = [value * share for value, share in zip(values, shares, strict=True)]
    return sum(weighted[1:], weighted[0])
