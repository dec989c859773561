"""Save and load in the middle of a run changes nothing (taxonomy 10)."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from losses_under_test import METHODS, M, battery, case_name, data, run, same_state, snapshot

from negchain import NegativeCacheLoss


def train(loss_fn, net, optimizer, items, steps) -> list[float]:
    values = []
    for step in steps:
        index = torch.randperm(M, generator=torch.Generator().manual_seed(step))[:6]
        optimizer.zero_grad()
        value = run(loss_fn, net, items, index)
        value.backward()
        optimizer.step()
        values.append(value.item())
        if isinstance(loss_fn, NegativeCacheLoss):
            ids = loss_fn.refresh_ids()
            with torch.no_grad():
                for side in range(loss_fn.num_sides):
                    loss_fn.refresh(ids, net(items[ids]), side)
    return values


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_k_plus_k_steps_equal_2k(case) -> None:
    def fresh():
        net, items = data()
        loss_fn = METHODS[case[0]].build(5.0, **case[1])
        return loss_fn, net, torch.optim.Adam(net.parameters(), lr=0.02), items

    whole = fresh()
    expected = train(*whole, range(10))
    first = fresh()
    got = train(*first, range(5))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first[:3]], file)
    file.seek(0)
    second = fresh()
    for part, state in zip(second[:3], torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert same_state(snapshot(first[0]), snapshot(second[0]))
    got += train(*second, range(5, 10))
    assert got == expected
    assert same_state(snapshot(whole[0]), snapshot(second[0]))
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mh-cached", "mh-cache", "negcache", "sogclr"])
def test_loading_back_to_the_beginning(name) -> None:
    """The state before the first step can be loaded into a loss that has run, and the other way."""
    net, items = data()
    loss_fn = METHODS[name].build()
    begin = copy.deepcopy(loss_fn.state_dict())
    first = train(loss_fn, net, torch.optim.SGD(net.parameters(), lr=0.0), items, range(5))
    loss_fn.load_state_dict(begin)
    again = train(loss_fn, net, torch.optim.SGD(net.parameters(), lr=0.0), items, range(5))
    assert first == again


@pytest.mark.parametrize("name", ["mh", "isir", "negcache"])
def test_the_seed_matters_and_nothing_else_does(name) -> None:
    def values(seed: int, disturb: bool) -> list[float]:
        net, items = data()
        loss_fn = METHODS[name].build(5.0, seed=seed)
        if disturb:
            torch.manual_seed(99)  # the global generator is nobody's business here
        return train(loss_fn, net, torch.optim.SGD(net.parameters(), lr=0.1), items, range(6))

    assert values(0, False) == values(0, True)
    assert values(0, False) != values(1, False)
