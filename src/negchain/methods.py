"""The register of methods: the one place where a method has a name.

The command line, the trainer, `compare`, reports, `bench` and `estimator_report` read it. A method
of your own needs one call, `register(Method(...))`, and no change in the package
(examples/own_method.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import negchain  # whose losses are imported when one is built: torch takes seconds

if TYPE_CHECKING:
    from torch import Tensor

    from negchain.losses import ContrastiveLoss

Denominator = Literal["negatives", "all"]


@dataclass(frozen=True)
class LossSettings:
    """What a method's loss is built from; a method reads what it needs."""

    num_samples: int
    beta: float | Tensor = 14.28
    dim: int | None = None
    seed: int = 0
    denominator: Denominator = "negatives"
    normalize: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    """The method's own options, by their names on the command line (`gamma`, `burn_in`, ...), and
    what suits the task: `draws` per step from beyond the batch, `k` of them for each sample, and
    for proposals from a stale table `share` and `sharpness`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How anchors and keys lie, as losses take it: `views`, `symmetric`, `num_keys`, ..."""

    def option(self, name: str, default: Any = None) -> Any:
        """An option, or `default` if it was not given."""
        value = self.options.get(name)
        return default if value is None else value

    @property
    def common(self) -> dict[str, Any]:
        """What every loss takes."""
        return {"normalize": self.normalize, **self.layout}

    @property
    def chosen(self) -> dict[str, Any]:
        """What losses take that draw random numbers and have no denominator of their own."""
        return {"denominator": self.denominator, "dim": self.dim, "seed": self.seed, **self.common}


@dataclass(frozen=True)
class Method:
    """A method: its names, its colour, how its loss is built.

    Attributes:
        name: on the command line and in run folders.
        title: in reports.
        colour: its CSS colour on light and on dark pages.
        build: from settings to a loss.
        options: of the command line that belong to it; others are refused.
        denominator: the one it has built in; None: the user's choice.
        aliases: other names people type.
        trains: offered by `compare` and `train`; False: `estimator_report` only.
        plain_keys: pictures that are keys (positives, negatives, tables) are not augmented; anchors
            are.
        lr_share: factor on the default learning rate; a preset's or the user's rate stays.
        proposal: default of `--proposal` for images with fresh views; a preset's stays.
        stored_proposal: the same for images with stored views, with a preset too.
        reproduced: whether `reproduce` compares it: on "all" data sets, or on "small" ones only,
            because it keeps a table.
    """

    name: str
    title: str
    colour: tuple[str, str]
    build: Callable[[LossSettings], ContrastiveLoss]
    options: tuple[str, ...] = ()
    denominator: Denominator | None = None
    aliases: tuple[str, ...] = ()
    trains: bool = True
    plain_keys: bool = False
    lr_share: float = 1.0
    proposal: Literal["batch", "both"] = "batch"
    stored_proposal: Literal["batch", "both"] = "batch"
    reproduced: Literal["all", "small"] | None = None


METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Make a method known under its name; a later one of the same name replaces it.

    Example:
        >>> import negchain
        >>> def build(settings):
        ...     return negchain.DCLLoss(settings.num_samples, settings.beta / 2)
        >>> _ = register(Method("soft-dcl", "soft DCL", ("#888", "#aaa"), build))
        >>> METHODS.pop("soft-dcl").title
        'soft DCL'
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", method.name):
        raise ValueError(
            "a method's name must be made of small letters, digits and '-' (it names folders and "
            f"colours), got {method.name!r}; its title may be anything"
        )
    METHODS[method.name] = method
    return method


def named(name: str) -> Method:
    """The method of a name or alias.

    Example:
        >>> named("simclr").title
        'InfoNCE'
        >>> type(named("dcl").build(LossSettings(num_samples=10))).__name__
        'DCLLoss'
    """
    for method in METHODS.values():
        if name == method.name or name in method.aliases:
            return method
    raise ValueError(f"the method must be one of {', '.join(METHODS)}, got {name!r}")


def title_of(name: str) -> str:
    """The title of a method; a name that is not registered is its own title.

    Example:
        >>> title_of("isir"), title_of("full gradient")
        ('EMC² i-SIR', 'full gradient')
    """
    return METHODS[name].title if name in METHODS else name


def trained() -> tuple[str, ...]:
    """Names of the methods `train` and `compare` offer.

    Example:
        >>> trained()[:2]
        ('infonce', 'dcl')
    """
    return tuple(name for name, method in METHODS.items() if method.trains)


def reproduced(small: bool = True) -> tuple[str, ...]:
    """Names of the methods `reproduce` compares, on small data sets or on large ones.

    Example:
        >>> [name for name in reproduced() if name not in reproduced(small=False)]
        ['negcache', 'informed']
    """
    kinds = ("all", "small") if small else ("all",)
    return tuple(name for name, method in METHODS.items() if method.reproduced in kinds)


def _uniform(num: int | None) -> Any:
    """Random items beside the batch; 0: the batch alone; None: the loss's default."""
    return negchain.InBatch() if num == 0 else num and negchain.Uniform(num)


