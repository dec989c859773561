"""Play the same steps with two twins of a loss, and say what differs.

What the fused path and its readable twin compute differs by rounding only, which decides a
comparison where acceptance is within rounding of a tie: chains of rows with such a near-tie (read
off the twin's own walk) may part ways, all others must agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from negchain import (
    ISIR,
    MH,
    ContrastiveLoss,
    DCLLoss,
    EMC2Loss,
    InfoNCELoss,
    LargeBatchEMC2Loss,
    SogCLRLoss,
)
from negchain.losses import sweeps, walk
from negchain.weights import metropolis

NEAR = 1e-5  # of a tie: logits and log u are exact to about 3e-6
MAX_TIES = 0.03  # share of rows that may be that near; 0.025 at 4,096 columns in bf16
LOSSES = {"emc2": EMC2Loss, "infonce": InfoNCELoss, "dcl": DCLLoss, "sogclr": SogCLRLoss}


@dataclass(frozen=True)
class Case:
    """A loss, its options and the batches it is given."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)  # see `build`
    loss: str = "emc2"
    size: int = 6
    steps: int = 3
    dim: int = 5
    num_samples: int = 11
    beta: float = 6.0
    learned: bool = False
    dtype: torch.dtype = torch.float32
    repeats: bool = False  # some items twice in a batch
    one_item: bool = False  # all rows of a batch are one item: no proposal anywhere
    zeros: bool = False  # some embeddings have no direction
    strided: bool = False  # embeddings that are not contiguous
    evaluate: bool = False  # a last step in evaluation mode
    whole: bool = False  # a large batch in tiles against the loss without them, too
    tolerance: float = 2e-5  # of gradients


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
    """The case's loss; of EMC²'s options some are the kernel's, and `large` chooses the class."""
    beta = torch.nn.Parameter(torch.tensor(case.beta)) if case.learned else case.beta
    options = {**case.options, **more}
    kind: Any = LOSSES[case.loss]
    if case.loss == "emc2":
        kind = LargeBatchEMC2Loss if options.pop("large", False) else EMC2Loss
        name, every = options.pop("kernel", "mh"), options.pop("count_every", 1)
        burn_in = options.pop("burn_in", 0.5)
        options["kernel"] = ISIR(every) if name == "isir" else MH(burn_in, every)
        options = {"dim": case.dim, "seed": 3, **options}
    loss_fn: ContrastiveLoss = kind(case.num_samples, beta, **options).to(device)
    return loss_fn


def play(case: Case, device: str = "cpu", **more: Any) -> list[Step]:
    """Training steps and then one in evaluation mode, with what they left behind."""
    generator = torch.Generator().manual_seed(11)
    loss_fn = build(case, device, **more)
    items = torch.randn(case.num_samples, case.dim, generator=generator)
    steps = []
    for number in range(case.steps + case.evaluate):
        loss_fn.train(number < case.steps)
        index = torch.randperm(case.num_samples, generator=generator)[: case.size]
        if case.repeats:
            index[1::4] = index[: len(index[1::4])]
        if case.one_item:
            index[:] = index[0]
        steps.append(_step(case, loss_fn, index, items, generator, device))
    return steps


def _step(
    case: Case,
    loss_fn: ContrastiveLoss,
    index: Tensor,
    items: Tensor,
    generator: torch.Generator,
    device: str,
) -> Step:
    def leaf(z: Tensor, none: int = 0) -> Tensor:
        if case.zeros:
            z[none] = 0.0
        z = z.to(device, case.dtype)
        if case.strided:
            z = torch.stack([z, -z], 1)[:, 0]
        return z.requires_grad_()

    def noise() -> Tensor:
        return torch.randn(case.size, case.dim, generator=generator)

    there = index.to(device)
    inputs = {"z_a": leaf(items[index] + 0.5 * noise(), 1)}
    inputs["z_b"] = leaf(items[index] + 0.5 * noise(), 2)
    held = [ids.cpu() for ids in loss_fn.held(there)]
    request = loss_fn.request(there)
    answers = [leaf(items[want.ids.cpu()] + 0.3) for want in request.wants]
    inputs |= {f"carried {side}": z for side, z in enumerate(answers)}
    with near_ties(case.size, device) as near:
        value = loss_fn(inputs["z_a"], inputs["z_b"], there, request.answer(answers))
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
    scan, isir = walk.mh_scan, sweeps.isir_weights

    def watched_scan(logits: Tensor, start: Tensor, log_u: Tensor, *rest: Any) -> Any:
        threshold = logits - log_u
        before = metropolis._state_logits(threshold, logits, start)[:, :-1]
        near.logical_or_(((threshold - before).abs() < NEAR).any(1).view(-1, size).any(0))
        return scan(logits, start, log_u, *rest)

    def watched_isir(logits: Tensor, start: Tensor, gumbel: Tensor, every: int) -> Any:
        noisy = torch.cat([start[:, None], logits], 1) + gumbel
        groups = [noisy, *(noisy[:, 1:].split(every, 1) if every > 1 else ())]
        for group in groups:
            if group.shape[1] > 1:
                first, second = group.topk(2, 1).values.T
                near.logical_or_((first - second < 3 * NEAR).view(-1, size).any(0))
        return isir(logits, start, gumbel, every)

    walk.mh_scan, sweeps.isir_weights = watched_scan, watched_isir
    try:
        yield near
    finally:
        walk.mh_scan, sweeps.isir_weights = scan, isir


