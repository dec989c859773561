"""Where Triton kernels can run, and how they multiply: the one place that asks."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def prefers_triton(like: Tensor) -> bool:
    """What backend="auto" means: kernels for tensors on a GPU, where Triton is installed."""
    return like.is_cuda and has_triton()


def triton_error(like: Tensor) -> str | None:
    """What kernels lack to run on such a tensor, or None.

    Example:
        >>> import torch
        >>> triton_error(torch.empty(1, device="meta")) is None
        False
    """
    if not has_triton():
        return "the package triton"
    if not like.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA tensor or TRITON_INTERPRET=1, got a tensor on {like.device}"
    return None


def float32_products() -> Literal["ieee", "tf32"]:
    """How a kernel multiplies float32 matrices: as torch's setting says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
