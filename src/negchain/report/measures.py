"""The numbers of a run: names in the files and on the page, units, which way is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from negchain.tasks import TASKS, options

if TYPE_CHECKING:
    from .runs import Run


@dataclass(frozen=True)
class Metric:
    """A metric's name in `metrics.jsonl`, on the page, its unit, and whether higher is better."""

    key: str
    name: str
    unit: str
    note: str = ""
    higher: bool = False
    short: str = ""  # at a chart's line


LOSS = Metric("loss", "Training loss", "number", "What each step minimised")
GLOBAL_LOSS = Metric("global_loss", "Global loss, exact", "number", "On a fixed probe set")
OWN_LOSS = Metric("own_loss", "Global loss of plain keys, exact", "number", "What it trains")
ONLINE = Metric(
    "online_probe", "Online probe", "percent",
    "A linear head on the embeddings of training batches, learning beside the encoder", True
)  # fmt: skip
VARIANCE = Metric(
    "embedding_variance", "Embedding variance", "number", "1: spread over the sphere, 0: collapsed"
)
ACCEPTANCE = Metric(
    "acceptance_rate", "Acceptance rate", "percent", "Share of proposals the chains accept"
)
CARRIED = Metric(
    "carried_mass", "Carried mass", "percent", "Weight on negatives kept from earlier steps"
)
EFFECTIVE = Metric(
    "effective_negatives", "Effective negatives", "count", "Per row, 1 / Σ of squared weights"
)
THROUGHPUT = Metric("samples_per_second", "Throughput", "count", "Samples per second", higher=True)
RATE = Metric("lr", "Learning rate", "number", "Of the optimizer")
TIME = Metric("seconds", "Time", "seconds")


@dataclass(frozen=True)
class Shown:
    """What the report shows of a task's runs, beside losses and chains.

    Attributes:
        noun: what its samples are, in plural.
        tested: what its results are tested on, in plural.
        lead: the results; the first that was measured decides.
        secondary: further results, in a table below.
        columns: of `lead` and `secondary`, those a comparison's table has.
        baselines: what a result is held against: prefix of its key, name on the page.
        explained: a sentence or two on the baselines.
        pictures: (run, small) -> (title, HTML, data for the page's script or None) of each section
            below the curves; `small`: a few, for a page of many runs.
    """

    noun: str = "samples"
    tested: str = "test samples"
    lead: tuple[Metric, ...] = ()
    secondary: tuple[Metric, ...] = ()
    columns: tuple[Metric, ...] = ()
    baselines: Mapping[str, str] = field(default_factory=lambda: {"untrained": "Untrained encoder"})
    explained: str = ""
    pictures: Callable[[Run, bool], list[tuple[str, str, Any]]] = lambda run, small: []


def foreign(task: object) -> set[str]:
    """Settings that belong to other tasks."""
    return options() - set(TASKS[str(task)].options) if str(task) in TASKS else set()


def shown(task: object, pretrained: bool = False) -> Shown:
    """What is shown of runs of a task; of one nobody registered, what every run has.

    >>> shown("images").lead[0].name
    '1-NN accuracy'
    >>> [shown("images", pretrained).baselines["untrained"] for pretrained in (False, True)]
    ['Untrained encoder', 'Pretrained encoder']
    """
    found = TASKS[str(task)].shown() if str(task) in TASKS else Shown()
    names = {k: v.replace("Untrained", "Pretrained") for k, v in found.baselines.items()}
    return replace(found, baselines=names) if pretrained else found
