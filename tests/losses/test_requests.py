"""What a loss asks to have encoded, and which answers it refuses."""

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
    DCLLoss,
    EMC2Loss,
    ImportanceLoss,
    Informed,
    NegativeCacheLoss,
    SogCLRLoss,
    TopKLoss,
    Uniform,
)

INDEX = torch.tensor([3, 14, 20, 7, 0])
every_case = pytest.mark.parametrize("case", battery(), ids=case_name)


def table_of() -> torch.Tensor:
    return torch.randn(2 * M, DIM, generator=torch.Generator().manual_seed(0))


def named(loss_fn) -> dict:
    """Arguments of the call that requests take too."""
    more = extras(loss_fn, lambda ids: table_of()[ids], INDEX)
    return {k: v for k, v in more.items() if k in ("key_index", "augmentation")}


@pytest.mark.parametrize("bad", [-1, M])
def test_positions_out_of_range_are_refused_when_asked_for(bad: int) -> None:
    """They were brought into the range, and another sample's negatives were handed out."""
    index = torch.tensor([3, bad])
    loss_fn = EMC2Loss(M, 5.0)
    before = snapshot(loss_fn)
    for ask in (loss_fn.held, loss_fn.request, SogCLRLoss(M, 5.0).request):
        with pytest.raises(ValueError, match=rf"in \[0, {M}\), got \[{bad}\]; was the loss built"):
            ask(index)
    assert same_state(snapshot(loss_fn), before)
    with pytest.raises(ValueError, match=r"torch.float32 \(2,\); pass an integer per sample"):
        loss_fn.request(index.float())


@every_case
def test_the_explicit_form_is_the_simple_one(case) -> None:
    """Request, answer, request, answer, call: equal to `encode=` in value, gradient and state."""
    results = []
    for explicit in (False, True):
        loss_fn = METHODS[case[0]].build(**case[1])
        table = table_of().requires_grad_()
        more = extras(loss_fn, lambda ids, t=table: t[ids], INDEX)
        for _ in range(3):
            z_a, z_b = table[INDEX], table[INDEX].roll(1, 1)
            if explicit:
                first = loss_fn.request(INDEX, **named(loss_fn))
                first.answer([table[want.ids] for want in first.wants])
                second = loss_fn.request(INDEX, z_a, z_b, **named(loss_fn))
                second.answer([table[want.ids] for want in second.wants])
                value = loss_fn(z_a, z_b, INDEX, first, second, **more)
            else:
                encode = towers(loss_fn, lambda ids, t=table: t[ids])
                value = loss_fn(z_a, z_b, INDEX, encode=encode, **more)
        (gradient,) = torch.autograd.grad(value, table)
        results.append((value.item(), gradient, snapshot(loss_fn)))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1])  # sums in another order
    assert same_state(results[0][2], results[1][2])


@every_case
def test_asking_changes_nothing(case) -> None:
    loss_fn = METHODS[case[0]].build(**case[1])
    before = snapshot(loss_fn)
    z = table_of()[INDEX]
    asked = [loss_fn.request(INDEX, **named(loss_fn)) for _ in range(2)]
    given = [loss_fn.request(INDEX, z, z, **named(loss_fn)) for _ in range(2)]
    for a, b in (asked, given):
        for one, other in zip(a.wants, b.wants, strict=True):
            assert torch.equal(one.ids, other.ids) and one[1:] == other[1:]
    assert same_state(before, snapshot(loss_fn))


def test_what_is_asked_for() -> None:
    z = table_of()[INDEX]
    assert len(DCLLoss(M).request(INDEX).ids) == 0 == len(DCLLoss(M).request(INDEX, z, z).ids)
    loss_fn = EMC2Loss(M, views="paired", proposals=Uniform(3))
    wants = loss_fn.request(INDEX).wants
    assert [(len(w.ids), w.tower, w.gradient) for w in wants] == [
        (5, "keys", True),
        (5, "anchors", True),
        (3, "keys", True),
        (3, "anchors", True),
    ]
    assert torch.equal(wants[0].ids, loss_fn.held(INDEX)[0])
    with pytest.raises(ValueError, match="keys and for anchors"):
        _ = loss_fn.request(INDEX).ids
    loss_fn = EMC2Loss(M, proposals=Informed(4, refresh=0.1), carried="cached")
    assert [(len(w.ids), w.gradient) for w in loss_fn.request(INDEX).wants] == [(3, False)]
    assert [(len(w.ids), w.gradient) for w in loss_fn.request(INDEX, z, z).wants] == [(4, True)]
    cache = NegativeCacheLoss(M, refresh=0.1, views="paired")
    assert [w.tower for w in cache.request(INDEX, z, z).wants] == ["keys", "anchors"]


