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

from negchain.tasks.images import ImageTask
from negchain.train import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "train"))
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


def stop_rank(top: Path, rng: random.Random) -> Cells:
    """SIGSTOP of a rank, which never comes back."""
    words, alone = left_alone(top)
    for number in range(3):
        out, log = top / f"stopped{number}", top / f"log{number}"
        step, unlucky = rng.randrange(4, STEPS), rng.randrange(2)

        def stall(rank: int, step: int = step, unlucky: int = unlucky) -> None:
            if rank == unlucky:
                at_step(step, lambda run: os.kill(os.getpid(), signal.SIGSTOP))

        ranks = start(2, f"{words} {out} --rank-timeout 20", log, stall)
        ranks[1 - unlucky].join(120)
        assert ranks[1 - unlucky].exitcode == 1, said(log)
        end(ranks)
        told = sentence(log)
        assert "did not answer for 20 s" in told and "--resume" in told, told
        resumed(out, alone, rng.randint(1, 3), top / "log")
    return "SIGSTOP of a rank of two, for good (--rank-timeout 20)", 3, AGAIN, told


def nan_rank(top: Path, rng: random.Random) -> Cells:
    """A batch that is not numbers, on one rank."""
    words, alone = left_alone(top)
    for number in range(5):
        out, log = top / f"nan{number}", top / f"log{number}"
        step, unlucky = rng.randrange(4, STEPS), rng.randrange(2)

        def spoil(rank: int, step: int = step, unlucky: int = unlucky) -> None:
            inputs = ImageTask.inputs

            def nan(self: ImageTask, *given: object) -> object:
                return inputs(self, *given) * float("nan")  # type: ignore[arg-type]

            if rank == unlucky:
                at_step(step, lambda run: setattr(ImageTask, "inputs", nan))

        assert ended(2, f"{words} {out}", log, spoil) == [1, 1], said(log)
        told = sentence(log)
        assert "must be finite" in told, told
        loaded = checkpoint.load_latest(out / "checkpoints")
        assert loaded is not None and loaded.step == step // 3 * 3
        resumed(out, alone, rng.randint(1, 3), top / "log")
    return "NaN in the batch of one rank of two", 5, AGAIN, told


FAULTS: dict[str, Callable[[Path, random.Random], Cells]] = {
    f.__name__: f for f in (kill_rank, stop_rank, nan_rank)
}
