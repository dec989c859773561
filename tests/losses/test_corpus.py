"""A corpus of keys: columns of the batch are somebody's positives, not uniform draws.

q(z) of a batch column is the share of the *other* pairs whose key is z, given or counted; chains
reach keys that are nobody's positive by uniform draws the loss asks for by itself.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import negchain.losses.columns as columns
from negchain import DCLLoss, Draw, EMC2Loss, Given, ImportanceLoss, InBatch, SogCLRLoss, Uniform
from oracles import unit

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
    assert abs(nobodys_mass(loss_fn, 200, 50)) < 3.9


@pytest.mark.statistical
@pytest.mark.parametrize("kernel", ["mh", pytest.param("isir", marks=pytest.mark.slow)])
def test_batch_columns_taken_for_uniform_are_caught(monkeypatch, kernel) -> None:
    uniform = -math.log(KEYS)
    flat = lambda ids: torch.full(ids.shape, uniform)  # noqa: E731
    monkeypatch.setattr(columns, "popularity", lambda *_: flat)
    loss_fn = EMC2Loss(ANCHORS, BETA, kernel, views="paired", num_keys=KEYS)
    assert abs(nobodys_mass(loss_fn, 200, 50)) > 5


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
    given.load_state_dict(SogCLRLoss(ANCHORS, BETA, views="paired", num_keys=KEYS).state_dict())
    assert torch.equal(given.key_counts, before)  # nor replaced: with counts of 0 nothing has a q


def test_keys_that_are_all_positives_need_no_draws() -> None:
    counts = torch.arange(KEYS) % 3 + 1
    loss_fn = EMC2Loss(ANCHORS, views="paired", num_keys=KEYS, key_counts=counts)
    assert loss_fn.proposals == InBatch()
    with pytest.raises(ValueError, match="Uniform"):
        EMC2Loss(ANCHORS, views="paired", num_keys=KEYS, proposals="batch")


# ---------------------------------------------------------------- q of the batch's columns

# eight pairs: key 0 is the positive of three, keys 6 and 7 of nobody
PAIRS = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5])
LABELS = torch.tensor([[-1, -1], [3, 0], [-1, 5], [0, 2], [7, -1], [-1, -1], [5, 4], [0, 6]])


def estimate_of(loss_fn: ImportanceLoss, pick: Tensor, **call) -> tuple[Tensor, Tensor]:
    """Log partition of each row [B], and its weights [B, K]."""
    (queries, keys, _), found, right = pairs(), [], loss_fn._estimate

    def watched(*args):
        found.append(right(*args))
        return found[-1]

    loss_fn._estimate = watched
    queries, keys = queries.double(), keys.double()
    known, positive = LABELS[pick], PAIRS[pick]
    loss_fn(queries[pick], keys[positive], pick, key_index=positive, known=known, **call)
    loss_fn._estimate = right
    return found[0][0].log_partition, found[0][0].weights


def estimated(proposals: InBatch | Given, batches: list[tuple[int, ...]]) -> Tensor:
    """Mean of Z W over the batches an anchor is in, as a share of exp(beta s), by key; [8, 8].

    `Given`: a uniform draw beside the batch, every key once. NaN: a key that is no negative and has
    no weight.
    """
    queries, keys = (z[:8].double() for z in pairs()[:2])
    right = (BETA * queries @ keys.T).exp()
    right[torch.arange(8), PAIRS] = 0.0
    for anchor, known in enumerate(LABELS.tolist()):
        right[anchor, [key for key in known if key >= 0]] = 0.0
    total, visits = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 1)
    counts = torch.bincount(PAIRS, minlength=8)
    draws = [()] if isinstance(proposals, InBatch) else [(z,) for z in range(8)]
    for batch, drawn in itertools.product(batches, draws):
        loss_fn = ImportanceLoss(8, BETA, proposals, views="paired", num_keys=8, key_counts=counts)
        ids, pick = torch.tensor(drawn, dtype=torch.int64), torch.tensor(batch)
        call = {"draw": Draw(ids), "drawn": keys[ids]} if drawn else {}
        log_z, weights = estimate_of(loss_fn, pick, **call)
        found = (weights * log_z.exp()[:, None]).nan_to_num(0.0)
        columns = torch.cat([PAIRS[pick], ids]).expand(len(batch), -1)
        total.index_put_((pick[:, None], columns), found, accumulate=True)
        visits.index_add_(0, pick, torch.ones(len(batch), 1))
    return total / visits / right


SETS = list(itertools.combinations(range(8), 3))
REACHED = torch.bincount(PAIRS, minlength=8) > 0


@pytest.mark.filterwarnings("ignore:.*no negatives")
@pytest.mark.parametrize("proposals", [InBatch(), Given(alone=False)], ids=str)
def test_the_partition_is_unbiased_key_by_key(proposals) -> None:
    """All 56 batches of three pairs, and all draws beside them, are listed: nothing is random."""
    share = estimated(proposals, SETS)
    share = share[:, REACHED] if isinstance(proposals, InBatch) else share
    told = share[~share.isnan()]
    assert len(told) > 30 and torch.allclose(told, torch.ones_like(told))


@pytest.mark.filterwarnings("ignore:.*no negatives")
def test_the_share_of_all_pairs_is_flagged(monkeypatch) -> None:
    """Planted: count / m, as if the row's own pair could be another column of its batch."""
    right = columns.popularity

    def of_all(counts, *rest):
        return lambda ids: right(counts, *rest)(ids) + math.log(7 / 8)

    monkeypatch.setattr(columns, "popularity", of_all)
    share = estimated(InBatch(), SETS)[:, REACHED]
    assert share.nanmean().item() == pytest.approx(8 / 7)


