"""Every refusal: a ValueError that names the rule, before any state has changed."""

from __future__ import annotations

import math

import pytest
import torch
from losses_under_test import DIM, METHODS, M, arguments, battery, case_name, same_state, snapshot

from negchain import (
    DCLLoss,
    Draw,
    EMC2Loss,
    InfoNCELoss,
    NegativeCacheLoss,
    SogCLRLoss,
)

INDEX = torch.tensor([3, 14, 20, 7, 0])
every_case = pytest.mark.parametrize("case", battery(), ids=case_name)


def prepared(case):
    """A loss in the middle of a run, and a call it would accept."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2 * M, DIM, generator=generator)
    loss_fn = METHODS[case[0]].build(5.0, **case[1])
    for _ in range(2):
        z_a = torch.randn(5, DIM, generator=generator)
        z_b = torch.randn(5, DIM, generator=generator)
        call = arguments(loss_fn, lambda ids: table[ids], z_a, z_b, INDEX)
        loss_fn(z_a, z_b, INDEX, **call)
    call = arguments(loss_fn, lambda ids: table[ids], z_a, z_b, INDEX)
    return loss_fn, {"z_a": z_a, "z_b": z_b, "index": INDEX, **call}


def refused(loss_fn, call, words: str) -> None:
    before, shown = snapshot(loss_fn), dict(loss_fn._info)
    with pytest.raises(ValueError, match=words) as caught:
        loss_fn(**call)
    assert len(str(caught.value)) > 30, "the message must say what to do"
    assert same_state(before, snapshot(loss_fn))
    assert loss_fn._info == shown


def with_nan(z):
    z = z.clone()
    z[2, 1] = math.nan
    return z


WRONG_BATCHES = {
    "index too large": (lambda c: {"index": INDEX + 10}, "index must"),
    "index negative": (lambda c: {"index": INDEX - 1}, "index must"),
    "index too short": (lambda c: {"index": INDEX[:4]}, "index must"),
    "index of floats": (lambda c: {"index": INDEX.float()}, "index must"),
    "z_b of another size": (lambda c: {"z_b": c["z_b"][:4]}, "one shape"),
    "z_b of another width": (lambda c: {"z_b": c["z_b"][:, :4]}, "one shape"),
    "three dimensions": (
        lambda c: {"z_a": c["z_a"][None], "z_b": c["z_b"][None]},
        "one shape|must",
    ),
    "integers": (lambda c: {"z_a": c["z_a"].long(), "z_b": c["z_b"].long()}, "floating point"),
    "NaN in z_a": (lambda c: {"z_a": with_nan(c["z_a"])}, "finite"),
    "inf in z_b": (lambda c: {"z_b": c["z_b"] / 0.0}, "finite"),
    "known of one dimension": (lambda c: {"known": INDEX}, "known must"),
    "known of floats": (lambda c: {"known": torch.zeros(5, 1)}, "known must"),
    "key_index without keys": (lambda c: {"key_index": INDEX}, "key_index"),
}


@every_case
def test_wrong_batches(case) -> None:
    loss_fn, call = prepared(case)
    for change, words in WRONG_BATCHES.values():
        refused(loss_fn, {**call, **change(call)}, words)


@every_case
def test_wrong_extras(case) -> None:
    """carried=, draw= and drawn= that are missing, of another shape, or not finite."""
    loss_fn, call = prepared(case)

    def pairwise(value, function):
        return tuple(map(function, value)) if type(value) is tuple else function(value)

    if "carried" in call:
        held = call["carried"]
        refused(loss_fn, {k: v for k, v in call.items() if k != "carried"}, "carried=")
        refused(loss_fn, {**call, "carried": pairwise(held, lambda z: z[:4])}, "carried must")
        refused(loss_fn, {**call, "carried": pairwise(held, lambda z: z[:, :4])}, "carried must")
        refused(loss_fn, {**call, "carried": pairwise(held, with_nan)}, "carried.*finite")
        if type(held) is tuple:
            refused(loss_fn, {**call, "carried": held[0]}, "carried")
    elif isinstance(loss_fn, EMC2Loss):
        refused(loss_fn, {**call, "carried": call["z_a"]}, "carried= is not used")
    if "draw" in call:
        draw, drawn = call["draw"], call["drawn"]
        without = {k: v for k, v in call.items() if k not in ("draw", "drawn")}
        refused(loss_fn, without, "draw=")
        refused(loss_fn, {**without, "draw": draw}, "drawn")
        refused(loss_fn, {**call, "drawn": pairwise(drawn, lambda z: z[..., :4])}, "drawn must")
        refused(loss_fn, {**call, "drawn": pairwise(drawn, lambda z: z / 0.0)}, "finite")
        far = pairwise(draw, lambda d: d._replace(ids=d.ids + M))
        refused(loss_fn, {**call, "draw": far}, r"draw.ids must")
        odd = pairwise(draw, lambda d: d._replace(log_q=torch.zeros(3)))
        refused(loss_fn, {**call, "draw": odd}, r"draw.log_q must")
    if "augmentation" in call:
        refused(loss_fn, {k: v for k, v in call.items() if k != "augmentation"}, "augmentation")
        wrong = (torch.full_like(INDEX, 2), call["augmentation"][1])
        refused(loss_fn, {**call, "augmentation": wrong}, "augmentation must")


@every_case
def test_a_state_of_another_size_is_refused(case) -> None:
    loss_fn, _ = prepared(case)
    if case[0] in ("infonce", "dcl"):
        return  # no state per sample
    other = METHODS[case[0]].build(5.0, num_samples=M + 1, **case[1])
    with pytest.raises(RuntimeError, match="size mismatch") as told:
        other.load_state_dict(loss_fn.state_dict())
    assert str(told.value).count("another data set") == 1 and "build the loss as" in str(told.value)


def test_another_width_is_refused() -> None:
    for options in ({"carried": "cached"}, {"proposal": "cache"}):
        for denominator in ("negatives", "all"):
            loss_fn = EMC2Loss(M, denominator=denominator, **options)
            z = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0))
            table = torch.randn(M, DIM + 1, generator=torch.Generator().manual_seed(0))
            call = arguments(loss_fn, lambda ids, t=table: t[ids][..., :DIM], z, z, INDEX)
            loss_fn(z, z, INDEX, **call)
            wide = table[INDEX]
            draw = Draw(torch.tensor([1, 2]))
            more = {} if "carried" in options else {"draw": draw, "drawn": table[draw.ids]}
            if "proposal" in options:
                more["carried"] = wide
            refused(loss_fn, {"z_a": wide, "z_b": wide, "index": INDEX, **more}, "dimension")


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: InfoNCELoss(0.0), "beta"),
        (lambda: DCLLoss(math.inf), "beta"),
        (lambda: InfoNCELoss(views="both"), "views"),
        (lambda: SogCLRLoss(1), "num_samples"),
        (lambda: SogCLRLoss(10, gamma=0.0), "gamma"),
        (lambda: SogCLRLoss(10, gamma=1.1), "gamma"),
        (lambda: SogCLRLoss(10, denominator="none"), "denominator"),
        (lambda: SogCLRLoss(10, num_keys=20), "num_keys"),
        (lambda: NegativeCacheLoss(10, 4, refresh=1.5), "refresh"),
        (lambda: EMC2Loss(10, kernel="gibbs"), "kernel"),
        (lambda: EMC2Loss(10, carried="no"), "carried"),
        (lambda: EMC2Loss(10, proposal="all"), "proposal"),
        (lambda: EMC2Loss(10, walk="random"), "walk"),
        (lambda: EMC2Loss(10, backend="cuda"), "backend"),
        (lambda: EMC2Loss(10, burn_in=1.0), "burn_in"),
        (lambda: EMC2Loss(10, burn_in=-0.1), "burn_in"),
        (lambda: EMC2Loss(10, partition_rate=2.0), "partition_rate"),
        (lambda: EMC2Loss(10, augmentations=0), "augmentations"),
        (lambda: EMC2Loss(10, augmentations=2, views="paired"), "augmentations"),
        (lambda: EMC2Loss(10, num_draws=4), "num_draws"),
    ],
)
def test_wrong_settings(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_missing_index_and_lonely_batches() -> None:
    z = torch.randn(1, DIM)
    with pytest.raises(ValueError, match="index= is missing"):
        DCLLoss(num_samples=10)(torch.randn(2, DIM), torch.randn(2, DIM))
    for views in ("shared", "paired"):
        with pytest.raises(ValueError, match="no negative"):
            DCLLoss(views=views)(z, z)


def test_propose_refusals() -> None:
    z = torch.randn(5, DIM)
    with pytest.raises(ValueError, match="proposal='cache'"):
        EMC2Loss(M).propose(z, INDEX)
    with pytest.raises(ValueError, match="z_b"):
        EMC2Loss(M, proposal="cache", views="paired").propose(z, INDEX)
    with pytest.raises(ValueError, match="z_b"):
        NegativeCacheLoss(M, DIM, views="paired").propose(z, INDEX)
    with pytest.raises(ValueError, match="index must"):
        NegativeCacheLoss(M, DIM).propose(z, INDEX + 10)


def test_a_draw_with_probabilities_needs_the_size_of_the_data_set() -> None:
    z = torch.randn(5, DIM)
    draw = Draw(torch.tensor([1, 2]), torch.tensor([-3.0, -3.0]))
    with pytest.raises(ValueError, match="num_samples"):
        DCLLoss()(z, z, INDEX, draw=draw, drawn=z[:2])
