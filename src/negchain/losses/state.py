"""What a loss keeps: its state, by position and in `state_dict`, and numbers about its last call.

A registered buffer is not safe for state: DistributedDataParallel broadcasts all of them from rank
0 at every forward pass (chains of the other ranks would vanish), and `.to(torch.bfloat16)` casts
them (an average of many values then stands still). So state is kept beside the buffers: it is in
`state_dict`, follows `.to(device)`, keeps its type, and `named_buffers` does not list it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from negchain.losses.batch import is_traced
from negchain.pool import write_rows
from negchain.printable import counted
from negchain.weights.softmax import draw_from

if TYPE_CHECKING:
    from negchain.losses.distributed import Ranks

Number = Callable[[], Tensor]  # computed when somebody looks
Report = dict[str, list[Number]]
OTHER_STATE = (
    "this is the state of a loss for another data set, or with other settings; build the loss as "
    "it was built when the state was saved, or start without it (loss_fn.skip_saved_state())"
)


@dataclass(frozen=True)
class Rows:
    """M rows of a state, all of which lie here; `negchain.losses.shards` has them on many ranks.

    Shapes: `M` rows in all, `m` rows that lie here, `n` positions.

    Example:
        >>> rows = Rows(3)
        >>> table = torch.tensor([5, 6, 7])
        >>> rows.write(table, torch.tensor([2]), torch.tensor([9]), torch.tensor([True]))
        >>> rows.read(table, torch.tensor([2, 0]))
        tensor([9, 5])
    """

    total: int  # M
    ranks: Ranks | None = None  # among whom they are shared out

    @staticmethod
    def of(total: int, ranks: Ranks | None) -> Rows:
        """All rows, or this rank's block of them."""
        if ranks is None:
            return Rows(total)
        from negchain.losses.shards import Shards  # imports this module

        return Shards(total, ranks)

    @property
    def first(self) -> int:
        """Position of the first row here."""
        return 0

    @property
    def count(self) -> int:
        """m."""
        return self.total

    def read(self, table: Tensor, slots: Tensor) -> Tensor:  # [m,...] [n] -> [n,...]
        """Rows at some positions, which may be of any shape."""
        return table[slots]

    write = staticmethod(write_rows)
    draw = staticmethod(draw_from)  # over all rows

    def every(self, value: Tensor) -> Tensor:  # [...] -> [W,...]
        """The same thing of every rank."""
        return value[None]

    def outward(self, local: Tensor, dim: int) -> Tensor:
        """A state as the outside sees it."""
        return local

    def inward(self, saved: Tensor, dim: int) -> Tensor:
        """The rows of a saved state that lie here."""
        whole = hasattr(saved, "to_local")  # saved by ranks that shared it out; all load it
        return saved.full_tensor() if whole else saved  # type: ignore[attr-defined, no-any-return]


ALL = Rows(0)  # every row is here, however many there are


class Kept(NamedTuple):
    """How a state is kept; see `Stateful.add_state`."""

    lazy: bool
    saved: bool
    given: bool
    rows: Rows
    dim: int


