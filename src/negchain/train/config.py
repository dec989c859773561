"""What a run is: one frozen dataclass, checked before anything starts.

`resolve` lays the sources of a value over each other,

    field default  <  data set's default  <  preset  <  what the user gave,

and remembers what the user gave, because only that can contradict: `--gamma 0.5` with EMC² is a
mistake, gamma's default standing unused in an EMC² run is not. `TrainConfig` itself refuses wrong
types, unknown names and values out of range, wherever it is built; only `resolve` and `resume`
look at the machine (folder, GPU, encoder name), so a run's config.json can be read anywhere.
"""

import ast
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from negchain.train import presets
from negchain.train.presets import DATA_DEFAULTS, ConfigError, choose, show

__all__ = ["ConfigError", "TrainConfig", "field_help", "from_json", "resolve", "resume",
           "same_run", "to_json"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run; the string under a field is its help text.

    >>> TrainConfig(method="dcl", batch_size=32).method
    'dcl'
    """

    data: str = "digits"
    """digits, cifar10, stl10, or a folder (train/, test/, unlabeled/, or images); A,B for two."""
    method: Literal["infonce", "dcl", "sogclr", "negcache", "emc2", "isir"] = "emc2"
    """Estimator of the negatives: infonce is SimCLR's; emc2 and isir keep a chain per image."""
    batch_size: int = 64
    """Images per step; each enters with two views."""
    epochs: int = 60
    """Passes over the training images."""
    steps: int | None = None
    """Stop after this many steps, whatever --epochs says."""
    beta: float = 14.28
    """Sharpness of the softmax over negatives: beta = 1/temperature."""
    burn_in: float = 0.5
    """emc2: share of the proposals discarded before visits count (P/R in the paper)."""
    carried: Literal["encode", "cached"] = "encode"
    """emc2, isir: carried negatives are encoded anew (the paper), or kept as embeddings."""
    denominator: Literal["negatives", "all"] = "negatives"
    """Softmax over the negatives alone (the paper), or with the positive kept in."""
    proposal: Literal["batch", "informed"] = "batch"
    """emc2, isir: proposals are the batch (the paper), or drawn from a table of old embeddings."""
    gamma: float = 0.9
    """sogclr: rate of the moving average, 1 forgets the past."""
    refresh: float = 0.01
    """negcache, --proposal informed: share of the table re-encoded per step."""
    encoder: str = "small-cnn"
    """small-cnn, resnet18, resnet50, or the name of any timm model."""
    norm: Literal["batch", "group", "none"] = "batch"
    """Normalisation layers; none is the paper's, batch lets images of one step see each other."""
    embedding_dim: int | None = None
    """Width of the embedding; 0 takes the encoder's usual one."""
    projector: Literal["paper", "linear", "mlp"] = "paper"
    """Head from features to embedding: the paper's for the encoder, one layer, or an MLP."""
    optimizer: Literal["sgd", "adam", "adamw", "lars"] = "adam"
    """Optimizer."""
    lr: float = 1e-3
    """Peak learning rate; given --optimizer alone, a rate that suits it."""
    weight_decay: float = 1e-4
    """Weight decay."""
    momentum: float = 0.9
    """sgd, lars: momentum."""
    warmup_epochs: float = 6.0
    """Epochs of linear warm-up before the cosine decay; unless given, at most a tenth of all."""
    recipe: Literal["simclr-stl10", "simclr-imagenet", "cifar", "digits", "none"] = "digits"
    """Augmentation."""
    image_size: int | None = None
    """Side in pixels of the images the encoder sees; 0 keeps the size of the data."""
    augmentations: int | None = None
    """Augmentations stored per image, at least 2; 0 draws fresh ones every step."""
    subset: int | None = None
    """Train on the first N images only; 0 takes all."""
    seed: int = 0
    """Seed of everything random: weights, order, augmentation, chains."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the encoder; auto is bf16 on a GPU and float32 on a CPU."""
    graph: bool = True
    """On a GPU, replay the whole step as a CUDA graph; --no-graph is for debugging."""
    eval_every: int = 10
    """Epochs between evaluations during training; 0 evaluates at the end only."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints to keep."""
    probe_samples: int = 1000
    """Images of the fixed set on which the exact global loss is computed."""
    root: str = "data"
    """Folder of downloaded data sets."""
    download: bool = False
    """Download cifar10 or stl10 into --root if it is not there."""
    strict: bool = False
    """Stop at the first unreadable image instead of leaving it out."""
    holdout: float = 0.2
    """Share of each class held out to test probes where the data has no test split; 0 for none."""
    workers: int = 2
    """Processes that decode images."""
    resident_gb: float = 8.0
    """Keep the pictures on the training device up to this size; stream larger sets."""
    log_every: int = 10
    """Steps between lines of metrics."""
    out: str | None = None
    """Run folder; by default a new one under runs/."""
    preset: str | None = None
    """Start from the settings of one of the paper's experiments."""

    def __post_init__(self) -> None:
        """Refuse wrong types, unknown names and values out of range."""
        for name, hint in _hints().items():
            object.__setattr__(self, name, _typed(name, hint, getattr(self, name)))
        for name, (holds, rule) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ConfigError(f"{_option(name)} must be {rule}, got {show(value)}")
        if self.preset is not None:
            choose("--preset", self.preset, presets.PRESETS)
        if self.subset is not None and self.subset < self.batch_size:
            raise ConfigError(
                f"--batch-size {self.batch_size} needs as many images and --subset leaves "
                f"{self.subset}; lower --batch-size or raise --subset"
            )


RECORDED = ("versions", "hardware", "commit", "data_info")
"""Keys of a run's config.json that say what it ran on, not what was asked for."""

_Rule = tuple[Callable[[Any], bool], str]


def _between(low: int, high: int = 2**31 - 1) -> _Rule:  # steps and positions are 32-bit integers
    return lambda v: low <= v <= high, f"from {low} to {high}"


_share: _Rule = (lambda v: 0 < v <= 1, "above 0 and at most 1")
_named: _Rule = (lambda v: v.strip() != "" and "\0" not in v, "a name or a path")

_RULES: dict[str, _Rule] = {
    "data": _named,
    "encoder": _named,
    "root": _named,
    "out": _named,
    "batch_size": (lambda v: 2 <= v <= 2**20, "from 2 (one image has no negatives) to 1048576"),
    "epochs": _between(1),
    "steps": _between(1),
    "beta": (lambda v: 0 < v <= 1000, "above 0 and at most 1000 (beta = 1/temperature)"),
    "burn_in": (lambda v: 0 <= v < 1, "at least 0 and below 1, a share of the proposals"),
    "gamma": _share,
    "refresh": _share,
    "embedding_dim": _between(2, 65536),
    "lr": (lambda v: 0 < v <= 1000, "above 0 and at most 1000"),
    "weight_decay": _between(0, 1),
    "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "warmup_epochs": _between(0, 10**6),
    "image_size": _between(8, 2048),
    "augmentations": (lambda v: 2 <= v <= 1024, "from 2 (a pair needs two views) to 1024, or 0"),
    "subset": _between(2),
    "seed": (lambda v: 0 <= v < 2**32, "at least 0 and below 2**32"),
    "eval_every": _between(0),
    "checkpoint_every": _between(0),
    "keep_checkpoints": _between(1),
    "probe_samples": _between(2),
    "holdout": (lambda v: 0 <= v <= 0.9, "a share from 0 to 0.9"),
    "workers": _between(0, 1024),
    "resident_gb": _between(0, 10**6),
    "log_every": _between(1),
}

_ZERO_IS_NONE = ("augmentations", "embedding_dim", "image_size", "subset")

# Which choices an option belongs to: option, deciding field, values it goes with, what it is.
_BELONGS: tuple[tuple[str, str, tuple[str | None, ...], str], ...] = (
    ("carried", "method", ("emc2", "isir"), "only chains carry a negative"),
    ("proposal", "method", ("emc2", "isir"), "only chains have proposals"),
    ("burn_in", "method", ("emc2",), "i-SIR and the others discard no steps"),
    ("gamma", "method", ("sogclr",), "the rate of its moving average"),
    ("momentum", "optimizer", ("sgd", "lars"), "Adam has its own"),
    ("download", "data", ("cifar10", "stl10"), "nothing else can be downloaded"),
    ("root", "data", ("cifar10", "stl10"), "other data is not stored there"),
)

# Fields that may change when a run is continued: where and how it runs, never what it computes.
_FREE = frozenset({"out", "device", "graph", "eval_every", "checkpoint_every",
                   "keep_checkpoints", "root", "download", "strict", "workers", "resident_gb",
                   "log_every"})  # fmt: skip


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def _typed(name: str, hint: Any, value: object) -> object:
    """Return `value` as the field's type (an int becomes a float where one is due) or refuse."""
    if get_origin(hint) is Literal:
        return choose(_option(name), value, get_args(hint))
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    kind: type = kinds[0]
    if kind is float and type(value) is int and abs(value) < 2**1000:  # beyond, float() overflows
        return float(value)
    if type(value) is not kind:
        noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]
        raise ConfigError(f"{_option(name)} must be {noun}, got {show(value)}")
    return value


