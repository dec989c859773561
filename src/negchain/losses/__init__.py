"""The losses: modules with state, made of `negchain.weights` and the one objective.

| file | what |
|---|---|
| `emc2.py` (`chains.py` its state, `walk.py` one visit), `large_batch.py` | EMC² |
| `softmax.py`, `sogclr.py`, `negative_cache.py`, `importance.py`, `top_k.py` | other methods |
| `weighted.py` | `WeightedLoss`, base of a method of your own |
| `settings.py` | how chains move, and what they are offered |
| `request.py` | what a loss wants encoded |
| `base.py`, `batch.py`, `state.py` | what all of them share |
| `sweeps.py` | a visit over columns of several kinds, and by i-SIR |
| `columns.py`, `table.py` | draws from beyond the batch, and their stale table |
| `distributed.py`, `agreement.py`, `shards.py` | several ranks: one joined batch, equal state |
| `fused.py` | what a loss hands the kernels of `negchain.fast` |

To read EMC² on a CPU: `emc2.py`, `walk.py` and `chains.py`, then `base.py` and `batch.py`. From
`sweeps.py` on the files are of other paths (docs/design.md says where they are chosen).
"""

from negchain.losses.base import ContrastiveLoss
from negchain.losses.emc2 import EMC2Loss
from negchain.losses.importance import ImportanceLoss
from negchain.losses.large_batch import LargeBatchEMC2Loss
from negchain.losses.negative_cache import NegativeCacheLoss
from negchain.losses.request import Request, Want
from negchain.losses.settings import ISIR, MH, Given, InBatch, Informed, Uniform
from negchain.losses.softmax import DCLLoss, InfoNCELoss
from negchain.losses.sogclr import SogCLRLoss
from negchain.losses.top_k import TopKLoss
from negchain.losses.weighted import WeightedLoss

__all__ = [
    "ISIR",
    "MH",
    "ContrastiveLoss",
    "DCLLoss",
    "EMC2Loss",
    "Given",
    "ImportanceLoss",
    "InBatch",
    "InfoNCELoss",
    "Informed",
    "LargeBatchEMC2Loss",
    "NegativeCacheLoss",
    "Request",
    "SogCLRLoss",
    "TopKLoss",
    "Uniform",
    "Want",
    "WeightedLoss",
]
