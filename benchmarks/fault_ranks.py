"""Faults of one rank among several: rows of benchmarks/faults.py.

Ranks are started as torchrun starts them (tests/train/torchrun_ranks.py), and ended as it ends
them: when one is gone the others are asked to stop, and killed 30 s later. Afterwards the run is
resumed by another number of ranks, and its losses are those of one process that was left alone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from fault_runs import RESIDENT, STEPS, TINY, pictures

from negchain.train import checkpoint
from negchain.train.trainer import Run

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "train")]
from torchrun_ranks import at_step, ended, metrics, said, start  # noqa: E402

WORDS = f"{TINY} --steps {STEPS} {RESIDENT} --precision float64 --data"
AGAIN = "steps since the checkpoint, done again, by 1, 2 or 3 ranks"
Cells = tuple[str, int, str, str]


def left_alone(top: Path) -> tuple[str, Path]:
    """Words that start a run, but for --out, and the run of one process by them."""
    words = f"{WORDS} {pictures(top / 'pictures')} --out"
    assert ended(1, f"{words} {top / 'alone'}", top / "log") == [0], said(top / "log")
    return words, top / "alone"


def end(ranks: list[BaseProcess]) -> None:
    """What torchrun does when one rank is gone."""
    for patience, ask in ((5.0, BaseProcess.terminate), (30.0, BaseProcess.kill)):
        limit = time.monotonic() + patience
        for rank in ranks:
            rank.join(max(limit - time.monotonic(), 0))
        for rank in ranks:
            if rank.is_alive():
                ask(rank)
    for rank in ranks:
        rank.join()


def resumed(out: Path, alone: Path, world: int, log: Path) -> None:
    """Let a run go on to its end, by so many ranks; its losses must be the other's."""
    assert ended(world, f"train --quiet --resume --out {out}", log) == [0] * world, said(log)
    ours, theirs = metrics(out), metrics(alone)
    assert list(ours) == list(theirs)
    wrong = [s for s in ours if abs(ours[s]["loss"] - theirs[s]["loss"]) > 1e-9]
    assert not wrong, wrong


def sentence(log: Path) -> str:
    found = [line for line in said(log).splitlines() if line.startswith(("failed", "stopped"))]
    assert len(found) <= 1 and "Traceback" not in said(log), said(log)
    return found[0] if found else ""


def kill_rank(top: Path, rng: random.Random) -> Cells:
    """One run, of which a rank is killed ten times at random moments, then left to end."""
    words, alone = left_alone(top)
    begun = time.perf_counter()
    assert ended(2, f"{words} {top / 'timed'}", top / "log") == [0, 0]
    length, out, kills = time.perf_counter() - begun, top / "killed", 0
    told, lost = list[str](), list[int]()
    while kills < 10:
        log = top / f"log{time.monotonic_ns()}"
        fresh = not (out / "config.json").exists()
        ranks = start(2, f"{words} {out}" if fresh else f"train --quiet --resume --out {out}", log)
        time.sleep(rng.uniform(0, length))
        unlucky = rng.choice(ranks)
        if all(rank.is_alive() for rank in ranks):
            os.kill(unlucky.pid or 0, signal.SIGKILL)
            end(ranks)
            kills += 1
            told.append(sentence(log))
            reached = max(metrics(out), default=0) if (out / "metrics.jsonl").exists() else 0
            loaded = checkpoint.load_latest(out / "checkpoints")
            lost.append(reached - (loaded.step if loaded else 0))
        else:  # it came to its end before: begin again
            end(ranks)
            shutil.rmtree(out)
    if (out / "config.json").exists():
        resumed(out, alone, rng.randint(1, 3), top / "log")
    spoken = [text for text in told if text.startswith("failed")]
    return ("kill -9 of a rank of two at a random moment", kills, f"at most {max(lost)} {AGAIN}",
            f"{len(spoken)} times (else torchrun alone says it): {spoken[0]}")  # fmt: skip


def struck(
    top: Path, rng: random.Random, times: int, do: Callable[[Run], None], said_: str, more: str = ""
) -> tuple[int, str, str]:
    """Do something to one of two ranks before a random step, so often; `said_` must be said."""
    words, alone = left_alone(top)
    for number in range(times):
        out, log = top / f"struck{number}", top / f"log{number}"
        step, unlucky = rng.randrange(4, STEPS), rng.randrange(2)

        def strike(rank: int, step: int = step, unlucky: int = unlucky) -> None:
            if rank == unlucky:
                at_step(step, do)

        ranks = start(2, f"{words} {out} {more}", log, strike)
        ranks[1 - unlucky].join(120)
        assert ranks[1 - unlucky].exitcode == 1, said(log)
        end(ranks)
        told = sentence(log)
        assert said_ in told, told
        loaded = checkpoint.load_latest(out / "checkpoints")
        assert loaded is not None and loaded.step == step // 3 * 3
        resumed(out, alone, rng.randint(1, 3), top / "log")
    return times, AGAIN, told


def stop_rank(top: Path, rng: random.Random) -> Cells:
    """SIGSTOP of a rank, which never comes back."""

    def stall(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    found = struck(top, rng, 3, stall, "did not answer for 20 s", "--rank-timeout 20")
    return "SIGSTOP of a rank of two, for good (--rank-timeout 20)", *found


def nan_rank(top: Path, rng: random.Random) -> Cells:
    """A batch that is not numbers, on one rank."""

    def spoil(run: Run) -> None:
        inputs = run.task.inputs
        run.task.inputs = lambda *given: inputs(*given) * float("nan")  # type: ignore[method-assign]

    return "NaN in the batch of one rank of two", *struck(top, rng, 5, spoil, "must be finite")


FAULTS: dict[str, Callable[[Path, random.Random], Cells]] = {
    f.__name__: f for f in (kill_rank, stop_rank, nan_rank)
}
