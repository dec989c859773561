"""InfoNCE, DCL and SogCLR against closed formulas and against lightly (taxonomy 2 and 9)."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import negchain.losses.sogclr as sogclr
from negchain import DCLLoss, InBatch, InfoNCELoss, SogCLRLoss, Uniform
from negchain.losses.batch import Call, check_batch, lay_out
from negchain.weights import moving_log_mean, sogclr_weights
from oracles import contrastive_dense, contrastive_loops, unit

IN_BATCH = [(InfoNCELoss, "all"), (DCLLoss, "negatives")]
IDS = [4, 0, 4, 2, 1, 3]
KNOWN = [[2, -1], [-1, -1], [-1, -1], [-1, -1], [3, 0], [-1, -1]]
LAYOUTS = [("shared", True), ("shared", False), ("paired", True), ("paired", False)]


@pytest.mark.parametrize("ids, known", [(None, None), (IDS, None), (IDS, KNOWN)])
@pytest.mark.parametrize("views, symmetric", LAYOUTS)
@pytest.mark.parametrize("loss_class, denominator", IN_BATCH)
def test_closed_formula(pair, loss_class, denominator, views, symmetric, ids, known) -> None:
    ours = [t.clone().requires_grad_() for t in pair]
    dense = [t.clone().requires_grad_() for t in pair]
    betas = [nn.Parameter(torch.tensor(4.2, dtype=torch.float64)) for _ in range(2)]
    loss_fn = loss_class(None, betas[0], views=views, symmetric=symmetric)
    value = loss_fn(
        *ours,
        None if ids is None else torch.tensor(ids),
        known=None if known is None else torch.tensor(known),
    )
    layout = {"views": views, "symmetric": symmetric, "denominator": denominator}
    expected = contrastive_dense(*dense, betas[1], ids=ids, known=known, **layout)
    value.backward()
    expected.backward()
    assert abs(value.item() - expected.item()) < 1e-12
    loops = contrastive_loops(*map(unit, pair), 4.2, ids=ids, known=known, **layout)
    assert abs(value.item() - loops) < 1e-12
    for a, b in zip([*ours, betas[0]], [*dense, betas[1]], strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-10


@pytest.mark.parametrize("views", ["shared", "paired"])
@pytest.mark.parametrize("loss_class, denominator", IN_BATCH)
def test_one_call_may_go_one_way(pair, loss_class, denominator, views) -> None:
    """As a loss that is not symmetric, and the next call is symmetric again."""
    both, single = (loss_class(None, 4.2, views=views, symmetric=s) for s in (True, False))
    found = [both(*pair, IDS, known=KNOWN, one_way=way).item() for way in (False, True, False)]
    assert found[1] == single(*pair, IDS, known=KNOWN).item() != found[0] == found[2]
    assert both(*pair, IDS, one_way=True).item() == single(*pair, IDS).item()


def test_a_loss_with_state_of_both_directions_goes_both_ways(pair) -> None:
    for loss_fn in (SogCLRLoss(9, views="paired"), InfoNCELoss(9)):
        with pytest.raises(ValueError, match="num_samples=9; build the loss with symmetric=False"):
            loss_fn(*pair, IDS, one_way=True)


@pytest.mark.parametrize("loss_class, name", [(InfoNCELoss, "NTXentLoss"), (DCLLoss, "DCLLoss")])
@pytest.mark.parametrize("size, beta", [(2, 2.0), (7, 14.28), (33, 5.0)])
def test_equals_lightly(loss_class, name, size, beta) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside lightly's own imports
        import lightly.loss
    generator = torch.Generator().manual_seed(size)
    z = torch.randn(2, size, 9, generator=generator, dtype=torch.float64)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    value = loss_class(None, beta)(ours[0], ours[1])
    other = getattr(lightly.loss, name)(temperature=1 / beta)(theirs[0], theirs[1])
    value.backward()
    other.backward()
    assert abs(value.item() - other.item()) < 1e-10
    assert (ours.grad - theirs.grad).abs().max() < 1e-10


def test_repeated_positions_are_labels_of_pytorch_metric_learning() -> None:
    """Its NTXentLoss, whose positive pairs are the two views of a sample: negatives by label."""
    from pytorch_metric_learning import losses as pml

    size, beta = 9, 14.28
    index = torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(0))
    z = torch.randn(2, size, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    value = InfoNCELoss(None, beta)(ours[0], ours[1], index)
    rows, labels = torch.arange(2 * size), index.repeat(2)
    negatives = torch.where(labels[:, None] != labels)
    pairs = (rows, (rows + size) % (2 * size), *negatives)
    other = pml.NTXentLoss(temperature=1 / beta)(theirs.flatten(0, 1), indices_tuple=pairs)
    value.backward()
    other.backward()
    assert abs(value.item() - other.item()) < 1e-10
    assert (ours.grad - theirs.grad).abs().max() < 1e-10


@pytest.mark.parametrize("views, symmetric", LAYOUTS)
def test_sogclr_with_gamma_1_is_dcl(pair, views, symmetric) -> None:
    num_samples, index = 50, torch.tensor(IDS)
    multiplicity = 2 if views == "shared" else 1
    sogclr = SogCLRLoss(num_samples, 4.2, gamma=1.0, views=views, symmetric=symmetric)
    sogclr(pair[1], pair[0], index)  # whatever happened before does not matter at gamma = 1
    ours = [t.clone().requires_grad_() for t in pair]
    dcl = [t.clone().requires_grad_() for t in pair]
    value = sogclr(*ours, index)
    other = DCLLoss(None, 4.2, views=views, symmetric=symmetric)(*dcl, index)
    value.backward()
    other.backward()
    for a, b in zip(ours, dcl, strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-10
    seen = [multiplicity * sum(a != b for b in IDS) for a in IDS]  # K of each row
    shift = sum(math.log(multiplicity * (num_samples - 1) / k) for k in seen) / len(seen)
    assert abs(value.item() - other.item() - shift) < 1e-12


def test_sogclr_first_visit_starts_at_the_batch(pair) -> None:
    index = torch.arange(6)
    gradients = []
    for loss_fn in (SogCLRLoss(20, 4.2, gamma=0.3), DCLLoss(beta=4.2)):
        z_a, z_b = (t.clone().requires_grad_() for t in pair)
        loss_fn(z_a, z_b, index).backward()
        gradients.append(z_a.grad)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10


@pytest.mark.parametrize("denominator", ["negatives", "all"])
def test_sogclr_recursion_in_plain_exponentials(denominator) -> None:
    """Ten visits at small beta: log u, weights and gradient from sums of exp, no logarithms."""
    size, num_samples, beta, gamma = 4, 9, 1.5, 0.4
    generator = torch.Generator().manual_seed(3)
    loss_fn = SogCLRLoss(num_samples, beta, gamma, denominator=denominator)
    loss_fn.log_u = loss_fn.log_u.double()
    u: dict[int, float] = {}
    for _ in range(10):
        index = torch.randperm(num_samples, generator=generator)[:size]
        z = torch.randn(2, size, 3, generator=generator, dtype=torch.float64)
        z.requires_grad_()
        loss_fn(z[0], z[1], index).backward()
        leaf = z.detach().clone().requires_grad_()
        both = unit(torch.cat([leaf[0], leaf[1]]))
        surrogate = torch.zeros((), dtype=torch.float64)
        new: dict[int, list[float]] = {}
        for row in range(2 * size):
            item = int(index[row % size])
            columns = [j for j in range(2 * size) if j % size != row % size]
            exponentials = [
                math.exp(beta * float(both[row].detach() @ both[j].detach())) for j in columns
            ]
            mean = sum(exponentials) / len(columns)
            mixed = mean if item not in u else (1 - gamma) * u[item] + gamma * mean
            new.setdefault(item, []).append(mixed)
            positive = both[row] @ both[(row + size) % (2 * size)]
            pull = 1.0
            if denominator == "all":
                negatives = 2 * (num_samples - 1) * mixed
                pull = negatives / (negatives + math.exp(beta * positive.item()))
            for e, j in zip(exponentials, columns, strict=True):
                surrogate = surrogate + pull * beta * e / (len(columns) * mixed) * (
                    both[row] @ both[j]
                )
            surrogate = surrogate - pull * beta * positive
        (surrogate / (2 * size)).backward()
        assert (z.grad - leaf.grad).abs().max() < 1e-10
        u.update({item: sum(values) / 2 for item, values in new.items()})
        for item, value in u.items():
            assert abs(loss_fn.log_u[0, item].exp().item() - value) < 1e-12


def test_sogclr_stores_the_mean_of_both_views(monkeypatch) -> None:
    """In log space; what is not finite or not valid stays."""
    loss_fn, index, z = SogCLRLoss(4), torch.tensor([2, 0, 1]), torch.randn(3, 5)
    batch = check_batch(loss_fn, Call(z, z + 1, index))
    (side,) = lay_out(loss_fn, batch)
    new = torch.tensor([1.0, -math.inf, 3.0, 2.0, -math.inf, 3.0])  # view after view
    monkeypatch.setattr(sogclr, "sogclr_weights", lambda logits, *given: (logits, new))
    _, learn = loss_fn._estimate(0, side, torch.zeros(6, side.excluded.shape[1]))
    assert torch.equal(loss_fn.log_u, torch.full((1, 4), -math.inf))
    learn(replace(batch, valid=torch.tensor([True, True, False])))
    expected = math.log((math.exp(1.0) + math.exp(2.0)) / 2)
    assert loss_fn.log_u[0].tolist() == pytest.approx([-math.inf, -math.inf, expected, -math.inf])


def test_sogclr_average_reaches_the_mean() -> None:
    """With the same batch again and again u is the batch's mean, whatever gamma."""
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slow, once = (SogCLRLoss(5, 3.0, gamma=g) for g in (0.2, 1.0))
    once(z[0], z[1], torch.arange(5))
    slow(z[1], z[1].flip(0), torch.arange(5))  # a wrong start
    for _ in range(200):
        slow(z[0], z[1], torch.arange(5))
    assert (slow.log_u - once.log_u).abs().max() < 1e-6


