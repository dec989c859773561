"""What a task is: its data, its towers, how a batch becomes inputs, and how it is judged.

The trainer's step with a task, in which `Want(ids, tower)` names what to encode:

    index [B] ──► task.batch(index, step)             ids for either tower, arguments of the loss
              ──► loss_fn.request(index, ...)         more to encode: carried states, draws, tables
              ──► task.inputs([wants], step, row)     what the tower takes
              ──► tower(inputs) ──► loss

A sample keeps its position for ever: chains, tables, data order and checkpoints refer to it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from negchain.losses import ContrastiveLoss
from negchain.losses.request import Want
from negchain.tasks import EXACT
from negchain.train.config import ConfigError, TrainConfig

Numbers = dict[str, float]
Arrays = dict[str, NDArray[Any]]
SPLITS = {"validation": "", "test": "test_"}
"""Splits of held-out data, and what stands before the names of their numbers."""


class Batch(NamedTuple):
    """What a step encodes for its positions: ids for either tower, and arguments of the loss."""

    anchors: Tensor  # [B]
    keys: Tensor  # [B]
    told: dict[str, Any]
    """Some of `key_index`, `known` and `augmentation`, as in the call of a loss."""


@contextmanager
def judged(
    encoder: nn.Module, device: torch.device, autocast: torch.dtype | None
) -> Iterator[None]:
    """The encoder in eval mode, without gradient, in the run's arithmetic; then as it was."""
    before = encoder.training
    encoder.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            yield
    finally:
        encoder.train(before)


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


def evenly(size: int, count: int) -> Tensor:
    """At most `count` positions below `size`, evenly from the first to the last."""
    return torch.linspace(0, size - 1, min(count, size)).long()


def variance(embeddings: Tensor) -> float:  # [N,D]
    """Mean squared distance of unit embeddings from their mean.

    Near 1 when they spread over the sphere, 0 when they have collapsed to a point.

    >>> variance(torch.eye(4).double())
    0.75
    """
    centre = torch.nn.functional.normalize(embeddings, dim=-1).mean(0)
    return float(1 - centre.square().sum())


def at_start(answers: Arrays) -> Arrays:
    """The answers of `Judge.before`, by the names that the report pairs a run's own with.

    >>> at_start({"right_recall": [1, 0], "test_labels": [2, 3]})
    {'before_recall': [1, 0]}
    """
    right = "right_"
    return {f"before_{n.removeprefix(right)}": a for n, a in answers.items() if n.startswith(right)}


class Judge(ABC):
    """What a run is judged by; leaves the encoder in the mode it was in."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def judged(self, encoder: nn.Module) -> AbstractContextManager[None]:
        """The encoder in eval mode, in the arithmetic of the run; see `judged`."""
        return judged(encoder, self.task.device, self.task.autocast)

    def sample(self) -> Tensor:  # [P]
        """Positions of the training samples on which the exact loss is computed: always these."""
        config, size = self.task.config, self.task.num_samples
        generator = torch.Generator().manual_seed(config.seed)
        chosen = torch.randperm(size, generator=generator)[: config.probe_samples]
        return chosen.sort().values

    told: Callable[[str], None] = staticmethod(lambda text: None)
    """Hears how far a long evaluation is, for who waits."""

    def before(self, encoder: Any) -> tuple[Numbers, Arrays]:
        """`thorough` before the first step, with all that any result must beat."""
        return self.thorough(encoder)

    @abstractmethod
    def quick(self, encoder: Any) -> Numbers:
        """The numbers of an evaluation during training."""

    @abstractmethod
    def thorough(self, encoder: Any) -> tuple[Numbers, Arrays]:
        """Every number, and the answers behind them (for intervals); both end in the report.

        `right_NAME` holds what each held-out item contributes to the number NAME, their mean, and
        `test_labels` names the items: then runs, and a run and its start, are compared in pairs.
        """

    @abstractmethod
    def baselines(self, line: Mapping[str, Any]) -> Numbers:
        """The numbers of `before`, as the log has them, that a result is compared with."""

    best_by: str = ""
    """The number by which the best encoder is kept: of validation data, never of test data."""

    def score(self, numbers: Mapping[str, float]) -> float:
        """`best_by`, greater is better; where it is missing the exact loss decides."""
        return numbers.get(self.best_by, -numbers.get(EXACT, math.inf))

    def score_by(self, numbers: Mapping[str, float]) -> str:
        """The name of what `score` is."""
        return self.best_by if self.best_by in numbers else EXACT

    def previews(self) -> Arrays:
        """Arrays for the report of a run that has just begun."""
        return {}

    def artifacts(self, encoder: Any, loss_fn: ContrastiveLoss) -> Arrays:
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
    """Some of `views`, `symmetric` and `num_keys`, with which every loss is constructed."""
    key_counts: Tensor | None = None
    """[num_keys], where `num_keys` is set: how many anchors have each key, in the mean."""
    loss_options: Mapping[str, Any] = {}
    """Options of methods that follow from the data and are no settings (`negchain.methods`)."""
    versions: int = 1
    """Stored versions of an item: ids of wants are `item * versions + version`."""
    one_pass: bool = True
    """All of a step goes through the encoder at once; False: anchors, then keys."""
    resident: bool = True
    """Inputs are made on the device; False: batches are loaded by `load_ahead`."""
    capturable: bool = False
    """On a GPU a step has fixed shapes and asks the host for nothing: it can be a CUDA graph."""
    notes: Sequence[str] = ()
    """Sentences about what was decided for the user."""
    skipped: Sequence[tuple[str, str]] = ()
    """(what, why) of the data that was left out."""
    unjudged: str | None = None
    """Why nothing but the loss can be judged."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.autocast: torch.dtype | None = None  # of the encoder's arithmetic; None: its own

    def place(self, device: torch.device) -> None:
        """Make ready for steps on a device."""
        self.device, self.autocast = device, autocast_dtype(self.config, device)

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the run's record says of the data, as JSON."""

    @abstractmethod
    def build(self) -> tuple[Any, list[str]]:
        """The encoder with fresh weights on the device, and sentences about what was chosen."""

    def start_from(self, encoder: Any, pretrained: str) -> str:
        """Load the weights --pretrained names; returns a sentence about what was found."""
        raise ConfigError(
            f"--pretrained goes with images, and --task is {self.config.task}; leave it out (texts "
            "have the weights in the folder --encoder names)"
        )

    def towers(self, encoder: Any) -> tuple[nn.Module, nn.Module]:
        """The towers of anchors and of keys; one module for both where they are the same."""
        return encoder, encoder

    def beta(self, encoder: Any) -> float | Tensor:
        """The loss's inverse temperature: a number, or, where it is learned, a tensor.

        That is a parameter of the encoder, or computed from one; then every step asks for it anew.
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
        """What the tower of these wants takes, one row per id, in order.

        Args:
            wants: of one tower; with `one_pass` of both.
            step: number of the step, on the device.
            row: the row of the step's random draws that belongs to the first id; the next ids have
                the next rows. [R]: the row of every id, where other ranks have some of them.
            loaded: what `load_ahead` gave for the batch, whose wants come first.
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

    def load_ahead(self, positions: Tensor) -> Iterator[Any]:
        """What is loaded for the next batches [T, B], in order."""
        raise NotImplementedError

    @abstractmethod
    def judge(self) -> Judge:
        """What evaluates encoders on this data, on the device."""

    def finish(self, encoder: Any, folder: Path, summary: Mapping[str, Any]) -> None:
        """Write what the task leaves in the run folder beside checkpoints and report."""
        return None
