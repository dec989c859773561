"""Named settings: the paper's hyper-parameter table, and what suits each data set.

`PRESETS` holds whole experiments of the paper by name, `DATA_DEFAULTS` what a data set needs when
nothing else is said. Both are plain dictionaries of `TrainConfig` fields, which
`negchain.train.resolve` lays over each other. `ConfigError`, and `choose`, which raises it for an
unknown name, are here because settings and tasks both import this module.

Sources. [T] the paper's table of hyper-parameters (appendix "Experiment Details"); [D] its table
of data sets; [P] its text; [R] the recipe of the authors' README and defaults, where the paper is
silent.
"""

import difflib
from collections.abc import Iterable

from negchain.printable import show

Value = int | float | str | None


class ConfigError(ValueError):
    """A setting is wrong or contradicts another; the message is one sentence for the user."""


def choose(what: str, value: object, valid: Iterable[str]) -> str:
    """Return `value` if it is one of `valid`, else raise with the nearest valid name.

    >>> choose("--method", "emc2", ["dcl", "emc2"])
    'emc2'
    >>> choose("--method", "ecm2", ["dcl", "emc2"])
    Traceback (most recent call last):
    ...
    negchain.train.presets.ConfigError: --method must be one of dcl, emc2, got 'ecm2'; \
did you mean 'emc2'?
    """
    names = list(valid)
    if isinstance(value, str) and value in names:
        return value
    few = f"must be one of {', '.join(names)}" if len(names) <= 16 else "is unknown"
    # 64 characters bound the work of the match on absurd input; no valid name is that long.
    word = value[:64].lower() if isinstance(value, str) else ""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    own = what in ("--method", "--methods", "--task")
    otherwise = "; one of your own needs --import FILE" if own else ""
    remedy = f"; did you mean {near[0]!r}?" if near else otherwise
    raise ConfigError(f"{what} {few}, got {show(value)}{remedy}")


_PAPER: dict[str, Value] = {
    "norm": "none",  # [R] every BatchNorm replaced by the identity
    # [T] P = b - 1 of R = 2b - 2. With fresh augmentations R is b - 1 here, one copy of every other
    # image, and P half of it, as in the records of STL-10; --proposal both is the paper's R and P.
    "burn_in": 0.5,
    "carried": "encode",  # [P] Algorithm 1: the carried state is scored by the current encoder
    "denominator": "negatives",  # [P] eq. (1)
    "proposal": "batch",
    "gamma": 0.9,  # [R] SogCLR
}

_STL10: dict[str, Value] = {
    **_PAPER,
    "data": "stl10-unlabeled",  # [D] 100,000 images; `stl10` has the 5,000 labelled ones too
    "encoder": "resnet18",  # [T]
    "embedding_dim": 512,  # [T]
    "image_size": 96,  # [D]
    "recipe": "simclr-stl10",  # [R]
    "weight_decay": 1e-4,  # [T]; coupled, on every parameter [R]
    "optimizer": "adam",  # [P] section 4.2
    "epochs": 100,  # [P] captions of its figures against time, for batch 32; [R]
    "warmup_epochs": 10.0,  # [R] linear from 0, then cosine to 0, per step
}

