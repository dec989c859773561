"""What only a CUDA device can show of `OverlappedPass`: streams, captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from negchain.train.passes import OverlappedPass, PlainPass
from negchain.train.survivors import gradient_of_survivors
from test_passes import BF16, captured_adam, normal, weights_of
from torch import Tensor

from negchain.augment import Draws
from negchain.bench import runs, steps
from negchain.data import DataBundle, ImageSet
from negchain.encoders import build_encoder
from negchain.optim import build_optimizer, set_lr
from negchain.train import step as step_module
from negchain.train.resolve import resolve

pytestmark = pytest.mark.gpu
SIDE, COUNT, STEPS = 96, 16, 5
SOURCE = (15, 1, 8, 3, 12, 9, 6, 10)  # of 16 images: some move, some are at their own place
# (SGD, Adam): in five steps weights change by 0.3 to 5 % of themselves, which a stale copy would
# show, and not so much that training amplifies the rounding of bf16
LRS = {"none": (1e-5, 1e-4), "group": (1e-4, 1e-3), "batch": (3e-5, 1e-4)}


def gpu_run(
    norm: str, adam: bool, rows: bool, kind: type[PlainPass] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Changes of weights and statistics over five steps, the last three replayed if overlapped.

    `rows`: the second half of the images is scored, and half of it trained. `kind` None: in
    float32.
    """
    encoder = build_encoder("resnet18", norm=norm, image_size=SIDE).cuda()
    encoder = encoder.to(memory_format=torch.channels_last)
    # a large eps: Adam's steps are then in proportion to gradients
    optimizer = captured_adam(encoder, eps=1.0) if adam else build_optimizer(
        encoder, "sgd", lr=1e-3, capturable=True)  # fmt: skip
    set_lr(optimizer, LRS[norm][adam])
    passes = PlainPass(encoder, optimizer, None) if kind is None else kind(encoder, optimizer, BF16)
    before = weights_of(encoder)
    pixels = torch.empty(2 * COUNT if rows else COUNT, 3, SIDE, SIDE, device="cuda")
    source = torch.tensor(SOURCE, device="cuda")
    trained = COUNT + len(SOURCE) if rows else COUNT
    grad = normal(trained, 512, seed=3).to("cuda", torch.float32 if kind is None else BF16)

    def run() -> None:
        passes.begin()
        if not rows:
            passes.backward((passes.embed(pixels).float() * grad).sum())
        else:
            assert not passes.score(pixels).requires_grad
            passes.backward_rows(COUNT, source, grad)
        passes.finish()

    graph: torch.cuda.CUDAGraph | None = None
    stream = torch.cuda.Stream()
    for step in range(STEPS):
        pixels.copy_(normal(*pixels.shape, seed=step))
        torch.cuda.synchronize()
        if step < 2 or kind is not OverlappedPass:
            with torch.cuda.stream(stream):
                run()
            torch.cuda.synchronize()
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        graph.replay()
    torch.cuda.synchronize()
    changes = {name: (w - before[name]).double() for name, w in weights_of(encoder).items()}
    return changes, dict(encoder.named_buffers()), optimizer.state_dict()