def test_two_encoders() -> None:
    """Wants of the tower of the anchors go to the first function, the others to the second."""
    loss_fn = EMC2Loss(M, views="paired", proposals=Informed(4))
    seen: dict[str, list[bool]] = {"anchors": [], "keys": []}

    def encoder(name):
        def encode(ids):
            seen[name].append(torch.is_grad_enabled())
            return table_of()[ids]

        return encode

    z = table_of()[INDEX]
    loss_fn(z, z, INDEX, encode=(encoder("anchors"), encoder("keys")))
    # carried states and draws in one pass, a share of the table (without gradient) in another
    assert seen["anchors"] == seen["keys"] and sorted(seen["keys"]) == [False, True]


@pytest.mark.parametrize("name", ["mh", "mh-informed", "negcache", "dcl-uniform"])
def test_one_encoder_of_two_is_refused(name) -> None:
    """It encoded the anchors' negatives as keys, and the anchors' table with them."""
    loss_fn, z = METHODS[name].build(views="paired"), table_of()[INDEX]
    before = snapshot(loss_fn)

    def encode(ids):
        return table_of()[ids]

    for wrong in (encode, (encode,)):
        with pytest.raises(ValueError, match="keys and for anchors; pass encode=.anchors', keys'"):
            loss_fn(z, z, INDEX, encode=wrong)
        with pytest.raises(ValueError, match="or build the loss with symmetric=False"):
            loss_fn.request(INDEX).encode(wrong, loss_fn.request(INDEX, z, z))
        if loss_fn.tables:
            with pytest.raises(ValueError, match="keys and for anchors"):
                loss_fn.fill(wrong)
    with pytest.raises(ValueError, match="or a pair of them, got tuple"):
        loss_fn(z, z, INDEX, encode=(encode, encode, encode))
    assert same_state(before, snapshot(loss_fn))
    METHODS[name].build(views="paired", symmetric=False)(z, z, INDEX, encode=encode)


def test_in_the_batch_one_encoder_is_never_asked() -> None:
    z = table_of()[INDEX]
    DCLLoss(M, views="paired")(z, z, INDEX, encode=lambda ids: table_of()[ids])


# ---------------------------------------------------------------- refusals


def answered(loss_fn, index=INDEX, ahead=0):
    request = loss_fn.request(index, ahead=ahead)
    return request.answer(table_of()[request.ids])


def refused(words: str, loss_fn, *requests, index=INDEX) -> None:
    before, info = snapshot(loss_fn), loss_fn.info
    z = table_of()[index]
    with pytest.raises(ValueError, match=words) as told:
        loss_fn(z, z, index, *requests)
    assert len(str(told.value)) > 40, "the message must say what to do"
    assert same_state(before, snapshot(loss_fn)) and loss_fn.info == info


def test_requests_of_another_call_are_refused() -> None:
    loss_fn = EMC2Loss(M, 5.0)
    refused("needs its carried negatives encoded.*encode=lambda", loss_fn)
    refused("not answered", loss_fn, loss_fn.request(INDEX))
    refused("by another loss", loss_fn, answered(EMC2Loss(M, 5.0)))
    refused("another batch", loss_fn, answered(loss_fn, INDEX.flip(0)))
    refused("another batch", loss_fn, answered(loss_fn, INDEX[:4]))
    z = table_of()[INDEX]
    assert torch.isfinite(loss_fn(z, z, INDEX, answered(loss_fn)))


