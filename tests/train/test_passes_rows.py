"""A backward pass over some of the images that were embedded: `score` and `backward_rows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_passes import (
    BF16,
    KINDS,
    NETS,
    all_nets,
    assert_equal,
    captured_adam,
    loss_of,
    normal,
    weights_of,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from negchain.encoders import Encoder, build_encoder
from negchain.fast.layers import Recorded, recorded
from negchain.train.passes import OverlappedPass, PlainPass

FIRST, COUNT = 2, 7  # images that are always trained, and all
SOURCE = (4, 1, 3)  # of the others: two that move, one at its own place
ULP = 2**-8  # of bf16: numbers that were summed in another order are rounded to neighbours


def step_of_rows(
    passes: PlainPass, pixels: Tensor, source: tuple[int, ...] = SOURCE, seed: int = 3
) -> Tensor:
    """Embeddings of all images, after a step in which those at `source` were trained."""
    passes.begin()
    z = passes.score(pixels)
    assert not z.requires_grad
    held = z.clone()  # the backward pass overwrites some of it
    grad = normal(FIRST + len(source), z.shape[1], seed=seed).to(z)
    passes.backward_rows(FIRST, torch.tensor(source, device=z.device), grad)
    passes.finish()
    return held


def assert_rows_are_plain(
    make: Callable[[], nn.Module], side: int, adam: bool, rounding: float, steps: int
) -> None:
    """Both passes from the same weights every step: embeddings to the bit, changes to `rounding`.

    One optimizer's rounding of weights, 2^-24 of their size, comes beside.
    """
    nets = {kind: make() for kind in KINDS}
    passes: dict[str, PlainPass] = {}
    for kind, net in nets.items():
        # a large eps: Adam's steps are then in proportion to gradients
        trained = [p for p in net.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(trained, lr=1.0)
        passes[kind] = KINDS[kind](net, captured_adam(net, eps=1.0) if adam else sgd, BF16)
    for step in range(steps):
        nets["overlapped"].load_state_dict(nets["plain"].state_dict())
        before = weights_of(nets["plain"])
        x = normal(COUNT, 3, side, side, seed=step)
        z, again = (step_of_rows(p, x.clone(), seed=20 + step) for p in passes.values())
        assert z.equal(again)
        actual, expected = (weights_of(nets[kind]) for kind in ("overlapped", "plain"))
        moved = 0.0
        for name in expected:
            far, change = (actual[name] - expected[name]).norm(), expected[name] - before[name]
            allowed = rounding * change.norm() + 2**-23 * expected[name].norm()
            assert far <= allowed, (name, float(far / change.norm()))
            moved += float(change.norm())
        assert moved > 0
        for mine, theirs in zip(*(net.buffers() for net in nets.values()), strict=True):
            assert mine.equal(theirs)  # running statistics


@all_nets
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
def test_rows_of_networks(make, adam) -> None:
    """To the bit but for a sum of two bf16 gradients and for Adam's own arithmetic."""
    rounding = ULP if "tied" in make.__name__ else 1e-5 if adam else 0.0
    assert_rows_are_plain(make, 8, adam, rounding, steps=3)


def resnet(size: int = 32, **settings: Any) -> Encoder:
    return build_encoder("resnet18", image_size=size, **settings)


@pytest.mark.parametrize(
    "size, norm, projection, adam",
    [
        (32, "none", "linear", False),
        (32, "none", "mlp", True),
        (66, "none", "linear", True),
        (66, "none", "mlp", False),
        (32, "group", "linear", True),
        (32, "batch", "mlp", False),
    ],
)
def test_rows_of_encoders(size, norm, projection, adam) -> None:
    """A recorded pass sums a weight's gradient over fewer images, in another order."""
    rounding = ULP if norm == "none" else 1e-5 if adam else 0.0
    make = lambda: resnet(size, norm=norm, projection=projection)  # noqa: E731
    assert_rows_are_plain(make, size, adam, rounding, steps=2)


