"""The numbers of a run: names in the files and on the page, units, which way is better.

Also how a page writes numbers and long names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from negchain.tasks import TASKS

if TYPE_CHECKING:
    from .runs import Run


def number(value: float | None, unit: str = "number") -> str:
    """A number as people read it.

    >>> number(0.9731, "percent"), number(12345.6, "count"), number(2.34567), number(None)
    ('97.3 %', '12.3k', '2.346', '–')
    >>> number(75.0, "seconds"), number(0.0), number(-3e-4), number(999_680, "count")
    ('1 min 15 s', '0', '−3.00e−4', '1M')
    >>> number(9.995e11, "count"), number(2e15, "count")
    ('1T', '2e+15')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "percent":
        return f"{100 * value:.1f} %"
    if unit == "seconds":
        return _duration(value)
    if unit == "count" and 999.95 <= abs(value) < 9.995e14:  # 999.95 has 1000 as its four digits
        units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
        rounded = float(f"{value:.3g}")  # before its unit is chosen: 999,500 is 1M
        size, suffix = next(unit for unit in units if abs(rounded) >= unit[0])
        return f"{rounded / size:.3g}{suffix}".replace("-", "−")
    if 0 < abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def _duration(seconds: float) -> str:
    if seconds < 59.95:  # which is a minute in three digits
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def shortened(text: str, length: int) -> str:
    """At most `length` characters, cut in the middle: names mostly differ at their ends.

    A wide character (Chinese, Japanese, Korean) takes the room of two.

    >>> shortened("Staffordshire bull terrier", 15), shortened("a rather long name, number 12", 20)
    ('Staffor…terrier', 'a rather…number 12')
    >>> shortened("木" * 20, 21)
    '木木木木木…木木木木'
    """
    width = sum(1 + (east_asian_width(character) in "WF") for character in text)
    if width <= length:
        return text
    length = length * len(text) // width
    tail = text[-((length - 1) // 2) :]
    if not text[: -len(tail)].endswith(" ") and " " in tail.strip():  # from a whole word on
        tail = tail.split(" ", 1)[1]
    head = text[: length - 1 - len(tail)]
    if text[len(head)] != " " and head.rfind(" ") >= len(head) / 2:
        head = head[: head.rfind(" ")]
    return f"{head.rstrip(' ,')}…{tail.lstrip()}"


@dataclass(frozen=True)
class Metric:
    """A metric's name in `metrics.jsonl`, on the page, its unit, and whether higher is better."""

    key: str
    name: str
    unit: str
    note: str = ""
    higher: bool = False
    short: str = ""  # at a chart's line

    def text(self, value: float | None) -> str:
        """A value as people read it.

        >>> TIME.text(75.0)
        '1 min 15 s'
        """
        return number(value, self.unit)


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
        baselines: what a result is compared with: prefix of its key, name on the page.
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


def shown(task: str, pretrained: bool = False) -> Shown:
    """What is shown of runs of a task; of one that is not registered, what every run has.

    >>> shown("images").lead[0].name
    '1-NN accuracy'
    >>> [shown("images", pretrained).baselines["untrained"] for pretrained in (False, True)]
    ['Untrained encoder', 'Pretrained encoder']
    """
    found = TASKS[task].shown() if task in TASKS else Shown()
    names = {k: v.replace("Untrained", "Pretrained") for k, v in found.baselines.items()}
    return replace(found, baselines=names) if pretrained else found
