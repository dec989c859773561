"""Speed on the machine at hand: what `negchain bench` measures, one module per subject.

Each subject is a function `table(settings) -> Table`; fast paths are compared with their readable
twins in the same function, on fresh random inputs.
"""

from collections.abc import Callable

import torch

from negchain.bench import chains, large, losses, scan, steps, throughput
from negchain.bench.table import Check, Row, Settings, Spread, Table
from negchain.bench.timing import release

SUBJECTS: dict[str, Callable[[Settings], Table]] = {
    "scan": scan.table,
    "losses": losses.table,
    "step": steps.table,
    "trainer": throughput.table,
    "large": large.table,
    "tables": chains.table,
}
"""Everything that can be measured, by the name `--only` takes."""


def measure(subject: str, settings: Settings) -> Table:
    """Measure one subject, leaving torch's threads, seed and memory as they were."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        return SUBJECTS[subject](settings)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        release()


__all__ = [
    "SUBJECTS",
    "Check",
    "Row",
    "Settings",
    "Spread",
    "Table",
    "measure",
]
