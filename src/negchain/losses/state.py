"""State of a loss: tensors that are saved and moved like buffers, and that nobody else may touch.

A registered buffer is not safe for state: DistributedDataParallel broadcasts all of them from rank
0 at every forward pass (chains of the other ranks would vanish), and `.to(torch.bfloat16)` casts
them (an average of many values then stands still). So state is kept beside the buffers: it is in
`state_dict`, follows `.to(device)`, keeps its type, and `named_buffers` does not list it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from negchain.losses.shards import Rows

OTHER_STATE = (
    "this is the state of a loss for another data set, or with other settings; build the loss as "
    "it was built when the state was saved, or start without it (loss_fn.skip_saved_state())"
)


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
        self._lazy: set[str] = set()  # states whose last dimension is 0 until a first batch
        self._unsaved: set[str] = set()
        self._sharded: dict[str, tuple[Rows, int]] = {}  # states whose rows may lie on other ranks
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
        rows: Rows | None = None,
        dim: int = 0,
    ) -> None:
        """Keep `value` under `self.name`.

        `lazy`: its width may still be unknown (0). `saved=False`: it is not in `state_dict`.
        `rows`: which of the rows along `dim` are here.
        """
        self._state[name] = value
        if rows is not None and rows.ranks is not None:
            self._sharded[name] = (rows, dim)
        if lazy:
            self._lazy.add(name)
        if not saved:
            self._unsaved.add(name)

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
        """State keeps being state."""
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
            value = self._state[name]
            if name in self._sharded:
                rows, dim = self._sharded[name]
                value = rows.outward(value, dim)
            destination[prefix + name] = value

    def _saved(self) -> list[str]:
        return [name for name in self._state if name not in self._unsaved]

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
        for name, (rows, dim) in self._sharded.items():
            if name in found and found[name].shape[dim] == rows.total:
                found[name] = rows.inward(found[name], dim)
        rest = {k: v for k, v in state_dict.items() if k not in {prefix + n for n in found}}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        missing_keys += [prefix + name for name in self._saved() if name not in found and strict]
        wrong = [name for name, value in found.items() if not self._fits(name, value)]
        if wrong:
            error_msgs.append(f"{', '.join(prefix + name for name in wrong)}: {OTHER_STATE}")
            return
        with torch.no_grad(), torch.inference_mode(False):
            for name, value in found.items():
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
        waiting = name in self._lazy and 0 in (saved.shape[-1], mine.shape[-1])
        return waiting and saved.shape[:-1] == mine.shape[:-1]
