"""The losses: modules with state, made of `negchain.weights` and the one objective.

| file | loss |
|---|---|
| `softmax.py` | `InfoNCELoss`, `DCLLoss` |
| `sogclr.py` | `SogCLRLoss` |
| `negative_cache.py` | `NegativeCacheLoss` |
| `emc2.py` (`chains.py` its state, `walk.py` one visit) | `EMC2Loss` |
| `table.py` | the stale table two of them share |
| `base.py`, `batch.py` | what all of them share |
"""

from negchain.losses.emc2 import EMC2Loss
from negchain.losses.negative_cache import NegativeCacheLoss
from negchain.losses.softmax import DCLLoss, InfoNCELoss
from negchain.losses.sogclr import SogCLRLoss

__all__ = ["DCLLoss", "EMC2Loss", "InfoNCELoss", "NegativeCacheLoss", "SogCLRLoss"]