@pytest.mark.parametrize("rows", [False, True], ids=["one backward", "some rows"])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_gpu_graph_of_overlapped_passes(norm, adam, rows) -> None:
    """As far from float32's steps as torch's in bf16 are, times 1.5, for one weight twice."""
    exact, statistics, _ = gpu_run(norm, adam, rows, None)
    plain, _, usual = gpu_run(norm, adam, rows, PlainPass)
    actual, found, state = gpu_run(norm, adam, rows, OverlappedPass)

    def far(changes: dict[str, Tensor], names: list[str]) -> float:
        apart = sum(float((changes[n] - exact[n]).norm() ** 2) for n in names)
        return float((apart / sum(float(exact[n].norm() ** 2) for n in names)) ** 0.5)

    names = list(exact)
    assert far(actual, names) <= 1.5 * far(plain, names) + 1e-3
    for name in names:
        mine, theirs = far(actual, [name]), far(plain, [name])
        assert mine <= 2 * theirs + 0.01, (name, mine, theirs)
    for name, value in statistics.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.05)
    assert state["state"].keys() == usual["state"].keys()
    if adam:
        assert {float(held["step"]) for held in state["state"].values()} == {float(STEPS)}


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0], ids=["all alive", "most without weight", "none"])
def test_gpu_gradient_of_survivors(share) -> None:
    """Captured, against the twin on the CPU; 2^-7: neighbours in bf16, of weights as well."""
    count, first, room, dim = 256, 512, 128, 512
    grad = normal(first + count, dim)
    grad[first:][torch.rand(count, generator=torch.Generator().manual_seed(1)) < share] = 0
    step, given = torch.tensor(0, device="cuda"), grad.to("cuda", BF16)
    work = given.clone()

    def run() -> tuple[Tensor, Tensor]:
        work.copy_(given)  # it is changed
        return gradient_of_survivors(work, first, room, Draws(3, step, 34))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source, trained = run()
    for number in range(3):
        step.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        draws = Draws(3, torch.tensor(number), 34)
        expected, weighted = gradient_of_survivors(grad.to(BF16), first, room, draws)
        assert source.cpu().equal(expected)
        torch.testing.assert_close(trained.cpu(), weighted, rtol=2**-7, atol=0.0)


def few_pictures(noise: int) -> DataBundle:
    """500 pictures, each of one colour with noise."""
    generator = torch.Generator().manual_seed(0)
    colour = torch.randint(256, (500, 3, 1, 1), generator=generator)
    noisy = colour + torch.randint(-noise, noise + 1, (500, 3, 96, 96), generator=generator)
    images = ImageSet(tuple(map(str, range(500))), None, (noisy % 256).byte().cuda())
    return DataBundle("colours", images, None, None, (), (), "0" * 16)


@pytest.mark.parametrize(
    "method, noise",
    [
        ({"method": "infonce"}, 128),
        ({"method": "emc2", "carried": "encode"}, 128),
        ({"method": "emc2", "carried": "encode", "carried_gradient": "all"}, 128),
        ({"method": "emc2", "beta": 100.0, "burn_in": 0.0}, 20),
    ],
    ids=["infonce", "encode", "encode, all", "encode, with survivors"],
)
def test_gpu_captured_training_steps(method, noise, monkeypatch) -> None:
    """As near to float32 as an eager run, by the check of `negchain bench`, and counted once."""
    survivors = torch.zeros((), dtype=torch.int64, device="cuda")

    def counted(grad: Tensor, first: int, room: int, drawn: Draws) -> tuple[Tensor, Tensor]:
        survivors.add_((grad[first:] != 0).any(1).sum())
        return gradient_of_survivors(grad, first, room, drawn)

    monkeypatch.setattr(step_module, "gradient_of_survivors", counted)
    given = {**method, "batch_size": 32, "eval_every": 0, "checkpoint_every": 0, "device": "cuda"}
    data = few_pictures(noise)
    with runs.prepared(resolve("stl10-b32", given), data) as run:
        begun = weights_of(run.encoder)
        run.step.capture()
        assert type(run.step.passes) is OverlappedPass
        assert all(
            w.equal(begun[n]) for n, w in weights_of(run.encoder).items()
        )  # parameters end as they began
        check = steps._checked("captured", run, data)
        assert check.ok, check.found
        assert survivors > 0 or noise > 20
        counts = {float(state["step"]) for state in run.step.optimizer.state.values()}
        assert counts == {float(steps.CHECKED_STEPS)}
        moved = sum(float((w - begun[n]).norm() ** 2) for n, w in weights_of(run.encoder).items())
        assert moved > 0
