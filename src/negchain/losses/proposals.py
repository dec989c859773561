"""Where negatives come from beside the batch: settings of draws from beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from negchain.losses.settings import InBatch, check_count


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
        _check_num(self.num)


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
        _check_num(self.num)
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


def _check_num(num: int | None) -> None:
    if num is not None:
        check_count("num (draws per step)", num)
