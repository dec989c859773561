"""Every Triton kernel compiled for a Hopper GPU, on a machine that has none; run as a script.

Triton needs a GPU to launch a kernel, not to compile it. Here a stand-in for the driver names the
target, and a launch only compiles (`warmup`): what the paths below launch is built to machine code
with the types and constants they really use. Nothing is computed, so results are meaningless.

    python tests/fast/compile_cases.py quick    # or: all
prints {"compiled": {kernel: variants}, "left": [kernels that no path launched], "stack": {kernel:
most bytes of a thread that registers do not hold}} as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path as File
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

import negchain.fast
from negchain import (
    ISIR,
    MH,
    DCLLoss,
    EMC2Loss,
    InBatch,
    InfoNCELoss,
    LargeBatchEMC2Loss,
    SogCLRLoss,
)
from negchain.augment import Pictures, Uniforms, augmentation

HOPPER = GPUTarget("cuda", 90, 32)
SIZE, DIM = 32, 128  # of a batch: what the trainer has by default
Path = Callable[[], object]


class NoDevice:
    """What the compiler asks a driver for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


def loss(loss_fn: Any, size: int = SIZE, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Forward and backward of a fused loss, with what it wants encoded."""

    def path() -> None:
        index = torch.arange(size)
        z_a, z_b = (torch.randn(size, DIM, dtype=dtype, requires_grad=True) for _ in range(2))
        requests = []
        if getattr(loss_fn, "carried", "") == "encode":
            request = loss_fn.request(index)
            wants = [torch.randn(len(w.ids), DIM, dtype=dtype) for w in request.wants]
            requests.append(request.answer([w.requires_grad_() for w in wants]))
        loss_fn(z_a, z_b, index, *requests).backward()

    return path


def fused(
    kind: Any = EMC2Loss,
    size: int = SIZE,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Path:
    return loss(kind(2000, 10.0, backend="fused", **{"dim": DIM, **options}), size, dtype)


def scan() -> None:
    from negchain.fast.rng_triton import bits_triton
    from negchain.weights import mh_scan

    logits = torch.randn(SIZE, 100)
    mh_scan(logits, torch.zeros(SIZE), logits.abs().neg(), 50, backend="triton")
    mh_scan(logits, torch.zeros(SIZE), logits.abs().neg(), 50, backend="triton", count_every=4)
    bits_triton(7, torch.tensor(3), 2, torch.arange(SIZE), 100)


def views() -> None:
    from negchain.fast.augment.fused_triton import augment_fused

    augment = augmentation("simclr-stl10", size=96)
    images = torch.zeros(4, 3, 96, 96, dtype=torch.uint8)
    drawn = torch.rand(4, augment.num_uniforms)
    for pictures in (images, Pictures.of(images)):
        augment_fused(augment, pictures, drawn)
        augment_fused(augment, pictures, Uniforms(0, torch.tensor(3), 32))


def layers() -> None:
    from negchain.fast.layers import few_channels_triton, masked_triton, max_pool_triton

    def image(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16).contiguous(memory_format=last)

    last = torch.channels_last
    x, weight = image(2, 3, 96, 96), image(64, 3, 7, 7)
    y, folded = few_channels_triton.few_channels_forward(x, weight, 3)
    few_channels_triton.few_channels_gradient(folded, weight, y, 3)
    pooled, winner = max_pool_triton.max_pool_forward(y, 3, 2, 1)
    max_pool_triton.max_pool_backward(pooled, winner, y.shape, 3, 2, 1)
    masked_triton.masked_triton(y, y, None)
    masked_triton.masked_triton(y, y, y)


BOTH = InBatch(copies=2)
QUICK: dict[str, Path] = {
    "emc2": fused(),
    "isir, both copies, cached": fused(kernel="isir", proposals=BOTH, carried="cached"),
    "infonce": fused(InfoNCELoss),
}
ALL: dict[str, Path] = QUICK | {
    "emc2, both copies": fused(proposals=BOTH),
    "emc2, cached, all": fused(carried="cached", denominator="all", views="paired"),
    "emc2, one way": fused(views="paired", symmetric=False, kernel=MH(burn_in=3, count_every=2)),
    "isir": fused(kernel="isir", symmetric=False),
    "isir, both copies": fused(kernel="isir", proposals=BOTH, denominator="all", size=1024),
    "isir, one copy": fused(kernel="isir", proposals=InBatch()),
    "dcl": fused(DCLLoss, views="paired"),
    "sogclr": fused(SogCLRLoss, denominator="all"),
    "sogclr, an integer": fused(SogCLRLoss, gamma=1),  # which the compiler would take as constant
    "tiles": fused(LargeBatchEMC2Loss, kernel=MH(count_every=128)),
    "tiles, float32": fused(LargeBatchEMC2Loss, size=300, dtype=torch.float32),
    "tiles, isir, float32": fused(LargeBatchEMC2Loss, kernel="isir", dtype=torch.float32),
    "tiles, isir": fused(LargeBatchEMC2Loss, kernel="isir", carried="cached"),
    "tiles, isir by groups": fused(LargeBatchEMC2Loss, kernel=ISIR(128), denominator="all"),
    "scan": scan,
    "views": views,
    "layers": layers,
}


def kernels() -> dict[str, Any]:
    """Every launched kernel of the package: `triton.jit` functions that are named so."""
    found = {}
    for module in pkgutil.walk_packages(negchain.fast.__path__, "negchain.fast."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, jit.JITFunction) and name.endswith("_kernel"):
                found[f"{value.fn.__module__}.{value.fn.__name__}"] = value
    return found


def stack(cubin: bytes) -> int:
    """Bytes of a thread that its registers do not hold, as Triton's own tool reads them."""
    tool = File(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return max(map(int, re.findall(r"STACK:(\d+)", told.stdout)))


def main(which: str) -> None:
    """Compile what the paths launch, and say what was compiled."""
    warnings.simplefilter("ignore")
    known = kernels()  # imported before the next line, which is read when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"  # lets the paths below take tensors of a CPU
    driver.set_active(NoDevice())  # type: ignore[arg-type]
    launch, compiled = jit.JITFunction.run, dict[str, set[str]]()
    stacks = dict[str, int]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        assert kernel.asm["cubin"], name
        if kernel.hash not in compiled.setdefault(name, set()):
            compiled[name].add(kernel.hash)
            stacks[name] = max(stacks.get(name, 0), stack(kernel.asm["cubin"]))
        return kernel

    jit.JITFunction.run = compile_only
    with mock.patch("negchain.fast.fused.forward.copies_tiles", return_value=True):
        for path in (QUICK if which == "quick" else ALL).values():
            path()
    counts = {name: len(variants) for name, variants in sorted(compiled.items())}
    left = sorted(known.keys() - compiled.keys())
    told = {"compiled": counts, "left": left, "stack": stacks, "triton": triton.__version__}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
