"""What a run is: one frozen dataclass that refuses wrong types, unknown names, values out of range.

Each field stands beside its help, its rule and its place in `--help`. Nothing here looks at the
machine, so that a config.json can be read on any; `negchain.train.resolve` does look.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from negchain import methods, tasks
from negchain.printable import show
from negchain.train import presets
from negchain.train.presets import ConfigError, choose

__all__ = ["ConfigError", "Setting", "TrainConfig", "flag", "from_saved", "hints",
           "method_named", "same_run", "setting_of"]  # fmt: skip


Panel = Literal["The run", "Data", "Negatives", "Encoder and optimizer", "Watching"]
RUN, DATA, NEGATIVES, TRAINING, WATCHING = get_args(Panel)
Rule = tuple[Callable[[Any], bool], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What is known of a field beside its type and default."""

    help: str
    panel: Panel  # of `--help`
    rule: Rule | None = None  # what a value must fulfil, and that in words
    choices: Callable[[], tuple[str, ...]] | None = None  # at this time: users register names
    free: bool = False  # may change when a run is resumed: where and how it runs
    zero_is_none: bool = False  # 0 takes back what a preset or a data set asked for


def setting(default: T, panel: Panel, *, help: str, **known: Any) -> T:
    """A field of a dataclass with its default, and a `Setting` of the rest as its metadata."""
    return field(default=default, metadata={"": Setting(help, panel, **known)})


def between(low: int, high: int = 2**31 - 1) -> Rule:  # steps and positions are 32-bit integers
    """A rule for numbers from `low` to `high`, both ends allowed.

    >>> fulfilled, words = between(1, 5)
    >>> fulfilled(5), words
    (True, 'from 1 to 5')
    """
    return lambda v: low <= v <= high, f"from {low} to {high}"