def _with_dropout() -> nn.Module:
    encoder = resnet(projection="mlp")
    encoder.projector.insert(1, nn.Dropout(0.5))
    return encoder


def _with_frozen(name: str) -> nn.Module:
    encoder = resnet()
    encoder.get_parameter(name).requires_grad_(False)
    return encoder


def _with_batch_norm_behind() -> nn.Module:
    encoder = resnet()
    encoder.projector = nn.Sequential(encoder.projector, nn.BatchNorm1d(512))
    return encoder


class Noisy(Encoder):
    """An encoder with a forward pass of its own."""

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(images))


def _noisy() -> nn.Module:
    encoder = resnet()
    encoder.__class__ = Noisy
    return encoder


RECORDS: dict[str, tuple[bool, Callable[[], nn.Module]]] = {
    "resnet18, 32 px": (True, resnet),
    "resnet18, 66 px, mlp": (True, lambda: resnet(66, projection="mlp")),
    "resnet50": (True, lambda: build_encoder("resnet50", image_size=16)),
    "group norm": (False, lambda: resnet(norm="group")),
    "batch norm": (False, lambda: resnet(norm="batch")),
    "small-cnn": (False, lambda: build_encoder("small-cnn", image_size=8)),
    "ViT": (False, lambda: build_encoder("vit_tiny_patch16_224", image_size=32)),
    "dropout": (False, _with_dropout),
    "dropout in forward": (False, _noisy),
    "batch norm behind": (False, _with_batch_norm_behind),
    "a frozen kernel": (False, lambda: _with_frozen("backbone.layer3.0.conv1.weight")),
    "a frozen bias": (False, lambda: _with_frozen("projector.bias")),
    **{make.__name__: (False, make) for make in NETS},
}


@pytest.mark.parametrize("kind", RECORDS)
def test_which_encoders_are_recorded(kind) -> None:
    records, make = RECORDS[kind]
    net = make()
    trained = [p for p in net.parameters() if p.requires_grad]
    passes = OverlappedPass(net, torch.optim.SGD(trained, lr=1.0), BF16)
    assert passes._records == records


@pytest.mark.parametrize(
    "make", [_with_dropout, lambda: _with_frozen("backbone.layer3.0.conv1.weight")],
    ids=["dropout", "frozen"],
)  # fmt: skip
def test_rows_of_encoders_that_are_not_recorded(make) -> None:
    """With the same coins: the pass is made once."""

    def seeded() -> nn.Module:
        net = make()
        net.register_forward_pre_hook(lambda *given: torch.manual_seed(5) and None)
        return net

    assert_rows_are_plain(seeded, 32, False, 0.0, steps=1)


class Operations(TorchDispatchMode):
    """Notes the operations that do more than look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.computed.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def changes_of(passes: PlainPass, step: Callable[[PlainPass], Any]) -> dict[str, Tensor]:
    """What a step changes; the weights are put back."""
    before = weights_of(passes.encoder)
    step(passes)
    found = {name: w - before[name] for name, w in weights_of(passes.encoder).items()}
    with torch.no_grad():
        for name, weight in passes.encoder.named_parameters():
            weight.copy_(before[name])
    return found


def far_apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The worst weight's distance, relative."""
    return max(float((some[name] - others[name]).norm() / others[name].norm()) for name in others)


@pytest.fixture
def recording() -> OverlappedPass:
    net = resnet(projection="mlp")
    return OverlappedPass(net, torch.optim.SGD(net.parameters(), lr=1.0), BF16)


def fresh_pass(passes: PlainPass, pixels: Tensor) -> None:
    """What `step_of_rows` does, over the chosen images alone."""
    kept = torch.cat([pixels[:FIRST], pixels[FIRST + torch.tensor(SOURCE)]])
    passes.begin()
    z = passes.embed(kept)
    passes.backward(z, normal(*z.shape, seed=3).to(z))
    passes.finish()