def compare(case: Case, device: str = "cpu") -> list[str]:
    """What differs between the fused path and its twins."""
    fused = play(case, device, backend="fused")
    found = differences(case, play(case, device, backend="torch"), fused)
    if case.whole:
        whole = differences(case, play(case, device, backend="torch", large=False), fused)
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
        if gap(a.value, b.value) > (2e-5 if strict else 0.02):  # carried states are part of it
            found.append(f"step {number}: value {a.value:.7f} {b.value:.7f}")
        for name, grad in a.grads.items():
            apart, bound = gap(grad, b.grads[name], 1.0 if name == "beta" else 1e-3), case.tolerance
            if not strict:
                norm = grad.norm().clamp(min=1e-9)  # 0 where every chain has left what it carried
                apart = float((grad - b.grads[name]).norm() / norm)
                bound = 10 * bound + 2 * float(parted.float().mean()) ** 0.5
            if not apart < bound:
                found.append(f"step {number}: gradient of {name} {apart:.1e}")
        found += [f"step {number}: {text}" for text in _state_differences(a, b, parted)]
        found += [f"step {number}: {text}" for text in _info_differences(case, a, b, strict)]
    if case.evaluate and not _same(got[-1].state, got[-2].state):
        found.append("evaluation mode changed the state")
    return found


def gap(a: Tensor, b: Tensor, floor: float = 1.0) -> float:
    """Largest difference, relative to the largest entry (or the floor); inf for NaN."""
    apart = float((a - b).abs().max() / a.abs().max().clamp(min=floor))
    return apart if apart == apart and a.shape == b.shape else float("inf")


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
    if a.info.keys() != b.info.keys():
        yield f"info {sorted(a.info)} {sorted(b.info)}"
    for name in a.info.keys() & b.info.keys():
        bound = 1e-4 if strict else 0.05
        estimated = case.options.get("large") and case.options.get("kernel", "mh") == "mh"
        if name == "acceptance_rate" and estimated:  # from one proposal per row: five deviations
            bound = 2.5 / case.size**0.5
        if not abs(a.info[name] - b.info[name]) <= bound * (1 + abs(a.info[name])):
            yield f"info {name} {a.info[name]} {b.info[name]}"


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n].nan_to_num(-7.5), b[n].nan_to_num(-7.5)) for n in a)


# ---------------------------------------------------------------------------- bad batches

BAD_ROW = 2


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
            if case.options.get("carried") == "cached":
                loss_fn.chains.keys.fill_(0.2)
    before = {n: v.cpu().clone() for n, v in bad.state_dict().items()}
    known = index[BAD_ROW].expand(case.size, 1)

    def encode(ids: Tensor) -> Tensor:
        return held.repeat(len(ids) // case.size, 1).to(ids.device)

    towers: Any = (encode, encode) if good.num_sides == 2 else encode
    good(z_a, z_b, index, known=known, encode=towers)
    wrong_z, wrong_index = z_a.clone(), index.clone()
    if fault == "nan":
        wrong_z[BAD_ROW, 1] = float("nan")
    else:
        wrong_index[BAD_ROW] = case.num_samples + 3 if fault == "too large" else -2
    there = wrong_z.to(device), z_b.to(device), wrong_index.to(device)
    bad(*there, encode=towers)
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
        if "but 1 did not" not in str(error):
            yield f"info raised {error}"
