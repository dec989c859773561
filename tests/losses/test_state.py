"""State: saved and loaded exactly, moved but never cast or broadcast, written in any mode."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from losses_under_test import METHODS, M, battery, case_name, data, run, same_state, snapshot

import negchain
from negchain import DCLLoss, EMC2Loss, InfoNCELoss, Informed, NegativeCacheLoss, SogCLRLoss


def train(loss_fn, net, optimizer, items, steps) -> list[float]:
    values = []
    for step in steps:
        index = torch.randperm(M, generator=torch.Generator().manual_seed(step))[:6]
        optimizer.zero_grad()
        value = run(loss_fn, net, items, index)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_k_plus_k_steps_equal_2k(case) -> None:
    def fresh():
        net, items = data()
        loss_fn = METHODS[case[0]].build(5.0, **case[1])
        return loss_fn, net, torch.optim.Adam(net.parameters(), lr=0.02), items

    whole = fresh()
    expected = train(*whole, range(6))
    first = fresh()
    got = train(*first, range(3))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first[:3]], file)
    file.seek(0)
    second = fresh()
    for part, state in zip(second[:3], torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert same_state(snapshot(first[0]), snapshot(second[0]))
    got += train(*second, range(3, 6))
    assert got == expected
    assert same_state(snapshot(whole[0]), snapshot(second[0]))
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mh-cached", "mh-informed", "negcache", "sogclr", "mh-corpus"])
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


# ---------------------------------------------------------------- loading what does not fit


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_a_state_of_another_size_is_refused(case) -> None:
    loss_fn = METHODS[case[0]].build(5.0, **case[1])
    other = METHODS[case[0]].build(5.0, num_samples=M + 1, **case[1])
    before = snapshot(other)
    with pytest.raises(RuntimeError, match="another data set") as told:
        other.load_state_dict(loss_fn.state_dict())
    assert "build the loss as" in str(told.value)
    assert same_state(before, snapshot(other))


@pytest.mark.parametrize("loss_class", [EMC2Loss, SogCLRLoss, NegativeCacheLoss, InfoNCELoss])
def test_a_state_of_another_corpus_is_refused(loss_class) -> None:
    """As many anchors, but 500 keys into 400: chains would hold positions that do not exist."""
    large, small = (loss_class(40, views="paired", num_keys=k) for k in (500, 400))
    with pytest.raises(RuntimeError, match="another data set"):
        small.load_state_dict(large.state_dict())
    with pytest.raises(RuntimeError, match="another data set"):
        large.load_state_dict(small.state_dict())
    with pytest.raises(RuntimeError, match="another data set|Missing|Unexpected"):
        small.load_state_dict(loss_class(40, views="paired").state_dict())
    small.load_state_dict(loss_class(40, views="paired", num_keys=400).state_dict())


def test_a_state_that_lacks_something_is_refused() -> None:
    state = EMC2Loss(M).state_dict()
    del state["chains.states"]
    with pytest.raises(RuntimeError, match="Missing.*chains.states"):
        EMC2Loss(M).load_state_dict(state)
    with pytest.raises(RuntimeError, match="(?s)Unexpected.*log_u: .*build the loss as"):
        EMC2Loss(M).load_state_dict(EMC2Loss(M).state_dict() | SogCLRLoss(M).state_dict())


@pytest.mark.parametrize("loss_fn", [EMC2Loss(M), EMC2Loss(M, carried="cached"), SogCLRLoss(M)])
def test_weights_without_a_state_are_loaded_where_strict_is_false(loss_fn) -> None:
    """A pretrained encoder, into a model that holds its loss."""
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "loss": loss_fn})
    pretrained = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2)}).state_dict()
    before = snapshot(loss_fn)
    with pytest.raises(RuntimeError, match='Missing key.*"loss.step"'):
        model.load_state_dict(pretrained)
    missing = model.load_state_dict(pretrained, strict=False).missing_keys
    assert torch.equal(model["net"].weight, pretrained["net.weight"])
    assert missing == [f"loss.{name}" for name in loss_fn.state_dict()]
    assert same_state(before, snapshot(loss_fn))
    with pytest.raises(RuntimeError, match="another data set"):  # as weights of another shape are
        other = torch.nn.ModuleDict({"loss": EMC2Loss(M + 1)})
        model.load_state_dict(other.state_dict(), strict=False)


# ---------------------------------------------------------------- wrappers and modes


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_state_keeps_its_type_and_is_no_buffer(case) -> None:
    """An average in bfloat16 stands still: 1 + 1/1000 is 1."""
    net, items = data()
    loss_fn = METHODS[case[0]].build(5.0, **case[1])
    run(loss_fn, net, items, torch.arange(6))
    before = snapshot(loss_fn)
    holder = torch.nn.ModuleDict({"net": net, "loss": loss_fn})
    assert not any(name.startswith("loss") for name, _ in holder.named_buffers())
    assert {f"loss.{name}" for name in before} <= set(holder.state_dict())
    for cast in (torch.bfloat16, torch.float64, torch.float16):
        holder.to(cast)
        assert same_state(before, snapshot(loss_fn)), cast
    assert all(t.device.type == "meta" for t in copy.deepcopy(loss_fn).to("meta").state_tensors())


def test_a_loss_whose_beta_was_computed_can_be_copied() -> None:
    """The FAQ's learned logarithm: weights averaged from some step on copy the loss there."""
    net, items = data()
    loss_fn, log_beta = EMC2Loss(M, 5.0), torch.nn.Parameter(torch.tensor(2.0))
    loss_fn.beta = log_beta.exp()
    run(loss_fn, net, items, torch.arange(6)).backward()
    assert log_beta.grad is not None
    for copied in (copy.deepcopy(loss_fn), pickle.loads(pickle.dumps(loss_fn))):
        assert torch.equal(copied.beta, loss_fn.beta) and not copied.beta.requires_grad
        assert same_state(snapshot(loss_fn), snapshot(copied))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_state_is_of_float32_whatever_the_default_is(kind) -> None:
    """Models are built under a default of bfloat16, and a loss beside them."""
    builders = [negchain.SogCLRLoss, negchain.ImportanceLoss]
    builders += [functools.partial(negchain.EMC2Loss, carried="cached")]
    index, z = torch.arange(4), torch.randn(8, 4)
    torch.set_default_dtype(kind)
    try:
        for build in builders:
            loss_fn = build(20)
            loss_fn(z[:4], z[4:], index, encode=lambda ids: z[ids % 8])
            floats = [s.dtype for s in loss_fn.state_tensors() if s.is_floating_point()]
            assert floats == [torch.float32], build
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_average_moves_on_after_a_cast() -> None:
    net, items = data()
    loss_fn = SogCLRLoss(M, 5.0, gamma=0.001).to(torch.bfloat16)
    run(loss_fn, net, items, torch.arange(6))
    first = loss_fn.log_u.clone()
    run(loss_fn, net, items + 0.5, torch.arange(6))
    assert loss_fn.log_u.dtype == torch.float32
    assert (loss_fn.log_u != first)[0, :6].all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: EMC2Loss(M, carried="cached"),
        lambda: EMC2Loss(M, proposals=Informed()),
        lambda: EMC2Loss(M, denominator="all"),
        lambda: NegativeCacheLoss(M),
        lambda: SogCLRLoss(M),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_first_call_under_inference_mode(build, training) -> None:
    """Tables that wait for their width are made then, and must be ordinary tensors."""
    net, items = data()
    loss_fn = build().train(training)
    with torch.inference_mode():
        run(loss_fn, net, items, torch.arange(6))
    loss_fn.train()
    for _ in range(2):
        run(loss_fn, net, items, torch.arange(4, 10)).backward()
    assert not any(tensor.is_inference() for tensor in loss_fn.state_tensors())
    build().load_state_dict(loss_fn.state_dict())


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:There is a performance drop")
@pytest.mark.parametrize(
    "build",
    [
        InfoNCELoss,
        DCLLoss,
        negchain.SogCLRLoss,
        negchain.EMC2Loss,
        negchain.LargeBatchEMC2Loss,
        functools.partial(negchain.EMC2Loss, kernel="isir", denominator="all"),
        functools.partial(negchain.EMC2Loss, proposals=negchain.Uniform(3)),
        negchain.NegativeCacheLoss,
        negchain.ImportanceLoss,
        negchain.TopKLoss,
    ],
    ids=str,
)
def test_torch_func(build) -> None:
    """Per-sample tools: grad and vmap of a loss in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 2, 6, 4, generator=generator, dtype=torch.float64)
    items = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    loss_fn = build(20, 5.0).eval()

    def value(pair):
        return loss_fn(pair[0], pair[1], torch.arange(6), encode=lambda ids: items[ids])

    expected = []
    for pair in z:
        leaf = pair.clone().requires_grad_()
        value(leaf).backward()
        expected.append(leaf.grad)
    got = torch.func.vmap(torch.func.grad(value))(z)
    assert (got - torch.stack(expected)).abs().max() < 1e-12
    assert (torch.func.grad(value)(z[0]) - expected[0]).abs().max() < 1e-12
    assert (torch.func.vmap(value)(z) - torch.stack([value(p) for p in z])).abs().max() < 1e-12
    other = torch.func.vmap(lambda second: value((z[0, 0], second)))(z[:, 1])  # a frozen tower
    assert abs(other[0] - value(z[0])) < 1e-12
    assert loss_fn.info["nonfinite_rows"] == 0


@pytest.mark.parametrize("more", [{}, {"augmentations": 2}], ids=str)
def test_vmap_over_batches_of_different_samples(more) -> None:
    """Each batch has positions of its own: what its chains hold depends on them."""
    z, items = torch.randn(3, 2, 6, 4), torch.randn(40, 4)
    index, views = torch.arange(18).view(3, 6), torch.randint(2, (3, 2, 6))
    loss_fn = negchain.EMC2Loss(20, 5.0, **more)
    encode = lambda ids: items[ids]  # noqa: E731
    which = [tuple(v) if more else None for v in views]
    for batch in range(2):  # some chains have moved, some have not
        loss_fn(*z[batch], index[batch], augmentation=which[batch], encode=encode)
    loss_fn.eval()

    def value(z, index, views):
        which = (views[0], views[1]) if more else None
        return loss_fn(z[0], z[1], index, augmentation=which, encode=encode)

    one_by_one = torch.stack([value(*each) for each in zip(z, index, views, strict=True)])
    torch.testing.assert_close(torch.func.vmap(value)(z, index, views), one_by_one)


@pytest.mark.parametrize("build", [negchain.InfoNCELoss, negchain.DCLLoss])
def test_torch_func_in_training(build) -> None:
    """A loss without state changes none, in training mode neither."""
    z, loss_fn = torch.randn(2, 6, 4), build()
    grad = torch.func.grad(lambda first: loss_fn(first, z[1]))(z[0])
    assert torch.isfinite(grad).all() and grad.any()


def test_a_loss_that_was_called_is_saved_whole() -> None:
    """torch.save of a model, or a process that is spawned: numbers of the last call stay behind."""
    loss_fn, items = EMC2Loss(20, 5.0), torch.randn(20, 4)
    loss_fn(items[:6], items[6:12], torch.arange(6), encode=lambda ids: items[ids])
    other = pickle.loads(pickle.dumps(loss_fn))
    assert torch.equal(other.chains.states, loss_fn.chains.states) and other.step == 1
    assert "carried_mass" in loss_fn.info and "carried_mass" not in other.info


@pytest.mark.parametrize("case", battery(), ids=case_name)
def test_a_zero_vector_has_no_gradient(case) -> None:
    """Not one of length 1e12: a vector without direction cannot be turned."""
    net, items = data()
    loss_fn = METHODS[case[0]].build(5.0, **case[1])
    leaves = []

    def zero_third(x):
        z = net(x)
        mask = torch.ones(*z.shape[:-1], 1)
        mask[2 % len(z)] = 0
        z = (z * mask).detach().requires_grad_()
        leaves.append(z)
        return z

    run(loss_fn, zero_third, items, torch.arange(5)).backward()
    for leaf in leaves:
        if leaf.grad is not None:
            assert torch.isfinite(leaf.grad).all() and leaf.grad.abs().max() < 1e4
            assert (leaf.grad[2 % len(leaf)] == 0).all()


def test_another_data_set_takes_the_weights_and_leaves_the_state() -> None:
    """Fine-tuning: the checkpoint of a model and its loss, loaded where the data is another."""

    def build(loss_fn) -> torch.nn.Module:
        return torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "loss": loss_fn})

    beta = torch.nn.Parameter(torch.tensor(7.0))
    old = build(EMC2Loss(30, beta, proposals=Informed(), denominator="all")).state_dict()
    for other in (EMC2Loss, SogCLRLoss, NegativeCacheLoss, InfoNCELoss):  # whatever comes next
        new = build(other(50, torch.nn.Parameter(torch.tensor(3.0))))
        with pytest.raises(RuntimeError):
            new.load_state_dict(old)
        before = snapshot(new["loss"])
        new["loss"].skip_saved_state()
        new.load_state_dict(old)
        after = snapshot(new["loss"])
        assert torch.equal(new["net"].weight, old["net.weight"]) and new["loss"].beta.item() == 7
        assert same_state({**before, "beta": after["beta"]}, after)


def test_a_replica_of_data_parallel_refuses() -> None:
    loss_fn, z, index = EMC2Loss(10), torch.randn(2, 4, 3), torch.arange(4)
    replica = loss_fn._replicate_for_data_parallel()
    for ask in (
        lambda: replica.request(index),
        lambda: replica(*z, index, encode=z[0].__getitem__),
    ):
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            ask()
    loss_fn(*z, index, encode=lambda ids: torch.randn(len(ids), 3))
