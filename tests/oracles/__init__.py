"""What the paper says, slow and obvious, and independent of the package.

| file | holds |
|---|---|
| `exact.py` | the global loss and its gradient for every layout of data: float64, loops |
| `in_batch.py` | what InfoNCE, DCL and SogCLR make of one batch |
| `chains.py` | one chain, one step, in scalars; the loss of a batch in one dense formula |
| `small.py` | the mean gradient of EMC² on five items, by listing all that can happen |
| `simulated.py`, `moves.py` | every loss played a row at a time, for settings without a formula |
| `visit.py` | one visit from a fixed start |
"""

from oracles.chains import (
    algorithm_1,
    clusters,
    contrastive_dense,
    contrastive_loops,
    dot,
    expected_visits,
    metropolis_matrix,
    subsets,
    unit,
)
from oracles.exact import Exact, Row, corpus_rows, exact, paired_rows, shared_rows, target

__all__ = [
    "Exact",
    "Row",
    "algorithm_1",
    "clusters",
    "contrastive_dense",
    "contrastive_loops",
    "corpus_rows",
    "dot",
    "exact",
    "expected_visits",
    "metropolis_matrix",
    "paired_rows",
    "shared_rows",
    "subsets",
    "target",
    "unit",
]
