"""The fused losses against their readable twins; run as a script it does so without a GPU.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/fast/fused/fused_cases.py fast
prints {name of a case: [what differed, ...]} as JSON. See `fused_play` for what may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from fused_inputs import INPUTS, cached
from fused_play import Case, compare, gap, invalid_row
from torch import Tensor

from fast.kernel_cases import (
    draw_bits,
    draw_bits_of_all_streams,
    draw_logarithms,
    launched_elsewhere,
    scan,
    thinned_scan,
    thinned_scan_at_length,
)
from interpreter import hurry
from negchain import ISIR, MH, EMC2Loss, Given, InBatch, InfoNCELoss
from negchain.fast.fused import forward, function, layout_triton


def emc2(name: str, *, size: int = 6, steps: int = 2, **options: Any) -> Case:
    """A case whose further arguments are the fields of `Case` it knows, and options of EMC2Loss."""
    fields = {f.name for f in dataclasses.fields(Case)}
    mine = {key: options.pop(key) for key in list(options) if key in fields}
    return Case(name, options, size=size, steps=steps, **mine)


ASYMMETRIC = {"views": "paired", "symmetric": False}
BOTH = {"proposals": InBatch(copies=2)}  # the paper's R = 2b - 2

# fmt: off
CASES = [
    emc2("shared", size=7, repeats=True, seed=2**40 + 5),
    emc2("shared-one-anchor-cached", symmetric=False, carried="cached", count_every=3, size=9),
    emc2("shared-all", evaluate=True, denominator="all", repeats=True, learned=True),
    emc2("shared-cached-strided", carried="cached", strided=True, burn_in=0.29),
    emc2(
        "paired-all", views="paired", denominator="all", repeats=True, learned=True, burn_in=0.29,
        num_samples=8,
    ),
    emc2(
        "paired-cached-all", evaluate=True, views="paired", carried="cached", denominator="all",
        size=5,
    ),
    emc2("one-way", evaluate=True, **ASYMMETRIC, burn_in=0.9, size=10, learned=True),
    emc2("burn-in-of-2-steps", burn_in=2, size=7, repeats=True, steps=2),
    emc2("burn-in-of-all-steps", **ASYMMETRIC, burn_in=3, size=5, repeats=True, steps=2),
    emc2("burn-in-of-4-thinned", burn_in=4, count_every=3, size=8, learned=True, steps=2),
    emc2("burn-in-of-all-thinned", burn_in=3, count_every=2, views="paired", size=5, steps=2),
    emc2("zeros", zeros=True, steps=2),
    emc2("zeros-paired-all", zeros=True, views="paired", denominator="all", learned=True, steps=2),
    emc2("free-length", normalize=False, beta=1.0, learned=True),
    emc2("bfloat16", dtype=torch.bfloat16, tolerance=1e-2),
    emc2("float16-paired", views="paired", dtype=torch.float16, tolerance=2e-3),
    emc2("batch-of-2", size=2, repeats=False),
    emc2("batch-of-2-equal", size=2, repeats=True, denominator="all", learned=True),
    emc2("batch-of-3", **ASYMMETRIC, size=3, count_every=2),
    emc2("batch-of-17", **ASYMMETRIC, size=17, steps=2, dim=33, burn_in=0.9, num_samples=20),
    emc2("batch-of-33", size=33, steps=1, num_samples=40, dim=12),
    emc2("one-item", one_item=True, size=3, denominator="all"),
    emc2("one-item-cached", one_item=True, size=3, carried="cached", views="paired"),
    emc2("isir", kernel="isir", repeats=True, seed=2**33 + 1, learned=True),
    emc2("isir-one-anchor", kernel="isir", symmetric=False, size=9, repeats=True),
    emc2("isir-paired-all", kernel="isir", views="paired", denominator="all", repeats=True),
    emc2(
        "isir-cached-all", evaluate=True, kernel="isir", carried="cached", denominator="all",
        learned=True,
    ),
    emc2("isir-zeros", kernel="isir", views="paired", zeros=True, size=5, steps=2),
    emc2("isir-batch-of-2", kernel="isir", size=2, denominator="all", repeats=True),
    emc2("isir-one-item", kernel="isir", one_item=True, size=3, learned=True),
    emc2("isir-free-length", kernel="isir", normalize=False, beta=1.0, strided=True),
    emc2("isir-bfloat16", kernel="isir", dtype=torch.bfloat16, tolerance=1e-2, size=3),
    emc2("isir-one-copy", kernel="isir", proposals=InBatch(), repeats=True, learned=True),
    emc2("both", **BOTH, size=7, repeats=True, seed=2**40 + 5),
    emc2(
        "both-cached-all", **BOTH, carried="cached", denominator="all", learned=True,
        evaluate=True, burn_in=0.29, repeats=True,
    ),
    emc2("both-one-anchor-thinned", **BOTH, symmetric=False, count_every=3, size=9, burn_in=4),
    emc2("both-batch-of-2", **BOTH, size=2, steps=3, denominator="all"),
    emc2("both-batch-of-33", **BOTH, size=33, steps=1, num_samples=40, dim=12),
    emc2("both-one-item", **BOTH, one_item=True, size=3),
    Case("infonce", loss="infonce", repeats=True, learned=True, steps=2),
    Case("infonce-paired", {"views": "paired"}, loss="infonce", size=17, steps=1, num_samples=20),
    Case("infonce-zeros", {"views": "paired"}, loss="infonce", zeros=True, steps=1),
    Case("infonce-one-item", loss="infonce", one_item=True, steps=1),
    Case("dcl", {"symmetric": False}, loss="dcl", repeats=True, steps=2),
    Case("dcl-batch-of-2", loss="dcl", size=2, steps=1, learned=True),
    Case("dcl-paired", {**ASYMMETRIC, "normalize": False}, loss="dcl", beta=1.0, steps=1),
    Case("sogclr", {}, loss="sogclr", evaluate=True, repeats=True, learned=True),
    Case(  # weights too small to square
        "sogclr-lags", ASYMMETRIC, loss="sogclr", beta=100.0, dim=2, size=7, num_samples=7,
        repeats=True, tolerance=5e-4,
    ),
    Case("sogclr-one-item", loss="sogclr", one_item=True, size=2, steps=2),
    Case("sogclr-paired-all", {"views": "paired", "denominator": "all"}, loss="sogclr"),
]
# fmt: on


def tiled(name: str, *, size: int = 10, steps: int = 2, **options: Any) -> Case:
    """A case in tiles; Metropolis-Hastings counts at ends of tiles."""
    every = 1 if options.get("kernel") == "isir" else 128
    options = {"large": True, "count_every": every, "num_samples": size + 5, **options}
    return emc2(name, size=size, steps=steps, **options)


TILES = [
    tiled("tiles", repeats=True, learned=True),
    tiled(
        "tiles-one-anchor-cached-all", evaluate=True, symmetric=False, carried="cached",
        denominator="all", steps=1,
    ),
    tiled("tiles-paired", views="paired", whole=True, steps=3, burn_in=3, zeros=True),
    tiled("tiles-one-item", one_item=True, size=3, denominator="all"),
    tiled(
        "tiles-130", size=130, **ASYMMETRIC, dim=70, beta=12.0, whole=True, repeats=True,
        denominator="all", burn_in=0.3, steps=1, seed=7,
    ),
    tiled(
        "tiles-300", size=300, **ASYMMETRIC, dim=20, beta=12.0, whole=True, steps=1, learned=True,
        burn_in=200,
    ),
    tiled("tiles-isir", kernel="isir", repeats=True),
    tiled("tiles-isir-one-item", kernel="isir", one_item=True, size=3, views="paired"),
    tiled("tiles-isir-all", kernel="isir", denominator="all", steps=1),
    tiled("tiles-isir-long", kernel="isir", beta=60.0, repeats=True, steps=1),
    tiled(
        "tiles-isir-130", kernel="isir", size=130, **ASYMMETRIC, dim=70, beta=12.0, whole=True,
        repeats=True, carried="cached", steps=1,
    ),
    tiled("tiles-isir-one-group", kernel="isir", count_every=128, repeats=True, learned=True),
    tiled(  # two groups, walked at once
        "tiles-isir-130-groups", kernel="isir", count_every=128, size=130, **ASYMMETRIC, dim=70,
        beta=12.0, whole=True, repeats=True, denominator="all", steps=1,
    ),
]  # fmt: skip

SLOW = [
    tiled(  # three groups one after the other, the last one short
        "tiles-isir-300-groups", kernel="isir", count_every=128, size=300, **ASYMMETRIC, dim=20,
        beta=12.0, whole=True, learned=True, repeats=True, steps=1,
    ),
    tiled("tiles-130-shared", size=130, dim=70, repeats=True, learned=True),
    tiled("tiles-130-paired", size=130, views="paired", carried="cached", whole=True),
    tiled(
        "tiles-300-all", size=300, views="paired", count_every=256, denominator="all", whole=True,
        burn_in=0.4, repeats=True,
    ),
    tiled("tiles-300-256", size=300, count_every=256, dim=70, burn_in=0.0),
    tiled("tiles-isir-300", kernel="isir", size=300, dim=70, denominator="all", repeats=True),
    tiled(
        "tiles-isir-300-256", kernel="isir", count_every=256, size=300, carried="cached", dim=70,
        denominator="all", repeats=True,
    ),
    tiled(
        "tiles-isir-530-paired", kernel="isir", count_every=256, size=530, views="paired", dim=9,
        whole=True, steps=1,
    ),
    tiled(
        "tiles-isir-300-long", kernel="isir", count_every=128, size=300, beta=90.0, whole=True,
        views="paired", repeats=True, steps=1,
    ),
    *(
        emc2(f"{kernel}-{carried}-{views}-{denominator}-{size}", kernel=kernel, carried=carried,
             views=views, denominator=denominator, size=size, num_samples=20, repeats=size > 5,
             dim=9, burn_in=0.29)
        for kernel in ("mh", "isir")
        for carried in ("encode", "cached")
        for views in ("shared", "paired")
        for denominator in ("negatives", "all")
        for size in (3, 17)
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------- bad batches

FAULTS = ("nan", "too large", "negative")
INVALID = [
    emc2("rows", carried="cached", size=7),
    emc2("rows-all", views="paired", denominator="all", burn_in=0.2),
    emc2("rows-isir", kernel="isir", size=7, symmetric=False),
    emc2("both", **BOTH, carried="cached", size=7),
    emc2("isir-one-copy", kernel="isir", proposals=InBatch(), denominator="all"),
    tiled("tiles", carried="cached", denominator="all"),
    tiled("tiles-isir", kernel="isir", **ASYMMETRIC),
    tiled("tiles-isir-groups", kernel="isir", count_every=128, **ASYMMETRIC),
]


# ---------------------------------------------------------------------------- further promises


def refusals() -> list[str]:
    """backend="fused" says so where it does not apply; it never silently takes the other path."""
    z, index = torch.randn(4, 5), torch.arange(4)
    learned = torch.nn.Parameter(torch.tensor(5.0))
    calls: dict[str, Callable[[], Tensor]] = {
        "float64": lambda: cached()(z.double(), z.double(), index),
        "known": lambda: cached()(z, z, index, known=index[:, None]),
        "no dim": lambda: EMC2Loss(9, 5.0, carried="cached", backend="fused")(z, z, index),
        "count_every": lambda: cached(large=True, kernel=MH(count_every=100))(z, z, index),
        "groups of 100": lambda: cached(large=True, kernel=ISIR(100))(z, z, index),
        "groups of a small batch": lambda: cached(kernel=ISIR(128))(z, z, index),
        "learned": lambda: cached(learned, large=True, kernel="isir")(z, z, index),
        "draws": lambda: cached(proposals=Given(alone=False))(z, z, index),
        "ids beyond int32": lambda: InfoNCELoss(2**33, 5.0, backend="fused")(z, z, index + 2**32),
        "large": lambda: cached()(
            torch.randn(1025, 5), torch.randn(1025, 5), torch.arange(1025) % 9
        ),
        "both copies of 513": lambda: cached(proposals=InBatch(copies=2))(
            torch.randn(513, 5), torch.randn(513, 5), torch.arange(513) % 9
        ),
    }
    found = []
    for name, call in calls.items():
        try:
            call()
            found.append(f"{name} was not refused")
        except ValueError as error:
            if "backend='fused'" not in str(error):
                found.append(f"{name}: {error}")
    return found


def burn_in_of_all_steps() -> list[str]:
    """P < R in rows and in tiles, or the call is refused and leaves everything as it was."""
    z, index, found = torch.randn(2, 4, 5), torch.arange(4), []
    both = {"proposals": InBatch(copies=2)}
    for options, steps in (({}, 3), (both, 6), ({"large": True}, 3)):
        every = 128 if "large" in options else 1
        cached(**options, kernel=MH(steps - 1, every))(*z, index)
        loss_fn = cached(**options, kernel=MH(steps, every))
        try:
            loss_fn(*z, index)
            found.append(f"{options}: {steps} of {steps} steps were not refused")
        except ValueError as error:
            if f"offers {steps} at batch size 4" not in str(error) or loss_fn.step:
                found.append(f"{options}: {error}")
    return found


def later_backward(**options: Any) -> list[str]:
    """Two steps and then both backward passes: as if each had followed its step at once."""
    grads = []
    for late in (False, True):
        generator = torch.Generator().manual_seed(2)
        loss_fn = cached(**options)
        z = torch.randn(2, 3, 5, generator=generator).requires_grad_()
        total = torch.zeros(())
        for part in z:
            value = loss_fn(part, part.roll(1, 1), torch.arange(3))
            if late:
                total = total + value
            else:
                value.backward()
        if late:
            total.backward()
        assert z.grad is not None
        grads.append(z.grad)
    return [] if gap(*grads) < 1e-6 else [f"{options}: {gap(*grads)}"]


def later_backward_of_tiles() -> list[str]:
    return later_backward(large=True)


def second_backward() -> list[str]:
    """A small batch can be differentiated again; a large one says that it cannot."""
    found = []
    z = torch.randn(4, 5, requires_grad=True)
    value = cached()(z, z.roll(1, 1), torch.arange(4))
    first, second = (torch.autograd.grad(value, z, retain_graph=True)[0] for _ in range(2))
    if not torch.equal(first, second):
        found.append("a small batch differs the second time")
    value = cached(large=True)(z, z.roll(1, 1), torch.arange(4))
    torch.autograd.grad(value, z, retain_graph=True)
    try:
        torch.autograd.grad(value, z)
        found.append("a large one was differentiated twice")
    except RuntimeError as error:
        if "once" not in str(error):
            found.append(str(error))
    return found


def backward_under_autocast() -> list[str]:
    """Products of the backward pass are of float32, too."""
    found = []
    for large in (False, True):
        z = torch.randn(4, 5, requires_grad=True)
        value = cached(large=large, kernel="isir")(z, z.roll(1, 1), torch.arange(4))
        with torch.autocast("cpu", torch.bfloat16):
            (under,) = torch.autograd.grad(value, z)
        value = cached(large=large, kernel="isir")(z, z.roll(1, 1), torch.arange(4))
        (plain,) = torch.autograd.grad(value, z)
        found += [] if torch.equal(under, plain) else [f"large={large}: {gap(plain, under)}"]
    return found


def one_part_after_the_other() -> list[str]:
    """Rows enough to fill a GPU are not split into two parts walked at once: same results."""
    cases = [case for case in TILES if case.name in ("tiles-130", "tiles-isir-130-groups")]
    most, forward.MAX_SPLIT_BLOCKS = forward.MAX_SPLIT_BLOCKS, 0
    try:
        cases = [dataclasses.replace(case, whole=False) for case in cases]
        return [f"{case.name}: {text}" for case in cases for text in compare(case)]
    finally:
        forward.MAX_SPLIT_BLOCKS = most


# ---------------------------------------------------------------------------- planted bugs

Change = Callable[[Any], dict[str, Any]]  # of a `Plan`'s fields

PLANTED: dict[str, tuple[str, Change]] = {
    "another seed": ("shared", lambda plan: {"seed": plan.seed + 1}),
    "seed cut to 32 bits": ("isir", lambda plan: {"seed": plan.seed % 2**32}),
    "burn-in off by one": ("one-way", lambda plan: {"burn_in": plan.burn_in - 1 / 9}),
    "counts every 4th": ("shared-one-anchor-cached", lambda plan: {"count_every": 4}),
    "steps taken for a share": ("burn-in-of-2-steps", lambda plan: {"burn_in": 2 / 7}),
    "an end of a tile missed": ("tiles-130", lambda plan: {"burn_in": 0.99}),
    "groups of another size": ("tiles-isir-130-groups", lambda plan: {"count_every": 256}),
    "all columns weigh": ("tiles-isir-130-groups", lambda plan: {"count_every": 1}),
    "the positive left out": ("paired-all", lambda plan: {"denominator": "negatives"}),
    "one direction's draws for both": ("paired-all", lambda plan: {"side": 0}),
    "moves in evaluation mode": ("one-way", lambda plan: {"training": True}),
    "carried weight dropped": ("isir", lambda plan: {}),
    "tiles in plain order": ("tiles", lambda plan: {}),
    "an item twice is proposed twice": ("isir", lambda plan: {}),
    "one copy offered": ("both", lambda plan: {"copies": 1}),
    "both copies offered": ("isir-one-copy", lambda plan: {"copies": 2}),
    "and in tiles": ("tiles-isir", lambda plan: {}),
}


@contextlib.contextmanager
def sabotage(name: str) -> Iterator[None]:
    """Plant a bug into the fused path."""
    fused_loss, change = function.fused_loss, PLANTED[name][1]
    tile_column, repeated = layout_triton._tile_column, forward.repeated

    def changed(a: Tensor, b: Tensor, carried: Any, beta: Any, plan: Any) -> Any:
        if name == "carried weight dropped":
            carried = carried.detach() + 0 * carried
        return fused_loss(a, b, carried, beta, dataclasses.replace(plan, **change(plan)))

    function.fused_loss = changed
    if name == "tiles in plain order":
        layout_triton._tile_column = lambda time, TILE: time
    if name in ("an item twice is proposed twice", "and in tiles"):
        forward.repeated = lambda ids, valid: torch.zeros_like(valid)
    try:
        yield
    finally:
        function.fused_loss, layout_triton._tile_column = fused_loss, tile_column
        forward.repeated = repeated


def planted(name: str) -> list[str]:
    """What the comparison says about a planted bug."""
    case = next(case for case in (*CASES, *TILES) if case.name == PLANTED[name][0])
    with sabotage(name):
        return compare(dataclasses.replace(case, whole=False, steps=1 + case.evaluate))


# ---------------------------------------------------------------------------- as a script

PROMISES = (
    refusals,
    burn_in_of_all_steps,
    later_backward,
    later_backward_of_tiles,
    second_backward,
    backward_under_autocast,
    one_part_after_the_other,
    scan,
    thinned_scan,
    thinned_scan_at_length,
    draw_bits,
    draw_bits_of_all_streams,
    draw_logarithms,
    launched_elsewhere,
    *INPUTS,
)

# What `make test` runs; `make test-slow` has the rest. Interpreted, a step takes half a second and
# a step in tiles two to seven, so that one case of each kernel and the commonest bugs remain.
QUICK = {
    "shared", "paired-all", "isir-cached-all", "sogclr-paired-all", "dcl-paired", "infonce",
    "both", "isir-one-copy", "tiles-one-item", "nan: rows", "refusals", "scan", "thinned_scan",
    "draw_bits", "launched_elsewhere", "bad_carried", "held_by_a_bad_item", "late_first_proposal",
    "backward_under_autocast", "burn_in_of_all_steps",
    "planted: another seed", "planted: burn-in off by one", "planted: carried weight dropped",
}  # fmt: skip


def jobs(which: str) -> dict[str, Callable[[], list[str]]]:
    """What the script checks, by name: "fast", "slow" or all whose name holds the word."""
    named: dict[str, Callable[[], list[str]]] = {
        case.name: partial(compare, case) for case in (*CASES, *TILES, *SLOW)
    }
    for case in INVALID:
        for fault in FAULTS:
            named[f"{fault}: {case.name}"] = partial(invalid_row, case, fault)
    for promise in PROMISES:
        named[promise.__name__] = promise
    named |= {f"planted: {name}": partial(planted, name) for name in PLANTED}
    assert named.keys() >= QUICK, QUICK - named.keys()
    if which in ("fast", "slow"):
        return {name: job for name, job in named.items() if (name in QUICK) == (which == "fast")}
    return {name: job for name, job in named.items() if which in name}


def main(which: str) -> None:
    """Check everything (or what is named) and print what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy under the interpreter: inf - inf
    hurry()
    found = {}
    for name, job in jobs(which).items():
        start = time.process_time()
        try:
            found[name] = job()
        except Exception:
            found[name] = [traceback.format_exc()]
        print(f"{time.process_time() - start:.1f} s {name}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