def test_a_request_for_what_a_buffer_held_is_refused() -> None:
    """Also where positions are of numpy, whose memory a tensor shares."""
    loss_fn, table = EMC2Loss(20, 5.0), torch.randn(20, 4)
    for index in (torch.arange(4), torch.arange(4).numpy()):
        request = loss_fn.request(index)
        index += 4
        request.answer(table[request.ids])
        with pytest.raises(ValueError, match="another batch"):
            loss_fn(table[index], table[index], index, request)


@pytest.mark.parametrize("stored", [None, 2])
@pytest.mark.parametrize("ids", [torch.arange, lambda n: torch.arange(n).numpy()])
def test_an_encoder_may_refill_the_buffers_of_a_call(ids, stored) -> None:
    """The call is that of the batch it was given: its value, its chains and no others."""
    table, found = torch.randn(40, 4), []
    for refill in (False, True):
        loss_fn, index = EMC2Loss(20, 5.0, augmentations=stored), ids(4)
        which = (ids(4) % 2, ids(4) // 2) if stored else None

        def encode(wanted: torch.Tensor, index=index, which=which, refill=refill) -> torch.Tensor:
            if refill:
                index += 10
                for view in which or ():
                    view += -view + 1
            return table[wanted]

        value = loss_fn(table[:4], table[4:8], index, augmentation=which, encode=encode)
        found.append((value, loss_fn.chains.states[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("build", [EMC2Loss, SogCLRLoss, ImportanceLoss, TopKLoss])
@pytest.mark.parametrize("as_given", [torch.clone, torch.Tensor.numpy, torch.Tensor.tolist])
def test_an_encoder_may_refill_the_keys_of_a_call(build, as_given) -> None:
    """`key_index` and `known` are buffers of the batch as `index` is: none is read after it."""
    table, found = torch.randn(40, 4), []
    for refill in (False, True):
        loss_fn = build(20, 5.0, num_keys=40, views="paired")
        loss_fn.fill(lambda ids: table[ids])
        buffers = [
            as_given(ids) for ids in (torch.arange(4), torch.arange(3, 7), torch.eye(4, 2).long())
        ]

        def encode(wanted: torch.Tensor, buffers=buffers, refill=refill) -> torch.Tensor:
            for buffer in buffers if refill else ():
                for row in range(4):
                    buffer[row] = buffer[0]
            return table[wanted]

        index, key_index, known = buffers
        more = {"key_index": key_index, "known": known, "encode": encode}
        found.append((loss_fn(table[:4], table[4:8], index, **more), loss_fn.key_counts))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_no_sample_holds_no_chain() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert [len(view) for view in EMC2Loss(20, augmentations=2).held(none, (none, none))] == [0, 0]


def test_a_request_for_other_augmentations_is_refused() -> None:
    """Their chains are others: each would go on from a state it does not hold."""
    loss_fn, z = EMC2Loss(M, 5.0, augmentations=2), table_of()
    which = 0 * INDEX, 0 * INDEX + 1
    request = loss_fn.request(INDEX, augmentation=which)
    request.answer(z[request.ids])
    with pytest.raises(ValueError, match="another batch: its index .or augmentation"):
        loss_fn(z[:5], z[5:10], INDEX, request, augmentation=which[::-1])
    assert torch.isfinite(loss_fn(z[:5], z[5:10], INDEX, request, augmentation=which))


def test_a_request_for_the_views_a_buffer_held_is_refused() -> None:
    loss_fn, table, index = EMC2Loss(20, 5.0, augmentations=2), torch.randn(40, 4), torch.arange(4)
    which = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    request = loss_fn.request(index, augmentation=which)
    request.answer(table[request.ids])
    which[0][0] = 1
    with pytest.raises(ValueError, match="another batch"):
        loss_fn(table[2 * index], table[2 * index + 1], index, request, augmentation=which)
    which[0][0] = 0
    loss_fn(table[2 * index], table[2 * index + 1], index, request, augmentation=which)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("views", ["shared", "paired"])
def test_a_chain_that_moved_since_is_refused(views, ahead) -> None:
    """Asked before another visit of the same items: the negatives encoded are not those held."""
    loss_fn = EMC2Loss(M, 5.0, views=views, symmetric=views == "shared")
    early, z = answered(loss_fn, ahead=ahead), table_of()[INDEX]
    held = loss_fn.held(INDEX)[0]
    loss_fn(z, z, INDEX, answered(loss_fn))
    assert not torch.equal(held, loss_fn.held(INDEX)[0])
    refused("have moved", loss_fn, early)
    other = torch.tensor([1, 2, 4, 5, 6])  # visited by nobody meanwhile: what was asked still holds
    early, z = answered(loss_fn, other, ahead), table_of()[other]
    mine = table_of()[INDEX]
    loss_fn(mine, mine, INDEX, answered(loss_fn))
    assert torch.isfinite(loss_fn(z, z, other, early))


def test_draws_of_another_step_are_refused() -> None:
    loss_fn = EMC2Loss(M, 5.0, proposals=Uniform(), carried="cached")
    early, z = answered(loss_fn), table_of()[INDEX]
    loss_fn(z, z, INDEX, answered(loss_fn))
    refused("of another step", loss_fn, early)
    ahead = answered(loss_fn, ahead=1)  # a loader that prefetches says for which call it asks
    refused("of another step", loss_fn, ahead)
    loss_fn(z, z, INDEX, answered(loss_fn))
    assert torch.isfinite(loss_fn(z, z, INDEX, ahead))


def test_evaluation_does_not_spend_a_request() -> None:
    loss_fn = EMC2Loss(M, 5.0, proposals=Uniform())
    request, z = answered(loss_fn), table_of()[INDEX]
    values = [loss_fn.eval()(z, z, INDEX, request).item() for _ in range(2)]
    assert values[0] == values[1] == loss_fn.train()(z, z, INDEX, request).item()


def test_wrong_answers() -> None:
    loss_fn = EMC2Loss(M, 5.0, proposals=Uniform(4))
    request, z = loss_fn.request(INDEX), table_of()
    good = z[request.ids]
    for answer, words in (
        (good[:8], "one embedding per id, 9, got 8"),
        ([good], "one tensor per want, 2, got 1"),
        ([good[:5], good[5:8]], r"\[4, D\]"),
        (good[:, None], r"\[5, D\]"),
    ):
        with pytest.raises(ValueError, match=words):
            request.answer(answer)
    refused("answer must hold embeddings|drawn must", loss_fn, request.answer(good[:, :4]))
    for row in (2, 7):  # a carried state, a draw
        bad = good.clone()
        bad[row, 0] = math.inf
        words = rf"those of ids \[{request.ids[row]}\] hold NaN or inf; lower the learning"
        refused(words, loss_fn, request.answer(bad))


TABLES = [n for n, method in METHODS.items() if method.build().tables]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "spoil", [lambda z: z[:, :4], lambda z: z.repeat(1, 2), lambda z: z.long()]
)  # fmt: skip
def test_a_wrong_refresh_has_written_nothing(name, spoil) -> None:
    """A table's share is a pass of its own, and was looked at after other rows were written."""
    loss_fn, z = METHODS[name].build(), table_of()[INDEX]

    def encode(ids):
        return table_of()[ids] if torch.is_grad_enabled() else spoil(table_of()[ids])

    before = snapshot(loss_fn)
    with pytest.raises(ValueError, match="answer must hold embeddings .* D = 5 in floating point"):
        loss_fn(z, z.roll(1, 1), INDEX, encode=encode)
    assert same_state(before, snapshot(loss_fn))


@pytest.mark.parametrize("name", ["mh", "isir", "mh-uniform", "dcl-uniform", "negcache", "topk"])
def test_an_encoder_that_calls_its_loss_is_refused(name) -> None:
    """Its call moved the chains, and took the draws, that the outer one had asked for."""
    loss_fn, z = METHODS[name].build(), table_of()[INDEX]
    called = []

    def encode(ids):
        if not called:
            called.append(True)
            loss_fn(z, z.roll(1, 1), INDEX, encode=encode)
            called.append(snapshot(loss_fn))
        return table_of()[ids]

    with pytest.raises(
        ValueError, match="chains of this batch have moved|made for call 0.*encode="
    ):
        loss_fn(z, z.roll(1, 1), INDEX, encode=encode)
    assert same_state(called[1], snapshot(loss_fn))


def test_informed_draws_need_the_second_request() -> None:
    loss_fn = EMC2Loss(M, 5.0, proposals=Informed())
    refused("needs its drawn negatives encoded", loss_fn, answered(loss_fn))


@pytest.mark.parametrize("views", ["shared", "paired"])
def test_what_the_other_view_draws_needs_its_embeddings(views) -> None:
    z, other = table_of()[INDEX], table_of()[INDEX].flip(1)
    one_way = NegativeCacheLoss(M, 5.0, views=views, symmetric=False)
    alone, both = one_way.request(INDEX, z), one_way.request(INDEX, z, other)
    assert torch.equal(alone.ids, both.ids)
    with pytest.raises(ValueError, match="z_b's rows are anchors"):
        NegativeCacheLoss(M, 5.0, views=views).request(INDEX, z)


def test_positions_may_be_a_list() -> None:
    z, index = table_of()[INDEX], INDEX.tolist()
    values = []
    for ids in (index, INDEX, INDEX.int()):
        loss_fn = EMC2Loss(M, 5.0)
        loss_fn(z, z.roll(1, 1), ids, encode=lambda i: table_of()[i])
        request = loss_fn.request(ids)
        request.answer(table_of()[request.ids])
        values.append(loss_fn(z, z.roll(1, 1), ids, request, known=[[1]] * 5).item())
        assert torch.equal(torch.stack(loss_fn.held(ids)), torch.stack(loss_fn.held(INDEX)))
    assert values[0] == values[1] == values[2]


def test_wanted_items_are_encoded_under_the_callers_autocast() -> None:
    """In the precision of the batch, not in the float32 the loss itself computes with."""
    net, items, seen = torch.nn.Linear(4, 8), torch.randn(20, 4), []

    def encode(ids):
        seen.append(net(items[ids]))
        return seen[-1]

    loss_fn, index = EMC2Loss(20, 5.0), torch.arange(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(net(items[index]), net(items[index] + 0.1), index, encode=encode)
    assert seen[0].dtype == torch.bfloat16 and loss.dtype == torch.float32


def test_a_sample_that_a_batch_holds_twice_draws_twice() -> None:
    """One draw offered twice is no two draws: chains would leave their target."""
    loss_fn = EMC2Loss(M, 5.0, proposals=Uniform(), carried="cached")
    drawn = torch.stack([loss_fn.request([3, 7, 3], ahead=n).ids for n in range(40)])
    assert (drawn[:, 0] == drawn[:, 2]).float().mean() < 0.5
    alone = torch.stack([loss_fn.request([7, 3], ahead=n).ids for n in range(40)])
    assert torch.equal(alone[:, 1], drawn[:, 0])  # whoever else is there


def test_a_request_beside_encode_is_refused() -> None:
    """It would be encoded anew, and one of another loss or step go unnoticed."""
    loss_fn, z, index = EMC2Loss(M, 5.0), table_of(), torch.arange(4)
    request = loss_fn.request(index).answer(z[:4])
    with pytest.raises(ValueError, match="instead of requests"):
        loss_fn(z[:4], z[:4], index, request, encode=lambda ids: z[ids])


@pytest.mark.parametrize("spoil", [lambda z: z[:, :3], lambda z: z / 0.0])
@pytest.mark.parametrize("build", [NegativeCacheLoss, ImportanceLoss])
def test_a_refused_answer_has_written_nothing(build, spoil) -> None:
    """Neither to the table of the direction before it, nor what precedes refreshed rows."""
    table, index = table_of(), torch.arange(4)
    for number in range(4):
        loss_fn = build(M, 5.0, views="paired")
        requests = loss_fn.request(index), loss_fn.request(index, table[:4], table[4:8])
        parts = [part for request in requests for part in request.parts]
        for place, part in enumerate(parts):
            z = table[part.want.ids]
            part.embeddings = spoil(z) if place == number else z
        before = snapshot(loss_fn)
        if parts[number].want.gradient or spoil(table).shape != table.shape:
            with pytest.raises(ValueError, match="answer"):
                loss_fn(table[:4], table[4:8], index, *requests)
            assert same_state(before, snapshot(loss_fn))
