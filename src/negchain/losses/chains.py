"""The chain table: where each anchor's Markov chain stands between two visits.

One integer per chain, and nothing else unless asked for: `carried="cached"` keeps the embedding of
the carried state, `"score"` its last similarity, draws with probabilities the log-probability the
state was proposed with (needed to correct the acceptance ratio at the next visit).

Shapes: `S` sides, `M` chains, `B` chains of the batch, `D` embedding.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from negchain import draws
from negchain.losses.base import LazyState
from negchain.pool import write_rows

Carried = Literal["encode", "cached", "score"]


class Arrival(NamedTuple):
    """Where the chains of a batch ended."""

    moved: Tensor  # [B] bool: the state is a new one
    ids: Tensor  # [B] id of the new state
    similarity: Tensor  # [B] its similarity to the anchor
    key: Tensor  # [B,D] its embedding
    correction: Tensor | None  # [B] log(q m_neg) it was proposed with; None: uniform


class ChainTable(LazyState):
    """State of one chain per anchor.

    Args:
        num_sides: S, tables of chains (directions).
        num_chains: M.
        num_states: number of ids a chain can hold.
        ids_per_item: ids per item (stored augmentations).
        own: chain i belongs to an item whose own ids are no negatives: no chain starts there.
        keep: what is remembered of the carried state beside its id.
        dim: D, for keep="cached"; None waits for the first batch.
        seed: of the initial states.

    Example:
        >>> table = ChainTable(1, 5, num_states=5, ids_per_item=1, own=True, keep="encode", seed=0)
        >>> bool((table.states[0] != torch.arange(5)).all()), table.states.dtype
        (True, torch.int32)
    """

    states: Tensor  # [S,M] int32 (int64 beyond 2^31 ids)
    corrections: Tensor  # [S,M or 0] log(q m_neg) of the carried state
    keys: Tensor  # [S,M,D or 0] "cached"
    scores: Tensor  # [S,M or 0] "score"
    _lazy_buffers = ("corrections", "keys")

    def __init__(
        self,
        num_sides: int,
        num_chains: int,
        *,
        num_states: int,
        ids_per_item: int,
        own: bool,
        keep: Carried,
        dim: int | None = None,
        seed: int,
    ) -> None:
        super().__init__()
        self.keep = keep
        rows = []
        for side in range(num_sides):
            rows.append(_initial_states(num_chains, num_states, ids_per_item, own, seed, side))
        self.register_buffer("states", torch.stack(rows))
        self.register_buffer("corrections", torch.zeros(num_sides, 0))
        if keep == "cached":
            self.register_buffer("keys", torch.full((num_sides, num_chains, dim or 0), math.nan))
        if keep == "score":
            self.register_buffer("scores", torch.full((num_sides, num_chains), math.nan))

    def ids(self, side: int, slots: Tensor) -> Tensor:  # [B] -> [B] int64
        """Ids of the carried states."""
        return self.states[side][slots].long()

    def cached_keys(self, side: int, slots: Tensor, dim: int) -> Tensor:  # -> [B,D]
        """Embeddings of the carried states as of their last visit; NaN before the first."""
        width = self.keys.shape[2]
        if width == 0:
            return self.keys.new_full((len(slots), dim), math.nan)
        if width != dim:
            raise ValueError(f"the chains hold embeddings of dimension {width}, got {dim}")
        return self.keys[side][slots]

    def correction(self, side: int, slots: Tensor) -> Tensor | None:
        """log(q m_neg) of the carried states; None while every proposal was uniform."""
        return self.corrections[side][slots] if self.corrections.shape[1] else None

    def commit(self, side: int, slots: Tensor, arrival: Arrival, valid: Tensor) -> None:
        """Store where the chains of the valid rows ended; the others stay as they are."""
        allowed = valid & arrival.moved
        if arrival.correction is not None and self.corrections.shape[1] == 0:
            self.corrections = torch.zeros_like(self.states, dtype=torch.float32)
        write_rows(self.states[side], slots, arrival.ids, allowed)
        if self.corrections.shape[1]:
            correction = arrival.correction
            correction = torch.zeros_like(arrival.similarity) if correction is None else correction
            write_rows(self.corrections[side], slots, correction, allowed)
        if self.keep == "cached":
            if self.keys.shape[2] == 0:
                shape = (*self.keys.shape[:2], arrival.key.shape[1])
                self.keys = self.keys.new_full(shape, math.nan)
            write_rows(self.keys[side], slots, arrival.key, allowed)
        if self.keep == "score":
            write_rows(self.scores[side], slots, arrival.similarity, allowed)


def _initial_states(
    num_chains: int, num_states: int, ids_per_item: int, own: bool, seed: int, side: int
) -> Tensor:
    """A uniform draw from D_neg(x_i) for every chain (Algorithm 1's input), [M]."""
    dtype = torch.int32 if num_states <= 2**31 - 1 else torch.int64
    states = torch.empty(num_chains, dtype=dtype)
    step = torch.tensor(side)
    chunk = 1 << 22  # keeps the temporaries of a table of 10^9 chains small
    for begin in range(0, num_chains, chunk):
        rows = torch.arange(begin, min(begin + chunk, num_chains))
        u = draws.uniform(seed, step, draws.STREAM_INIT, rows, 1, torch.float64)[:, 0]
        choices = num_states - ids_per_item if own else num_states
        drawn = draws.integers_below(torch.full_like(rows, choices), u)
        if own:  # skip the ids of the chain's own item
            first = rows // ids_per_item * ids_per_item
            drawn = torch.where(drawn >= first, drawn + ids_per_item, drawn)
        states[begin : begin + len(rows)] = drawn.to(dtype)
    return states
