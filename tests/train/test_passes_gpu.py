"""What only a CUDA device can show of `OverlappedPass`: streams, captured in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_passes import BF16, captured_adam, normal, weights_of
from torch import Tensor

from negchain.encoders import build_encoder
from negchain.optim import build_optimizer, set_lr
from negchain.train.passes import OverlappedPass, PlainPass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIDE, COUNT, STEPS = 96, 16, 5
# (SGD, Adam): in five steps weights change by 0.3 to 5 % of themselves, which a stale copy would
# show, and not so much that training amplifies the rounding of bf16
LRS = {"none": (1e-5, 1e-4), "group": (1e-4, 1e-3), "batch": (3e-5, 1e-4)}


def gpu_run(
    norm: str, adam: bool, both: bool, kind: type[PlainPass] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Changes of weights and statistics over five steps, the last three replayed if overlapped.

    `kind` None: in float32.
    """
    encoder = build_encoder("resnet18", norm=norm, image_size=SIDE).cuda()
    encoder = encoder.to(memory_format=torch.channels_last)
    # a large eps: Adam's steps are then in proportion to gradients
    optimizer = captured_adam(encoder, eps=1.0) if adam else build_optimizer(
        encoder, "sgd", lr=1e-3, capturable=True)  # fmt: skip
    set_lr(optimizer, LRS[norm][adam])
    passes = PlainPass(encoder, optimizer, None) if kind is None else kind(encoder, optimizer, BF16)
    before = weights_of(encoder)
    pixels, others = (torch.empty(COUNT, 3, SIDE, SIDE, device="cuda") for _ in range(2))
    weights = normal(COUNT, 512, seed=3).cuda(), normal(COUNT, 512, seed=4).cuda()

    def run() -> None:
        passes.begin()
        if not both:
            z = passes.embed(pixels)
            passes.backward((z.float() * weights[0]).sum())
        else:
            z, _ = passes.embed_both(pixels, others)
            passes.backward_both(
                z, weights[0].to(z.dtype), lambda: (passes.embed(others), weights[1].to(z.dtype))
            )
        passes.finish()

    graph: torch.cuda.CUDAGraph | None = None
    stream = torch.cuda.Stream()
    for step in range(STEPS):
        pixels.copy_(normal(COUNT, 3, SIDE, SIDE, seed=step))
        others.copy_(normal(COUNT, 3, SIDE, SIDE, seed=100 + step))
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


@pytest.mark.parametrize("both", [False, True], ids=["one backward", "two"])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_gpu_graph_of_overlapped_passes(norm, adam, both) -> None:
    """As far from float32's steps as torch's in bf16 are, times 1.5, for one weight twice."""
    exact, statistics, _ = gpu_run(norm, adam, both, None)
    plain, _, usual = gpu_run(norm, adam, both, PlainPass)
    actual, found, state = gpu_run(norm, adam, both, OverlappedPass)

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


@pytest.mark.parametrize(
    "method",
    [
        {"method": "infonce"},
        {"method": "emc2", "carried": "encode"},
        {"method": "emc2", "carried_gradient": "sampled"},
    ],
    ids=["infonce", "encode", "sampled"],
)
def test_gpu_captured_training_steps(method) -> None:
    """Losses of a captured run against an eager one: `bench.steps` says why 5e-3."""
    from negchain.bench import runs, steps
    from negchain.data import DataBundle, ImageSet
    from negchain.train.config import resolve

    given = {**method, "batch_size": 32, "eval_every": 0, "checkpoint_every": 0, "device": "cuda"}
    config = resolve("stl10-b32", given)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (500, 3, 96, 96), dtype=torch.uint8, generator=generator)
    images = ImageSet(tuple(map(str, range(500))), None, pixels.cuda())
    data = DataBundle("random", images, None, None, (), (), "0" * 16)
    with runs.prepared(config, data) as run, runs.prepared(config, data) as eager:
        begun = weights_of(run.encoder)
        run.step.capture()
        assert type(run.step.passes) is OverlappedPass
        assert all(
            w.equal(begun[n]) for n, w in weights_of(run.encoder).items()
        )  # parameters end as they began
        check = steps._compared("captured", run, eager)
        assert check.ok, check.found
        counts = {float(state["step"]) for state in run.step.optimizer.state.values()}
        assert counts == {float(steps.CHECKED_STEPS)}
        moved = sum(float((w - begun[n]).norm() ** 2) for n, w in weights_of(run.encoder).items())
        assert moved > 0
