"""Where an encoder computes, and how precisely."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from negchain.train.config import ConfigError, TrainConfig
from negchain.train.team import here


def choose_device(name: str) -> torch.device:
    """The device of a name: "auto" takes a GPU if there is one, "cuda" refuses to do without."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("--device cuda needs a GPU and none is visible; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and there else "cpu")


def autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """bfloat16 if --precision asks for it, or is auto where it is fast; None: the encoder's own.

    The small CNN of the demo stays in float32 on a CPU: it gains little, and its results are then
    the same on all of them.
    """
    if config.precision != "auto":
        return torch.bfloat16 if config.precision == "bf16" else None
    small = config.encoder == "small-cnn"
    fast = device.type == "cuda" or (multiplies_bf16() and not small)
    return torch.bfloat16 if fast else None


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for it; without, bf16 is slower than float32.

    Torch before 2.10 cannot tell, and counts as a CPU without.
    """
    told: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    return bool(told().get("avx512_bf16", False))


def in_double(encoder: nn.Module) -> None:
    """Let an encoder compute in float64: it, and each of its parts, widens what it is given."""

    def wider(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            g.double() if isinstance(g, Tensor) and g.is_floating_point() else g for g in given
        )

    for module in encoder.double().modules():
        module.register_forward_pre_hook(wider)


def check_ranks(config: TrainConfig, device: torch.device) -> None:
    """Refuse more ranks than a batch has samples, and more on a machine than it has GPUs."""
    world = here().world
    if config.batch_size < world:
        raise ConfigError(
            f"--batch-size {config.batch_size} is shared by {world} processes and must give each "
            "a sample; raise it, or lower --nproc-per-node"
        )
    if world == 1 or device.type != "cuda":
        return
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        raise ConfigError(
            f"every rank needs a GPU of its own, and torchrun started {ranks} on a machine with "
            f"{gpus}; lower --nproc-per-node or use --device cpu"
        )
