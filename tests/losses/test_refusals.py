"""Every refusal: a ValueError that names the rule, before any state has changed.

Requests and their answers are in test_requests.py.
"""

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
    extras,
    same_state,
    snapshot,
    towers,
)

from negchain import (
    ISIR,
    MH,
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    ImportanceLoss,
    InBatch,
    InfoNCELoss,
    Informed,
    LargeBatchEMC2Loss,
    NegativeCacheLoss,
    SogCLRLoss,
    TopKLoss,
    Uniform,
)

INDEX = torch.tensor([3, 14, 20, 7, 0])
every_case = pytest.mark.parametrize("case", battery(), ids=case_name)


def table_of() -> torch.Tensor:
    return torch.randn(2 * M, DIM, generator=torch.Generator().manual_seed(0))


def encode(ids):
    return table_of()[ids]


def prepared(case):
    """A loss in the middle of a run, and a call it would accept."""
    loss_fn = METHODS[case[0]].build(5.0, **case[1])
    z = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1))
    call = {"z_a": z[0], "z_b": z[1], "index": INDEX, "encode": towers(loss_fn, encode)}
    call |= extras(loss_fn, encode, INDEX)
    loss_fn(**call)
    return loss_fn, call


def refused(loss_fn, call, words: str) -> None:
    before, shown = snapshot(loss_fn), loss_fn.info
    with pytest.raises(ValueError, match=words) as caught:
        loss_fn(**call)
    assert len(str(caught.value)) > 30, "the message must say what to do"
    assert same_state(before, snapshot(loss_fn))
    assert loss_fn.info == shown


def with_nan(z):
    z = z.clone()
    z[2, 1] = math.nan
    return z


WRONG_BATCHES = {
    "index too large": (lambda c: {"index": INDEX + 10}, "index must"),
    "index negative": (lambda c: {"index": INDEX - 1}, "index must"),
    "index too short": (lambda c: {"index": INDEX[:4]}, "(index|augmentation) must"),
    "index of floats": (lambda c: {"index": INDEX.float()}, "index must"),
    "index of a batch": (lambda c: {"index": 3}, "index must"),
    "index as a mask": (lambda c: {"index": INDEX > 0}, "index must"),
    "z_b of another size": (lambda c: {"z_b": c["z_b"][:4]}, "one shape"),
    "z_b of another width": (lambda c: {"z_b": c["z_b"][:, :4]}, "one shape"),
    "three dimensions": (lambda c: {"z_a": c["z_a"][None], "z_b": c["z_b"][None]}, "one shape"),
    "no index": (lambda c: {"index": None}, "index= is missing"),
    "integers": (lambda c: {"z_a": c["z_a"].long(), "z_b": c["z_b"].long()}, "floating point"),
    "NaN in z_a": (lambda c: {"z_a": with_nan(c["z_a"])}, "finite"),
    "inf in z_b": (lambda c: {"z_b": c["z_b"] / 0.0}, "finite"),
    "known of one dimension": (lambda c: {"known": INDEX}, "known must"),
    "known of floats": (lambda c: {"known": torch.zeros(5, 1)}, "known must"),
    "known too large": (lambda c: {"known": torch.full((5, 1), 10**6)}, "known, .*must.*10{6}"),
    "known padded with -2": (lambda c: {"known": torch.full((5, 1), -2)}, "with -1, must.*-2"),
    "key_index without keys": (lambda c: {"key_index": INDEX}, "key_index"),
}


@every_case
def test_wrong_batches(case) -> None:
    loss_fn, call = prepared(case)
    for name, (change, words) in WRONG_BATCHES.items():
        if name == "key_index without keys" and loss_fn.num_keys is not None:
            continue
        refused(loss_fn, {**call, **change(call)}, words)