def test_moving_log_mean() -> None:
    old, new = torch.tensor([0.3, -2.0]).double(), torch.tensor([1.0, 4.0]).double()
    mixed = moving_log_mean(old, new, 0.25)
    assert torch.allclose(mixed.exp(), 0.75 * old.exp() + 0.25 * new.exp(), atol=1e-14)
    inf = torch.full((2,), -math.inf)
    assert torch.equal(moving_log_mean(inf, torch.tensor([1.0, -math.inf]), 0.5)[:1], torch.ones(1))
    assert torch.equal(moving_log_mean(torch.ones(2), inf, 0.5), torch.ones(2))
    huge = moving_log_mean(torch.tensor([1000.0]), torch.tensor([999.0]), 0.5)
    assert torch.isfinite(huge).all()
    weights, log_u = sogclr_weights(torch.full((1, 3), -math.inf), torch.tensor([-math.inf]), 0.5)
    assert torch.equal(weights, torch.zeros(1, 3)) and log_u.item() == -math.inf


class PlainGCLoss:
    """LibAUC's `GCLoss_v2` from its formulas, in loops over rows: float64, two encoders.

    h_ij = s_ij - s_ii,   u_i <- (1 - gamma) u_i + gamma mean_{j != i} exp(h_ij / tau)
    L = 1/2 sum over both directions of mean_i sum_{j != i} [exp(h_ij / tau) / u_i] h_ij
    """

    def __init__(self, size: int, tau: float, gamma: float) -> None:
        self.u = [[0.0] * size for _ in range(2)]
        self.tau, self.gamma = tau, gamma

    def __call__(self, z_a: torch.Tensor, z_b: torch.Tensor, index: list[int]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for u, (a, b) in zip(self.u, ((z_a, z_b), (z_b, z_a)), strict=True):
            for i, item in enumerate(index):
                h = [unit(a[i]) @ unit(b[j]) - unit(a[i]) @ unit(b[i]) for j in range(len(index))]
                e = {j: math.exp(h[j].item() / self.tau) for j in range(len(index)) if j != i}
                g = sum(e.values()) / len(e)
                u[item] = g if u[item] == 0 else (1 - self.gamma) * u[item] + self.gamma * g
                total = total + sum(e[j] / u[item] * h[j] for j in e) / len(index) / 2
        return total


def test_sogclr_is_libaucs_on_a_first_visit_only() -> None:
    """Up to their factor tau K; later sum W is not 1, and what u remembers differs."""
    beta, gamma, size, generator = 4.2, 0.4, 4, torch.Generator().manual_seed(0)
    theirs, ours = PlainGCLoss(size, 1 / beta, gamma), SogCLRLoss(size, beta, gamma, views="paired")
    apart = []
    for _ in range(3):
        index = torch.randperm(size, generator=generator)
        z = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
        (expected,) = torch.autograd.grad(theirs(z[0], z[1], index.tolist()), z)
        (got,) = torch.autograd.grad(ours(z[0], z[1], index), z)
        apart.append(float((got * 3 / beta - expected).norm() / expected.norm()))
    assert apart[0] < 1e-6 and min(apart[1:]) > 0.1, apart


def test_sogclr_of_shared_views_is_libaucs() -> None:
    """`GCLoss_v1` in loops: equal at every visit, up to its factor 2 tau and float32 averages.

    (LibAUC's own classes gave these numbers where they were installed: 2026-11-18, version 2.0.1.)

    u_i <- (1 - gamma) u_i + gamma mean_j exp(s_ij / tau) for each view, their mean is kept
    L = mean over items, sum over views of sum_j [exp(s_ij / tau) / (K u_i)] s_ij - s_i+
    """
    beta, gamma, generator = 4.2, 0.4, torch.Generator().manual_seed(0)
    ours, u = SogCLRLoss(6, beta, gamma), [0.0] * 6
    for _ in range(6):
        index = torch.randperm(6, generator=generator)[:3]
        z = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
        theirs, before = torch.zeros((), dtype=torch.float64), list(u)
        for i, item in enumerate(index.tolist()):
            u[item] = 0.0
            for a in (0, 1):
                others = [z[v, j] for v in (0, 1) for j in range(3) if j != i]
                s = [unit(z[a, i]) @ unit(other) for other in others]
                e = [math.exp(beta * one.item()) for one in s]
                new = sum(e) / len(e)
                new = (1 - gamma) * before[item] + gamma * new if before[item] else new
                u[item] += new / 2
                pushed = sum(one / (len(e) * new) * t for one, t in zip(e, s, strict=True))
                theirs = theirs + (pushed - unit(z[a, i]) @ unit(z[1 - a, i])) / 3
        (expected,) = torch.autograd.grad(theirs, z)
        (got,) = torch.autograd.grad(ours(z[0], z[1], index), z)
        assert torch.allclose(got * 2 / beta, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("proposals", [Uniform(32), Uniform(32, alone=True), InBatch()], ids=str)
def test_sogclr_at_rate_one_saturates_against_the_partition_of_its_value(proposals) -> None:
    """Excluded columns are draws too: left out, the partition was up to 1.7 times too large."""
    counts, positive = torch.tensor([3, 1, 1, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 0, 1, 2, 3])
    loss_fn = SogCLRLoss(
        8, 3.0, 1.0, views="paired", num_keys=8, key_counts=counts, proposals=proposals,
        denominator="all",
    )  # fmt: skip
    queries, keys = torch.randn(6, 4), torch.randn(8, 4)
    found, estimate = [], loss_fn._estimate

    def watched(*args):
        found.append(estimate(*args))
        return found[-1]

    loss_fn._estimate = watched
    known = torch.tensor([[4, 5]]).expand(6, -1)
    call = {"key_index": positive, "known": known, "encode": lambda ids: keys[ids]}
    loss_fn(queries, keys[positive], torch.arange(6), **call)
    ((made, _),) = found
    assert torch.allclose(made.log_saturation, made.log_partition, atol=1e-5)
