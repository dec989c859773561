"""logits -> weights: every method's estimate of the negative distribution, as pure functions.

Each file is one estimator: it takes the logits of a row's candidate negatives, the state it
needs and its random draws, and returns weights `W` that stand for the softmax over *all* negatives.
No function here keeps state, draws random numbers or knows about encoders, ids or gradients.

| file | estimate |
|---|---|
| `softmax.py` | softmax over the pool (InfoNCE, DCL); draws from one over everything |
| `sogclr.py` | exponentials over a moving average |
| `metropolis.py` | visits of a Metropolis-Hastings chain |
| `isir.py` | softmax over the carried state and the pool |
"""

from negchain.weights.isir import isir_weights
from negchain.weights.metropolis import Scan, mh_scan
from negchain.weights.softmax import draw_from, softmax_weights
from negchain.weights.sogclr import moving_log_mean, sogclr_weights

__all__ = [
    "Scan",
    "draw_from",
    "isir_weights",
    "mh_scan",
    "moving_log_mean",
    "sogclr_weights",
    "softmax_weights",
]
