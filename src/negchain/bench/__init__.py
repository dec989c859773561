"""Speed on the machine at hand: what `negchain bench` measures.

A subject is a function `settings -> Table`: rows of what takes turns, as ratios to a baseline, and
checks of fast paths against their readable twins, on fresh random inputs.
"""

from collections.abc import Callable

import torch

from negchain.bench import losses, training
from negchain.bench.record import Settings, Table
from negchain.bench.timing import release

SUBJECTS: dict[str, Callable[[Settings], Table]] = {
    "scan": losses.scan,
    "losses": losses.alone,
    "step": training.steps,
    "trainer": training.images,
    "large": losses.large,
    "tables": losses.tables,
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


__all__ = ["SUBJECTS", "Settings", "measure"]
