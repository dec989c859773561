"""Where Triton kernels can run, and how they multiply: the one place that asks."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def prefers_triton(like: Tensor) -> bool:
    """What backend="auto" means: kernels for tensors on a GPU, where Triton is installed."""
    return like.is_cuda and has_triton()


def triton_error(like: Tensor) -> str | None:
    """What kernels lack to run on such a tensor, or None."""
    if not has_triton():
        return "the package triton"
    if not like.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA tensor or TRITON_INTERPRET=1, got a tensor on {like.device}"
    return None


def on_its_device(launch: Callable[P, T]) -> Callable[P, T]:
    """Make the device of the first argument that has one the current one meanwhile.

    Triton launches on the current device and its stream, wherever the tensors are. A backward pass
    needs no such care: autograd's threads have their own device.
    """

    @functools.wraps(launch)
    def there(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next(given.device for given in args if hasattr(given, "device"))
        with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: leaves it
            return launch(*args, **kwargs)

    return there


def float32_products() -> Literal["tf32x3", "tf32"]:
    """How a kernel multiplies float32 matrices: as torch's setting says.

    "tf32x3" is float32 but for the last bit or two, on tensor cores. Triton's "ieee" multiplies
    number by number, and tiles then keep 10 KiB of every thread's numbers in memory.
    """
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def copies_tiles(like: Tensor) -> bool:
    """Whether the hardware copies tiles of such a tensor: from compute capability 9 on."""
    return like.is_cuda and torch.cuda.get_device_capability(like.device)[0] >= 9