class Stateful(nn.Module):
    """A module with state that is in `state_dict` but not among its buffers.

    Example:
        >>> module = Stateful()
        >>> module.add_state("count", torch.zeros(3))
        >>> module.count += 1
        >>> module.to(torch.bfloat16).count.dtype, [name for name, _ in module.named_buffers()]
        (torch.float32, [])
        >>> module.state_dict()["count"]
        tensor([1., 1., 1.])
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Tensor] = {}
        self._kept_as: dict[str, Kept] = {}
        self._skips = False

    def skip_saved_state(self) -> None:
        """From now on loading a checkpoint leaves this module's state as it is.

        For fine-tuning on another data set: weights are wanted, the state of the old one is not.
        Parameters (a learned beta) are loaded as ever.

        Example:
            >>> module, other = Stateful(), Stateful()
            >>> module.add_state("count", torch.ones(3))
            >>> other.add_state("count", torch.zeros(5))
            >>> other.skip_saved_state()
            >>> other.load_state_dict(module.state_dict())
            <All keys matched successfully>
            >>> other.count
            tensor([0., 0., 0., 0., 0.])
        """
        self._skips = True

    def add_state(
        self,
        name: str,
        value: Tensor,
        *,
        lazy: bool = False,
        saved: bool = True,
        given: bool = False,
        rows: Rows = ALL,
        dim: int = 0,
    ) -> None:
        """Keep `value` under `self.name`.

        `lazy`: its width may still be unknown (0). `saved=False`: it is not in `state_dict`.
        `given`: it is a setting, and loading leaves it as it is. `rows`: which of the rows along
        `dim` are here.
        """
        if hasattr(self, name):  # which would be read in its place, or be lost
            raise ValueError(
                f"add_state needs a name that is free, and there is a {name!r} already"
            )
        self._state[name], self._kept_as[name] = value, Kept(lazy, saved, given, rows, dim)

    def wide(self, name: str, dim: int, empty: float) -> Tensor:
        """A lazy state of embeddings; before anything is written to it, `empty` of width `dim`."""
        value = self._state[name]
        if value.shape[-1] == 0:
            return value.new_full((1,) * value.dim(), empty).expand(*value.shape[:-1], dim)
        if value.shape[-1] != dim:
            raise ValueError(
                f"the loss keeps embeddings of dimension {value.shape[-1]}, got {dim}; build a new "
                "loss for another encoder"
            )
        return value

    def widen(self, name: str, dim: int, empty: float) -> None:
        """Give a lazy state the memory to be written to."""
        value = self.wide(name, dim, empty)
        if value is not self._state[name]:
            with torch.inference_mode(False):
                self._state[name] = value.clone(memory_format=torch.contiguous_format)

    def state_tensors(self) -> Iterator[Tensor]:
        """Every state tensor of this module and of those inside it."""
        for module in self.modules():
            if isinstance(module, Stateful):
                yield from module._state.values()

    def __getattr__(self, name: str) -> Any:
        """State by its name, then what nn.Module knows."""
        state = self.__dict__.get("_state", {})
        return state[name] if name in state else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A name that is state stays state."""
        state = self.__dict__.get("_state", {})
        if name in state:
            state[name] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move state with the module; its type stays."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in self._state.items():
            moved = fn(value)
            same_kind = moved.dtype == value.dtype
            self._state[name] = moved if same_kind else value.to(moved.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._saved():
            rows, dim = self._kept_as[name].rows, self._kept_as[name].dim
            destination[prefix + name] = rows.outward(self._state[name], dim)

    def _saved(self) -> list[str]:
        return [name for name in self._state if self._kept_as[name].saved]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._skips:  # what is there stands for what was saved; children see the same dict
            learned = {prefix + name for name, _ in self.named_parameters()}
            for key in [k for k in state_dict if k.startswith(prefix) and k not in learned]:
                del state_dict[key]
            mine = self.state_dict(prefix=prefix)
            state_dict.update({key: mine[key] for key in mine if key not in learned})
        found = {
            name: state_dict[prefix + name] for name in self._saved() if prefix + name in state_dict
        }
        for name, value in found.items():
            rows, dim = self._kept_as[name].rows, self._kept_as[name].dim
            if rows == ALL or value.shape[dim] == rows.total:
                found[name] = rows.inward(value, dim)
        before = len(missing_keys), len(unexpected_keys)
        rest = {k: v for k, v in state_dict.items() if k not in {prefix + n for n in found}}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys += [prefix + name for name in self._saved() if name not in found]
        wrong = [prefix + name for name, value in found.items() if not self._fits(name, value)]
        if found:  # another loss's state; where there is none, strict= decides (it is True here)
            wrong += missing_keys[before[0] :] + unexpected_keys[before[1] :]
        if wrong:
            error_msgs.append(f"{', '.join(wrong)}: {OTHER_STATE}")
            return
        with torch.no_grad(), torch.inference_mode(False):
            for name, value in found.items():
                if self._kept_as[name].given:
                    continue
                if self._state[name].shape != value.shape:
                    self._state[name] = self._state[name].new_empty(value.shape)
                self._state[name].copy_(value)

    def _fits(self, name: str, saved: Tensor) -> bool:
        """Whether a saved state can take the place of the one we have."""
        mine = self._state[name]
        if name.startswith("sizes"):
            return torch.equal(mine.cpu(), saved.cpu())
        if mine.shape == saved.shape:
            return True
        waiting = self._kept_as[name].lazy and 0 in (saved.shape[-1], mine.shape[-1])
        return waiting and saved.shape[:-1] == mine.shape[:-1]


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
        beta = self.__dict__.get("beta")  # a tensor here was computed (`log_beta.exp()`)
        plain = {"beta": beta.detach()} if isinstance(beta, Tensor) else {}
        return self.__dict__ | {"_info": {}} | plain

    def _finish(self, total: list[Tensor], report: Report, faults: Tensor | None = None) -> Tensor:
        """The mean loss over sides; the other numbers stay on the device for `info`."""
        if not is_traced(total[0]):
            if faults is not None:
                self.faults[:2] += faults
            self._info = {n: v[0] if len(v) == 1 else _mean_of(v) for n, v in report.items() if v}
        return total[0] if len(total) == 1 else sum(total[1:], total[0]) / len(total)

    @property
    def info(self) -> dict[str, float]:
        """Numbers about the last call as Python floats; reading them waits for the device.

        Every loss reports `effective_negatives` (mean over rows of (sum W)^2 / sum W^2) and, since
        it was built, `nonfinite_rows` and `rows_without_negatives` (these train nothing). Where the
        size of the data set is known also an estimate of the global loss, eq. (1):
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
                f"{counted(round(lonely), 'row', 'rows')} had no negatives, a loss of 0 and "
                "nothing to train: all others of the batch have the same id or are `known`; give "
                "batches of different ids (info['rows_without_negatives'] goes on counting)",
                stacklevel=6,
            )


def _mean_of(numbers: Sequence[Number]) -> Number:
    """The mean over sides, computed when somebody reads it."""
    return lambda: torch.stack([number().detach() for number in numbers]).mean()