@pytest.mark.parametrize("views", ["shared", "paired"])
def test_wrong_draws(views) -> None:
    """draw= and drawn= that are missing, of another shape, out of range, or not finite."""
    loss_fn, call = prepared(("mh-given", {"views": views}))

    def each(name, function):
        value = call[name]
        pair = isinstance(value, tuple) and not isinstance(value, Draw)
        return {**call, name: tuple(map(function, value)) if pair else function(value)}

    refused(loss_fn, {k: v for k, v in call.items() if k != "drawn"}, "draw=")
    refused(loss_fn, {k: v for k, v in call.items() if k != "draw"}, "draw=")
    refused(loss_fn, each("drawn", lambda z: z[..., :4]), "drawn must")
    refused(loss_fn, each("drawn", lambda z: z / 0.0), "finite")
    draw = call["draw"] if views == "shared" else call["draw"][0]
    refused(loss_fn, each("drawn", with_nan), rf"those of ids \[{draw.ids[2, 1]}\] hold NaN")
    refused(loss_fn, each("draw", lambda d: d._replace(ids=d.ids + M)), "draw.ids must")
    refused(loss_fn, each("draw", lambda d: d._replace(ids=d.ids.float())), "draw.ids must")
    refused(loss_fn, each("draw", lambda d: d._replace(ids=d.ids > 0)), "draw.ids must.*nonzero")
    refused(loss_fn, each("draw", lambda d: d._replace(ids=d.ids[:3])), "draw")
    refused(loss_fn, each("draw", lambda d: d.ids), "draw= must be Draw")
    refused(loss_fn, each("draw", lambda d: d._replace(ids=d.ids.tolist())), "draw= must be Draw")
    refused(loss_fn, each("draw", lambda d: d._replace(log_q=[0.0] * M)), "draw= must be Draw")
    refused(loss_fn, each("drawn", lambda z: z.tolist()), "drawn= a tensor")
    refused(loss_fn, each("draw", lambda d: d._replace(log_q=torch.zeros(3))), "log_q must")
    for log_q in (-math.inf, math.nan):
        log_q = torch.full((M,), log_q)
        refused(loss_fn, each("draw", lambda d, q=log_q: d._replace(log_q=q)), "finite at every id")
    if views == "paired":
        refused(loss_fn, {**call, "draw": call["draw"][0]}, "draw= must be a pair")
        call = {name: value[:4] for name, value in call.items() if name in ("z_a", "z_b", "index")}
        half = Draw(torch.zeros(2, 3, dtype=torch.int64))  # once repeated for the other two rows
        call |= {"draw": (half,) * 2, "drawn": (encode(half.ids),) * 2, "encode": (encode,) * 2}
        refused(loss_fn, call, "row of the batch, 4, got .2, 3.; pass one for each")
    other, call = prepared(("mh", {"views": views}))
    refused(other, {**call, "draw": Draw(INDEX), "drawn": call["z_a"]}, "proposals=Given")


def test_wrong_augmentations() -> None:
    loss_fn, call = prepared(("mh-augmentations", {}))
    refused(loss_fn, {k: v for k, v in call.items() if k != "augmentation"}, "augmentation")
    wrong = (torch.full_like(INDEX, 2), call["augmentation"][1])
    refused(loss_fn, {**call, "augmentation": wrong}, "augmentation must")


def test_a_corpus_needs_the_positions_of_its_keys() -> None:
    loss_fn, call = prepared(("mh-corpus", {}))
    refused(loss_fn, {**call, "key_index": None}, "key_index")
    refused(loss_fn, {**call, "key_index": INDEX + 2 * M - 1}, "key_index must")


@every_case
def test_what_follows_the_batch_is_named(case) -> None:
    loss_fn, call = prepared(case)
    rest = {k: v for k, v in call.items() if k not in ("z_a", "z_b", "index", "encode")}
    for wrong in (encode, encode(INDEX)):
        with pytest.raises(ValueError, match="requests follow index, got .*encode="):
            loss_fn(call["z_a"], call["z_b"], INDEX, wrong, **rest)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda ids: None, r"must be a tensor \[5, D\], got NoneType"),
        (lambda ids: (encode(ids), 0), r"must be a tensor \[5, D\], got tuple"),
        (table_of(), "function from positions .* got Tensor"),
        ((encode, encode), "views='shared' has one encoder.*views='paired'"),
    ],
    ids=["nothing", "tuple", "tensor", "pair"],
)
def test_what_encodes(wrong, words) -> None:
    loss_fn, call = prepared(("mh", {}))
    refused(loss_fn, {**call, "encode": wrong}, words)


def test_lists_of_different_lengths() -> None:
    loss_fn, call = prepared(("mh", {}))
    refused(loss_fn, {**call, "known": [[1], [2, 4], [], [], []]}, r"known must be.*padded with -1")