@functools.cache
def field_help() -> dict[str, str]:
    """Help text of every field, read from the strings under the fields.

    >>> field_help()["beta"]
    'Sharpness of the softmax over negatives: beta = 1/temperature.'
    """
    (body,) = ast.parse(inspect.getsource(TrainConfig)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
            found[field.target.id] = str(text.value.value)
    return found


def resolve(preset: str | None, overrides: Mapping[str, object]) -> TrainConfig:
    """Lay defaults, preset and the user's settings over each other, and refuse contradictions.

    An override of None counts as not given; 0 for `augmentations`, `embedding_dim`, `image_size`
    or `subset` takes back what a preset or a data set asked for. Folders become absolute.

    >>> resolve("stl10-b32", {"epochs": 20}).warmup_epochs  # a tenth of the run
    2.0
    """
    given = _given(overrides)
    name = given.pop("preset", preset)
    chosen = {} if name is None else presets.preset(name)
    data: Any = given.get("data", chosen.get("data", TrainConfig.data))
    if name is not None and "data" not in chosen and "data" not in given:
        raise ConfigError(f"--preset {name} needs --data PATH, the folder of its images")
    named = isinstance(data, str) and data in DATA_DEFAULTS
    base = {**(DATA_DEFAULTS[data] if named else presets.FOLDER_DEFAULTS), **chosen, "preset": name}
    config = replace(TrainConfig(), **{**base, **given})
    config = _fit(config, base, given)
    _refuse_contradictions(config, given)
    return _on_this_machine(config)


def resume(saved: TrainConfig, overrides: Mapping[str, object]) -> TrainConfig:
    """Settings of a continued run: the saved ones, with what may change on the way changed.

    >>> resume(TrainConfig(), {"log_every": 5}).log_every
    5
    """
    given = _given(overrides)
    config = _on_this_machine(replace(saved, **given))
    if differences := same_run(saved, config):
        raise ConfigError(
            f"a resumed run keeps its settings, but {'; '.join(differences)}: leave these "
            "options out, or start a new run in another --out"
        )
    _refuse_contradictions(config, given)
    return config


def _given(overrides: Mapping[str, object]) -> dict[str, Any]:
    names = _hints()
    given: dict[str, Any] = {}
    for name, value in overrides.items():
        choose("the setting", name, names)
        if value is not None:
            zero = name in _ZERO_IS_NONE and type(value) is int and value == 0
            given[name] = None if zero else value
    return given


def _fit(config: TrainConfig, base: dict[str, Any], given: dict[str, Any]) -> TrainConfig:
    """Adapt defaults that depend on what was given: rate, warm-up, built-in denominators."""
    changed: dict[str, Any] = {}
    if "lr" not in given and config.optimizer != base.get("optimizer", TrainConfig.optimizer):
        lars = round(0.075 * math.sqrt(config.batch_size), 6)
        changed["lr"] = presets.OPTIMIZER_LR.get(config.optimizer, lars)
    if "warmup_epochs" not in given:
        changed["warmup_epochs"] = min(config.warmup_epochs, config.epochs / 10)
    if "denominator" not in given and config.method in ("infonce", "dcl"):
        changed["denominator"] = "all" if config.method == "infonce" else "negatives"
    return replace(config, **changed)


def _refuse_contradictions(config: TrainConfig, given: Mapping[str, object]) -> None:
    for name, decider, values, reason in _BELONGS:
        actual = getattr(config, decider)
        if name in given and given[name] is not False and actual not in values:
            owners = " or ".join(value or "0" for value in values)
            _refuse(name, f"{_option(decider)} {owners}", decider, actual, reason)
    cached = config.method == "negcache" or (
        config.method in ("emc2", "isir") and config.proposal == "informed"
    )
    if "refresh" in given and not cached:
        owners = "--method negcache or --proposal informed"
        _refuse("refresh", owners, "method", config.method, "only these keep a table")
    built_in = {"infonce": "all", "dcl": "negatives"}.get(config.method, config.denominator)
    if config.denominator != built_in:
        other = "dcl" if config.method == "infonce" else "infonce"
        raise ConfigError(
            f"--method {config.method} has --denominator {built_in} built in and --denominator "
            f"{config.denominator} was given; choose --method {other} for that"
        )
    if "epochs" in given and "steps" in given:
        raise ConfigError("--epochs and --steps both set the length of the run; give one of them")
    if "warmup_epochs" in given and config.steps is None and config.warmup_epochs > config.epochs:
        raise ConfigError(
            f"--warmup-epochs {config.warmup_epochs:g} is longer than --epochs {config.epochs}; "
            "lower --warmup-epochs or raise --epochs"
        )


def _refuse(name: str, owners: str, decider: str, actual: str, reason: str) -> None:
    raise ConfigError(
        f"{_option(name)} belongs to {owners} ({reason}) and {_option(decider)} is "
        f"{show(actual)}; leave out {_option(name)} or change {_option(decider)}"
    )


def _on_this_machine(config: TrainConfig) -> TrainConfig:
    """Refuse a folder, GPU or encoder that is not there; return `config` with absolute folders."""
    # Imported here because torch and timm take seconds, and reading a config needs neither.
    import torch

    from negchain.data.sources import named_sources

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU and none is visible; use --device cpu or auto")
    if config.encoder not in ("small-cnn", "resnet18", "resnet50"):
        import timm

        choose("--encoder", config.encoder, ["small-cnn", *timm.list_models()])
    data = config.data
    if data not in DATA_DEFAULTS:
        try:
            parts = named_sources(data)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        data = ",".join(p if p in DATA_DEFAULTS else os.path.abspath(p) for p in parts)
    return replace(config, data=data, root=os.path.abspath(config.root))


def same_run(a: TrainConfig, b: TrainConfig) -> list[str]:
    """What differs between `a` and `b` and must not if `b` is to continue `a`; empty if nothing.

    >>> same_run(TrainConfig(), TrainConfig(batch_size=32, workers=7))
    ['--batch-size was 64 and is now 32']
    """
    return [
        f"{_option(f.name)} was {show(getattr(a, f.name))} and is now {show(getattr(b, f.name))}"
        for f in fields(TrainConfig)
        if f.name not in _FREE and getattr(a, f.name) != getattr(b, f.name)
    ]


def to_json(config: TrainConfig) -> str:
    """Return `config` as JSON text that `from_json` turns into an equal config."""
    return json.dumps(asdict(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> TrainConfig:
    """Read `to_json`'s text; a missing key takes its default, an unknown one is refused.

    >>> from_json(to_json(TrainConfig(beta=5))).beta
    5.0
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the config must be JSON, but {error}; restore the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config must be a JSON object, got {show(values)}")
    values = {name: value for name, value in values.items() if name not in RECORDED}
    for name in values:
        choose("the setting", name, _hints())
    return TrainConfig(**values)
