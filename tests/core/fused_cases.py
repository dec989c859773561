"""The fused losses against their readable twins; run as a script it does so without a GPU.

Triton decides at its import whether it interprets, hence the process of its own:
    TRITON_INTERPRET=1 python tests/core/fused_cases.py fast
prints {name of a case: [what differed, ...]} as JSON.

Both twins play the same steps. What they compute differs by rounding only, which decides a
comparison where acceptance is within rounding of a tie: chains of rows with such a near-tie (read
off the twin's own walk) may part ways, all others must agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from scan_cases import scan_cases
from torch import Tensor
from triton.runtime import interpreter

from negchain import DCLLoss, EMC2Loss, InfoNCELoss, SogCLRLoss, draws, draws_triton, mh_scan
from negchain.fused import function, layout_triton
from negchain.losses import walk
from negchain.losses.base import ContrastiveLoss
from negchain.weights import scan_torch

NEAR = 1e-5  # of a tie: logits and log u are exact to about 3e-6
MAX_TIES = 0.02  # share of rows that may be that near
LOSSES = {"emc2": EMC2Loss, "infonce": InfoNCELoss, "dcl": DCLLoss, "sogclr": SogCLRLoss}


@dataclass(frozen=True)
class Case:
    """A loss, its options and the batches it is given."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    loss: str = "emc2"
    size: int = 6
    steps: int = 3
    dim: int = 5
    num_samples: int = 11
    beta: float = 6.0
    learned: bool = False
    dtype: torch.dtype = torch.float32
    repeats: bool = False  # some items twice in a batch
    strided: bool = False  # embeddings that are not contiguous
    evaluate: bool = False  # a last step in evaluation mode
    whole: bool = False  # a streaming loss against the loss that does not stream, too
    tolerance: float = 1e-5


def emc2(name: str, *, size: int = 6, steps: int = 3, **options: Any) -> Case:
    """A case whose further arguments are the fields of `Case` it knows, and options of EMC2Loss."""
    fields = {f.name for f in dataclasses.fields(Case)}
    mine = {key: options.pop(key) for key in list(options) if key in fields}
    return Case(name, options, size=size, steps=steps, **mine)


ASYMMETRIC = {"views": "paired", "symmetric": False}

# fmt: off
CASES = [
    emc2("shared", size=7, repeats=True, seed=2**40 + 5),
    emc2("shared-one-anchor-cached", symmetric=False, carried="cached", count_every=3, size=9),
    emc2(
        "shared-score-all", evaluate=True, carried="score", denominator="all", repeats=True,
        learned=True,
    ),
    emc2("shared-cached-strided", carried="cached", strided=True, burn_in=0.29),
    emc2(
        "paired-all", views="paired", denominator="all", repeats=True, learned=True, burn_in=0.29,
        num_samples=8,
    ),
    emc2(
        "paired-cached-all", evaluate=True, views="paired", carried="cached", denominator="all",
        size=5,
    ),
    emc2(
        "one-way-score", evaluate=True, **ASYMMETRIC, carried="score", burn_in=0.9, size=10,
        learned=True,
    ),
    emc2("keys", views="paired", num_keys=31, burn_in=0.0, size=8, repeats=True),
    emc2("keys-cached", views="paired", num_keys=17, carried="cached", count_every=3, size=7),
    emc2("free-length", normalize=False, beta=1.0, learned=True),
    emc2("bfloat16", dtype=torch.bfloat16, tolerance=1e-2),
    emc2("float16-paired", views="paired", dtype=torch.float16, tolerance=2e-3),
    emc2("batch-of-2", size=2, repeats=False),
    emc2("batch-of-2-equal", size=2, repeats=True, steps=2, denominator="all"),
    emc2("batch-of-3", **ASYMMETRIC, size=3, count_every=2),
    emc2("batch-of-17", **ASYMMETRIC, size=17, steps=2, dim=33, burn_in=0.9, num_samples=20),
    emc2("batch-of-33", size=33, steps=1, num_samples=40, dim=12, carried="score"),
    emc2("isir", kernel="isir", repeats=True, seed=2**33 + 1, learned=True),
    emc2("isir-one-anchor-score", kernel="isir", symmetric=False, carried="score", size=9),
    emc2("isir-paired-all", kernel="isir", views="paired", denominator="all", repeats=True),
    emc2(
        "isir-cached-all", evaluate=True, kernel="isir", carried="cached", denominator="all",
        learned=True,
    ),
    emc2("isir-keys", kernel="isir", views="paired", num_keys=9, size=5),
    emc2("isir-free-length", kernel="isir", normalize=False, beta=1.0, strided=True),
    emc2("isir-bfloat16", kernel="isir", dtype=torch.bfloat16, tolerance=1e-2, size=3),
    Case("infonce", loss="infonce", repeats=True, learned=True, steps=2),
    Case("infonce-paired", {"views": "paired"}, loss="infonce", size=17, steps=1, num_samples=20),
    Case("infonce-keys", {"views": "paired", "num_keys": 31}, loss="infonce", steps=1),
    Case("dcl", {"symmetric": False}, loss="dcl", repeats=True, steps=2),
    Case("dcl-paired", {**ASYMMETRIC, "normalize": False}, loss="dcl", beta=1.0, steps=1),
    Case("sogclr", {}, loss="sogclr", evaluate=True, repeats=True, learned=True),
    Case("sogclr-paired-all", {"views": "paired", "denominator": "all"}, loss="sogclr"),
]
# fmt: on


