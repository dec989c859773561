"""Speed on the machine at hand: what `negchain bench` measures, one module per subject.

Each subject is a function `table(settings) -> Table`; fast paths are compared with their readable
twins in the same function, on fresh random inputs.
"""

from collections.abc import Callable

import torch

from negchain.bench import chains, jobs, losses, scan, steps, stream, throughput
from negchain.bench.table import Bar, Check, Row, Settings, Spread, Table
from negchain.bench.timing import release

SUBJECTS: dict[str, Callable[[Settings], Table]] = {
    "scan": scan.table,
    "losses": losses.table,
    "step": steps.table,
    "trainer": throughput.table,
    "stream": stream.table,
    "tables": chains.table,
    "jobs": jobs.table,
}
"""Everything that can be measured, by the name `--only` takes."""

ON_REQUEST = ("jobs",)
"""On a CPU measured only when named: processes that start for half a minute to share two cores."""


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
    "ON_REQUEST",
    "SUBJECTS",
    "Bar",
    "Check",
    "Row",
    "Settings",
    "Spread",
    "Table",
    "measure",
]
