"""negchain: contrastive learning on the global loss with small batches.

Losses that go where an InfoNCE loss was, each an estimate of the softmax over *all* negatives:

    loss_fn = negchain.EMC2Loss(num_samples=len(dataset))
    loss = loss_fn(z_a, z_b, index, encode=lambda ids: encoder(items[ids]))

See `negchain.weights` for the estimators themselves and `docs/design.md` for the idea.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from negchain.chunked import Chunked
    from negchain.diagnostics import EstimatorReport, estimator_report
    from negchain.exact import global_loss
    from negchain.losses import (
        ISIR,
        MH,
        ContrastiveLoss,
        DCLLoss,
        EMC2Loss,
        Given,
        ImportanceLoss,
        InBatch,
        InfoNCELoss,
        Informed,
        LargeBatchEMC2Loss,
        NegativeCacheLoss,
        Request,
        SogCLRLoss,
        TopKLoss,
        Uniform,
        Want,
        WeightedLoss,
    )
    from negchain.objective import effective_negatives
    from negchain.pool import Draw
    from negchain.train.trained import Trained
    from negchain.weights.metropolis import Scan, mh_scan

__version__ = "0.1.0"


def load(run: str | Path, device: str = "auto") -> Trained:
    """The trained encoder of a run folder.

    `load(run).encode(what)` gives features [N,F] of files, folders, PIL images or uint8 tensors;
    `.embed(what)` keeps file and class names beside them and writes .npz, .csv or .parquet.

    Args:
        run: a folder that `negchain train` wrote.
        device: "auto", "cpu" or "cuda".

    Example:
        >>> load("/no/such/run").encode("photos/")
        Traceback (most recent call last):
        negchain.train.presets.ConfigError: /no/such/run holds no run (no config.json); \
give a folder negchain train made
    """
    # imported here: losses in somebody's own loop need neither timm nor scikit-learn
    from negchain.train.trained import load_run_encoder

    return load_run_encoder(run, device)


__all__ = [
    "ISIR",
    "MH",
    "Chunked",
    "ContrastiveLoss",
    "DCLLoss",
    "Draw",
    "EMC2Loss",
    "EstimatorReport",
    "Given",
    "ImportanceLoss",
    "InBatch",
    "InfoNCELoss",
    "Informed",
    "LargeBatchEMC2Loss",
    "NegativeCacheLoss",
    "Request",
    "Scan",
    "SogCLRLoss",
    "TopKLoss",
    "Uniform",
    "Want",
    "WeightedLoss",
    "effective_negatives",
    "estimator_report",
    "global_loss",
    "load",
    "mh_scan",
]

# Where names live that are not in `negchain.losses`. All are imported when first used: torch takes
# seconds, and `negchain --help` needs none of it.
_ELSEWHERE = {
    "Chunked": "chunked",
    "Draw": "pool",
    "EstimatorReport": "diagnostics",
    "Scan": "weights.metropolis",
    "effective_negatives": "objective",
    "estimator_report": "diagnostics",
    "global_loss": "exact",
    "mh_scan": "weights.metropolis",
}


def __getattr__(name: str) -> Any:
    if name in ("losses", "methods", "weights"):  # without an import of their own
        return import_module(f"negchain.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'negchain' has no attribute {name!r}")
    module = import_module(f"negchain.{_ELSEWHERE.get(name, 'losses')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