def _informed(s: LossSettings, num: int | None, **more: Any) -> negchain.Informed:
    defaults = {"share": 0.5, "sharpness": 1.0, "refresh": 0.01}
    given = {name: s.option(name, value) for name, value in defaults.items()}
    return negchain.Informed(num, **given, **more)


def _in_batch(s: LossSettings, kind: Callable[..., ContrastiveLoss]) -> ContrastiveLoss:
    proposals = _uniform(s.option("draws")) or "batch"
    return kind(s.num_samples, s.beta, proposals=proposals, seed=s.seed, **s.common)


def _sogclr(s: LossSettings) -> ContrastiveLoss:
    gamma, proposals = s.option("gamma", 0.9), _uniform(s.option("draws"))
    return negchain.SogCLRLoss(s.num_samples, s.beta, gamma, proposals=proposals, **s.chosen)


def _negative_cache(s: LossSettings) -> ContrastiveLoss:
    refresh = s.option("refresh", 0.01)
    return negchain.NegativeCacheLoss(s.num_samples, s.beta, refresh, **s.chosen)


def _topk(s: LossSettings) -> ContrastiveLoss:
    numbers = s.option("k", 2), s.option("top", 20), s.option("refresh", 0.01)
    return negchain.TopKLoss(s.num_samples, s.beta, *numbers, **s.chosen)


def _importance(s: LossSettings) -> ContrastiveLoss:
    informed = _informed(s, s.option("draws"), alone=True)
    return negchain.ImportanceLoss(s.num_samples, s.beta, informed, **s.chosen)


def _logq(s: LossSettings) -> ContrastiveLoss:
    uniform = _uniform(s.option("draws")) or negchain.Uniform()
    chosen = {**s.chosen, "denominator": "all"}
    return negchain.ImportanceLoss(s.num_samples, s.beta, uniform, **chosen)


def _emc2(s: LossSettings, isir: bool = False, **always: str) -> ContrastiveLoss:
    s = replace(s, options={**s.options, **always})
    kernel = negchain.ISIR() if isir else negchain.MH(burn_in=s.option("burn_in", 0.5))
    stored, proposal = s.option("augmentations"), s.option("proposal")
    num, k = s.option("draws"), s.option("k")
    if num and k:
        num -= num // k  # each sample encodes a carried one as well
    shared = s.layout.get("views", "shared") == "shared"
    # Stored views have a chain each, so that both copies of an item are different states. i-SIR's
    # set would hold two of every item beside one of the held: biased (tests/losses/test_found.py).
    both = proposal == "both" or (proposal is None and stored and not isir)
    proposals: Any = negchain.InBatch(copies=2) if both else _uniform(num)
    if proposal == "batch" and shared and not (both or num):
        proposals = negchain.InBatch()
    if proposal == "informed":
        proposals = _informed(s, num or None)
    return negchain.EMC2Loss(
        s.num_samples, s.beta, kernel, proposals=proposals,
        carried=s.option("carried", "encode"), augmentations=stored, **s.chosen,
    )  # fmt: skip


_CHAIN = ("carried", "proposal", "refresh")

# fmt: off
_TABLE = (
    Method("infonce", "InfoNCE", ("#0072b2", "#4ba3e0"),
        lambda s: _in_batch(s, negchain.InfoNCELoss),
        denominator="all", aliases=("simclr",), reproduced="all"),
    Method("dcl", "DCL", ("#3fa3dc", "#8fd0f5"),
        lambda s: _in_batch(s, negchain.DCLLoss),
        denominator="negatives", reproduced="all"),
    Method("sogclr", "SogCLR", ("#009e73", "#2fc898"), _sogclr,
        options=("gamma",), reproduced="all"),
    Method("negcache", "Negative Cache", ("#c0649a", "#e092c0"), _negative_cache,
        options=("refresh",), plain_keys=True, reproduced="small",
        lr_share=1 / 3),  # with all of it it did not learn: records/2026-11-17_negcache-rate_h200
    Method("emc2", "EMC²", ("#d55e00", "#f5823d"), _emc2,
        options=("burn_in", *_CHAIN), reproduced="all",
        proposal="both", stored_proposal="both"),  # the paper's R = 2b - 2
    Method("isir", "EMC² i-SIR", ("#d99000", "#f2b63c"), lambda s: _emc2(s, isir=True),
        options=_CHAIN, proposal="both", reproduced="all"),
    Method("informed", "Informed importance", ("#7a5195", "#b99ad6"), _importance,
        options=("refresh",), reproduced="small"),
    Method("topk", "Top-k, uncorrected", ("#5b6b7a", "#a3b3c2"), _topk, options=("refresh",)),
    Method("logq", "Corrected logQ", ("#2c7f86", "#6cc5cc"), _logq, denominator="all"),
    Method("emc2-cached", "EMC², cached", ("#8a5a2b", "#c99a6b"),
        lambda s: _emc2(s, carried="cached"), trains=False),
    Method("emc2-informed", "EMC², informed", ("#a8322d", "#e57373"),
        lambda s: _emc2(s, proposal="informed"), trains=False),
)
# fmt: on
for _method in _TABLE:
    register(_method)
