"""Settings by question: how a chain moves, whose batches are one; `proposals.py` has the draws."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, ClassVar, Literal, Never, TypedDict

import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from negchain.losses.batch import Views
    from negchain.objective import Denominator


COUNT_EVERY = "count_every (every c-th state, or one column of every c)"


@dataclass(frozen=True)
class MH:
    """Metropolis-Hastings: weights are the shares of steps a chain spends at each negative.

    Example:
        >>> MH(burn_in=31)            # an absolute number of steps, as in the paper's tables
        MH(burn_in=31, count_every=1)
    """

    burn_in: float = 0.5
    """Steps of a visit that are not counted (P): a share below 1, or their number."""
    count_every: int = 1
    """Count every c-th state only (for large batches): at stationarity only the variance grows."""

    def __post_init__(self) -> None:
        share = is_number(self.burn_in) and self.burn_in >= 0
        if not share or (self.burn_in >= 1 and self.burn_in % 1 != 0):
            raise ValueError(
                "burn_in must be a share in [0, 1) or a whole number of steps, got "
                f"{self.burn_in!r:.50}"
            )
        check_count(COUNT_EVERY, self.count_every)


@dataclass(frozen=True)
class ISIR:
    """Iterated sampling-importance resampling: softmax over the carried state and the proposals.

    Example:
        >>> ISIR(count_every=128)     # for batches of thousands
        ISIR(count_every=128)
    """

    count_every: int = 1
    """One column of every c speaks for all c: more variance, the same mean given the batch."""

    def __post_init__(self) -> None:
        check_count(COUNT_EVERY, self.count_every)


@dataclass(frozen=True)
class InBatch:
    """Proposals are the other items of the batch (the paper's experiments).

    Example:
        >>> InBatch(copies=2)         # both views of every item to each row
        InBatch(copies=2)
    """

    alone: ClassVar[bool] = False

    copies: int = 1
    """Shared views: copies of every item a row is offered, 1 (one of the two views) or 2 (both)."""

    def __post_init__(self) -> None:
        if not is_number(self.copies) or self.copies not in (1, 2):
            raise ValueError(f"copies must be 1 or 2 (the two views of an item), got {self.copies}")


Gather = bool | Literal["even"] | dist.ProcessGroup
"""True: ranks gather; "even": so, and all their batches are of one size (nothing is checked, so
nothing waits for the device and a CUDA graph can record it); a process group: among its ranks only.
False: every rank has a pool of its own."""
Kernel = MH | ISIR


class Common(TypedDict, total=False):
    """What every loss takes, by name; `InfoNCELoss` says what it means."""

    views: Views
    symmetric: bool
    num_keys: int | None
    dim: int | None
    normalize: bool
    seed: int
    gather: Gather
    shard_state: bool


class Shared(Common, total=False):
    """What every loss takes that has no denominator of its own."""

    denominator: Denominator


def as_kernel(kernel: Kernel | Literal["mh", "isir"]) -> Kernel:
    """A kernel from its name.

    Example:
        >>> as_kernel("isir")
        ISIR(count_every=1)
    """
    if isinstance(kernel, (MH, ISIR)):
        return kernel
    if kernel not in ("mh", "isir"):
        raise ValueError(f"kernel must be 'mh', 'isir', MH(...) or ISIR(...), got {kernel!r}")
    return MH() if kernel == "mh" else ISIR()


def as_beta(beta: float | Tensor) -> float | Tensor:
    """A number (which may come as numpy's), or a tensor that is learned, now or later."""
    later = isinstance(beta, nn.Parameter)  # frozen for a while
    if isinstance(beta, Tensor) and beta.numel() == 1 and not (beta.requires_grad or later):
        beta = float(beta)
    one = beta.shape in ((), (1,)) if isinstance(beta, Tensor) else is_number(beta)
    unseen = isinstance(beta, Tensor) and beta.is_meta
    if not one or not (unseen or 0 < beta < math.inf):
        raise ValueError(f"beta (1 / temperature) must be one positive number, got {beta}")
    return beta if isinstance(beta, Tensor) else float(beta)


def as_seed(seed: int) -> int:
    """An integer of Python's: numpy's would overflow."""
    if not is_number(seed, Integral):
        raise ValueError(f"seed must be an integer, got {seed!r:.50}")
    return int(seed)


def check_gather(gather: Gather, shard_state: bool) -> None:
    """Refuse what is not among the ways to gather."""
    if shard_state and gather is False:
        raise ValueError("shard_state=True needs gather=True: its ranks work on one batch")
    if not isinstance(gather, (bool, dist.ProcessGroup)) and gather != "even":
        raise ValueError(f"gather must be True, False, 'even' or a process group, got {gather!r}")


def refuse_replica() -> Never:
    """Refuse to be a copy that nn.DataParallel made."""
    raise RuntimeError(
        "nn.DataParallel calls copies of the loss and throws them away, and its chains "
        "with them; use torchrun and DistributedDataParallel, or keep the loss outside"
    )


def refuse_unknown(kind: type, arguments: Iterable[str]) -> None:
    """Refuse arguments that no constructor on the way to the base took, in the user's words."""
    for name in arguments:
        takes = [p for base in kind.__mro__ for p in inspect.signature(base).parameters.values()]
        known = sorted({p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)})
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"; did you mean {near[0]!r}?" if near else ""
        remedy = "; pass beta=, 1 / temperature" if name == "temperature" else remedy
        raise TypeError(f"{kind.__name__}() got an unexpected keyword argument {name!r}{remedy}")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_sizes(num_samples: int | None, num_keys: int | None, views: Views) -> None:
    """Refuse sizes of the data set and of a corpus of keys that no loss can have."""
    for name, size in (("num_samples", num_samples), ("num_keys", num_keys)):
        if size is not None and not isinstance(size, Integral):
            raise ValueError(f"{name} must be an integer, len(dataset) say, got {size!r:.50}")
    if num_samples is not None and num_samples < (2 if num_keys is None else 1):
        raise ValueError(
            f"num_samples must be at least 2, got {num_samples}: one sample has no negative"
        )
    if num_keys is not None:
        _check_corpus(num_samples, num_keys, views)


def _check_corpus(num_samples: int | None, num_keys: int, views: Views) -> None:
    if views != "paired" or num_keys < 2 or num_samples is None:
        raise ValueError(
            "num_keys (the size of a corpus of keys) needs num_samples, views='paired' and at "
            f"least 2 keys, got num_keys={num_keys}, num_samples={num_samples} and "
            f"views={views!r}"
        )


def require_samples(num_samples: int | None) -> None:
    """Refuse None: for a loss that keeps state of every sample."""
    if num_samples is None:
        raise ValueError(
            "num_samples must be the size of the data set, len(dataset) say, as this loss keeps "
            "state of every sample, got None; InfoNCELoss and DCLLoss need none"
        )


def is_number(value: object, kind: type = Real) -> bool:
    """Whether a setting is a number, of one kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_dim(dim: int | None, sharded: bool) -> None:
    """Refuse a width that is none, and a sharded table without one: checkpoints need its shape."""
    if dim is not None:
        check_count("dim (of the embeddings)", dim)
    elif sharded:
        raise ValueError("shard_state=True needs dim=, the dimension of the embeddings it keeps")


def check_count(name: str, value: int) -> None:
    """Refuse what is no whole number of at least 1."""
    if not is_number(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r:.50}")