@pytest.mark.parametrize("options", [{"carried": "cached"}, {"proposals": Informed()}])
def test_another_width_is_refused(options) -> None:
    loss_fn = EMC2Loss(M, 5.0, **options)
    z = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0))
    loss_fn(z, z, INDEX, encode=encode)
    wide = torch.randn(M, DIM + 1, generator=torch.Generator().manual_seed(0))
    call = {"z_a": wide[INDEX], "z_b": wide[INDEX], "index": INDEX, "encode": lambda i: wide[i]}
    refused(loss_fn, call, "dimension.*build a new loss")


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: InfoNCELoss(beta=0.0), "beta.*0.0"),
        (lambda: DCLLoss(beta=math.inf), "beta.*inf"),
        (lambda: DCLLoss(beta=torch.tensor([3.0, 4.0])), r"beta.*one.*3., 4."),
        (lambda: DCLLoss(beta=torch.nn.Parameter(torch.ones(2))), "(?s)beta.*one.*1., 1."),
        (lambda: DCLLoss(beta=torch.nn.Parameter(-torch.ones(()))), "(?s)beta.*positive.*-1."),
        (lambda: DCLLoss(beta="10"), "beta.*10"),
        (lambda: DCLLoss(seed=1.5), "seed.*1.5"),
        (lambda: InfoNCELoss(views="both"), "views.*both"),
        (lambda: InfoNCELoss(proposals=Uniform()), "num_samples="),
        (lambda: SogCLRLoss(1), "num_samples.*1"),
        (lambda: ImportanceLoss(10, 5.0, 8), "proposals must be.*8"),
        (lambda: SogCLRLoss(10.0), "num_samples must be an integer.*10.0"),
        (lambda: EMC2Loss(torch.ones(10)), "num_samples must be an integer"),
        (lambda: SogCLRLoss(10, gamma=0.0), "gamma.*0.0"),
        (lambda: SogCLRLoss(10, gamma=1.1), "gamma.*1.1"),
        (lambda: SogCLRLoss(10, denominator="none"), "denominator.*none"),
        (lambda: SogCLRLoss(10, num_keys=20), "num_keys"),
        (lambda: EMC2Loss(10, num_keys=20), "needs .*views='paired'"),
        (lambda: SogCLRLoss(10, views="paired", num_keys=20, key_counts=torch.ones(3)), "key_coun"),
        (
            lambda: EMC2Loss(2, views="paired", num_keys=3, key_counts=torch.ones(3) > 0),
            "key_counts must.*bool.*bincount",
        ),
        *(
            (
                lambda n=n: EMC2Loss(
                    2, views="paired", num_keys=3, key_counts=torch.tensor([1.0, n, 2.0])
                ),
                rf"key_counts must.*at least 0, got \[{n}\]; .*bincount",
            )
            for n in (-3.0, math.nan, math.inf)
        ),
        *(
            (lambda kind=kind: kind(10, key_counts=torch.ones(3)), "key_counts= .*num_keys=None")
            for kind in (InfoNCELoss, SogCLRLoss, EMC2Loss, ImportanceLoss, NegativeCacheLoss)
        ),
        (lambda: NegativeCacheLoss(10, refresh=1.5), "refresh.*1.5"),
        (lambda: EMC2Loss(10, kernel="gibbs"), "kernel.*gibbs"),
        (lambda: LargeBatchEMC2Loss(10, kernel="gibbs"), "kernel.*gibbs"),
        (lambda: EMC2Loss(10, views="paired", num_keys=1), "num_keys.*1"),
        (lambda: EMC2Loss(10, carried="score"), "carried.*score"),
        (lambda: EMC2Loss(10, proposals="all"), "proposals.*all"),
        (lambda: EMC2Loss(10, backend="cuda"), "backend.*cuda"),
        (lambda: EMC2Loss(10, augmentations=0), "augmentations.*0"),
        (lambda: EMC2Loss(10, augmentations=1.5), "augmentations.*1.5"),
        (lambda: EMC2Loss(10, augmentations=2, views="paired"), "augmentations"),
        (lambda: EMC2Loss(10, augmentations=2, proposals=Informed()), "augmentations"),
        (lambda: EMC2Loss(10, views="paired", proposals=InBatch(2)), "copies=2"),
        (lambda: EMC2Loss(10, views="paired", num_keys=20, proposals="batch"), "Uniform"),
        (lambda: MH(burn_in=-0.1), "burn_in.*-0.1"),
        (lambda: MH(burn_in=1.5), "burn_in.*1.5"),
        (lambda: MH(burn_in=math.inf), "burn_in.*inf"),
        (lambda: MH(count_every=2.5), "count_every.*2.5"),
        (lambda: ISIR(count_every=0), "count_every.*0"),
        (lambda: InBatch(3), "copies.*3"),
        (lambda: Uniform(0), "num.*0"),
        (lambda: Uniform(2.5), "num.*2.5"),
        (lambda: TopKLoss(10, num=1, top=2.5), "top.*2.5"),
        (lambda: Informed(share=1.0), "share.*1.0"),
        (lambda: Informed(sharpness=0.0), "sharpness.*0.0"),
        (lambda: Informed(sharpness=math.inf), "sharpness.*inf"),
        (lambda: Informed(refresh=-1.0), "refresh.*-1.0"),
        (lambda: MH(burn_in=True), "burn_in.*True"),
        (lambda: MH(burn_in="0.5"), "burn_in.*'0.5'"),
        (lambda: MH(count_every=True), "count_every.*True"),
        (lambda: InBatch(True), "copies.*True"),
        (lambda: Uniform(True), "num.*True"),
        (lambda: DCLLoss(beta=True), "beta.*True"),
        (lambda: DCLLoss(seed=False), "seed.*False"),
        (lambda: EMC2Loss(10, carried="cached", dim=-3), "dim.*-3"),
        (lambda: NegativeCacheLoss(10, dim=2.5), "dim.*2.5"),
    ],
)
def test_wrong_settings(build, words) -> None:
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("build", [EMC2Loss, LargeBatchEMC2Loss, NegativeCacheLoss, SogCLRLoss])
def test_state_of_every_sample_needs_their_number(build) -> None:
    with pytest.raises(ValueError, match="num_samples must be the size .* got None"):
        build(None)


