"""What a run is: one frozen dataclass that refuses wrong types, unknown names, values out of range.

A field and what is known of it (help, rule, place in `--help`) stand together. Nothing here looks
at the machine, so a run's config.json can be read anywhere; `negchain.train.resolve` does.
"""

import functools
import json
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from negchain import methods, tasks
from negchain.printable import show
from negchain.train import presets
from negchain.train.presets import ConfigError, choose
from negchain.train.rules import Setting, between, in_0_1, named, setting, share

__all__ = ["ConfigError", "Setting", "TrainConfig", "flag", "from_json", "hints",
           "method_named", "same_run", "setting_of", "to_json"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run; `setting_of` tells a field's help and rule.

    >>> TrainConfig(method="dcl", batch_size=32).method
    'dcl'
    """

    preset: str | None = setting(
        None, "Start from the settings of one of the paper's experiments.", "The run"
    )
    out: str | None = setting(
        None, "Run folder; by default a new one under runs/.", "The run", rule=named, free=True
    )
    name: str | None = setting(
        None,
        "What to call the run: in its folder's name, in reports and at loggers.",
        "The run",
        rule=named,
        free=True,
    )
    seed: int = setting(
        0,
        "Seed of everything random: weights, order, augmentation, chains.",
        "The run",
        rule=(lambda v: 0 <= v < 2**32, "at least 0 and below 2**32"),
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where to train; auto takes a GPU if there is one.", "The run", free=True
    )
    precision: Literal["auto", "float32", "bf16", "float64"] = setting(
        "auto", "Precision of the encoder; auto is bf16 on a GPU and float32 on a CPU.", "The run"
    )
    graph: bool = setting(
        True,
        "On a GPU, replay the whole step as a CUDA graph; --no-graph is for debugging.",
        "The run",
        free=True,
    )
    epochs: int = setting(60, "Passes over the training images.", "The run", rule=between(1))
    steps: int | None = setting(
        None, "Stop after this many steps, whatever --epochs says.", "The run", rule=between(1)
    )
    task: str = setting(
        "images",
        "What the data is and what is learned from it; unless given, by what --data holds.",
        "Data",
        choices=tasks.names,
    )
    data: str = setting(
        "digits",
        "digits, cifar10, stl10, a folder of images, tar shards, save_to_disk, BEIR; A,B for two.",
        "Data",
        rule=named,
    )
    recipe: Literal["simclr-stl10", "simclr-imagenet", "cifar", "digits", "mild", "none"] = setting(
        "digits", "Augmentation.", "Data"
    )
    image_size: int | None = setting(
        None,
        "Side in pixels of the images the encoder sees; 0 keeps the size of the data.",
        "Data",
        rule=between(8, 2048),
        zero_is_none=True,
    )
    augmentations: int | None = setting(
        None,
        "Augmentations stored per image, at least 2; 0 draws fresh ones every step.",
        "Data",
        rule=(lambda v: 2 <= v <= 1024, "from 2 (a pair needs two views) to 1024, or 0"),
        zero_is_none=True,
    )
    subset: int | None = setting(
        None,
        "Train on the first N images only; 0 takes all.",
        "Data",
        rule=between(2),
        zero_is_none=True,
    )
    root: str = setting("data", "Folder of downloaded data sets.", "Data", rule=named, free=True)
    download: bool = setting(
        False, "Download cifar10 or stl10 into --root if it is not there.", "Data", free=True
    )
    strict: bool = setting(
        False, "Stop at the first unreadable image instead of leaving it out.", "Data", free=True
    )
    holdout: float = setting(
        0.2,
        "Share of each class held out to test probes where the data has no test split; 0: none.",
        "Data",
        rule=(lambda v: 0 <= v <= 0.9, "a share from 0 to 0.9"),
    )
    workers: int = setting(
        2, "Processes that decode images.", "Data", rule=between(0, 1024), free=True
    )
    resident_gb: float = setting(
        8.0,
        "Keep the pictures on the training device up to this size; stream larger sets.",
        "Data",
        rule=between(0, 10**6),
        free=True,
    )
    max_length: int = setting(
        256, "Texts: tokens the encoder sees of each.", "Data", rule=between(4, 2**17)
    )
    method: str = setting(
        "emc2",
        "Estimator of the negatives: infonce is SimCLR's; emc2 and isir keep a chain per image.",
        "Negatives",
        choices=methods.trained,
    )
    batch_size: int = setting(
        64,
        "Images per step; each enters with two views.",
        "Negatives",
        rule=(lambda v: 2 <= v <= 2**20, "from 2 (one image has no negatives) to 1048576"),
    )
    beta: float = setting(
        14.28,
        "Sharpness of the softmax over negatives: beta = 1/temperature.",
        "Negatives",
        rule=(lambda v: 0 < v <= 1000, "above 0 and at most 1000 (beta = 1/temperature)"),
    )
    burn_in: float = setting(
        0.5,
        "emc2: share of the proposals discarded before visits count (P/R in the paper).",
        "Negatives",
        rule=(lambda v: 0 <= v < 1, "at least 0 and below 1, a share of the proposals"),
    )
    carried: Literal["encode", "cached"] = setting(
        "encode",
        "emc2, isir: carried negatives are encoded anew (the paper), or kept as embeddings.",
        "Negatives",
    )
    denominator: Literal["negatives", "all"] = setting(
        "negatives",
        "Softmax over the negatives alone (the paper), or with the positive kept in.",
        "Negatives",
    )
    proposal: Literal["batch", "informed"] = setting(
        "batch",
        "emc2, isir: proposals are the batch (the paper), or drawn from a table of old embeddings.",
        "Negatives",
    )
    draws: int = setting(
        2,
        "Texts: documents encoded per query beside its positive, random or proposed; 0: none.",
        "Negatives",
        rule=between(0, 1024),
    )
    gamma: float = setting(
        0.9, "sogclr: rate of the moving average, 1 forgets the past.", "Negatives", rule=share
    )
    refresh: float = setting(
        0.01,
        "negcache, --proposal informed: share of the table re-encoded per step.",
        "Negatives",
        rule=share,
    )
    encoder: str = setting(
        "small-cnn",
        "small-cnn, resnet18, resnet50, any timm model; for texts a sentence-transformers folder.",
        "Encoder and optimizer",
        rule=named,
    )
    text_encoder: str | None = setting(
        None,
        "image-text: folder of a transformers or sentence-transformers encoder on this machine.",
        "Encoder and optimizer",
        rule=named,
    )
    stem: Literal["auto", "small", "large"] = setting(
        "auto",
        "First layer of the ResNets: small keeps every pixel, large is 8x faster; auto: by data.",
        "Encoder and optimizer",
    )
    pretrained: str | None = setting(
        None,
        "Start from weights: timm (may download), a run folder, or a .pt or .safetensors file.",
        "Encoder and optimizer",
        rule=named,
    )
    norm: Literal["batch", "group", "none"] = setting(
        "batch",
        "Normalisation layers; none is the paper's, batch lets images of one step see each other.",
        "Encoder and optimizer",
    )
    embedding_dim: int | None = setting(
        None,
        "Width of the embedding; 0 takes the encoder's usual one.",
        "Encoder and optimizer",
        rule=between(2, 65536),
        zero_is_none=True,
    )
    projector: Literal["paper", "linear", "mlp"] = setting(
        "paper",
        "Head from features to embedding: the paper's for the encoder, one layer, or an MLP.",
        "Encoder and optimizer",
    )
    optimizer: Literal["sgd", "adam", "adamw", "lars"] = setting(
        "adam", "Optimizer.", "Encoder and optimizer"
    )
    lr: float = setting(
        1e-3,
        "Peak learning rate; given --optimizer alone, a rate that suits it.",
        "Encoder and optimizer",
        rule=(lambda v: 0 < v <= 1000, "above 0 and at most 1000"),
    )
    weight_decay: float = setting(
        1e-4, "Weight decay.", "Encoder and optimizer", rule=between(0, 1)
    )
    momentum: float = setting(0.9, "sgd, lars: momentum.", "Encoder and optimizer", rule=in_0_1)
    warmup_epochs: float = setting(
        6.0,
        "Epochs of linear warm-up before the cosine decay; unless given, at most a tenth of all.",
        "Encoder and optimizer",
        rule=between(0, 10**6),
    )
    eval_every: int = setting(
        10,
        "Epochs between evaluations during training; 0 evaluates at the end only.",
        "Watching",
        rule=between(0),
        free=True,
    )
    patience: int | None = setting(
        None,
        "Stop after this many evaluations without a better one and keep the best encoder; 0: no.",
        "Watching",
        rule=between(1),
        zero_is_none=True,
    )
    probe_samples: int = setting(
        1000,
        "Images of the fixed set on which the exact global loss is computed.",
        "Watching",
        rule=between(2),
    )
    log_every: int = setting(
        10, "Steps between lines of metrics.", "Watching", rule=between(1), free=True
    )
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = setting(
        "tensorboard",
        "Where the numbers also go; wandb and mlflow through their own packages.",
        "Watching",
        free=True,
    )
    checkpoint_every: int = setting(
        200,
        "Steps between checkpoints; 0 writes one at the end only.",
        "Watching",
        rule=between(0),
        free=True,
    )
    keep_checkpoints: int = setting(
        2, "How many of the latest checkpoints to keep.", "Watching", rule=between(1), free=True
    )

    def __post_init__(self) -> None:
        """Refuse wrong types, unknown names and values out of range."""
        for name, hint in hints().items():
            value, known = _typed(name, hint, getattr(self, name)), setting_of(name)
            object.__setattr__(self, name, value)
            if value is not None and known.choices:
                choose(flag(name), value, known.choices())
            if value is not None and known.rule is not None and not known.rule[0](value):
                raise ConfigError(f"{flag(name)} must be {known.rule[1]}, got {show(value)}")
        if self.preset is not None:
            choose("--preset", self.preset, presets.PRESETS)
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
    """The method's own name, for that or another people know it by.

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
    return _settings()[name]


@functools.cache
def _settings() -> dict[str, Setting]:
    return {f.name: f.metadata[""] for f in fields(TrainConfig)}


def same_run(a: TrainConfig, b: TrainConfig) -> list[str]:
    """What differs between `a` and `b` and must not if `b` is to continue `a`; empty if nothing.

    >>> same_run(TrainConfig(), TrainConfig(batch_size=32, workers=7))
    ['--batch-size was 64 and is now 32']
    """
    return [
        f"{flag(f.name)} was {show(getattr(a, f.name))} and is now {show(getattr(b, f.name))}"
        for f in fields(TrainConfig)
        if not setting_of(f.name).free and getattr(a, f.name) != getattr(b, f.name)
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
        choose("the setting", name, hints())
    return TrainConfig(**values)
