"""The chain table: where each anchor's Markov chain stands between two visits.

One integer per chain, and nothing else unless asked for: `carried="cached"` keeps the embedding of
the carried state.

A chain that has not moved yet is stored as -1. Its state is then its *initial draw*, a uniform draw
from D_neg(x_i) (Algorithm 1's input) that is a pure function of (seed, side, chain), so a table of
10^9 chains is built by filling memory once and a chain costs nothing before its first visit:

    bits  = rng.bits(seed, step=side + 2 * (chain >> 32), FOR_INIT, row=chain, column=0)
    n     = num_states - ids_per_item if own else num_states
    id    = min(floor((bits + 0.5) * 2^-31 * n), n - 1)              multiplied in float64
    first = chain // ids_per_item * ids_per_item                     own only: the item's first id
    id    = id + ids_per_item if own and id >= first else id

`bits` are 31 and `row` is `chain` modulo 2^32; the step takes the rest of the chain number, so that
chains 2^32 apart do not share a draw. A kernel that reads `states` must compute the same.

Shapes: `S` sides, `M` chains, `B` chains of the batch, `D` embedding.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from negchain import rng
from negchain.files import replacing
from negchain.losses.batch import Views, as_ids
from negchain.losses.distributed import Ranks
from negchain.losses.settings import InBatch, Informed, check_count, check_dim
from negchain.losses.state import Rows, Stateful

Carried = Literal["encode", "cached"]
CHUNK = 1 << 20  # states of a table that are copied at a time when it is written to a file
NOT_MOVED = -1  # in `ChainTable.states`: the chain is still at its initial draw


class Arrival(NamedTuple):
    """Where the chains of a batch ended, and how often their rows moved."""

    slots: Tensor  # [B] chains; one that stands here twice goes on as its first says
    moved: Tensor  # [B] bool: the state is a new one
    ids: Tensor  # [B] id of the new state
    key: Tensor | None  # [B,D] its embedding, where it is kept
    accepts: Tensor  # [N]
    num_steps: Tensor  # [N] moves each row could make: its proposals, or one for i-SIR


class ChainTable(Stateful):
    """State of one chain per anchor.

    Example:
        >>> table = ChainTable(1, 5, num_states=5, ids_per_item=1, own=True, keep="encode", seed=0)
        >>> table.states
        tensor([[-1, -1, -1, -1, -1]], dtype=torch.int32)
        >>> chains = torch.arange(5)
        >>> bool((table.ids(0, chains) != chains).all())
        True
    """

    states: Tensor  # [S,M] id, NOT_MOVED: the initial draw; read it through `ids`
    keys: Tensor  # [S,M,D or 0] "cached": carried states as of the last visit, NaN before the first

    def __init__(
        self,
        num_sides: int,  # S, tables of chains (directions)
        num_chains: int,  # M
        *,
        num_states: int,  # ids a chain can hold
        ids_per_item: int,  # k with k stored augmentations, else 1
        own: bool,  # chain i is of an item whose own ids are no negatives: no chain starts there
        keep: Carried,
        dim: int | None = None,  # D, for keep="cached"; None waits for the first batch
        seed: int,  # of the initial draws
        file: str | os.PathLike[str] | None = None,  # see `map_to`
        ranks: Ranks | None = None,  # that own a block of the chains each; None: all are here
    ) -> None:
        super().__init__()
        self.keep = keep
        self.num_states = num_states
        self.ids_per_item = ids_per_item
        self.own = own
        self.seed = seed
        states = torch.full((1, 1), NOT_MOVED, dtype=state_dtype(num_states))
        self.rows = Rows.of(num_chains, ranks)
        states = states.expand(num_sides, self.rows.count)  # no memory yet: a file may hold it
        states = states if file is not None else states.contiguous()
        self.add_state("states", states, rows=self.rows, dim=1)
        if keep == "cached":
            check_dim(dim, ranks is not None)
            keys = torch.full((num_sides, self.rows.count, dim or 0), math.nan, dtype=torch.float32)
            self.add_state("keys", keys, lazy=True, rows=self.rows, dim=1)
        if file is not None:
            mine = "" if ranks is None else f".{ranks.rank}-of-{ranks.world}"
            self.map_to(os.fspath(file) + mine)

    @property
    def tables(self) -> list[Tensor]:
        """What is kept of every chain, [S,M,...] each."""
        return [self.states, self.keys] if self.keep == "cached" else [self.states]

    def ids(self, side: int, slots: Tensor) -> Tensor:  # [B] -> [B] int64
        """Ids of the carried states."""
        held = self.rows.read(self.states[side], slots).long()
        if rng.fit_for_numpy(held) and bool((held >= 0).all()):
            return held
        return torch.where(held >= 0, held, self.initial_ids(side, slots))

    def initial_ids(self, side: int, slots: Tensor) -> Tensor:  # [B] -> [B] int64
        """Where chains start: the initial draw of the module's docstring."""
        # On the host, where the key of all chains costs a GPU nothing; no copy, no waiting.
        step = torch.tensor(side, device="cpu")
        if self.rows.total > 2**32:
            step = side + 2 * (slots >> 32)
        u = rng.uniform(self.seed, step, rng.FOR_INIT, slots, 1, torch.float64)[:, 0]
        choices = self.num_states - self.ids_per_item if self.own else self.num_states
        drawn = (u * choices).long().clamp(max=choices - 1)
        if self.own:  # skip the ids of the chain's own item
            first = slots // self.ids_per_item * self.ids_per_item
            drawn = torch.where(drawn >= first, drawn + self.ids_per_item, drawn)
        return drawn

    def commit(self, side: int, arrival: Arrival, valid: Tensor) -> None:
        """Store where the chains of the valid rows ended; the others stay as they are.

        A chain with several rows goes on as the first of them says, moved or not: to ask the first
        that moved would leave p (tests/losses/test_found.py).
        """
        slots = arrival.slots
        valid = valid if len(valid) == len(slots) else valid.repeat(len(slots) // len(valid))
        self.rows.write(self.states[side], slots, arrival.ids, valid, arrival.moved)
        if arrival.key is not None:
            self.widen("keys", arrival.key.shape[1], math.nan)
            self.rows.write(self.keys[side], slots, arrival.key, valid, arrival.moved)

    # ------------------------------------------------------------------ a table in a file

    def map_to(self, path: str | os.PathLike[str]) -> None:
        """Keep the states in a memory-mapped file, for a loss on the CPU; see docs/large_tables.md.

        A file that does not exist is created with the states of now. One that exists takes the
        place of the states of now: its chains go on where they stood when its last process ended,
        killed or not. Only the states are in it; give it to one loss at a time.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "chains.bin"
            >>> make = lambda: ChainTable(
            ...     1, 5, num_states=5, ids_per_item=1, own=True, keep="encode", seed=0, file=path
            ... )
            >>> make().states[0, 2] = 4
            >>> make().states
            tensor([[-1, -1,  4, -1, -1]], dtype=torch.int32)
        """
        states, path = self.states, Path(path)
        if states.device.type != "cpu":
            raise ValueError(
                "a chain table in a file needs a loss on the CPU, but this one is on "
                f"{states.device}; move it with .cpu(), or keep the table in device memory"
            )
        if not path.exists():
            _write_states(path, states)
        (num_sides, num_chains), count, dtype = states.shape, states.numel(), states.dtype
        size, needed = path.stat().st_size, count * dtype.itemsize
        if size != needed:
            raise ValueError(
                f"a file of {num_sides} x {num_chains} chains of {dtype.itemsize} bytes has "
                f"{needed} bytes, but {path} has {size}: it belongs to another data set, or is no "
                "chain table; give another path, or delete it to start the chains anew"
            )
        flat = torch.from_file(str(path), shared=True, size=count, dtype=dtype, device="cpu")
        self.states = flat.view(num_sides, num_chains)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse to move away from a file: no step would write to it any more."""
        file = self.states.untyped_storage().filename
        if file is not None and fn(torch.empty(0, device="cpu")).device.type != "cpu":
            raise ValueError(
                f"a chain table in a file stays on the CPU, and this one is in {file}; load its "
                "state_dict into a loss without a file, and move that one"
            )
        return super()._apply(fn, recurse)


def state_dtype(num_states: int) -> torch.dtype:
    """The smallest integers that hold the ids 0 .. num_states - 1, and NOT_MOVED.

    Example:
        >>> state_dtype(2**31), state_dtype(2**31 + 1)
        (torch.int32, torch.int64)
    """
    return torch.int32 if num_states <= 2**31 else torch.int64


def _write_states(path: Path, states: Tensor) -> None:
    """Create a file that is there whole or not at all, in little memory.

    It is written page by page because Linux may cache a file in units of the size it was written
    in, up to 2 MiB, and changing one state of a unit marks all of it as changed: slow at once, and
    slow again when all of it goes to the disk.
    """
    page = mmap.PAGESIZE
    with replacing(path, buffering=page) as file:
        for row in states:
            for chunk in row.split(CHUNK):
                data = memoryview(chunk.contiguous().numpy()).cast("B")
                for begin in range(0, len(data), page):
                    file.write(data[begin : begin + page])


def stored_ids(
    index: Tensor, augmentation: tuple[Tensor, Tensor], per_item: int
) -> Tensor:  # [B], two [B] -> [2,B]
    """Ids of (item, stored augmentation), for both views.

    Example:
        >>> stored_ids(torch.tensor([3]), (torch.tensor([0]), torch.tensor([1])), 2)
        tensor([[6],
                [7]])
    """
    chosen = [as_ids("augmentation", a, len(index), index.device) for a in augmentation]
    for a in chosen:
        if rng.fit_for_numpy(a) and not bool(((a >= 0) & (a < per_item)).all()):
            raise ValueError(f"augmentation must lie in [0, {per_item}), got {a.tolist()[:8]}")
    return torch.stack([index * per_item + a.clamp(0, per_item - 1) for a in chosen])


def check_stored(augmentations: int, views: Views, proposals: object) -> None:
    """Refuse numbers of stored augmentations, and combinations, that cannot be."""
    check_count("augmentations (stored per item)", augmentations)
    offered = InBatch() if proposals in (None, "batch") else proposals
    if views != "shared" or isinstance(proposals, Informed):
        raise ValueError(
            "augmentations (stored per item) go with views='shared' and proposals other than "
            f"Informed; got {augmentations}, {views!r}, {offered}"
        )
