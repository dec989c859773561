"""ResNet-50, LARS, b = 256 (the paper's Fig. 6).

Paper   ImageNet-100 at 224 px, β = 14.28, lr 1.2: EMC² above SimCLR, "on par with SogCLR".
Code    (the authors') 800 epochs, no normalisation layers.
Ours    any image folder; here Tiny-ImageNet-100 (35,000 images) at 64 px, few epochs.
"""

from __future__ import annotations

from typing import Any

from negchain.reproduce.common import Experiment, Options, Row
from negchain.reproduce.runs import train
from negchain.reproduce.stl10 import accuracy_figure, accuracy_table, training_jobs

METHODS = ("infonce", "dcl", "sogclr", "emc2")
_SMALL: Row = {"preset": "imagenet100-b256", "image_size": 64, "stem": "large"}
SETTINGS: dict[str, Row] = {
    "b256-batch": {**_SMALL, "norm": "batch"},
    "b256-none": _SMALL,
    "224px-none": {"preset": "imagenet100-b256"},  # the paper's, for those who have the images
}


def jobs(options: Options) -> list[Row]:
    """All methods, seed by seed."""
    settings = SETTINGS if options.settings else dict(list(SETTINGS.items())[:2])
    return training_jobs(options, settings, METHODS, seeds=2)


def draw(rows: list[Row]) -> dict[str, Any]:
    """Linear probe and 1-NN against samples."""
    return {
        "imagenet100-probe": accuracy_figure(rows, "probe"),
        "imagenet100-1nn": accuracy_figure(rows, "knn1"),
    }


EXPERIMENT = Experiment("imagenet100", jobs, train, accuracy_table, draw)