@pytest.mark.filterwarnings("ignore:.*no negatives")
def test_batches_drawn_with_replacement_have_a_smaller_partition() -> None:
    """By (m - 1) / m: other columns may then be of the row's own pair, which is no negative."""
    repeated = list(itertools.product(range(8), repeat=2))
    share = estimated(InBatch(), repeated)[:, REACHED]
    assert torch.allclose(share[~share.isnan()], torch.tensor(7 / 8, dtype=torch.float64))


def counted_passes() -> list[float]:
    """Largest error of a row's log partition in each step of three shuffled passes, one by one."""
    queries, keys = (z.double() for z in pairs()[:2])
    loss_fn = ImportanceLoss(ANCHORS, BETA, InBatch(), views="paired", num_keys=KEYS)
    worst, generator = [], torch.Generator().manual_seed(0)
    for _ in range(3):
        for pick in torch.randperm(ANCHORS, generator=generator).split(8):
            value = loss_fn(queries[pick], keys[pick], pick, key_index=pick)
            logits = BETA * queries[pick] @ keys[pick].T
            positive = logits.diagonal().clone()
            log_z = logits.fill_diagonal_(-math.inf).logsumexp(1) + math.log((ANCHORS - 1) / 7)
            worst.append(abs(float((log_z - positive).mean() - value)))
    return worst


def test_keys_counted_on_the_way_are_as_likely_as_they_are() -> None:
    """Every key has one pair: the count is right in every step of every shuffled pass."""
    assert max(counted_passes()) < 1e-6


def test_several_keys_of_an_anchor_need_their_counts_given() -> None:
    """Ten anchors with four keys each, shown with all of them: counted, a pass has ten pairs."""
    first = torch.tensor([0, 10, 20, 31, 2])
    batch = SimpleNamespace(both=torch.zeros(1).double(), key_index=first, valid=torch.ones(5) > 0)
    counts = torch.zeros(41, dtype=torch.int64)
    counted = columns.popularity(counts, batch, 10, True)(first).exp()
    counts = columns.first_counts(torch.ones(40, dtype=torch.int64), 40)
    given = columns.popularity(counts, batch, 10, False)(first).exp()
    assert torch.allclose(given, torch.full_like(given, 1 / 39))
    assert torch.allclose(counted, torch.full_like(given, 1 / 9))