def streaming(name: str, *, size: int = 10, steps: int = 2, **options: Any) -> Case:
    """A streaming case; Metropolis-Hastings counts at ends of tiles."""
    every = 1 if options.get("kernel") == "isir" else 128
    options = {"stream": True, "count_every": every, "num_samples": size + 5, **options}
    return emc2(name, size=size, steps=steps, **options)


TILES = [
    streaming("stream", repeats=True, learned=True),
    streaming(
        "stream-one-anchor-cached-all", evaluate=True, symmetric=False, carried="cached",
        denominator="all", steps=1,
    ),
    streaming("stream-keys", views="paired", num_keys=55, whole=True, steps=3),
    streaming(
        "stream-130", size=130, **ASYMMETRIC, dim=70, beta=12.0, whole=True, repeats=True,
        carried="score", denominator="all", burn_in=0.3, steps=1, seed=7,
    ),
    streaming(
        "stream-300", size=300, **ASYMMETRIC, dim=20, beta=12.0, whole=True, steps=1, learned=True,
        burn_in=0.3,
    ),
    streaming("stream-isir", kernel="isir", repeats=True),
    streaming("stream-isir-score-all", kernel="isir", carried="score", denominator="all", steps=1),
    streaming(
        "stream-isir-130", kernel="isir", size=130, **ASYMMETRIC, dim=70, beta=12.0, whole=True,
        repeats=True, carried="cached", steps=1,
    ),
]  # fmt: skip