def test_a_missing_index() -> None:
    with pytest.raises(ValueError, match="index= is missing"):
        DCLLoss(10)(torch.randn(2, DIM), torch.randn(2, DIM))


def test_a_draw_with_probabilities_needs_the_size_of_the_data_set() -> None:
    z = torch.randn(5, DIM)
    draw = Draw(torch.tensor([1, 2]), torch.tensor([-3.0, -3.0]))
    with pytest.raises(ValueError, match="num_samples"):
        DCLLoss(proposals=Given(alone=False))(z, z, INDEX, draw=draw, drawn=z[:2])


def test_large_batches_are_offered_the_batch_alone() -> None:
    with pytest.raises(TypeError, match="proposals"):
        LargeBatchEMC2Loss(M, proposals=Uniform())
    with pytest.raises(ValueError, match="for a corpus .* use EMC2Loss"):
        LargeBatchEMC2Loss(M, views="paired", num_keys=2 * M)
    with pytest.raises(ValueError, match="augmentations.* use EMC2Loss"):  # half its chains slept
        LargeBatchEMC2Loss(M, augmentations=2)


@pytest.mark.parametrize(
    ("build", "name", "remedy"),
    [
        (EMC2Loss, "bta", "; did you mean 'beta'?"),
        (LargeBatchEMC2Loss, "view", "; did you mean 'views'?"),
        (DCLLoss, "temperature", "; pass beta=, 1 / temperature"),
        (DCLLoss, "queue", ""),
    ],
)
def test_an_unknown_argument_is_said_of_the_class_that_was_called(build, name, remedy) -> None:
    with pytest.raises(TypeError) as refusal:
        build(M, **{name: 1})
    said = f"{build.__name__}() got an unexpected keyword argument {name!r}{remedy}"
    assert str(refusal.value) == said


@pytest.mark.parametrize("build", [DCLLoss, EMC2Loss, LargeBatchEMC2Loss])
def test_an_empty_batch(build) -> None:
    empty, loss_fn = torch.zeros(0, 4), build(M)
    call = {"z_a": empty, "z_b": empty, "index": INDEX[:0], "encode": lambda ids: empty}
    refused(loss_fn, call, "at least one sample")


def test_only_a_beta_with_a_gradient_is_learned() -> None:
    given = torch.tensor(3.0)
    assert "beta=3.0," in repr(DCLLoss(beta=given)) and not list(DCLLoss(beta=given).parameters())
    assert "beta=3 (learned)" in repr(DCLLoss(beta=torch.nn.Parameter(given)))
    loss_fn = DCLLoss(beta=given)
    loss_fn.beta = 5  # by a schedule
    assert "beta=5," in repr(loss_fn)
