"""Settings by question: how a chain moves, what it is offered, whose batches are one."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, ClassVar, Literal, Never, TypedDict

import torch
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
        >>> MH(burn_in=31)            # steps: the paper's at b = 32, with InBatch(copies=2)
        MH(burn_in=31, count_every=1)
    """

    burn_in: float = 0.5
    """Steps of a visit that are not counted (P): a share below 1, or their number, less than R."""
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
    """Proposals are the other items of the batch; in both copies, the paper's R = 2b - 2.

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


@dataclass(frozen=True)
class Uniform:
    """Uniform draws from the whole set, offered to all rows.

    Example:
        >>> Uniform(32, alone=True)   # Algorithm 1 with R = 32
        Uniform(num=32, alone=True)
    """

    num: int | None = None
    """Draws per step; None: as many as the batch has samples."""
    alone: bool = False
    """Instead of the batch (Algorithm 1 to the letter), not beside it."""

    def __post_init__(self) -> None:
        if self.num is not None:
            check_count("num (draws per step)", self.num)


@dataclass(frozen=True)
class Informed:
    """Draws from a stale table of all embeddings, beside the batch.

    q(z) = (1 - share) / M + share * mean_i softmax_z(sharpness * beta * x_i . psi_old(z))

    With `per_row` the mean is left out: row i draws from q of its own, for itself alone.

    Example:
        >>> Informed(num=64).share    # half of the draws are uniform
        0.5
    """

    num: int | None = None
    """Draws per step; None: as many as the batch has samples. With `per_row`: per row; None: 1."""
    share: float = 0.5
    """Part of q that comes from the stale softmaxes; the rest is uniform."""
    sharpness: float = 1.0
    """The proposal's beta, relative to the loss's."""
    refresh: float = 0.01
    """Share of the table that is encoded anew per step, in turn."""
    alone: bool = False
    """Instead of the batch, not beside it."""
    per_row: bool = False
    """Each row draws for itself; else all rows share all draws."""

    def __post_init__(self) -> None:
        if self.num is not None:
            check_count("num (draws per step)", self.num)
        if not 0 <= self.share < 1:
            raise ValueError(
                f"share must be in [0, 1): every negative needs some probability, got {self.share}"
            )
        if not 0 < self.sharpness < math.inf:
            raise ValueError(f"sharpness must be positive and finite, got {self.sharpness}")
        if not 0 <= self.refresh <= 1:
            raise ValueError(
                f"refresh (share of the table per step) must be in [0, 1], got {self.refresh}"
            )


@dataclass(frozen=True)
class Given:
    """Draws the caller makes: `draw=Draw(ids, log_q)` and `drawn=` in the call.

    Example:
        >>> import torch
        >>> import negchain
        >>> loss_fn = negchain.DCLLoss(100, proposals=Given())
        >>> z, ids = torch.randn(6, 4), torch.randint(100, (12,))
        >>> draw = negchain.Draw(ids)                       # uniform: no log_q
        >>> loss_fn(z, z + 0.1, torch.arange(6), draw=draw, drawn=torch.randn(12, 4)).isfinite()
        tensor(True)
    """

    alone: bool = True
    """Instead of the batch, not beside it."""


Proposals = InBatch | Uniform | Informed | Given


def num_proposals(proposals: Proposals, size: int, given: int = 0) -> int:
    """R: columns a row is offered by a batch of `size` samples, and by so many draws of the caller.

    Those that it may not use (ids that repeat its own, known positives) are among them.

    Example:
        >>> num_proposals(InBatch(copies=2), 32), num_proposals(Uniform(8), 32)
        (62, 39)
    """
    if isinstance(proposals, InBatch):
        return proposals.copies * (size - 1)
    drawn = given
    if not isinstance(proposals, Given):
        per_row = isinstance(proposals, Informed) and proposals.per_row
        drawn = proposals.num or (1 if per_row else size)
    return drawn if proposals.alone else size - 1 + drawn


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


def corpus_proposals(
    proposals: Proposals | Literal["batch"] | None, key_counts: Tensor | None
) -> Proposals | Literal["batch"] | None:
    """What chains over a corpus may move to: uniform draws, if nothing is said.

    The batch alone only where every key is somebody's positive, so that batches reach them all.

    Example:
        >>> corpus_proposals(None, None)
        Uniform(num=None, alone=False)
    """
    if key_counts is not None and bool((torch.as_tensor(key_counts) > 0).all()):
        return proposals
    if proposals == "batch" or isinstance(proposals, InBatch):
        raise ValueError(
            "proposals='batch' reaches only keys that are somebody's positive; with num_keys= "
            "use Uniform() or Informed(), or give key_counts= if every key is one"
        )
    return Uniform() if proposals is None else proposals


def checked_proposals(proposals: Proposals, num_samples: int | None, views: str) -> Proposals:
    """Proposals other than "batch", if they can be made here."""
    if not isinstance(proposals, (InBatch, Uniform, Informed, Given)):
        raise ValueError(
            "proposals must be 'batch', InBatch(...), Uniform(...), Informed(...) or Given(...), "
            f"got {proposals!r}"
        )
    if num_samples is None and not isinstance(proposals, (InBatch, Given)):
        raise ValueError(
            f"proposals={proposals} draws from the data set; give its size, num_samples="
        )
    if isinstance(proposals, InBatch) and proposals.copies == 2 and views != "shared":
        raise ValueError(
            "InBatch(copies=2) is for the two views of views='shared', got views='paired'; "
            "use InBatch()"
        )
    return proposals


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
    if num_keys is not None and (views != "paired" or num_keys < 2 or num_samples is None):
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