SLOW = [
    streaming("stream-130-shared", size=130, dim=70, repeats=True, learned=True),
    streaming("stream-130-paired", size=130, views="paired", carried="cached", whole=True),
    streaming(
        "stream-300-all", size=300, views="paired", count_every=256, denominator="all", whole=True,
        burn_in=0.4, repeats=True,
    ),
    streaming("stream-300-256", size=300, count_every=256, carried="score", dim=70, burn_in=0.0),
    streaming("stream-isir-300", kernel="isir", size=300, dim=70, denominator="all", repeats=True),
    *(
        emc2(f"{kernel}-{carried}-{views}-{denominator}-{size}", kernel=kernel, carried=carried,
             views=views, denominator=denominator, size=size, num_samples=20, repeats=size > 5,
             dim=9, burn_in=0.29)
        for kernel in ("mh", "isir")
        for carried in ("encode", "cached", "score")
        for views in ("shared", "paired")
        for denominator in ("negatives", "all")
        for size in (3, 17)
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------- playing a case


@dataclass
class Step:
    """What one step showed."""

    index: Tensor
    value: Tensor
    grads: dict[str, Tensor]
    info: dict[str, float]
    state: dict[str, Tensor]
    held: list[Tensor]  # ids of the carried states
    near: Tensor  # [B] bool: a near-tie in one of the item's rows


def build(case: Case, device: str = "cpu", **more: Any) -> ContrastiveLoss:
    beta = torch.nn.Parameter(torch.tensor(case.beta)) if case.learned else case.beta
    options = {**case.options, **more}
    if case.loss == "emc2":
        options = {"dim": case.dim, "seed": 3, **options}
    return LOSSES[case.loss](num_samples=case.num_samples, beta=beta, **options).to(device)


def play(case: Case, device: str = "cpu", **more: Any) -> list[Step]:
    """Training steps and then one in evaluation mode, with what they left behind."""
    generator = torch.Generator().manual_seed(11)
    loss_fn = build(case, device, **more)
    items = torch.randn(case.num_samples, case.dim, generator=generator)
    keys = torch.randn(case.options.get("num_keys", 0), case.dim, generator=generator)
    steps = []
    for number in range(case.steps + case.evaluate):
        loss_fn.train(number < case.steps)
        index = torch.randperm(case.num_samples, generator=generator)[: case.size]
        if case.repeats:
            index[1::4] = index[: len(index[1::4])]
        steps.append(_step(case, loss_fn, index, items, keys, generator, device))
    return steps


def _step(
    case: Case,
    loss_fn: ContrastiveLoss,
    index: Tensor,
    items: Tensor,
    keys: Tensor,
    generator: torch.Generator,
    device: str,
) -> Step:
    def leaf(z: Tensor) -> Tensor:
        z = z.to(device, case.dtype)
        if case.strided:
            z = torch.stack([z, -z], 1)[:, 0]
        return z.requires_grad_()

    def noise() -> Tensor:
        return torch.randn(case.size, case.dim, generator=generator)

    there = index.to(device)
    inputs = {"z_a": leaf(items[index] + 0.5 * noise())}
    call: dict[str, Any] = {}
    key_items = items[index]
    if len(keys):
        call["key_index"] = (there * 7) % len(keys)
        key_items = keys[call["key_index"].cpu()]
    inputs["z_b"] = leaf(key_items + 0.5 * noise())
    held: list[Tensor] = []
    if isinstance(loss_fn, EMC2Loss):
        ids = loss_fn.carried(there)
        held = [x.cpu() for x in (ids if isinstance(ids, tuple) else (ids,))]
        if loss_fn.carried_mode == "encode":
            table = keys if len(keys) else items
            carried = [leaf(table[x] + 0.3) for x in held]
            inputs |= {f"carried {side}": z for side, z in enumerate(carried)}
            call["carried"] = tuple(carried) if len(carried) == 2 else carried[0]
    with near_ties(case.size, device) as near:
        value = loss_fn(inputs["z_a"], inputs["z_b"], there, **call)
    if case.learned:
        inputs["beta"] = loss_fn.beta
    grads = torch.autograd.grad(1.7 * value, list(inputs.values()))
    return Step(
        index=index,
        value=value.detach().cpu(),
        grads={n: g.detach().cpu().float() for n, g in zip(inputs, grads, strict=True)},
        info=loss_fn.info,
        state={n: v.detach().cpu().clone() for n, v in loss_fn.state_dict().items()},
        held=held,
        near=near.cpu(),
    )


@contextlib.contextmanager
def near_ties(size: int, device: str) -> Iterator[Tensor]:
    """Look over the readable walk's shoulder: items with a comparison within rounding of a tie."""
    near = torch.zeros(size, dtype=torch.bool, device=device)
    scan, isir = walk.mh_scan, walk.isir_weights

    def watched_scan(logits: Tensor, start: Tensor, log_u: Tensor, *rest: Any) -> Any:
        threshold = logits - log_u
        before = scan_torch._state_logits(threshold, logits, start)[:, :-1]
        near.logical_or_(((threshold - before).abs() < NEAR).any(1).view(-1, size).any(0))
        return scan(logits, start, log_u, *rest)

    def watched_isir(logits: Tensor, start: Tensor, gumbel: Tensor) -> Any:
        first, second = (torch.cat([start[:, None], logits], 1) + gumbel).topk(2, 1).values.T
        near.logical_or_((first - second < NEAR).view(-1, size).any(0))
        return isir(logits, start, gumbel)

    walk.mh_scan, walk.isir_weights = watched_scan, watched_isir
    try:
        yield near
    finally:
        walk.mh_scan, walk.isir_weights = scan, isir


def compare(case: Case, device: str = "cpu") -> list[str]:
    """What differs between the fused path and its twins."""
    fused = play(case, device, backend="fused")
    found = differences(case, play(case, device, backend="torch"), fused)
    if case.whole:
        whole = differences(case, play(case, device, backend="torch", stream=False), fused)
        found += [f"whole: {text}" for text in whole]
    return found


def differences(case: Case, expected: list[Step], got: list[Step]) -> list[str]:
    """Step by step; see the module's header for what may differ."""
    found = []
    parted = torch.zeros(case.num_samples, dtype=torch.bool)
    near = sum(int(step.near.sum()) for step in expected)
    if near > MAX_TIES * case.size * len(expected):
        found.append(f"{near} of {case.size * len(expected)} rows are near a tie")
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        for side, (x, y) in enumerate(zip(a.held, b.held, strict=True)):
            if not torch.equal(x[~parted[a.index]], y[~parted[a.index]]):
                found.append(f"step {number}: carried ids of side {side}")
        parted[a.index[a.near]] = True
        strict = not bool(parted.any())
        if _apart(a.value, b.value) > 1e-5:  # does not depend on the walk
            found.append(f"step {number}: value {a.value:.7f} {b.value:.7f}")
        for name, grad in a.grads.items():
            apart = _apart(grad, b.grads[name])
            if not strict:
                apart = float((grad - b.grads[name]).norm() / grad.norm()) / 10
            if not apart < case.tolerance + (0 if strict else float(parted.float().mean()) ** 0.5):
                found.append(f"step {number}: gradient of {name} {apart:.1e}")
        found += [f"step {number}: {text}" for text in _state_differences(a, b, parted)]
        found += [f"step {number}: {text}" for text in _info_differences(case, a, b, strict)]
    if case.evaluate and not _same(got[-1].state, got[-2].state):
        found.append("evaluation mode changed the state")
    return found


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry where that is above 1; inf for NaN."""
    gap = float((a - b).abs().max() / a.abs().max().clamp(min=1))
    return gap if gap == gap and a.shape == b.shape else float("inf")


def _state_differences(a: Step, b: Step, parted: Tensor) -> Iterator[str]:
    if a.state.keys() != b.state.keys():
        yield f"names of the state {sorted(a.state)} {sorted(b.state)}"
    for name, x in a.state.items():
        y = b.state[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            yield f"{name} {tuple(x.shape)} {tuple(y.shape)}"
        elif x.dim() > 1 and x.shape[1] == len(parted):
            x, y = x[:, ~parted], y[:, ~parted]
        if x.is_floating_point():
            if not torch.allclose(x, y, atol=2e-5, rtol=1e-5, equal_nan=True):
                yield f"{name} by {float((x - y).abs().nan_to_num(99.0).max()):.1e}"
        elif not torch.equal(x, y):
            yield f"{name} in {int((x != y).sum())} of {x.numel()}"


def _info_differences(case: Case, a: Step, b: Step, strict: bool) -> Iterator[str]:
    if not case.options.get("stream") and a.info.keys() != b.info.keys():
        yield f"info {sorted(a.info)} {sorted(b.info)}"
    if "global_loss" not in b.info:
        yield "info has no global_loss"
    for name in a.info.keys() & b.info.keys():
        if name != "acceptance_rate" or not case.options.get("stream"):
            bound = 1e-4 if strict or name == "global_loss" else 0.05
            if not abs(a.info[name] - b.info[name]) <= bound * (1 + abs(a.info[name])):
                yield f"info {name} {a.info[name]} {b.info[name]}"


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n].nan_to_num(-7.5), b[n].nan_to_num(-7.5)) for n in a)


# ---------------------------------------------------------------------------- bad batches

BAD_ROW = 2
FAULTS = ("nan", "too large", "negative")
INVALID = [
    emc2("rows", carried="cached", size=7),
    emc2("rows-all", views="paired", denominator="all", carried="score", burn_in=0.2),
    emc2("rows-isir", kernel="isir", size=7, symmetric=False),
    streaming("tiles", carried="cached", denominator="all"),
    streaming("tiles-isir", kernel="isir", **ASYMMETRIC),
]


def invalid_row(case: Case, fault: str, device: str = "cpu") -> list[str]:
    """A batch with one bad row: no state comes of it, and everybody else goes on as without it.

    The twin that shows how it goes on without the row is the readable path told that the bad item
    is a known positive of everybody.
    """
    generator = torch.Generator().manual_seed(4)
    good, bad = build(case, backend="torch"), build(case, device, backend="fused")
    last = case.num_samples - 1  # the chain an id out of range must not be taken for
    index = torch.randperm(last - 1, generator=generator)[: case.size]
    z_a, z_b, held = (torch.randn(case.size, case.dim, generator=generator) for _ in range(3))
    with torch.no_grad():
        for loss_fn in (good, bad):  # nobody holds the bad item; everybody has been seen before
            loss_fn.chains.states.fill_(last - 1)
            loss_fn.chains.states[:, last - 1] = last
            if case.options.get("carried") == "score":
                loss_fn.chains.scores.fill_(0.1)
            if case.options.get("carried") == "cached":
                loss_fn.chains.keys.fill_(0.2)
    before = {n: v.cpu().clone() for n, v in bad.state_dict().items()}
    call: dict[str, Any] = {}
    if good.carried_mode == "encode":
        call["carried"] = (held, held) if good.num_sides == 2 else held
    bad_call = {
        n: tuple(z.to(device) for z in v) if isinstance(v, tuple) else v.to(device)
        for n, v in call.items()
    }
    known = index[BAD_ROW].expand(case.size, 1)
    good(z_a, z_b, index, known=known, **call)
    wrong_z, wrong_index = z_a.clone(), index.clone()
    if fault == "nan":
        wrong_z[BAD_ROW, 1] = float("nan")
    else:
        wrong_index[BAD_ROW] = case.num_samples + 3 if fault == "too large" else -2
    bad(wrong_z.to(device), z_b.to(device), wrong_index.to(device), **bad_call)
    return list(_consequences(case, fault, good, bad, before, index))


def _consequences(
    case: Case,
    fault: str,
    good: ContrastiveLoss,
    bad: ContrastiveLoss,
    before: dict[str, Tensor],
    index: Tensor,
) -> Iterator[str]:
    after, expected = bad.state_dict(), good.state_dict()
    others = torch.ones(case.num_samples, dtype=torch.bool)
    others[index[BAD_ROW]] = False
    for name, value in after.items():
        if value.dim() < 2 or value.shape[1] != case.num_samples:
            continue
        value = value.cpu()
        if not torch.equal(value[:, ~others].nan_to_num(9), before[name][:, ~others].nan_to_num(9)):
            yield f"the bad row changed {name}"
        told = expected[name][:, others].double()
        if name == "log_partition":  # a known positive is no negative; an invalid one still is
            told += math.log((case.num_samples - 1) / (case.num_samples - 2))
        if not torch.allclose(value[:, others].double(), told, atol=2e-5, equal_nan=True):
            yield f"{name} of other rows"
    if bool((after["chains.states"].cpu() == index[BAD_ROW]).any()):
        yield "somebody moved to the bad item"
    if fault == "nan":
        if bad.info["nonfinite_rows"] != 1:
            yield "info does not count one non-finite row"
        return
    try:
        _ = bad.info
        yield "info did not raise"
    except ValueError as error:
        if "but 1 since" not in str(error):
            yield f"info raised {error}"
    if bad.info["nonfinite_rows"] != 0:
        yield "a fault is reported twice"


# ---------------------------------------------------------------------------- further promises


def refusals() -> list[str]:
    """backend="fused" says so where it does not apply; it never silently takes the other path."""
    z, index = torch.randn(4, 5), torch.arange(4)
    learned = torch.nn.Parameter(torch.tensor(5.0))
    calls: dict[str, Callable[[], Tensor]] = {
        "float64": lambda: _score_loss()(z.double(), z.double(), index),
        "known": lambda: _score_loss()(z, z, index, known=index[:, None]),
        "sequential": lambda: _score_loss(walk="sequential")(z, z, index),
        "count_every": lambda: _score_loss(stream=True, count_every=100)(z, z, index),
        "learned": lambda: EMC2Loss(
            9, learned, kernel="isir", carried="score", stream=True, backend="fused"
        )(z, z, index),
        "large": lambda: _score_loss()(
            torch.randn(1025, 5), torch.randn(1025, 5), torch.arange(1025) % 9
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


def _score_loss(**options: Any) -> EMC2Loss:
    return EMC2Loss(9, 5.0, carried="score", backend="fused", **options)


def later_backward() -> list[str]:
    """Two steps and then both backward passes: as if each had followed its step at once."""
    found = []
    for options in ({}, {"stream": True, "count_every": 128}):
        grads = []
        for late in (False, True):
            generator = torch.Generator().manual_seed(2)
            loss_fn = EMC2Loss(4, 5.0, carried="cached", dim=5, backend="fused", **options)
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
        if _apart(*grads) > 1e-6:
            found.append(f"{options}: {_apart(*grads)}")
    return found


def second_backward() -> list[str]:
    """A small batch can be differentiated again; a streaming one says that it cannot."""
    found = []
    z = torch.randn(4, 5, requires_grad=True)
    value = _score_loss()(z, z.roll(1, 1), torch.arange(4))
    first, second = (torch.autograd.grad(value, z, retain_graph=True)[0] for _ in range(2))
    if not torch.equal(first, second):
        found.append("a small batch differs the second time")
    value = _score_loss(stream=True, count_every=128)(z, z.roll(1, 1), torch.arange(4))
    torch.autograd.grad(value, z, retain_graph=True)
    try:
        torch.autograd.grad(value, z)
        found.append("a streaming loss was differentiated twice")
    except RuntimeError as error:
        if "once" not in str(error):
            found.append(str(error))
    return found


def thinned_scan(device: str = "cpu") -> list[str]:
    """`mh_scan` with count_every > 1: Triton's equals the reference to the bit."""
    found = []
    for columns, every in ((1, 2), (7, 3), (41, 4), (41, 100), (1100, 128)):
        for name, inputs in scan_cases((columns,)):
            if isinstance(inputs[3], Tensor) or "14.28" not in name + "14.28" * (columns < 9):
                continue
            few = [x[:2] if isinstance(x, Tensor) else x for x in inputs]
            there = [x.to(device) if isinstance(x, Tensor) else x for x in few]
            got = mh_scan(*there, backend="triton", count_every=every)
            expected = mh_scan(*few, backend="reference", count_every=every)
            for part in expected._fields:
                if not torch.equal(getattr(got, part).cpu(), getattr(expected, part)):
                    found.append(f"{name}, every {every}: {part}")
    return found


# ---------------------------------------------------------------------------- draws


def draw_bits(device: str = "cpu") -> list[str]:
    """`bits_triton` against the torch twin, to the bit."""
    found = []
    for seed in (0, 3, 2**40 + 5, 2**64 - 1):
        for stream in (1, 2, 3 + 16):
            for number, columns in ((0, 1), (7, 37), (2**31 + 9, 1030), (2**33, 3)):
                step = torch.tensor(number)
                rows = torch.tensor([0, 5, 2**31 - 1, 2**31 + 7, 2**32 + 7, 12345])
                expected = draws._bits_torch(seed, step, stream, rows, columns)
                got = draws_triton.bits_triton(
                    draws.seed_key(seed), step.to(device), stream, rows.to(device), columns
                )
                if not torch.equal(expected, got.cpu()):
                    found.append(f"seed={seed} step={number} stream={stream} K={columns}")
    return found


@triton.jit
def _draws_kernel(hash_ptr, log_u_ptr, gumbel_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    column_hash = tl.load(hash_ptr + at).to(tl.uint32)
    row_hash = column_hash * 0
    tl.store(log_u_ptr + at, draws_triton.log_uniform(row_hash, column_hash))
    tl.store(gumbel_ptr + at, draws_triton.gumbel(row_hash, column_hash))


def draw_logarithms(device: str = "cpu") -> list[str]:
    """`log_uniform` and `gumbel` in float32 against float64, for chosen bits.

    With a row hash of 0 the bits are mix(column hash) >> 1, and `mix` can be inverted: the test
    chooses the bits, the rarest (a uniform of 2^-32) among them.
    """
    edges = [0, 1, 2, 3, 5, 9, 100, 2**16, 2**24 - 1, 2**24 + 1, 2**30, 2**31 - 1]
    edges += [int(0.01 * 2**31) + k for k in (-300, -1, 0, 1, 300)]
    random = torch.randint(0, 2**31, (2048 - len(edges),), generator=torch.manual_seed(1))
    bits = torch.cat([torch.tensor(edges), random])
    hashes = torch.tensor([_unmix(2 * int(b)) for b in bits], dtype=torch.int64)
    log_u, gumbel = torch.empty(2048, device=device), torch.empty(2048, device=device)
    _draws_kernel[(1,)](hashes.to(device), log_u, gumbel, SIZE=2048)
    u = (bits.double() + 0.5) * 2.0**-31
    found = []
    error = (log_u.cpu().double() - u.log()).abs().max()
    if not error <= 1e-5:
        found.append(f"log_uniform is off by {float(error):.1e}")
    expected = -(-torch.log1p(-u)).log()
    # float32 cannot tell uniforms near 1 apart: the smallest Gumbels, which never win
    usual = u < 0.999
    error = (gumbel.cpu().double() - expected)[usual].abs().max()
    if not error <= 1e-5:
        found.append(f"gumbel is off by {float(error):.1e}")
    if not bool((gumbel.cpu()[~usual] <= float(expected[usual].min()) + 1e-3).all()):
        found.append("gumbel of a uniform near 1 is too large")
    return found


def _unmix(x: int) -> int:
    """The inverse of `draws._mix` on unsigned 32-bit integers."""

    def unshift(y: int, by: int) -> int:
        x = y
        for _ in range(32 // by):
            x = y ^ (x >> by)
        return x

    x = unshift(x, 15) * pow(draws.MIX_B, -1, 2**32) % 2**32
    x = unshift(x, 15) * pow(draws.MIX_A, -1, 2**32) % 2**32
    return unshift(x, 16)


# ---------------------------------------------------------------------------- planted bugs

Change = Callable[[Any], dict[str, Any]]  # of a `Plan`'s fields

PLANTED: dict[str, tuple[str, Change]] = {
    "another seed": ("shared", lambda plan: {"seed": plan.seed + 1}),
    "seed cut to 32 bits": ("isir", lambda plan: {"seed": plan.seed % 2**32}),
    "burn-in off by one": ("one-way-score", lambda plan: {"burn_in": plan.burn_in - 1 / 9}),
    "counts every 4th": ("keys-cached", lambda plan: {"count_every": 4}),
    "an end of a tile missed": ("stream-130", lambda plan: {"burn_in": 0.99}),
    "partition follows too fast": ("paired-all", lambda plan: {"partition_rate": 1.0}),
    "one table for both directions": ("paired-all", lambda plan: {"side": 0}),
    "moves in evaluation mode": ("one-way-score", lambda plan: {"training": True}),
    "carried weight dropped": ("stream", lambda plan: {}),
    "tiles in plain order": ("stream", lambda plan: {}),
}


@contextlib.contextmanager
def sabotage(name: str) -> Iterator[None]:
    """Plant a bug into the fused path."""
    fused_loss, change = function.fused_loss, PLANTED[name][1]
    tile_column = layout_triton._tile_column

    def changed(a: Tensor, b: Tensor, carried: Any, beta: Any, plan: Any) -> Any:
        if name == "carried weight dropped":
            carried = carried.detach() + 0 * carried
        return fused_loss(a, b, carried, beta, dataclasses.replace(plan, **change(plan)))

    function.fused_loss = changed
    if name == "tiles in plain order":
        layout_triton._tile_column = lambda time, TILE: time
    try:
        yield
    finally:
        function.fused_loss, layout_triton._tile_column = fused_loss, tile_column


def planted(name: str) -> list[str]:
    """What the comparison says about a planted bug."""
    case = next(case for case in (*CASES, *TILES) if case.name == PLANTED[name][0])
    with sabotage(name):
        steps = 3 if name == "partition follows too fast" else 1 + case.evaluate
        return compare(dataclasses.replace(case, whole=False, steps=steps))


# ---------------------------------------------------------------------------- as a script

PROMISES = (
    refusals,
    later_backward,
    second_backward,
    thinned_scan,
    draw_bits,
    draw_logarithms,
)


def jobs(which: str) -> dict[str, Callable[[], list[str]]]:
    """Everything the script can check, by name."""
    if which == "slow":
        return {case.name: partial(compare, case) for case in SLOW}
    named: dict[str, Callable[[], list[str]]] = {
        case.name: partial(compare, case) for case in (*CASES, *TILES)
    }
    for case in INVALID:
        for fault in FAULTS:
            named[f"{fault}: {case.name}"] = partial(invalid_row, case, fault)
    for promise in PROMISES:
        named[promise.__name__] = promise
    return named | {f"planted: {name}": partial(planted, name) for name in PLANTED}


def _hurry() -> None:
    """A third of the interpreter's time: patch the language once per launch, check no overflow."""
    builder, patch_lang, done = interpreter.interpreter_builder, interpreter._patch_lang, set()
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def once(fn: Any) -> Any:
        langs = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if langs in done:
            return None
        scope = patch_lang(fn)
        done.add(langs)
        if scope is not None:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = once


def main(which: str) -> None:
    """Check everything (or what is named) and print what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy under the interpreter: inf - inf
    _hurry()
    named = jobs("slow" if which == "slow" else "fast")
    found = {}
    for name, job in named.items():
        if which in ("fast", "slow") or which in name:
            start = time.perf_counter()
            try:
                found[name] = job()
            except Exception:
                found[name] = [traceback.format_exc()]
            print(f"{time.perf_counter() - start:.1f} s {name}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
