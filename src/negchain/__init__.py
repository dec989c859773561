"""negchain: contrastive learning on the global loss with small batches.

Losses that go where an InfoNCE loss was, each an estimate of the softmax over *all* negatives:

    loss_fn = negchain.EMC2Loss(num_samples=len(dataset))
    loss = loss_fn(z_a, z_b, index, encode=lambda ids: encoder(items[ids]))

See `negchain.weights` for the estimators themselves and `docs/design.md` for the idea.
"""

from negchain.diagnostics import EstimatorReport, estimator_report
from negchain.exact import global_backward, global_loss
from negchain.losses import (
    ISIR,
    MH,
    ContrastiveLoss,
    DCLLoss,
    EMC2Loss,
    Given,
    InBatch,
    InfoNCELoss,
    Informed,
    NegativeCacheLoss,
    Request,
    SogCLRLoss,
    StreamingEMC2Loss,
    Uniform,
    Want,
)
from negchain.losses.partition import effective_negatives
from negchain.pool import Draw
from negchain.weights.metropolis import Scan, mh_scan

__version__ = "0.1.0"

__all__ = [
    "ISIR",
    "MH",
    "ContrastiveLoss",
    "DCLLoss",
    "Draw",
    "EMC2Loss",
    "EstimatorReport",
    "Given",
    "InBatch",
    "InfoNCELoss",
    "Informed",
    "NegativeCacheLoss",
    "Request",
    "Scan",
    "SogCLRLoss",
    "StreamingEMC2Loss",
    "Uniform",
    "Want",
    "effective_negatives",
    "estimator_report",
    "global_backward",
    "global_loss",
    "mh_scan",
]
