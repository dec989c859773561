"""A corpus of keys: columns of the batch are somebody's positives, not uniform draws.

q(z) of a batch column is the share of pairs whose key is z, given or counted; chains reach keys
that are nobody's positive by uniform draws the loss asks for by itself.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import negchain.losses.columns as columns
from negchain import DCLLoss, EMC2Loss, InBatch, SogCLRLoss, Uniform

ANCHORS, KEYS, DIM, BETA = 40, 80, 8, 5.0


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, keys, and each anchor's key: some keys are positives of several, half of none."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(ANCHORS + KEYS, DIM, generator=generator)
    z = torch.nn.functional.normalize(z, dim=1)
    key_of = torch.arange(ANCHORS)
    key_of[20:32] = torch.arange(20, 32) % 4  # keys 0 .. 3 are popular
    return z[:ANCHORS], z[ANCHORS:], key_of


def nobodys_mass(loss_fn: EMC2Loss, steps: int, warm_up: int) -> float:
    """z-score of the time chains spend at keys that are nobody's positive, against the softmax."""
    queries, keys, key_of = pairs()
    logits = BETA * queries @ keys.T
    logits[torch.arange(ANCHORS), key_of] = -math.inf
    free = torch.ones(KEYS, dtype=torch.bool)
    free[key_of] = False
    target = (logits.softmax(1) * free).sum(1)
    assert 0.4 < target.mean() < 0.8
    generator = torch.Generator().manual_seed(1)
    everyone, spent = torch.arange(ANCHORS), torch.zeros(ANCHORS)
    for step in range(steps):
        i = torch.randperm(ANCHORS, generator=generator)[:8]
        with torch.no_grad():
            loss_fn(
                queries[i], keys[key_of[i]], i, key_index=key_of[i], encode=lambda ids: keys[ids]
            )
        if step >= warm_up:
            spent += free[loss_fn.held(everyone)[0]]
    apart = spent / (steps - warm_up) - target
    return float(apart.mean() / (apart.std() / math.sqrt(ANCHORS)))


@pytest.mark.statistical
@pytest.mark.parametrize(
    "kernel, counted",
    [
        ("mh", True),
        ("isir", False),
        pytest.param("mh", False, marks=pytest.mark.slow),
        pytest.param("isir", True, marks=pytest.mark.slow),
    ],
)
def test_chains_reach_every_key_with_its_probability(kernel, counted) -> None:
    """False alarm 1e-4 (two-sided normal); before, chains never held such a key: z = -30."""
    counts = None if counted else torch.bincount(pairs()[2], minlength=KEYS)
    loss_fn = EMC2Loss(ANCHORS, BETA, kernel, views="paired", num_keys=KEYS, key_counts=counts)
    assert loss_fn.proposals == Uniform()
    assert abs(nobodys_mass(loss_fn, 300, 50)) < 3.9


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", pytest.param("isir", marks=pytest.mark.slow)])
def test_batch_columns_taken_for_uniform_are_caught(monkeypatch, kernel) -> None:
    uniform = -math.log(KEYS)
    flat = lambda ids: torch.full(ids.shape, uniform)  # noqa: E731
    monkeypatch.setattr(columns, "popularity", lambda *_: flat)
    loss_fn = EMC2Loss(ANCHORS, BETA, kernel, views="paired", num_keys=KEYS)
    assert abs(nobodys_mass(loss_fn, 600, 50)) > 5


def test_counts_are_learned_and_saved() -> None:
    queries, keys, key_of = pairs()
    loss_fn = SogCLRLoss(ANCHORS, BETA, views="paired", num_keys=KEYS)
    for i in torch.arange(ANCHORS).split(8):
        loss_fn(queries[i], keys[key_of[i]], i, key_index=key_of[i], encode=lambda ids: keys[ids])
    expected = torch.bincount(key_of, minlength=KEYS)
    assert torch.equal(loss_fn.key_counts[:-1], expected) and loss_fn.key_counts[-1] == ANCHORS
    again = SogCLRLoss(ANCHORS, BETA, views="paired", num_keys=KEYS)
    again.load_state_dict(loss_fn.state_dict())
    assert torch.equal(again.key_counts, loss_fn.key_counts)
    given = SogCLRLoss(ANCHORS, BETA, views="paired", num_keys=KEYS, key_counts=expected)
    before = given.key_counts.clone()
    given(queries[:8], keys[:8], range(8), key_index=range(8), encode=lambda ids: keys[ids])
    assert torch.equal(given.key_counts, before)  # what was given is not counted on


