"""The paper's experiments, rerun: `negchain reproduce NAME`.

Each experiment says which runs there are, what one measures, and how its record becomes a table and
figures. Records are the only thing figures are drawn from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # help must not wait for torch
    from negchain.reproduce.common import Experiment

NAMES = {
    "stationarity": "exact loss and squared gradient norm on 500 stored images, b = 4 (Fig. 7)",
    "stl10": "linear probe and 1-NN on STL-10, b = 32 and 256, and 8 and 16 (Fig. 5)",
    "burn-in": "EMC² with P = 0, b/2, b, 3b/2 of R = 2b - 2 steps (Fig. 4)",
    "finite-augmentations": "EMC² with stored and with fresh augmentations (Fig. 3)",
    "time": "accuracy against seconds, from the records of stl10 and cost (Fig. 1 and 8)",
    "imagenet100": "ResNet-50, LARS, b = 256 on any image folder (Fig. 6)",
    "theory": "Lemmas 1 and 2, Theorem 1, bias and variance, on problems small enough to be exact",
    "cost": "state, memory, encodes and time per step of every method (Table 1)",
}
MODULES = {name: name for name in ("stationarity", "theory", "cost")} | {"time": "cost"}


def load(name: str) -> Experiment:
    """The experiment of a name.

    Example:
        >>> load("time").reads
        ('stl10', 'cost')
    """
    if name not in NAMES:
        raise ValueError(f"the experiment must be one of {', '.join(NAMES)}, got {name!r}")
    module = importlib.import_module(f"negchain.reproduce.{MODULES.get(name, 'accuracy')}")
    experiment: Experiment = module.EXPERIMENTS[name]
    return experiment
