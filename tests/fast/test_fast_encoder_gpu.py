"""What only a CUDA device can show of the fast path: streams, captured in a graph."""

from __future__ import annotations

import pytest
import torch
from fast_step import checked
from test_fast_encoder import BF16, normal, weights_of
from torch import Tensor

from negchain.bench import runs
from negchain.data import DataBundle
from negchain.encoders import build_encoder
from negchain.fast.encoder import accelerate, choose
from negchain.optim import build_optimizer, set_lr
from negchain.train.resolve import resolve

pytestmark = pytest.mark.gpu
SIDE, COUNT, STEPS = 96, 16, 5
# Learning rates of SGD: in five steps weights change by 0.3 to 5 % of themselves, which a stale
# copy would show, and not so much that training amplifies the rounding of bf16.
CASES = [
    ("resnet18", "none", "blocks", 1e-5),
    ("resnet18", "none", "compiled", 1e-5),
    ("resnet18", "batch", "compiled", 3e-5),
    ("vit_tiny_patch16_224", "none", "compiled", 1e-5),
]


TWICE = [(*CASES[0], 2), (*CASES[2], 2)]  # drawn negatives are encoded by a second call


def changes(
    name: str, norm: str, lr: float, strategy: str | None, calls: int = 1
) -> dict[str, Tensor]:
    """Of weights and statistics over five steps, the last three replayed; None: in float32."""
    encoder = build_encoder(name, norm=norm, image_size=SIDE).cuda()
    encoder = encoder.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(encoder, "sgd", lr=lr, capturable=True)
    set_lr(optimizer, lr)
    fast = accelerate(encoder, None if strategy is None else BF16, strategy or "plain")
    before = weights_of(encoder)
    pixels = torch.empty(COUNT, 3, SIDE, SIDE, device="cuda")
    grad = normal(COUNT, encoder.embedding_dim, seed=3).cuda()

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        fast.begin()
        z = torch.cat([fast(part) for part in pixels.chunk(calls)])
        (z.float() * grad).sum().backward()
        optimizer.step()

    graph: torch.cuda.CUDAGraph | None = None
    stream = torch.cuda.Stream()
    for step in range(STEPS):
        pixels.copy_(normal(*pixels.shape, seed=step))
        torch.cuda.synchronize()
        if step < 2:
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
    return {name: (w - before[name]).double() for name, w in weights_of(encoder).items()}


@pytest.mark.parametrize("name, norm, strategy, lr, calls", [*((*c, 1) for c in CASES), *TWICE])
def test_gpu_graph_of_fast_steps(name, norm, strategy, lr, calls) -> None:
    """As far from float32's steps as torch's in bf16 are, times 1.5, for one weight twice."""
    kinds = (None, "plain", strategy)
    exact, plain, actual = (changes(name, norm, lr, kind, calls) for kind in kinds)

    def far(found: dict[str, Tensor], names: list[str]) -> float:
        apart = sum(float((found[n] - exact[n]).norm() ** 2) for n in names)
        return float((apart / sum(float(exact[n].norm() ** 2) for n in names)) ** 0.5)

    assert far(actual, list(exact)) <= 1.5 * far(plain, list(exact)) + 1e-3
    for weight in exact:
        mine, theirs = far(actual, [weight]), far(plain, [weight])
        assert mine <= 2 * theirs + 0.01, (weight, mine, theirs)


def test_gpu_takes_a_fast_path() -> None:
    for norm, strategy in (("none", "blocks"), ("batch", "compiled")):
        assert choose(build_encoder("resnet18", norm=norm).cuda(), BF16) == strategy
    assert choose(build_encoder("resnet18").cuda(), None) == "plain"


def few_pictures() -> DataBundle:
    """500 pictures, each of one colour with noise."""
    generator = torch.Generator().manual_seed(0)
    colour = torch.randint(256, (500, 3, 1, 1), generator=generator)
    noisy = colour + torch.randint(-128, 129, (500, 3, 96, 96), generator=generator)
    return runs.bundle((noisy % 256).byte().cuda())


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("method", ["infonce", "emc2", "negcache"])
def test_gpu_captured_training_steps(method, norm) -> None:
    """As near to float32 as an eager run, and counted once."""
    given = {"method": method, "norm": norm, "batch_size": 32, "eval_every": 0}
    data = few_pictures()
    config = resolve("stl10-b32", {**given, "checkpoint_every": 0, "device": "cuda"})
    with runs.prepared(config, data) as run:
        begun = weights_of(run.encoder)
        run.step.capture()
        assert all(
            w.equal(begun[n]) for n, w in weights_of(run.encoder).items()
        )  # parameters end as they began
        ok, found = checked(run, data)
        assert ok, found
        counts = {float(state["step"]) for state in run.step.optimizer.state.values()}
        assert counts == {20.0}
        moved = sum(float((w - begun[n]).norm() ** 2) for n, w in weights_of(run.encoder).items())
        assert moved > 0
