"""Clocks: CUDA events after warm-up on a GPU, `perf_counter` on a CPU; everything takes turns.

What is compared runs in one process, round by round, so that a machine that is busy or hot for a
while slows all of it alike. Ratios are formed within a round.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from negchain.fast.streams import forked, join, new_stream

Call = Callable[[], object]

WARM_UP = 3  # calls: libraries initialise, kernels compile, caches fill
MOST_RUNS = 1000  # in one measurement


@dataclass(frozen=True)
class Timed:
    """Something to time: `run()` does it `calls` times on `device`."""

    run: Call
    device: torch.device
    calls: int = 1
    kept: object = None  # holds what a replay reads


def graphed(call: Call, device: torch.device, calls: int = 1) -> Timed:
    """Time `call` as a replayed CUDA graph of `calls` of it; on a CPU, as it is.

    At small sizes the time of an eager call is that of its launches, which training in a graph
    does not pay; many calls in a graph hide the launch of the graph itself.
    """
    if device.type != "cuda":
        return Timed(call, device)
    side = new_stream(device)
    with forked(side):
        for _ in range(WARM_UP):
            call()
    join(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return Timed(graph.replay, device, calls, kept=call)


def milliseconds(timed: Timed, runs: int = 1) -> float:
    """Time of one call, from `runs` runs in a row."""
    if timed.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()  # type: ignore[no-untyped-call]
        for _ in range(runs):
            timed.run()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        total: float = begin.elapsed_time(end)  # type: ignore[no-untyped-call]
    else:
        start = time.perf_counter()
        for _ in range(runs):
            timed.run()
        total = (time.perf_counter() - start) * 1e3
    return total / (runs * timed.calls)


def interleaved(
    timed: Mapping[str, Timed], rounds: int, window_ms: float = 20.0
) -> dict[str, list[float]]:
    """Milliseconds per call of everything, one number per round.

    In a round each takes its turn for about `window_ms`. The order shifts from round to round, so
    that none always comes first.

    >>> cpu = torch.device("cpu")
    >>> found = interleaved({"a": Timed(lambda: None, cpu), "b": Timed(lambda: None, cpu)}, 4, 0.1)
    >>> [len(times) for times in found.values()]
    [4, 4]
    """
    runs: dict[str, int] = {}
    for name, item in timed.items():
        for _ in range(WARM_UP):
            item.run()
        took = milliseconds(item) * item.calls
        runs[name] = min(MOST_RUNS, max(1, math.ceil(window_ms / max(took, 1e-6))))
    names = list(timed)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(milliseconds(timed[name], runs[name]))
    return times


def peak_bytes(call: Call) -> int:
    """Most memory a call holds on the GPU above what was held before it."""
    call()  # libraries make their workspaces, which stay
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def release() -> None:
    """Give back what finished measurements held, so that the next finds the memory free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
