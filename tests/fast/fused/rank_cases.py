"""Ranks by all pairs against ranks by sorting; run as a script it does so without a GPU.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/fast/fused/rank_cases.py
prints {name of a case: [what differed, ...]} as JSON.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from interpreter import hurry
from negchain import draws
from negchain.fast.fused import ranks, ranks_triton

SIZES = (1, 2, 31, 32, 33, 127, 129, 500, 1025)
DRAWS = ((0, 0, 1), (2**40 + 5, 7, 1 + 16), (3, 2**31 + 9, 1))  # seed, step, stream
FEW_KEYS = 5


def times_cases(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Arguments of `times`: all draws for small sizes, one for large ones."""
    for size in sizes:
        for seed, step, stream in DRAWS[: 3 if size < 200 else 1]:
            yield seed, step, stream, size


def id_cases(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Arguments of `num_equal`: ids [B] int64 and valid [B] int32."""
    generator = torch.Generator().manual_seed(size)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    valid = draw(0, 4).int()
    repeated = draw(0, size // 2 + 1)
    outside = repeated + torch.tensor([2**32, -(2**32), -size - 1])[draw(0, 3)]
    return {
        "distinct": (torch.randperm(size, generator=generator), torch.full_like(valid, 3)),
        "all equal": (torch.full((size,), 2**31 - 1), valid),
        "repeated": (repeated + 2**31 - size, valid),
        "out of range": (torch.where(valid == 3, repeated, outside), valid),
    }


def other_cases(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Arguments of `among`: ids [B] and others [B], int64."""
    generator = torch.Generator().manual_seed(size)
    ids, others = (torch.randint(0, 2 * size, (size,), generator=generator) for _ in range(2))
    return {
        "some": (ids, others),
        "all": (ids, ids.flip(0)),
        "none": (ids, -1 - others),
        "padding": (torch.zeros_like(ids), others + 1),
        "largest": (ids + 2**31 - 2 * size, others + 2**31 - 2 * size),
        "other upper halves": (ids, others + 2**32),
    }


# ---------------------------------------------------------------------------- comparisons


def differing(
    fast: Callable[..., Tensor], twin: Callable[..., Tensor], *given: Any, device: str = "cpu"
) -> bool:
    """Whether a function of tensors differs from its twin, in a value or in its type."""
    there = [x.to(device) if isinstance(x, Tensor) else x for x in given]
    got, expected = fast(*there).cpu(), twin(*given)
    return got.dtype != expected.dtype or not torch.equal(got, expected)


def check_times(sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> list[str]:
    return [
        f"seed={seed} step={step} stream={stream} B={size}"
        for seed, step, stream, size in times_cases(sizes)
        if differing(
            ranks.times, ranks.times_sorted, seed, torch.tensor(step), stream, size, device=device
        )
    ]


def check_num_equal(sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> list[str]:
    return [
        f"{name}, B={size}"
        for size in sizes
        for name, given in id_cases(size).items()
        if (size < 200 or name == "out of range")
        and differing(ranks.num_equal, ranks.num_equal_sorted, *given, device=device)
    ]


def check_repeated(sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> list[str]:
    return [
        f"{name}, B={size}"
        for size in sizes
        for name, given in id_cases(size).items()
        if (size < 200 or name == "out of range")
        and differing(ranks.repeated, ranks.repeated_sorted, *given, device=device)
    ]


def check_among(sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> list[str]:
    return [
        f"{name}, B={size}"
        for size in sizes
        for name, given in other_cases(size).items()
        if (size < 200 or name == "some")
        and differing(ranks.among, ranks.among_sorted, *given, device=device)
    ]


@contextlib.contextmanager
def changed(where: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module, or a helper of interpreted kernels."""
    old = getattr(where, name)
    setattr(where, name, new)
    try:
        yield
    finally:
        setattr(where, name, old)


def check_ties() -> list[str]:
    """With five different keys nearly all are equal: items of a key keep their order."""
    bits, keys = draws.bits, ranks_triton._keys
    with (
        changed(draws, "bits", lambda *args: bits(*args) % FEW_KEYS),
        changed(ranks_triton, "_keys", lambda items, key: keys(items, key) % FEW_KEYS),
    ):
        return check_times((2, 31, 33, 129, 500))


# ---------------------------------------------------------------------------- planted bugs


def planted() -> dict[str, list[str]]:
    """What the comparison says about planted bugs."""
    keys, small = ranks_triton._keys, (1, 2, 33)

    def all_ids(ids_ptr: Any, valid_ptr: Any, items: Any, num_items: Any) -> Any:
        return tl.load(ids_ptr + items, mask=items < num_items, other=-1).to(tl.int32)

    found = {}
    with changed(ranks_triton, "_smaller", lambda keys, mine: keys <= mine):
        found["not smaller but at most"] = check_times(small)
    with changed(ranks_triton, "_keys", lambda items, key: keys(items + 1, key)):
        found["the next item's key"] = check_times(small)
    with changed(ranks_triton, "_keys", lambda items, key: keys(items, key) >> 24):
        found["keys cut to 7 bits"] = check_times(small)
    with changed(ranks_triton, "LARGEST", 0):
        found["padding counted"] = check_times(small)
    with changed(ranks_triton, "NOBODY", 0):
        found["padding among the others"] = check_among(small)
    with changed(ranks_triton, "_valid_ids", all_ids):
        found["everybody valid"] = check_num_equal(small)
        found["everybody was there"] = check_repeated(small)
    return found


def main() -> None:
    """Check everything and print what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hurry()
    found = {check.__name__: check() for check in CHECKS}
    print(json.dumps(found | {f"planted: {name}": told for name, told in planted().items()}))


CHECKS = (check_times, check_ties, check_num_equal, check_repeated, check_among)

if __name__ == "__main__":
    main()
