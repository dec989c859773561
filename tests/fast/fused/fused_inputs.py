"""Inputs a user may pass that kernels read differently from tensors; part of `fused_cases`."""

from __future__ import annotations

from typing import Any

import torch
from fused_play import gap

from negchain import (
    ISIR,
    MH,
    DCLLoss,
    EMC2Loss,
    InBatch,
    InfoNCELoss,
    LargeBatchEMC2Loss,
    SogCLRLoss,
)


def cached(beta: Any = 5.0, *, large: bool = False, **options: Any) -> EMC2Loss:
    """A small loss that needs nothing encoded."""
    options = {"carried": "cached", "dim": 5, "backend": "fused", **options}
    return (LargeBatchEMC2Loss if large else EMC2Loss)(9, beta, **options)


def _views(size: int = 8) -> torch.Tensor:
    return torch.randn(3, size, 4, generator=torch.manual_seed(0))


def strided_index() -> list[str]:
    """Every other element of a longer tensor."""
    z_a, z_b, held = _views()
    index, found = torch.randperm(64, generator=torch.manual_seed(1))[:16][::2], []
    for backend in ("torch", "fused"):
        loss_fn = EMC2Loss(64, 5.0, backend=backend)
        value = loss_fn(z_a, z_b, index, loss_fn.request(index).answer(held))
        found.append([loss_fn.held(index)[0], value, loss_fn.chains.states])
    equal = [torch.allclose(a, b) for a, b in zip(*found, strict=True)]
    return [] if all(equal) else [f"ids, value, states equal: {equal}"]


def any_integers_as_ids() -> list[str]:
    """Without num_samples ids are only compared: hashes and negative numbers will do."""
    z_a, z_b, _ = _views()
    wrong = []
    for kind, ids in (
        (InfoNCELoss, torch.arange(8) - 4),
        (DCLLoss, torch.arange(8) * 2**40),
        (InfoNCELoss, torch.tensor([5, 5, 1, 2, 3, 4, 6, 7])),
    ):
        plain, fast = (kind(None, 5.0, backend=b)(z_a, z_b, ids) for b in ("torch", "fused"))
        if not torch.allclose(plain, fast, atol=1e-5):
            wrong.append(f"{kind.__name__} {ids.tolist()}: {float(plain)}, {float(fast)}")
    return wrong


def missing_index() -> list[str]:
    """A loss that knows its data set needs positions."""
    z_a, z_b, _ = _views()
    taken = []
    for loss_fn in (
        InfoNCELoss(8, 5.0, backend="fused"),
        SogCLRLoss(8, backend="fused"),
    ):
        try:
            loss_fn(z_a, z_b, None)
            taken.append(type(loss_fn).__name__)
        except ValueError as error:
            assert "index" in str(error)
    return taken


def bad_carried() -> list[str]:
    """A carried embedding that is no number makes the loss none, so that a scaler sees it."""
    z_a, z_b, held = _views()
    held[2, 1] = float("nan")
    loss_fn, index = EMC2Loss(64, 5.0, backend="fused"), torch.arange(8)
    loss = loss_fn(z_a, z_b, index, loss_fn.request(index).answer(held))
    return [] if torch.isnan(loss) else [f"loss {float(loss)}"]


def held_by_a_bad_item() -> list[str]:
    """i-SIR: rows that hold an item which is not finite in this batch go on holding it."""
    z, _, _ = _views(4)
    z = torch.nn.functional.normalize(z, dim=1)
    bad, index, found = z.clone(), torch.tensor([3, 5, 6, 2]), []
    bad[3, 0] = float("nan")
    for options in ({}, {"symmetric": False}, {"views": "paired"}, {"proposals": InBatch()}):
        loss_fn = EMC2Loss(20, 100.0, "isir", backend="fused", **options)
        loss_fn.chains.states[:, index[:3]] = 2  # as near as can be: the chains stay there
        sides = (lambda ids: z,) * loss_fn.num_sides
        loss_fn(bad, z, index, encode=sides if len(sides) == 2 else sides[0])
        states = loss_fn.chains.states[:, index[:3]]
        found += [] if bool((states == 2).all()) else [f"{options}: {states.tolist()}"]
    return found


