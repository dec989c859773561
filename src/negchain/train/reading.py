"""Numbers of a step on their way from the device to the log, and the time they took."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from negchain.train.step import TrainStep

NOT_LOGGED = ("nonfinite_rows", "rows_without_negatives")  # unless they are above zero


class Reading:
    """Loss, `info` and what the task watched of a step; copied while the next steps run."""

    def __init__(self, step: TrainStep, number: int, watched: Mapping[str, Tensor] = {}) -> None:
        self.step = number
        self.at = time.perf_counter()  # when the host was done with the step
        self._loss_fn = step.loss_fn
        self._names, values = self._loss_fn.take_info()
        self._watched = list(watched)
        first = [number.view(1).double() for number in (step.loss, *watched.values())]
        values = torch.cat([*first, values.double()])
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream().record_event()
        self._values = values

    def numbers(self) -> tuple[float, dict[str, float]]:
        """The loss and `info`; waits until they are there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()
            self.at = time.perf_counter()
        loss, *values = self._values.tolist()
        count = len(self._watched)
        found = self._loss_fn.read_info(self._names, values[count:])
        return loss, {**found, **dict(zip(self._watched, values[:count], strict=True))}


def logged(info: Mapping[str, float]) -> dict[str, float]:
    """Numbers of `info` under their names in metrics.jsonl, which has exact losses as well.

    >>> logged({"global_loss": 2.0, "nonfinite_rows": 0.0})
    {'estimated_global_loss': 2.0}
    """
    kept = {name: value for name, value in info.items() if value or name not in NOT_LOGGED}
    return {
        f"estimated_{name}" if name.startswith("global_loss") else name: value
        for name, value in kept.items()
    }


class Clock:
    """Time spent on steps since a given one."""

    def __init__(self, step: int) -> None:
        self._first = step
        self._began = self._lapped = time.perf_counter()

    def lap(self, at: float | None = None) -> float:
        """Seconds since the last lap, until now or until `at` that time."""
        before, self._lapped = self._lapped, time.perf_counter() if at is None else at
        return self._lapped - before

    def steps_per_second(self, step: int, at: float) -> float:
        """The speed from the first step to this one, which was done `at` that time."""
        return (step - self._first) / max(at - self._began, 1e-9)