def test_the_second_pass_computes_nothing(recording, monkeypatch) -> None:
    """And its gradients are those of a pass over the chosen images alone."""
    pixels = normal(COUNT, 3, 32, 32).to(BF16)  # as the step makes them
    embed, noted = recording.embed, []

    def watched(given: Tensor) -> Tensor:
        with Operations() as operations:
            z = embed(given)
        noted.append((len(given), z.requires_grad, operations.computed))
        return z

    monkeypatch.setattr(recording, "embed", watched)
    actual = changes_of(recording, lambda passes: step_of_rows(passes, pixels.clone()))
    (scored, no_graph, computed), (kept, graph, again) = noted
    assert (scored, kept, no_graph, graph) == (COUNT, FIRST + len(SOURCE), False, True)
    assert computed.count("convolution") == 20 and computed.count("addmm") == 3
    assert again == []
    expected = changes_of(recording, lambda passes: fresh_pass(passes, pixels))
    assert far_apart(actual, expected) <= ULP
    assert recording._recorded is None  # and the step after next is as the first
    assert_equal(changes_of(recording, lambda p: step_of_rows(p, pixels.clone())), actual)


@pytest.mark.parametrize("source", [(0, 1, 2), (4, 3), (4,), (0, 1, 2, 3, 4)])
def test_any_rows(recording, source) -> None:
    pixels = normal(COUNT, 3, 32, 32)
    plain = PlainPass(recording.encoder, recording.optimizer, BF16)
    actual, expected = (
        changes_of(passes, lambda p: step_of_rows(p, pixels.clone(), source))
        for passes in (recording, plain)
    )
    assert far_apart(actual, expected) <= ULP


def _never_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorded, "move_rows", lambda *given: None)


def _moved_to_each_others_place(patch: pytest.MonkeyPatch) -> None:
    move = recorded.move_rows
    turned = torch.tensor([3, 1, 4])
    patch.setattr(recorded, "move_rows", lambda tensors, first, _: move(tensors, first, turned))


def _results_in_another_order(patch: pytest.MonkeyPatch) -> None:
    keep = Recorded.keep

    def kept(self: Recorded, first: int, source: Tensor) -> Tensor:
        images = keep(self, first, source)
        results = self._results  # ..., ReLU, linear, ReLU, linear
        assert results[-4][0].shape == results[-2][0].shape
        results[-4], results[-2] = results[-2], results[-4]
        return images

    patch.setattr(Recorded, "keep", kept)


@pytest.mark.parametrize(
    "plant", [_never_moved, _moved_to_each_others_place, _results_in_another_order]
)
def test_planted_bugs_are_caught(recording, monkeypatch, plant) -> None:
    pixels = normal(COUNT, 3, 32, 32)
    plain = PlainPass(recording.encoder, recording.optimizer, BF16)
    expected = changes_of(plain, lambda passes: step_of_rows(passes, pixels))
    plant(monkeypatch)
    actual = changes_of(recording, lambda passes: step_of_rows(passes, pixels.clone()))
    assert far_apart(actual, expected) > 10 * ULP


def test_a_result_changed_in_place_is_refused(recording) -> None:
    recording.begin()
    z = recording.score(normal(COUNT, 3, 32, 32))
    z += 1
    with pytest.raises(AssertionError, match="changed in place"):
        recording.backward_rows(FIRST, torch.tensor(SOURCE), torch.ones_like(z[:5]))


def test_scores_may_require_a_gradient(recording) -> None:
    """As a training step has them: the loss's gradient arrives there."""
    recording.begin()
    z = recording.score(normal(COUNT, 3, 32, 32)).requires_grad_()
    loss_of(z).backward()
    assert z.grad is not None
    recording.backward_rows(FIRST, torch.tensor(SOURCE), z.grad[: FIRST + len(SOURCE)])
    recording.finish()
    assert all(weight.grad.norm() > 0 for weight in recording.encoder.parameters())