PRESETS: dict[str, dict[str, Value]] = {
    "stl10-b32": {
        **_STL10,
        "batch_size": 32,  # [T]
        "beta": 14.28,  # [T]
        "lr": 1e-4,  # [T]
        "refresh": 0.01024,  # [T]
    },
    "stl10-b256": {
        **_STL10,
        "batch_size": 256,  # [T]
        "beta": 5.0,  # [T]
        "lr": 1e-3,  # [T]
        "refresh": 0.1,  # [T]
    },
    # No "data": ImageNet-100 cannot be downloaded, so the user names the folder. The table has no
    # cache refresh for it (Negative Cache was not run), so that field keeps its own default.
    "imagenet100-b256": {
        **_PAPER,
        "encoder": "resnet50",  # [T]
        "embedding_dim": 128,  # [T]
        "projector": "mlp",  # [R] Linear-ReLU-Linear
        "image_size": 224,  # [D]
        "recipe": "simclr-imagenet",  # [R]
        "batch_size": 256,  # [T]
        "beta": 14.28,  # [T]
        "optimizer": "lars",  # [P]; [R] trust 0.001, no scaling or decay of 1-D parameters
        "lr": 1.2,  # [T] = 0.075 * sqrt(256)
        "momentum": 0.9,  # [R]
        "weight_decay": 1e-6,  # [T]
        "epochs": 800,  # [R]
        "warmup_epochs": 10.0,  # [R]
    },
    "stl10-subset": {
        **_STL10,
        # What the trainer does otherwise than the paper: a pair is two different views, and the
        # rate decays. `reproduce stationarity` has pairs of equal views too, and a constant rate.
        "data": "stl10",  # in whose order the labelled images come first
        "subset": 500,  # [P] "the first 500 images ...
        "augmentations": 2,  # ... and using two pre-computed augmentations"
        "batch_size": 4,  # [T]
        "beta": 5.0,  # [T]
        "optimizer": "sgd",  # [P] caption of the figure
        "momentum": 0.0,  # [R]
        "lr": 1e-3,  # [T]
        "refresh": 0.1,  # [T]
        "epochs": 10,  # [R]
        "warmup_epochs": 0.0,  # ten epochs of warm-up would be the whole run
    },
}

PRESET_HELP: dict[str, str] = {
    "stl10-b32": "STL-10, ResNet-18 without normalisation, batch 32, beta 14.28, 100 epochs",
    "stl10-b256": "STL-10, ResNet-18 without normalisation, batch 256, beta 5, 100 epochs",
    "imagenet100-b256": "ImageNet-100 (give --data PATH), ResNet-50, batch 256, LARS, 800 epochs",
    "stl10-subset": "500 STL-10 images with 2 stored augmentations each, batch 4, beta 5, SGD",
}

_PICTURES: dict[str, Value] = {
    "encoder": "resnet18",
    "batch_size": 64,
    "epochs": 100,
    "warmup_epochs": 10.0,
    "lr": 3e-4,
    "checkpoint_every": 1000,
    "probe_samples": 2000,
}

FOLDER_DEFAULTS: dict[str, Value] = {**_PICTURES, "recipe": "simclr-stl10", "image_size": 96}
# The defaults of `TrainConfig` itself are those of "digits".
DATA_DEFAULTS: dict[str, dict[str, Value]] = {
    "digits": {},
    "cifar10": {**_PICTURES, "recipe": "cifar", "image_size": 32},
}

CAPTION_DEFAULTS: dict[str, Value] = {
    **_PICTURES,
    "method": "infonce",  # none is better at equal encodes (records/2026-11-16_flickr8k_h200)
    "denominator": "all",  # CLIP's, and what was measured there
    "recipe": "mild",
    "image_size": 112,  # half of ImageNet's
    "epochs": 30,
    "warmup_epochs": 1.0,
    "optimizer": "adamw",
    "lr": 1e-4,
    "weight_decay": 0.01,
    "eval_every": 5,
    "patience": 3,
    "probe_samples": 1000,
    "holdout": 0.1,
}

TEXT_DEFAULTS: dict[str, Value] = {
    "encoder": "none",  # and the task says that one must be named
    "method": "informed",
    "denominator": "all",
    "batch_size": 16,
    "beta": 50.0,
    "optimizer": "adamw",
    "lr": 5e-5,
    "weight_decay": 0.01,
    "epochs": 6,
    "eval_every": 1,
    "patience": 3,
}

# Learning rates of one optimizer mean nothing to another: used when --optimizer is given alone.
# That of LARS is times sqrt(b), as in SimCLR.
OPTIMIZER_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "lars": 0.075}