def off_target(size: int, passes: int) -> float:
    """Total variation between p and the law of a chain over counted keys, in the pass after these.

    One pair per key, batches of two, every place of the anchor in a shuffled pass listed.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(size - 1, dtype=torch.float64, generator=generator)
    kernel = torch.zeros(size - 1, size - 1, dtype=torch.float64)
    batch = SimpleNamespace(both=logits, key_index=torch.tensor([0, 1]), valid=torch.ones(2) > 0)
    for before in range(0, size, 2):
        counts = torch.full((size + 1,), passes)
        counts[2] += 1  # a held key that this pass has met; key 3 is one it has not
        counts[-1] = passes * size + before
        q = columns.popularity(counts, batch, size, True)(torch.tensor([1, 2, 3])).exp()
        assert float(q[0]) == pytest.approx(1 / (size - 1))
        for q_held, chance in ((q[2], 1 - before / (size - 2)), (q[1], before / (size - 2))):
            ratio = (logits[None] - logits[:, None]).exp() * q_held / q[0]
            kernel += chance * ratio.clamp(max=1) / (size - 1) / (size // 2)
    kernel.fill_diagonal_(0.0).diagonal().copy_(1 - kernel.sum(1))
    law = torch.linalg.matrix_power(kernel, 1 << 20)[0]
    return float((law - logits.softmax(0)).abs().sum() / 2)


def test_chains_over_keys_counted_on_the_way_are_a_little_off() -> None:
    """A held key was met once more than another, or not: less with every pair and every pass."""
    assert 0.005 < off_target(20, 1) < 0.01 and off_target(20, 10) < 0.002
    assert off_target(100, 1) < 0.003 and off_target(20, 10**6) < 1e-6


def test_a_batch_counted_whole_in_every_pass_is_flagged(monkeypatch) -> None:
    """Planted: at the start of the second pass each key of the batch then counts for two."""

    def whole(counts, batch, num_samples, counting):
        total = (counts[-1] + len(batch.index)).clamp(min=num_samples) * (1 - 1 / num_samples)
        return lambda ids: ((counts[ids] + 1) / total).log()

    monkeypatch.setattr(columns, "popularity", whole)
    worst = counted_passes()
    assert max(worst[:5]) < 1e-6 and worst[5] == pytest.approx(math.log(2 * 40 / 48), abs=1e-6)


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
    ((ids, z),) = leaves  # two carried ones, then the draws
    assert ids[:2].tolist() == [70, 70] and z.grad is not None
    assert (z.grad[0] == 0).all() and (z.grad[1] != 0).any()
    own = torch.isin(ids, key_of[index])
    assert (z.grad[2:][~own[2:]] != 0).any()


def test_in_batch_losses_take_the_batch_as_it_is() -> None:
    """DCL's value over a corpus is the plain one, and it makes no claim on the global loss."""
    queries, keys, key_of = pairs()
    i = torch.arange(6)
    corpus = DCLLoss(ANCHORS, BETA, views="paired", num_keys=KEYS)
    plain = DCLLoss(beta=BETA, views="paired", symmetric=False)
    value = corpus(queries[i], keys[i], i, key_index=i)
    assert value.item() == pytest.approx(plain(queries[i], keys[i], i).item(), abs=1e-6)
    assert "global_loss_low" not in corpus.info


def test_given_counts_are_as_precise_as_the_embeddings() -> None:
    """Their logarithm was taken in float32."""
    generator = torch.Generator().manual_seed(0)
    q, k = unit(torch.randn(2, 4, 3, dtype=torch.float64, generator=generator))
    counts, index = torch.tensor([3, 1, 2, 1, 1]), torch.arange(4)
    more = {"views": "paired", "num_keys": 5, "key_counts": counts, "denominator": "negatives"}
    value = ImportanceLoss(8, 2.0, InBatch(), **more)(q, k, index, key_index=index)
    terms = (2 * q @ k.T).exp() / (counts[:4].double() / 7)
    terms.fill_diagonal_(0)
    exact = (terms.sum(1) / 3).log() - 2 * torch.linalg.vecdot(q, k)
    assert abs(value - exact.mean()) < 1e-12


@pytest.mark.parametrize("proposals", [InBatch(), Uniform(4)])
def test_counts_that_lack_a_key_of_the_batch_are_refused(proposals) -> None:
    """Its probability would be 0, and the column dropped from every row without a word."""
    queries, keys, key_of = pairs()
    index, counts = torch.arange(4), torch.bincount(key_of, minlength=KEYS)
    counts[key_of[2]] = 0
    given = {"views": "paired", "num_keys": KEYS, "key_counts": counts}
    loss_fn = ImportanceLoss(ANCHORS, BETA, proposals, **given)
    call = {"key_index": key_of[index], "encode": lambda ids: keys[ids]}
    with pytest.raises(ValueError, match=rf"counts none of keys \[.*{key_of[2]}.*count these"):
        loss_fn(queries[index], keys[key_of[index]], index, **call)
    loss_fn.eval()(queries[index], keys[key_of[index]], index, **call)  # pairs that are held out
