"""Numbers about the last call of a loss, for `info`: kept on the device until somebody looks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from negchain.losses.batch import is_traced
from negchain.losses.state import Stateful

Number = Callable[[], Tensor]  # computed when somebody looks
Report = dict[str, list[Number]]


def keep(value: Tensor) -> Number:
    """A number that is known already, without the graph it came from."""
    value = value.detach()
    return lambda: value


class Reporting(Stateful):
    """A module that counts faults and tells numbers about its last call."""

    faults: Tensor  # [3] samples not finite, samples out of range, rows without negatives
    num_samples: int | None

    def __init__(self) -> None:
        super().__init__()
        self._info: Mapping[str, Number] = {}
        self._warned = False
        self.add_state("faults", torch.zeros(3, dtype=torch.int64), saved=False)

    def __getstate__(self) -> dict[str, object]:
        """All but the numbers of the last call, which no copy has made."""
        return self.__dict__ | {"_info": {}}

    def _finish(self, total: list[Tensor], report: Report) -> Tensor:
        """The mean loss over sides; the other numbers stay on the device for `info`."""
        if not is_traced(total[0]):
            self._info = {name: _mean_of(v) for name, v in report.items() if v}
        return total[0] if len(total) == 1 else sum(total[1:], total[0]) / len(total)

    @property
    def info(self) -> dict[str, float]:
        """Numbers about the last call as Python floats; reading them waits for the device.

        Every loss reports `effective_negatives` (mean over rows of 1 / sum of squared weights) and,
        since it was built, `nonfinite_rows` and `rows_without_negatives` (these train nothing).
        Where the size of the data set is known also an estimate of the global loss, eq. (1):
        `global_loss_low` lies below it on average (the logarithm of a noisy mean); see each loss.

        Raises:
            ValueError: samples had an index out of range. (On a CPU such a batch is refused at
                once; on a GPU its rows change no state and are reported here.)
        """
        names, values = self.take_info()
        return self.read_info(names, values.tolist())

    def take_info(self) -> tuple[list[str], Tensor]:
        """What `info` will say, still on the device: names, and values for `read_info`."""
        with torch.no_grad():
            values = [number() for number in self._info.values()]
        kind = values[0].dtype if values else torch.float32
        return list(self._info), torch.stack([*self.faults.to(kind), *(v.detach() for v in values)])

    def read_info(self, names: list[str], values: list[float]) -> dict[str, float]:
        """`info` from what `take_info` gave."""
        nonfinite, out_of_range, lonely = map(float, values[:3])
        if out_of_range:
            raise ValueError(
                f"index must hold data set positions below {self.num_samples}, but "
                f"{out_of_range:.0f} did not; was the loss built for another data set?"
            )
        self._warn(lonely)
        return {
            **dict(zip(names, values[3:], strict=True)),
            "nonfinite_rows": nonfinite,
            "rows_without_negatives": lonely,
        }

    def _warn(self, lonely: float) -> None:
        """Say once that rows train nothing: at the call on a CPU, on a GPU when `info` is read."""
        if lonely and not self._warned:
            self._warned = True
            warnings.warn(
                f"{lonely:.0f} rows had no negatives: their loss is 0 and they train nothing, as "
                "all others of their batch have their id or are `known`; give batches of "
                "different ids (info['rows_without_negatives'] goes on counting)",
                stacklevel=5,
            )


def _mean_of(numbers: Sequence[Number]) -> Number:
    """The mean over sides, as late as each of them."""
    return lambda: torch.stack([number().detach() for number in numbers]).mean()
