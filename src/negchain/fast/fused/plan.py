"""What one side of one step works with, and what its forward pass leaves behind.

Shapes: as in `layout_triton`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import triton
from torch import Tensor

from negchain.fast.fused import tiles_triton
from negchain.losses.chains import ChainTable
from negchain.objective import Denominator

Weighting = Literal["mh", "isir", "softmax", "sogclr"]
Numbers = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Plan:
    """What one side of one step works with."""

    index: Tensor  # [B] int64, chain of each item
    own: Tensor  # [B] int64, id of its positive
    chains: ChainTable | None
    side: int
    step: Tensor  # [] of the caller
    counts: bool  # whether this side counts it on
    faults: Tensor  # [2]
    running: Tensor | None  # [M] running partition (denominator="all"), SogCLR's moving average
    dim: int
    denominator: Denominator
    weighting: Weighting
    shared: bool
    views: int  # rows per item
    normalize: bool
    training: bool
    seed: int
    num_samples: int
    num_keys: int
    multiplicity: int
    stream: bool = False
    bounded: bool = False  # logits are known to lie in [-beta, beta], beta at most 75
    burn_in: float = 0.0
    count_every: int = 1
    partition_rate: float = 0.0
    gamma: float = 0.0  # SogCLR

    @property
    def blocks(self) -> int:
        """Blocks of columns: both copies of every item, or its one key."""
        return 2 if self.shared else 1

    @property
    def is_sparse(self) -> bool:
        """Whether a streaming row weighs a few columns only: counted states, one of each group."""
        return self.weighting == "mh" or self.count_every > 1

    @property
    def carried(self) -> str:
        """How carried states are scored."""
        return "none" if self.chains is None else self.chains.keep

    @property
    def num_columns(self) -> int:
        """K."""
        size, tile = len(self.index), tiles_triton.TILE
        return triton.cdiv(size, tile) * tile if self.stream else size

    @property
    def log_negatives(self) -> float:
        """log m_neg."""
        return math.log(max(self.num_keys - 1, 1) * self.multiplicity)


@dataclass
class Walked:
    """What the forward pass of a side leaves for its backward pass and for `info`."""

    beta: Tensor  # []
    step: Tensor  # [] of this pass; the caller's goes on
    queries: Tensor  # [N,P]
    pool: Tensor  # [blocks*K,P]
    pool_ids: Tensor  # [K]
    penalty: Tensor  # [K]
    column: Tensor  # [B]
    norms: Tensor  # [3,B]
    pull: Tensor  # [N]
    carried_weight: Tensor  # [N]
    stats: Tensor  # [7,N] see rows_triton
    moved: Tensor  # [2,B] valid and moved, valid
    last: Tensor  # [N]
    last_logit: Tensor  # [N]
    running: Tensor  # [N]
    held: Tensor  # [B,D] cached embeddings of the carried states; [0] without
    weights: Tensor | None = None  # [N,K] pulled; small batch
    # streaming: columns that have weight [N,S+1], their weights, pulled [N,S+1], how many [N]
    visits: tuple[Tensor, Tensor, Tensor] | None = None
    joint: Tensor | None = None  # [N] streaming i-SIR that weighs all columns

    def report(self, plan: Plan) -> Numbers:
        """Numbers for `info`, computed when somebody looks."""
        stats, moved = self.stats, self.moved
        if plan.weighting == "sogclr":
            return {
                "global_loss": lambda: stats[0].mean(),
                "effective_negatives": lambda: stats[5].mean(),
            }
        if plan.weighting == "softmax":
            return {
                "global_loss": lambda: (stats[0] + stats[1]).mean(),
                "effective_negatives": lambda: stats[5].mean(),
            }
        rate = "moves_per_tile" if plan.stream and plan.weighting == "mh" else "acceptance_rate"
        numbers: Numbers = {
            rate: lambda: stats[1].sum() / stats[2].sum().clamp(min=1),
            "carried_mass": lambda: stats[3].mean(),
            "dropped_mass": lambda: (stats[3] - stats[4]).mean(),
            "chain_age": lambda: (moved[1].sum() - moved[0].sum()) / moved[0].sum().clamp(min=1),
            "effective_negatives": lambda: stats[5].mean(),
            "global_loss": lambda: stats[0].mean(),
        }
        if plan.stream and not plan.is_sparse:
            del numbers["effective_negatives"]
        return numbers


def given(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel wants a pointer also for what it does not use."""
    return unused if tensor is None else tensor