def far_negatives() -> list[str]:
    """An item opposite to all others at a large beta: its partition must not underflow."""
    found = []
    z = torch.tensor([[1.0, 0.0]] + [[-1.0, 0.1]] * 3)
    for beta in (60.0, 100.0):
        for kernel in (MH(count_every=128), ISIR(), ISIR(128)):
            options = {"views": "paired", "symmetric": False, "kernel": kernel, "dim": 2}
            a, b = (
                cached(beta, large=True, backend=backend, **options)(z, z, torch.arange(4))
                for backend in ("torch", "fused")
            )
            if gap(a, b) > 1e-5:
                found.append(f"beta={beta} {kernel}: {float(a):.4f} {float(b):.4f}")
    return found


def bad_duplicate() -> list[str]:
    """The other copy of an item that is not finite: no column, and counted as none."""
    found = []
    z = torch.randn(2, 5, 4, generator=torch.manual_seed(0))
    z[0, 4] = float("nan")
    z.requires_grad_()
    for large in (False, True):
        loss_fn = cached(
            views="paired", symmetric=False, denominator="all", dim=4, large=large,
            kernel=MH(count_every=128),
        )  # fmt: skip
        value = loss_fn(z[0], z[1], torch.tensor([0, 1, 2, 3, 0]))
        found.append(torch.autograd.grad(value, z)[0][0, :4])  # 1 - p+ hangs on the count
    return [] if gap(*found) < 1e-5 else [f"{found[0].tolist()} {found[1].tolist()}"]


def late_first_proposal(large: bool = False) -> list[str]:
    """Chains without a state yet, all of whose first columns are their own item's copies."""
    found, size, every = [], 200 if large else 5, 128 if large else 2
    index = torch.zeros(size, dtype=torch.int64)
    index[-1] = 1
    for seed in (0, 3):
        grads = []
        for backend in ("torch", "fused"):
            options = {"views": "paired", "symmetric": False, "seed": seed, "large": large}
            beta = torch.tensor(5.0, requires_grad=True)
            loss_fn = cached(beta, kernel=MH(0.0, every), backend=backend, **options)
            z = torch.randn(2, size, 5, generator=torch.manual_seed(0)).requires_grad_()
            grads.append(torch.autograd.grad(loss_fn(*z, index), [z, beta]))
        apart = [gap(a, b, 0.1) for a, b in zip(*grads, strict=True)]
        found += [f"seed {seed}: {apart}"] if max(apart) > 1e-4 else []
    return found


def late_first_proposal_of_tiles() -> list[str]:
    return late_first_proposal(large=True)


def other_dimension() -> list[str]:
    """A table of embeddings of another dimension is refused, as the twin refuses it."""
    loss_fn = cached(dim=8)
    try:
        loss_fn(torch.randn(4, 5), torch.randn(4, 5), torch.arange(4))
        return ["chains that hold 8 dimensions took embeddings of 5"]
    except ValueError as error:
        return [] if "dimension" in str(error) else [str(error)]


def half_precision() -> list[str]:
    """Weights of i-SIR over a large batch in float16: beta / N of each must not vanish.

    A small beta stands for a batch of 16,000; the gradient is scaled as a scaler does.
    """
    grads, beta = [], 1e-3
    for backend, dtype, scale in (("torch", torch.float32, 1.0), ("fused", torch.float16, 1e6)):
        z = torch.randn(2, 130, 20, generator=torch.manual_seed(0)).half().to(dtype)
        options = {"views": "paired", "symmetric": False, "kernel": "isir", "dim": 20}
        loss_fn = LargeBatchEMC2Loss(135, beta, carried="cached", backend=backend, **options)
        value = loss_fn(*z.requires_grad_(), torch.arange(130))
        grads.append(torch.autograd.grad(value * scale, z)[0].float() / scale)
    apart = float((grads[0] - grads[1]).norm() / grads[0].norm())
    return [] if apart < 1e-3 else [f"gradients differ by {apart:.1e} of their norm"]


INPUTS = (
    half_precision,
    strided_index,
    any_integers_as_ids,
    missing_index,
    bad_carried,
    held_by_a_bad_item,
    far_negatives,
    bad_duplicate,
    late_first_proposal,
    late_first_proposal_of_tiles,
    other_dimension,
)
