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
from negchain.objective import Denominator

Numbers = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Plan:
    """What one side of one step works with."""

    index: Tensor  # [B] int64, id of each item
    side: int
    step: Tensor  # [] of the caller
    counts: bool  # whether this side increases `step`
    faults: Tensor  # [3]
    denominator: Denominator
    weighting: Literal["mh", "isir", "softmax", "sogclr"]
    shared: bool
    views: int  # rows per item
    normalize: bool
    training: bool
    seed: int
    num_samples: int
    states: Tensor | None = None  # [M] where the chains stand; None: no chains
    keys: Tensor | None = None  # [M,D] embeddings of their states, with carried="cached"
    averages: Tensor | None = None  # [M] SogCLR's moving averages
    tiled: bool = False  # a large batch
    bound: float = math.inf  # logits are known to lie between minus this and this
    burn_in: float = 0.0  # a share below 1, or steps
    count_every: int = 1
    copies: int = 1  # of every item that a row of a chain is offered; shared views may have 2
    gamma: float = 0.0  # SogCLR

    @property
    def blocks(self) -> int:
        """Blocks of columns: one for each copy of an item, unless every row meets both."""
        return 2 if self.shared and self.copies == 1 else 1

    @property
    def is_sparse(self) -> bool:
        """Whether a row in tiles weighs a few columns only: counted states, one of each group."""
        return self.weighting == "mh" or self.count_every > 1

    @property
    def carried(self) -> str:
        """How carried states are scored."""
        if self.states is None:
            return "none"
        return "encode" if self.keys is None else "cached"

    @property
    def bounded(self) -> bool:
        """Whether tiles may add up exponentials (and, where all columns weigh, squares) as is."""
        return self.bound <= (75 if self.is_sparse else 37)

    @property
    def num_columns(self) -> int:
        """K."""
        size, tile = len(self.index), tiles_triton.TILE
        return triton.cdiv(size, tile) * tile if self.tiled else self.copies * size

    @property
    def log_negatives(self) -> float:
        """log m_neg."""
        return math.log(max(self.num_samples - 1, 1) * (2 if self.shared else 1))


@dataclass
class Walked:
    """What the forward pass of a side leaves for its backward pass and for `info`."""

    beta: Tensor  # []
    step: Tensor  # [] of this pass; the caller's goes on
    queries: Tensor  # [N,P]
    pool: Tensor  # [blocks*K,P]
    pool_ids: Tensor  # [K]
    penalty: Tensor  # [K] 0, -inf: never a proposal
    column: Tensor  # [copies*B] of each item
    norms: Tensor  # [3,B] of both embeddings and of the carried one
    positive: Tensor  # [B] similarity of the two
    start_similarity: Tensor  # [N] to the carried state
    start_logit: Tensor  # [2,N] its logit, and as the walk sees it
    valid: Tensor  # [B] 2 bits: finite, in range
    pull: Tensor  # [N] beta / N times the row's factor
    carried_weight: Tensor  # [N] of the carried state, pulled
    stats: Tensor  # [8,N] value, accepts, steps, carried mass, low, negatives, drive, high
    moved: Tensor  # [2,B] valid and moved, valid
    last: Tensor  # [N] column of the final state in its block, -1: unmoved
    averages: Tensor  # [N] SogCLR: the new ones, log
    held: Tensor  # [B,D] cached embeddings of the carried states; [0] without
    repeated: Tensor  # [copies*B] i-SIR: which items the batch holds already
    weights: Tensor | None = None  # [N,K] pulled; small batch
    # tiles: columns that have weight [N,S+1], their weights, pulled [N,S+1], how many [N]
    visits: tuple[Tensor, Tensor, Tensor] | None = None
    # [N] tiles of i-SIR that weighs all columns: log of the sum over these and the carried state
    joint: Tensor | None = None

    def report(self, plan: Plan) -> Numbers:
        """Numbers for `info`, computed when it is read; names and meaning are the twin's.

        Tiles do not know which of their steps were accepted: there `acceptance_rate` is that of one
        proposal per row, the first of a tile.
        """
        stats, moved = self.stats, self.moved
        numbers: Numbers = {
            "global_loss_low": lambda: stats[4].mean(),
            "effective_negatives": lambda: stats[5].mean(),
        }
        if plan.states is None:
            return numbers
        return numbers | {
            "global_loss": lambda: stats[0].mean(),
            "global_loss_high": lambda: stats[7].mean(),
            "acceptance_rate": lambda: stats[1].sum() / stats[2].sum().clamp(min=1),
            "carried_mass": lambda: stats[3].mean(),
            "chain_age": lambda: (moved[1].sum() - moved[0].sum()) / moved[0].sum().clamp(min=1),
        }


def given(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel takes a pointer also for a tensor it does not use."""
    return unused if tensor is None else tensor
