"""What only a GPU can show of the losses: no waiting, the same chains, checks reported late."""

from __future__ import annotations

import math

import pytest
import torch
from losses_under_test import (
    DIM,
    METHODS,
    M,
    battery,
    case_name,
    data,
    extras,
    run,
    same_state,
    snapshot,
    towers,
)

from negchain import SogCLRLoss, rng
from weights.scan_cases import disagreement

pytestmark = pytest.mark.gpu
INDEX = torch.tensor([3, 14, 20, 7, 0])
every_case = pytest.mark.parametrize("case", battery(), ids=case_name)


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
def test_scan_equals_reference_to_the_bit(backend) -> None:
    assert disagreement(backend, "cuda") == []


def test_draws_are_the_same_on_both_devices() -> None:
    step, rows = torch.tensor(7), torch.arange(50)
    there = rng.bits(3, step.cuda(), 2, rows.cuda(), 300).cpu()
    assert torch.equal(rng.bits(3, step, 2, rows, 300), there)
    here = rng.permutation(3, step, 1, 500)
    assert torch.equal(here, rng.permutation(3, step.cuda(), 1, 500).cpu())


@every_case
def test_a_step_never_waits_for_the_device(case, no_synchronisation) -> None:
    net, items = data()
    net, items, index = net.cuda(), items.cuda(), INDEX.cuda()
    loss_fn = METHODS[case[0]].build(5.0, **case[1]).cuda()
    for step in range(3):
        if step == 1:  # the first one compiles kernels and allocates
            torch.cuda.synchronize()
            no_synchronisation(True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            run(loss_fn, net, items, index).backward()
    no_synchronisation(False)
    assert all(math.isfinite(v) for v in loss_fn.info.values())
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@every_case
def test_learned_beta_and_known_positives_never_wait(case, no_synchronisation) -> None:
    net, items = data()
    net, items, index = net.cuda(), items.cuda(), INDEX.cuda()
    known = torch.tensor([[1, -1]] * 5).cuda()
    beta = torch.nn.Parameter(torch.tensor(5.0))
    loss_fn = METHODS[case[0]].build(beta, **case[1]).cuda()
    for step in range(2):
        if step == 1:
            torch.cuda.synchronize()
            no_synchronisation(True)
        run(loss_fn, net, items, index, known).backward()
    no_synchronisation(False)
    assert torch.isfinite(loss_fn.beta.grad)


@every_case
def test_both_devices_run_the_same_chains(case) -> None:
    """The same embeddings (float64, so that rounding decides nothing) give the same states."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.functional.normalize(
        torch.randn(2 * M, DIM, generator=generator, dtype=torch.float64), dim=1
    )
    states, values = [], []
    for device in ("cpu", "cuda"):
        loss_fn = METHODS[case[0]].build(5.0, **case[1]).to(device)
        there = table.to(device)
        # in an empty table all keys are equally near
        loss_fn.fill(towers(loss_fn, lambda ids, t=there: t[ids]))
        seen = []
        for step in range(6):
            index = torch.randperm(M, generator=torch.Generator().manual_seed(step))[:6].to(device)
            z_a, z_b = there[index], there[index].roll(1, 1)
            more = extras(loss_fn, lambda ids, t=there: t[ids], index)
            encode = towers(loss_fn, lambda ids, t=there: t[ids])
            value = loss_fn(z_a, z_b, index, encode=encode, **more)
            seen.append(value.item())
        values.append(seen)
        states.append({k: v.cpu() for k, v in snapshot(loss_fn).items()})
    assert values[0] == pytest.approx(values[1], abs=1e-9)
    for name, here in states[0].items():
        if here.is_floating_point():
            assert torch.allclose(here, states[1][name], atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(here, states[1][name]), name


def calls_on_gpu(case, *, index=None, poison=False):
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(2 * M, DIM, generator=generator).cuda()
    loss_fn = METHODS[case[0]].build(5.0, **case[1]).cuda()
    good = INDEX.cuda()
    z_a, z_b = table[good], table[good] + 0.1
    if poison:
        z_a = z_a.clone()
        z_a[2] = math.nan
    there = good if index is None else index.cuda()
    more = extras(loss_fn, lambda ids: table[ids], good)
    encode = towers(loss_fn, lambda ids: table[ids])
    value = loss_fn(z_a, z_b, there, encode=encode, **more)
    return loss_fn, value


@every_case
def test_an_index_out_of_range_is_reported_by_info(case) -> None:
    bad = INDEX.clone()
    bad[1] = M + 3
    loss_fn, _ = calls_on_gpu(case, index=bad)
    with pytest.raises(ValueError, match="index must"):
        _ = loss_fn.info


@every_case
def test_a_row_with_nan_changes_no_state(case) -> None:
    """Slots of the poisoned sample stay as they were, and nothing stored is NaN because of it."""
    fresh = METHODS[case[0]].build(5.0, **case[1])
    loss_fn, value = calls_on_gpu(case, poison=True)
    assert torch.isnan(value) or torch.isfinite(value)
    item = int(INDEX[2])
    per_item = loss_fn.ids_per_item
    slots = slice(item * per_item, (item + 1) * per_item)
    before, after = snapshot(fresh), {k: v.cpu() for k, v in snapshot(loss_fn).items()}
    for name in ("chains.states", "log_u"):
        if name in after:
            old, new = (torch.nan_to_num(s[name][:, slots].float(), 9.0) for s in (before, after))
            assert torch.equal(old, new), name
    for name, tensor in after.items():
        if "embeddings" in name or name == "log_u":
            assert not torch.isnan(tensor).any(), name
    assert loss_fn.info["nonfinite_rows"] == 1


def test_state_moves_between_devices() -> None:
    case = ("mh", {"views": "shared", "denominator": "all"})
    net, items = data()
    loss_fn = METHODS["mh"].build(5.0, **case[1])
    run(loss_fn, net, items, INDEX)
    there = METHODS["mh"].build(5.0, **case[1]).cuda()
    there.load_state_dict(loss_fn.state_dict())
    assert same_state(snapshot(loss_fn), {k: v.cpu() for k, v in snapshot(there).items()})


def test_sogclr_at_large_beta_in_half_precision() -> None:
    loss_fn = SogCLRLoss(M, 100.0).cuda()
    z = torch.randn(5, DIM, device="cuda", dtype=torch.float16, requires_grad=True)
    value = loss_fn(z, z.flip(1), INDEX.cuda())
    value.backward()
    assert value.dtype == torch.float32 and torch.isfinite(z.grad).all()
