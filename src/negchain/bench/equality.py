"""A fast EMC² loss against its readable twin on the same inputs and draws, gradients included.

`exact_clustered` makes inputs whose inner products no arithmetic rounds: there nothing but the
order of sums may differ. On others a comparison within rounding may fall the other way, and that
row's chain goes elsewhere: such rows are counted.

Shapes: `B` batch, `D` embedding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.losses import EMC2Loss

VISITS = 2  # the second starts where the first one's chains ended
ROW_TOLERANCE = 2e-2  # of a row's gradient; gradients of bf16 embeddings are bf16: 2^-8


class Difference(NamedTuple):
    """How far two losses are apart."""

    value: float  # relative
    chains: float  # share that ended elsewhere
    rows: float  # share with another end or another gradient of z_a
    gradient: float  # largest over the inputs of |difference| / |gradient|

    def __str__(self) -> str:
        """For a table."""
        return (
            f"value within {self.value:.1g}, {self.rows:.2%} of the rows differ, gradients within "
            f"{self.gradient:.1g} of their norm"
        )


def difference(
    fast: EMC2Loss, slow: EMC2Loss, z_a: Tensor, z_b: Tensor, held: Tensor | None, index: Tensor
) -> Difference:
    """Visit the same batch with both losses and compare the last visit.

    >>> z_a, z_b, held = torch.randn(3, 4, 8).requires_grad_()
    >>> pair = [EMC2Loss(100, 5.0, backend=backend) for backend in ("torch", "reference")]
    >>> difference(*pair, z_a, z_b, held, torch.arange(4)).rows
    0.0
    """
    inputs = (z_a, z_b) if held is None else (z_a, z_b, held)
    values, gradients, ends = [], [], []
    for loss_fn in (fast, slow):
        for _ in range(VISITS):
            value = loss_fn(z_a, z_b, index, encode=lambda ids: held)
        values.append(float(value.detach()))
        gradients.append([g.double() for g in torch.autograd.grad(value, inputs)])
        ends.append(loss_fn.chains.ids(0, index))
    found, expected = gradients
    moved = ends[0] != ends[1]
    apart, scale = (
        torch.linalg.vector_norm(g, dim=1) for g in (found[0] - expected[0], expected[0])
    )
    return Difference(
        value=abs(values[0] - values[1]) / abs(values[1]),
        chains=float(moved.double().mean()),
        rows=float((moved | (apart > ROW_TOLERANCE * scale)).double().mean()),
        gradient=max(
            float((a - b).norm() / b.norm().clamp(min=1e-300))
            for a, b in zip(found, expected, strict=True)
        ),
    )


def clustered(
    count: int, dim: int, num_clusters: int, spread: float, generator: torch.Generator
) -> Tensor:
    """Unit vectors around random centres, [count, dim] float32.

    >>> z = clustered(100, 512, 4, 1.0, torch.Generator().manual_seed(0))
    >>> inside = (z @ z.T)[(z @ z.T) > 0.3].mean()  # of one cluster
    >>> bool(0.4 < inside < 0.6)
    True
    """
    centres = F.normalize(torch.randn(num_clusters, dim, generator=generator), dim=1)
    chosen = torch.randint(num_clusters, (count,), generator=generator)
    noise = torch.randn(count, dim, generator=generator) / math.sqrt(dim)
    return F.normalize(centres[chosen] + spread * noise, dim=1)


def exact_clustered(
    count: int, dim: int, num_clusters: int, spread: float, generator: torch.Generator
) -> Tensor:
    """Unit vectors around centres whose inner products bf16 computes without rounding.

    As many entries as the largest power of 4 up to `dim` are ± a power of two, the rest 0, so that
    squares sum to one; members of a cluster differ in the signs of a share `spread / 4` of them.

    >>> z = exact_clustered(8, 512, 2, 1.0, torch.Generator().manual_seed(0))
    >>> bool((z.norm(dim=1) == 1).all()), bool((z.bfloat16() == z).all())
    (True, True)
    """
    used = 4 ** int(math.log(dim, 4))  # entries 1 / sqrt(used), a power of two
    signs = torch.randint(2, (num_clusters, used), generator=generator) * 2 - 1
    chosen = torch.randint(num_clusters, (count,), generator=generator)
    flips = torch.rand(count, used, generator=generator) < spread / 4
    entries = torch.where(flips, -signs[chosen], signs[chosen]).float() / math.sqrt(used)
    return F.pad(entries, (0, dim - used))


def flipped(z: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A second view of exact vectors: a share of the signs turned."""
    return torch.where(torch.rand(z.shape, generator=generator) < share, -z, z)
