"""Chain tables in memory-mapped files: larger than memory, and there when a process is killed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from negchain.files import replacing

CHUNK = 1 << 20  # states of a table that are copied at a time when it is written to a file


def mapped(states: Tensor, path: Path) -> Tensor:  # [S,M] -> [S,M]
    """The states in a file, which is made of these if it is not there."""
    num_sides, num_chains = states.shape
    if states.device.type != "cpu":
        raise ValueError(
            "a chain table in a file needs a loss on the CPU, but this one is on "
            f"{states.device}; move it with .cpu(), or keep the table in device memory"
        )
    if not path.exists():
        _write_states(path, states)
    size, needed = path.stat().st_size, states.numel() * states.itemsize
    if size != needed:
        raise ValueError(
            f"a file of {num_sides} x {num_chains} chains of {states.itemsize} bytes has "
            f"{needed} bytes, but {path} has {size}: it belongs to another data set, or is no "
            "chain table; give another path, or delete it to start the chains anew"
        )
    count, dtype = states.numel(), states.dtype
    flat = torch.from_file(str(path), shared=True, size=count, dtype=dtype, device="cpu")
    return flat.view(num_sides, num_chains)


def refuse_to_move(states: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a move to another device of states that are in a file."""
    file = states.untyped_storage().filename
    if file is not None and fn(torch.empty(0, device="cpu")).device.type != "cpu":
        raise ValueError(
            f"a chain table in a file stays on the CPU, and this one is in {file}; load its "
            "state_dict into a loss without a file, and move that one"
        )


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
