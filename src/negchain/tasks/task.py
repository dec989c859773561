"""What a task is: its data, its towers, how a batch becomes inputs, and how it is judged.

The trainer's step with a task, in which `Want(ids, tower)` names what to encode:

    index [B] ──► task.batch(index, step)             ids for either tower, arguments of the loss
              ──► loss_fn.request(index, ...)         more to encode: carried states, draws, tables
              ──► task.inputs([wants], step, row)     whatever the tower eats
              ──► tower(inputs) ──► loss

A position is a sample's for ever: chains, tables, data order and checkpoints refer to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negchain.losses import ContrastiveLoss
from negchain.losses.request import Want
from negchain.train.presets import ConfigError

if TYPE_CHECKING:
    from negchain.train.config import TrainConfig

Numbers = dict[str, float]
Arrays = dict[str, NDArray[Any]]


class Batch(NamedTuple):
    """What a step encodes for its positions: ids for either tower, and what the loss is told."""

    anchors: Tensor  # [B]
    keys: Tensor  # [B]
    told: dict[str, Any]
    """Of `key_index`, `known`, `augmentation`: as in the call of a loss."""


@contextmanager
def judged(
    encoder: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """The encoder as it is judged: in eval mode, without gradient, in the run's arithmetic."""
    encoder.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        encoder.train()


class Judge(ABC):
    """What a run is judged by; leaves the encoder in training mode."""

    told: Callable[[str], None] = staticmethod(lambda text: None)
    """Hears how far a long evaluation is, for who waits."""

    @abstractmethod
    def before(self, encoder: Any) -> Numbers:
        """Of an encoder before its first step: `quick`, and what any result must beat."""

    @abstractmethod
    def quick(self, encoder: Any) -> Numbers:
        """The numbers of an evaluation during training."""

    @abstractmethod
    def thorough(self, encoder: Any) -> tuple[Numbers, Arrays]:
        """Every number, and the answers behind them (for intervals); both end in the report."""

    @abstractmethod
    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """The part of `before`, as the log has it, that a result is held against."""

    @abstractmethod
    def score(self, numbers: Mapping[str, float]) -> float:
        """By which the best encoder is kept: greater is better."""

    def previews(self) -> Arrays:
        """Arrays for the report of a run that has just begun."""
        return {}

    def artifacts(self, encoder: Any, loss_fn: ContrastiveLoss | None) -> Arrays:
        """Arrays for the report of a finished run, previews included."""
        return self.previews()


class Task(ABC):
    """A task with its data, made by `Kind.load`; `place` puts it on the training device.

    An encoder is a module with `embedding_dim`, and `encoder_config`, of which `Kind.rebuild`
    makes an encoder again.
    """

    num_samples: int
    """M: positions are 0 .. M - 1."""
    fingerprint: str
    """A hash by which a resumed run knows its data."""
    layout: Mapping[str, Any] = {}
    """Of `views`, `symmetric`, `num_keys`: as every loss is constructed."""
    key_counts: Tensor | None = None
    """[num_keys] with `num_keys`: anchors of a pass that have each key, or their mean number."""
    loss_options: Mapping[str, Any] = {}
    """Options of methods that suit the data and are no settings: see `negchain.methods`."""
    versions: int = 1
    """Stored versions of an item: ids of wants are `item * versions + version`."""
    one_pass: bool = True
    """All of a step goes through the encoder at once; False: anchors, then keys."""
    resident: bool = True
    """Inputs are made on the device; False: batches are loaded by `load_ahead`."""
    capturable: bool = False
    """On a GPU a step has fixed shapes and asks nobody: it can be a CUDA graph."""
    notes: Sequence[str] = ()
    """Sentences about what was decided for the user."""
    skipped: Sequence[tuple[str, str]] = ()
    """(what, why) of the data that was left out."""
    unjudged: str | None = None
    """Why nothing but the loss can be judged."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.autocast: torch.dtype | None = None

    def place(self, device: torch.device, autocast: torch.dtype | None) -> None:
        """Make ready for steps on a device; `autocast` is the dtype of the encoder's arithmetic."""
        self.device, self.autocast = device, autocast

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the run's record says of the data, as JSON."""

    @abstractmethod
    def build(self) -> tuple[Any, list[str]]:
        """The encoder with fresh weights on the device, and sentences about what was chosen."""

    @abstractmethod
    def start_from(self, encoder: Any, pretrained: str) -> str:
        """Load the weights --pretrained names; returns a sentence about what was found."""

    def towers(self, encoder: Any) -> tuple[nn.Module, nn.Module]:
        """The towers of anchors and of keys; one module for both where they are the same."""
        return encoder, encoder

    def beta(self, encoder: Any) -> float | Tensor:
        """The loss's inverse temperature; where it is learned a parameter of the encoder.

        Or a tensor computed from one, which is then asked for at every step.
        """
        return self.config.beta

    def after_step(self, encoder: Any) -> None:
        """Runs after the optimizer, in the graph too (to clamp a learned temperature, say)."""
        return None

    def batch(self, index: Tensor, step: Tensor) -> Batch:
        """What to encode for the positions [B] of a step; `step` is a tensor on the device."""
        return Batch(index, index, {})

    @abstractmethod
    def inputs(
        self, wants: Sequence[Want], step: Tensor, row: int | Tensor, loaded: Any = None
    ) -> Any:
        """Whatever the tower of these wants eats, one row per id in order.

        Args:
            wants: of one tower; with `one_pass` of both.
            step: number of the step, on the device.
            row: of the step's draws that the first id has, and the others follow; [R] where other
                ranks have some of the rows.
            loaded: what `load_ahead` gave for the batch; its wants come first.
        """

    def watch(self, embeddings: Tensor, index: Tensor) -> None:
        """Runs in every step, in the graph too: the anchors' embeddings [B,D], and their positions.

        What it finds is `watched`, and what it changes are `state_tensors`.
        """
        return None

    @property
    def watched(self) -> dict[str, Tensor]:
        """Numbers for the log beside the loss's, on the device."""
        return {}

    def state_tensors(self) -> list[Tensor]:
        """What steps change beside encoder and loss; in checkpoints."""
        return []

    def augment_by(self, function: Callable[[Tensor], Tensor]) -> None:
        """Take the user's own augmentation, before `place`."""
        raise ConfigError(f"augment= is for images, and --task is {self.config.task}; leave it out")

    def load_ahead(self, positions: Tensor, first: int) -> Iterator[Any]:
        """What is loaded for the batches [T, B] of the steps from `first` on, in order."""
        raise NotImplementedError

    @abstractmethod
    def judge(self) -> Judge:
        """What evaluates encoders on this data, on the device."""

    def finish(self, encoder: Any, folder: Path, summary: Mapping[str, Any]) -> None:
        """Write what the task leaves in the run folder beside checkpoints and report."""
        return None
