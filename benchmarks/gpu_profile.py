"""Where the time goes on a GPU: kernels of a training step, and of the streaming loss.

    PYTHONPATH=src python benchmarks/gpu_profile.py [step | stream]

`negchain bench` says how long things take; this says which kernels it was. Records name it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import negchain
from negchain import bench
from negchain.bench import runs

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
        {"step": step, "stream": stream}[what]()