share: Rule = (lambda v: 0 < v <= 1, "above 0 and at most 1")
named: Rule = (lambda v: v.strip() != "" and "\0" not in v, "a name or a path")
in_0_1: Rule = (lambda v: 0 <= v < 1, "at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run; `setting_of` tells a field's help and rule.

    >>> TrainConfig(method="dcl", batch_size=32).method
    'dcl'
    """

    # A table: what the tool knows of a setting, then what it tells the user.
    # fmt: off
    preset: str | None = setting(None, RUN, choices=lambda: tuple(presets.PRESETS),
        help="Start from the settings of one of the paper's experiments.")
    out: str | None = setting(None, RUN, rule=named, free=True,
        help="Run folder; by default a new one under runs/.")
    name: str | None = setting(None, RUN, rule=named, free=True,
        help="What to call the run: in its folder's name, in reports and at loggers.")
    seed: int = setting(0, RUN, rule=(lambda v: 0 <= v < 2**32, "at least 0 and below 2**32"),
        help="Seed of everything random: weights, order, augmentation, chains.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", RUN, free=True,
        help="Where to train; auto takes a GPU if there is one.")
    precision: Literal["auto", "float32", "bf16", "float64"] = setting("auto", RUN,
        help="Precision of the encoder; auto is bf16 where that is fast (a GPU, some CPUs), else "
        "float32.")
    graph: bool = setting(True, RUN, free=True,
        help="On a GPU, replay the whole step as a CUDA graph; --no-graph is for debugging.")
    epochs: int = setting(60, RUN, rule=between(1),
        help="Passes over the training images.")
    steps: int | None = setting(None, RUN, rule=between(1),
        help="Stop after this many steps, whatever --epochs says.")
    task: str = setting("images", DATA, choices=tasks.names,
        help="What the data is and what is learned from it; unless given, by what --data holds.")
    data: str = setting("digits", DATA, rule=named,
        help="digits, cifar10, stl10, a folder of images, tar shards, save_to_disk, BEIR; A,B "
        "for two.")
    recipe: Literal["simclr-stl10", "simclr-imagenet", "cifar", "digits", "mild", "none"] = setting(
        "digits", DATA, help="Augmentation.")
    image_size: int | None = setting(None, DATA, rule=between(8, 2048), zero_is_none=True,
        help="Side in pixels of the images the encoder sees; 0 keeps the size of the data.")
    augmentations: int | None = setting(None, DATA,
        rule=(lambda v: 2 <= v <= 1024, "from 2 (a pair needs two views) to 1024, or 0"),
        zero_is_none=True,
        help="Augmentations stored per image, at least 2; 0 draws fresh ones every step.")
    subset: int | None = setting(None, DATA, rule=between(2), zero_is_none=True,
        help="Train on the first N images only; 0 takes all.")
    root: str = setting("data", DATA, rule=named, free=True,
        help="Folder of downloaded data sets.")
    download: bool = setting(False, DATA, free=True,
        help="Download cifar10 or stl10 into --root if it is not there.")
    strict: bool = setting(False, DATA, free=True,
        help="Stop at the first unreadable image instead of leaving it out.")
    holdout: float = setting(0.2, DATA, rule=(lambda v: 0 <= v <= 0.9, "a share from 0 to 0.9"),
        help="Share of each class held out to test probes where the data has no test split; 0: "
        "none.")
    workers: int = setting(2, DATA, rule=between(0, 1024), free=True,
        help="Processes that decode images.")
    resident_gb: float = setting(8.0, DATA, rule=between(0, 10**6), free=True,
        help="Keep the pictures on the training device up to this size; larger sets stay on disk.")
    max_length: int = setting(256, DATA, rule=between(4, 2**17),
        help="Texts: tokens the encoder sees of each.")
    method: str = setting("emc2", NEGATIVES, choices=methods.trained,
        help="Estimator of the negatives: infonce is SimCLR's; emc2 and isir keep a chain per "
        "image.")
    batch_size: int = setting(64, NEGATIVES,
        rule=(lambda v: 2 <= v <= 2**20, "from 2 (one image has no negatives) to 1048576"),
        help="Images per step; each enters with two views.")
    beta: float = setting(14.28, NEGATIVES,
        rule=(lambda v: 0 < v <= 1000, "above 0 and at most 1000 (beta = 1/temperature)"),
        help="Sharpness of the softmax over negatives: beta = 1/temperature.")
    burn_in: float = setting(0.5, NEGATIVES,
        rule=(lambda v: 0 <= v < 1 or (v >= 1 and v % 1 == 0),
              "a share of the proposals, at least 0 and below 1, or a whole number of them"),
        help="emc2: proposals discarded at first: below 1 their share, from 1 their number (the "
        "paper's P).")
    carried: Literal["encode", "cached"] = setting("encode", NEGATIVES,
        help="emc2, isir: carried negatives are encoded anew (the paper), or kept as embeddings.")
    denominator: Literal["negatives", "all"] = setting("negatives", NEGATIVES,
        help="Softmax over the negatives alone (the paper), or with the positive kept in.")
    proposal: Literal["batch", "both", "informed"] = setting("batch", NEGATIVES,
        help="emc2, isir: one view of the batch's other images, both (default: fresh views), or a "
        "table's draws.")
    draws: int = setting(2, NEGATIVES, rule=between(0, 1024),
        help="Texts: documents encoded per query beside its positive, random or proposed; 0: none.")
    gamma: float = setting(0.9, NEGATIVES, rule=share,
        help="sogclr: rate of the moving average, 1 forgets the past.")
    refresh: float = setting(0.01, NEGATIVES, rule=share,
        help="informed, topk, negcache, --proposal informed: share of the table re-encoded a step.")
    encoder: str = setting("small-cnn", TRAINING, rule=named,
        help="small-cnn, resnet18, resnet50, any timm model; for texts a sentence-transformers "
        "folder.")
    text_encoder: str | None = setting(None, TRAINING, rule=named,
        help="image-text: folder of a transformers or sentence-transformers encoder on this "
        "machine.")
    shard_encoder: bool = setting(False, TRAINING, free=True,
        help="Under torchrun: ranks keep parts of the encoder (FSDP2), where one GPU cannot hold "
        "it.")
    stem: Literal["auto", "small", "large"] = setting("auto", TRAINING,
        help="First layer of the ResNets: small keeps every pixel, large is 4 to 16 times faster; "
        "auto: by data.")
    pretrained: str | None = setting(None, TRAINING, rule=named,
        help="Start from weights: timm (may download), a run folder, or a .pt or .safetensors "
        "file.")
    norm: Literal["batch", "group", "none"] = setting("batch", TRAINING,
        help="Normalisation layers; none is the authors', batch lets images of one step see each "
        "other.")
    embedding_dim: int | None = setting(None, TRAINING, rule=between(2, 65536), zero_is_none=True,
        help="Width of the embedding; 0 takes the encoder's usual one.")
    projector: Literal["paper", "linear", "mlp"] = setting("paper", TRAINING,
        help="Head from features to embedding: the encoder's by the authors' code (paper), one "
        "layer, or an MLP.")
    optimizer: Literal["sgd", "adam", "adamw", "lars"] = setting("adam", TRAINING,
        help="Optimizer.")
    lr: float = setting(1e-3, TRAINING, rule=(lambda v: 0 < v <= 1000, "above 0 and at most 1000"),
        help="Peak learning rate; given --optimizer alone, a rate that suits it.")
    weight_decay: float = setting(1e-4, TRAINING, rule=between(0, 1),
        help="Weight decay.")
    momentum: float = setting(0.9, TRAINING, rule=in_0_1,
        help="sgd, lars: momentum.")
    warmup_epochs: float = setting(6.0, TRAINING, rule=between(0, 10**6),
        help="Epochs of linear warm-up before the cosine decay; with --steps, and unless given, "
        "at most a tenth.")
    eval_every: int = setting(10, WATCHING, rule=between(0), free=True,
        help="Epochs between evaluations during training; 0 evaluates at the end only.")
    patience: int | None = setting(None, WATCHING, rule=between(1), zero_is_none=True,
        help="Stop after this many evaluations without a better one, keep the best encoder by "
        "validation; 0: no.")
    probe_samples: int = setting(1000, WATCHING, rule=between(2),
        help="Images of the fixed set on which the exact global loss is computed.")
    log_every: int = setting(10, WATCHING, rule=between(1), free=True,
        help="Steps between lines of metrics.")
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = setting("tensorboard", WATCHING,
        free=True,
        help="Where the numbers also go; wandb and mlflow through their own packages.")
    checkpoint_every: int = setting(200, WATCHING, rule=between(0), free=True,
        help="Steps between checkpoints; 0 writes one at the end only.")
    keep_checkpoints: int = setting(2, WATCHING, rule=between(1), free=True,
        help="How many of the latest checkpoints to keep.")
    # fmt: on

    def __post_init__(self) -> None:
        """Refuse wrong types, unknown names and values out of range."""
        for name, hint in hints().items():
            value, known = _typed(name, hint, getattr(self, name)), setting_of(name)
            object.__setattr__(self, name, value)
            if value is not None and known.choices:
                choose(flag(name), value, known.choices())
            if value is not None and known.rule is not None and not known.rule[0](value):
                raise ConfigError(f"{flag(name)} must be {known.rule[1]}, got {show(value)}")
        if self.subset is not None and self.subset < self.batch_size:
            raise ConfigError(
                f"--batch-size {self.batch_size} needs as many samples and --subset leaves "
                f"{self.subset}; lower --batch-size or raise --subset"
            )


RECORDED = ("versions", "hardware", "commit", "data_info")
"""Keys of a run's config.json that say what it ran on, not what was asked for."""


def flag(name: str) -> str:
    """The option of a setting: `--batch-size` for batch_size."""
    return "--" + name.replace("_", "-")


def method_named(option: str, value: object) -> str:
    """The name of a method, given that or one of its aliases.

    >>> method_named("--method", "simclr")
    'infonce'
    """
    other = {alias: name for name, m in methods.METHODS.items() for alias in m.aliases}
    known = other.get(value, value) if isinstance(value, str) else value
    return choose(option, known, methods.trained())


@functools.cache
def hints() -> dict[str, Any]:
    """The type of every setting."""
    return get_type_hints(TrainConfig)


def _typed(name: str, hint: Any, value: object) -> object:
    """Return `value` as the field's type (an int becomes a float where one is due) or refuse."""
    if get_origin(hint) is Literal:
        return choose(flag(name), value, get_args(hint))
    kinds = get_args(hint) or (hint,)
    if value is None and NoneType in kinds:
        return None
    kind: type = kinds[0]
    if kind is float and type(value) is int and abs(value) < 2**1000:  # beyond, float() overflows
        return float(value)
    if type(value) is not kind:
        noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]
        raise ConfigError(f"{flag(name)} must be {noun}, got {show(value)}")
    return value


def setting_of(name: str) -> Setting:
    """Help, rule and place of a field of `TrainConfig`.

    >>> setting_of("beta").help
    'Sharpness of the softmax over negatives: beta = 1/temperature.'
    """
    known: Setting = TrainConfig.__dataclass_fields__[name].metadata[""]
    return known


def same_run(a: TrainConfig, b: TrainConfig) -> list[str]:
    """A clause for every setting that differs, and must not if `b` is to continue `a`.

    >>> same_run(TrainConfig(), TrainConfig(batch_size=32, workers=7))
    ['--batch-size was 64 and is now 32']
    """
    return [
        f"{flag(f.name)} was {show(getattr(a, f.name))} and is now {show(getattr(b, f.name))}"
        for f in fields(TrainConfig)
        if not setting_of(f.name).free and getattr(a, f.name) != getattr(b, f.name)
    ]


def from_saved(values: Mapping[str, Any]) -> TrainConfig:
    """Settings as a config.json has them; a missing one has its default, an unknown is refused.

    >>> from_saved({"beta": 5, "commit": "unknown"}).beta
    5.0
    """
    given = {name: value for name, value in values.items() if name not in RECORDED}
    for name in given:
        choose("the setting", name, hints())
    return TrainConfig(**given)
