"""Where the time goes on a GPU: kernels of a training step, of the streaming loss, and layers.

    PYTHONPATH=src python benchmarks/gpu_profile.py [step | timeline | layers | stream]

`negchain bench` says how long things take; this says which kernels it was. Records name it.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import negchain
from negchain import bench
from negchain.bench import runs
from negchain.bench.timing import graphed, interleaved
from negchain.fast.layers.convolution import Sizes
from negchain.fast.layers.few_channels_triton import (
    few_channels_forward,
    few_channels_gradient,
    fold_of,
)
from negchain.fast.layers.max_pool_triton import max_pool_backward, max_pool_forward

DEVICE, CALLS = torch.device("cuda"), 5


def kernels(title: str, call: Callable[[], object], most: int = 14) -> None:
    """Print a call's kernels, slowest first."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.device_time_total > 0]
    events.sort(key=lambda e: -e.device_time_total)
    busy = sum(e.device_time_total for e in events) / CALLS / 1e3
    print(f"{title}: {sum(e.count for e in events) / CALLS:g} launches, {busy:.3f} ms busy")
    for event in events[:most]:
        each = event.device_time_total / CALLS / 1e3
        print(f"  {each:8.4f} ms x{event.count / CALLS:5.1f}  {event.key[:90]}")


def step() -> None:
    """The InfoNCE step at b = 32, as a CUDA graph."""
    settings = bench.Settings(device=DEVICE, quick=True)
    data = runs.on_device(runs.pictures(settings), DEVICE)
    with runs.prepared(runs.config(settings, 32, runs.METHODS["InfoNCE"]), data) as run:
        run.step.capture()
        kernels("InfoNCE step, b = 32", runs.stepper(run), most=16)


def timeline() -> None:
    """When each kernel of one replay begins and how long it takes, in microseconds."""
    settings = bench.Settings(device=DEVICE, quick=True)
    data = runs.on_device(runs.pictures(settings), DEVICE)
    with (
        runs.prepared(runs.config(settings, 32, runs.METHODS["InfoNCE"]), data) as run,
        tempfile.TemporaryDirectory() as folder,
    ):
        run.step.capture()
        advance = runs.stepper(run)
        for _ in range(3):
            advance()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(3):
                advance()
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        kinds = ("kernel", "gpu_memset", "gpu_memcpy")
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in kinds]
    events.sort(key=lambda event: event["ts"])
    events = events[len(events) // 3 : 2 * len(events) // 3]
    for event in events:
        begin = event["ts"] - events[0]["ts"]
        print(
            f"{begin:9.1f} {event['dur']:7.1f} s{event['args'].get('stream')} {event['name'][:90]}"
        )


def layers() -> None:
    """The stem's kernels and a block's fused convolutions against cuDNN's and torch's."""
    torch.backends.cudnn.benchmark = True
    last = torch.channels_last
    for count in (64, 512):
        x = torch.randn(count, 3, 96, 96, device=DEVICE).bfloat16().contiguous(memory_format=last)
        weight = torch.randn(64, 3, 7, 7, device=DEVICE).bfloat16().contiguous(memory_format=last)
        y, folded = few_channels_forward(x, weight, 3)
        grad, fold = torch.randn_like(y), fold_of(x, weight, 3)
        pooled, winner = max_pool_forward(y, 3, 2, 1)
        stem = Sizes((2, 2), (3, 3), (1, 1), 1)
        inner = Sizes((1, 1), (1, 1), (1, 1), 1)
        block = torch.randn(64, 64, 3, 3, device=DEVICE).bfloat16().contiguous(memory_format=last)
        calls: dict[str, Callable[[], object]] = {
            "stem forward": lambda: few_channels_forward(x, weight, 3),  # noqa: B023
            "stem forward, cuDNN": lambda: stem.convolve(x, weight),  # noqa: B023
            "stem gradient": lambda: few_channels_gradient(folded, weight, grad, fold),  # noqa: B023
            "stem gradient, cuDNN": lambda: stem.weight_gradient(grad, x, weight),  # noqa: B023
            "pool forward": lambda: max_pool_forward(y, 3, 2, 1),  # noqa: B023
            "pool forward, torch": lambda: F.max_pool2d(y, 3, 2, 1),  # noqa: B023
            "pool backward": lambda: max_pool_backward(pooled, winner, y.shape, 3, 2, 1),  # noqa: B023
            "block: convolution": lambda: inner.convolve(pooled, block),  # noqa: B023
            "block: convolution, add, ReLU": lambda: (
                inner.convolve(pooled, block).add_(pooled).relu_()  # noqa: B023
            ),
            "block: in one": lambda: inner.rectified(pooled, block, pooled),  # noqa: B023
        }
        timed = {name: graphed(call, DEVICE, calls=10) for name, call in calls.items()}
        for name, times in interleaved(timed, 5, window_ms=10.0).items():
            print(f"{count} images, {name}: {sorted(times)[2]:.4f} ms")


def stream() -> None:
    """Forward and backward of the streaming loss, paired views, one direction."""
    for size in (8_192, 32_768):
        centre = F.normalize(torch.randn(64, 512, device=DEVICE), dim=1)
        label = torch.randint(64, (size,), device=DEVICE)
        z = centre[label] + torch.randn(size, 512, device=DEVICE) / math.sqrt(512)
        noisy = [(z + 0.3 * torch.randn_like(z) / math.sqrt(512)).bfloat16() for _ in range(3)]
        a, b, held = (x.requires_grad_() for x in noisy)
        index = torch.randperm(10**6, device=DEVICE)[:size]
        every = max(128, size // 128)
        groups = max(256, size // 32)
        for name, options in {
            "MH": {"count_every": every},
            "i-SIR": {"kernel": "isir", "count_every": groups},
            "i-SIR, all weights": {"kernel": "isir"},
        }.items():
            loss_fn = negchain.EMC2Loss(
                10**6, 14.28, views="paired", symmetric=False, stream=True, **options
            ).to(DEVICE)

            def call(loss_fn: negchain.EMC2Loss = loss_fn) -> object:
                return torch.autograd.grad(loss_fn(a, b, index, carried=held), (a, b, held))  # noqa: B023

            kernels(f"streaming {name}, B = {size:,}", call)


if __name__ == "__main__":
    for what in sys.argv[1:] or ("step", "stream"):
        {
            "step": step,
            "timeline": timeline,
            "layers": layers,
            "stream": stream,
        }[what]()
