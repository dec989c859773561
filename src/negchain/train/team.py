"""The processes torchrun started for one run: who does what while the others wait.

    leads       rank 0, which alone evaluates, writes and shows progress
    on_rank_0   its work; the others wait, hear that it is still there, and get what it found
    any         what one rank knows (a signal came), all know at the same step
    joined      the process group; the rank that fails first says so, the others end silently

Collectives of the loss and of gradients use torch's default group (gloo, NCCL on GPUs). Messages
of this module use a gloo group of their own, so that the host never waits for the device, and so
that a lost rank ends in an exception and not in NCCL's abort.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from negchain.printable import reason
from negchain.train.presets import ConfigError

if TYPE_CHECKING:  # torch takes seconds
    import torch.distributed as dist

T = TypeVar("T")
BEAT = 1.0  # seconds between two signs of life
PATIENCE = 300.0  # seconds a rank waits for another


class Silent(Exception):
    """The run has failed, and another rank has said why."""


class Team:
    """This process among those that train together; without torchrun it is alone.

    Example:
        >>> team = Team()
        >>> team.leads, team.any(False), team.on_rank_0(lambda: 3)
        (True, False, 3)
    """

    def __init__(
        self, rank: int = 0, world: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self.leads = rank == 0  # it evaluates and writes
        self.leading = False  # others wait for what this rank does
        self._group = group

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks ask at the same point."""
        if self.world == 1:
            return flag
        import torch
        import torch.distributed as dist

        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Do work on rank 0; all ranks get what it returns, which must be plain data.

        Called again within such work, it just does it.
        """
        if self.world == 1 or self.leading:
            return work()
        import torch.distributed as dist

        found: list[Any] = [None]
        if self.leads:
            found = [self._lead(work)]
        else:
            while not self.any(False):
                pass
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]  # type: ignore[no-any-return]

    def _lead(self, work: Callable[[], T]) -> T:
        over, lost = threading.Event(), list[BaseException]()

        def beat() -> None:
            try:
                while not self.any(over.wait(BEAT)):
                    pass
            except RuntimeError as error:
                lost.append(error)

        signs = threading.Thread(target=beat, daemon=True)
        self.leading = True
        signs.start()
        try:
            found = work()
        finally:
            self.leading = False
            over.set()
            signs.join()
        if lost:
            raise lost[0]
        return found

    def same(self, what: str, value: int | str) -> None:
        """Refuse, on all ranks, a value that is not the same on all of them."""
        if self.any(self.on_rank_0(lambda: value) != value):
            raise ConfigError(
                f"all ranks must read one {what}, and some find another than rank 0; --out must "
                "be a folder that all machines share, and --data the same on each"
            )


_here = Team()


def here() -> Team:
    """The team of this process."""
    return _here


def is_one_of_several() -> bool:
    """Whether torchrun started this process and others beside it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def require_one_process(command: str, instead: str) -> None:
    """Refuse several processes of torchrun: each would start runs of its own."""
    if is_one_of_several():
        raise ConfigError(
            f"{command} must be one process, and torchrun started {os.environ.get('WORLD_SIZE')}; "
            f"start it without torchrun{instead}"
        )


@contextmanager
def joined(patience: float = PATIENCE) -> Iterator[Team]:
    """Join the other processes of torchrun, where it started this one, with so much patience."""
    global _here
    if not is_one_of_several():
        yield _here
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    wait, gpus = timedelta(seconds=patience), torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    store, rank, world = next(rendezvous("env://", timeout=wait))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        # On one machine torchrun keeps its store when it starts a run anew, and with it the
        # addresses of the ranks before. (On several, machines may differ in their count.)
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=wait * (2 if gpus else 1),  # the gloo group is the first to notice
    )
    _here = Team(rank, world, dist.new_group(backend="gloo", timeout=wait))  # type: ignore[arg-type]
    try:
        yield _here
        dist.destroy_process_group()
    except BaseException as error:
        cause = next((e for e in (error, error.__cause__) if e and _is_loss(e)), None)
        if not _speaks(store):
            raise Silent from error
        if cause is not None:
            raise RuntimeError(
                f"rank {rank} of {world} lost another one, which ended or did not answer for "
                f"{patience:g} s ({_last_words(cause)}); start the same command with --resume "
                "to go on after the last checkpoint; --rank-timeout sets the time"
            ) from error
        raise
    finally:
        _here = Team()


def _is_loss(error: BaseException) -> bool:
    """Whether an error is of the network between ranks."""
    import torch.distributed as dist

    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
    )


def _last_words(error: BaseException) -> str:
    """What torch says, without the place in its source and its advice.

    >>> _last_words(RuntimeError("[/gloo/tcp/pair.cc:5] Connection closed by peer [::1]. Check it"))
    'Connection closed by peer [::1]'
    """
    return re.sub(r"^\[[^\]]*\] ", "", reason(error)).split(". ")[0]


def _speaks(store: Any) -> bool:
    """Whether this is the first rank that fails: later failures mostly follow from it."""
    try:
        return int(store.add("negchain-failures", 1)) == 1
    except RuntimeError:  # nobody keeps the count any more
        return True