def test_keys_that_are_all_positives_need_no_draws() -> None:
    counts = torch.arange(KEYS) % 3 + 1
    loss_fn = EMC2Loss(ANCHORS, views="paired", num_keys=KEYS, key_counts=counts)
    assert loss_fn.proposals == InBatch()
    with pytest.raises(ValueError, match="Uniform"):
        EMC2Loss(ANCHORS, views="paired", num_keys=KEYS, proposals="batch")


@pytest.mark.statistical
def test_the_estimated_partition_is_unbiased() -> None:
    """SogCLR with gamma = 1 stores this visit's estimate of the mean over a row's negatives.

    Its mean over 400 batches with the row's own pair and seven others drawn with replacement:
    |z| < 3.9 for row 0, two-sided 1e-4.
    """
    queries, keys, key_of = pairs()
    counts = torch.bincount(key_of, minlength=KEYS)
    logits = BETA * queries[0] @ keys.T
    logits[key_of[0]] = -math.inf
    exact = float(logits.exp().sum()) / (KEYS - 1)
    generator = torch.Generator().manual_seed(3)
    seen = []
    for seed in range(400):
        loss_fn = SogCLRLoss(
            ANCHORS, BETA, 1.0, views="paired", num_keys=KEYS, key_counts=counts, seed=seed
        )
        i = torch.cat([torch.zeros(1).long(), torch.randint(0, ANCHORS, (7,), generator=generator)])
        with torch.no_grad():
            loss_fn(
                queries[i], keys[key_of[i]], i, key_index=key_of[i], encode=lambda ids: keys[ids]
            )
        seen.append(float(loss_fn.log_u[0, 0].exp()))
    values = torch.tensor(seen)
    assert abs(float((values.mean() - exact) / (values.std() / 20))) < 3.9


def test_known_positives_of_a_corpus() -> None:
    """A known key in the chain, in the batch or drawn has no weight for its row alone."""
    queries, keys, key_of = pairs()
    index = torch.tensor([4, 5])
    known = torch.tensor([[5, 70], [-1, -1]])
    loss_fn = EMC2Loss(ANCHORS, BETA, "isir", views="paired", num_keys=KEYS, proposals=Uniform(60))
    loss_fn.chains.states.fill_(70)
    leaves = []

    def encode(ids: Tensor) -> Tensor:
        leaves.append((ids, keys[ids].clone().requires_grad_()))
        return leaves[-1][1]

    z_b = keys[key_of[index]].clone().requires_grad_()
    call = {"key_index": key_of[index], "known": known, "encode": encode}
    loss_fn(queries[index], z_b, index, **call).backward()
    carried, drawn = leaves
    assert (carried[1].grad[0] == 0).all() and (carried[1].grad[1] != 0).any()
    own = torch.isin(drawn[0], key_of[index])
    assert (drawn[1].grad[~own] != 0).any()


def test_in_batch_losses_take_the_batch_as_it_is() -> None:
    """DCL's value over a corpus is the plain one, and it makes no claim on the global loss."""
    queries, keys, key_of = pairs()
    i = torch.arange(6)
    corpus = DCLLoss(ANCHORS, BETA, views="paired", num_keys=KEYS)
    plain = DCLLoss(beta=BETA, views="paired", symmetric=False)
    value = corpus(queries[i], keys[i], i, key_index=i)
    assert value.item() == pytest.approx(plain(queries[i], keys[i], i).item(), abs=1e-6)
    assert "global_loss_low" not in corpus.info
