"""Which samples a step sees: a function of the seed and the step, without a state to save."""

import functools

import torch
from torch import Tensor

from negchain.train.config import ConfigError


class DataOrder:
    """Which samples a step sees: a function of (seed, step), so no loader has a state to save.

    Each epoch is a fresh permutation of all positions; what is left after the last whole batch is
    left out of that epoch.

    Example:
        >>> order = DataOrder(num_samples=10, batch_size=4, seed=0)
        >>> order.steps_per_epoch, len(order.batch(0)), order.epoch(5)
        (2, 4, 2)
        >>> DataOrder(num_samples=1, batch_size=4, seed=0)
        Traceback (most recent call last):
        negchain.train.presets.ConfigError: --batch-size 4 needs ... has 1; give at least 2 samples
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        if batch_size > num_samples:
            remedy = f"lower it to {num_samples} or less"
            raise ConfigError(
                f"--batch-size {batch_size} needs as many samples and the data set has "
                f"{num_samples}; {remedy if num_samples > 1 else 'give at least 2 samples'}"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = num_samples // batch_size

    def epoch(self, step: int) -> int:
        """The epoch step number `step` belongs to."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Tensor:
        """Positions of the batch of step number `step`, [B] int64 on the CPU."""
        begin = step % self.steps_per_epoch * self.batch_size
        return _permutation(self.num_samples, self.seed, self.epoch(step))[
            begin : begin + self.batch_size
        ]


@functools.lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    # Seeds of neighbouring epochs must not give related permutations: spread them out.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch * 7_919 + 17) % 2**63)
    return torch.randperm(num_samples, generator=generator)
