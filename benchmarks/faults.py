"""The table of docs/reliability.md: every fault tried, what was lost and what was said.

    make faults                            all rows, and the table into docs/reliability.md
    python benchmarks/faults.py kill full  some rows, printed

Runs are small (24 pictures, a small CNN, one CPU core) and judged by one rule: after the fault and
`--resume`, the encoder, the optimizer, the chains and every line of metrics equal bit for bit those
of a run that was left alone. It runs in a mount namespace of its own (`unshare -Urm`), so that a
full disk and a read-only one are real and need no rights.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import fault_ranks
import fuzz
import torch
from fault_runs import (
    ON_DISK,
    RESIDENT,
    STEPS,
    TINY,
    at_step,
    ended,
    finished,
    require_equal,
    said,
    start,
    state_of,
    whole,
)
from PIL import Image

from negchain.tasks.images import ImageTask
from negchain.train import checkpoint

AGAIN = "steps since the checkpoint, done again"
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


class Row(NamedTuple):
    fault: str
    tried: int
    lost: str
    said: str


Fault = Callable[[Path, random.Random], Row]


# ------------------------------------------------------------------------------------- the faults


def kill(top: Path, rng: random.Random) -> Row:
    """One run, killed ten times, each time at a random moment; then left to end."""
    data, alone = whole(top, ON_DISK)
    out, kills = top / "killed", 0
    begun = time.perf_counter()
    finished_once = ended(f"{TINY} --steps {STEPS} {ON_DISK} --data", data, "--out", top / "timed",
                          log=top / "log")  # fmt: skip
    assert finished_once[0] == 0
    length = time.perf_counter() - begun
    while kills < 10:
        fresh = not (out / "config.json").exists()
        words = f"{TINY} --steps {STEPS} {ON_DISK} --data {data} --out" if fresh else (
            "train --quiet --resume --out")  # fmt: skip
        child = start(words, out, log=top / "log")
        child.join(rng.uniform(0, length))
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            kills += 1
        else:  # it came to its end before: begin again
            require_equal(alone, out)
            shutil.rmtree(out)
    if not (out / "config.json").exists():
        return kill(top / "again", rng)
    finished(out, top / "log")
    require_equal(alone, out)
    return Row(
        "kill -9 at a random moment", kills, AGAIN, "nothing can be said; `--resume` goes on"
    )


def _lines(folder: Path) -> list[Any]:
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def full(top: Path, rng: random.Random) -> Row:
    """A disk with room for a little more each time: every kind of write is the one that fails."""
    data, alone = whole(top, RESIDENT)
    size = sum(f.stat().st_size for f in alone.rglob("*") if f.is_file())
    disk, log, stopped = top / "disk", top / "log", dict[str, int]()
    disk.mkdir()
    tried, example = 0, ""
    pages = {*range(1, 11), 16, 30, *(int(size / 4096 * s) for s in (0.2, 0.5, 0.7, 0.9, 1))}
    for room in sorted(4096 * page for page in pages):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "none", disk], check=True)
        try:
            status, text = ended(f"{TINY} --steps {STEPS} {RESIDENT} --data", data, "--out",
                                 disk / "run", log=log)  # fmt: skip
            if status == 0:
                continue
            tried += 1
            found = re.search(r"disk is full: \S*?(?:/run/(\S+))? could not", text)
            assert found and "free some space" in text, text
            stopped[re.sub(r"\d+", "N", found[1] or "the folder")] = room
            example = example or text
            subprocess.run(["mount", "-o", "remount,size=64m", "none", disk], check=True)
            if not (disk / "run" / "config.json").exists():
                shutil.rmtree(disk / "run", ignore_errors=True)
                again = f"{TINY} --steps {STEPS} {RESIDENT} --data {data} --out"
                assert ended(again, disk / "run", log=log)[0] == 0
            else:
                finished(disk / "run", log)
            require_equal(alone, disk / "run")
            hidden = [p for p in (disk / "run").rglob("*.tmp")]
            assert not hidden, hidden
        finally:
            subprocess.run(["umount", disk], check=True)
    kinds = ", ".join(sorted(stopped))
    told = "the disk is full: FILE could not be written (…); free some space and try again"
    return Row(f"disk full while writing {kinds}", tried, AGAIN, told)


def flips(top: Path, rng: random.Random) -> Row:
    """One byte of the newest checkpoint changed: it is skipped for the one before, and said."""
    _, alone = whole(top, RESIDENT)
    folder = alone / "checkpoints"
    newest = sorted(folder.glob("step-*.pt"))[-1]
    content = newest.read_bytes()
    good = state_of(alone)[0]
    positions = rng.sample(range(len(content)), 500)
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= rng.randrange(1, 256)
        newest.write_bytes(damaged)
        loaded = checkpoint.load_latest(folder)
        assert loaded is not None and loaded.step < good and len(loaded.warnings) == 1
    (sentence,) = loaded.warnings
    return Row("one byte of a checkpoint flipped", len(positions), "0 loaded wrong; the one "
               "before is taken", f"note: {_short(sentence)}")  # fmt: skip


def nan(top: Path, rng: random.Random) -> Row:
    """A batch whose pixels are not numbers, at a random step."""
    data, alone = whole(top, RESIDENT)
    tried = 0
    for number in range(5):
        out, step = top / f"nan{number}", rng.randrange(4, STEPS)

        def spoil() -> None:
            inputs = ImageTask.inputs

            def spoiled(self: ImageTask, *arguments: Any, **named: Any) -> Any:
                found = inputs(self, *arguments, **named)
                found[0] = float("nan")
                return found

            ImageTask.inputs = spoiled  # type: ignore[method-assign]

        status, text = ended(f"{TINY} --steps {STEPS} {RESIDENT} --data", data, "--out", out,
                             log=top / "log", before=at_step(step, spoil))  # fmt: skip
        assert status == 1 and text, (status, text)
        finished(out, top / "log")
        require_equal(alone, out)
        tried += 1
    return Row("NaN in a batch", tried, AGAIN, _short(text))


def stop(top: Path, rng: random.Random) -> Row:
    """SIGSTOP for two seconds (a laptop that sleeps, a debugger), then SIGCONT."""
    data, alone = whole(top, ON_DISK)
    for number in range(5):
        out = top / f"stopped{number}"
        child = start(f"{TINY} --steps {STEPS} {ON_DISK} --data", data, "--out", out,
                      log=top / "log")  # fmt: skip
        time.sleep(rng.uniform(0.2, 3))
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGSTOP)
            time.sleep(2)
            os.kill(child.pid or 0, signal.SIGCONT)
        child.join(300)
        assert child.exitcode == 0, said(top / "log")
        require_equal(alone, out)
    return Row("SIGSTOP, 2 s later SIGCONT", 5, "nothing", "nothing: the run goes on")


def clock(top: Path, rng: random.Random) -> Row:
    """The wall clock jumps by up to ten years, back and forth, at every look."""
    data, alone = whole(top, RESIDENT)
    real = time.time
    for number in range(5):
        out = top / f"clock{number}"

        def jump() -> None:
            mock.patch("time.time", lambda: real() + rng.uniform(-3e8, 3e8)).start()

        status, text = ended(f"{TINY} --steps {STEPS} {RESIDENT} --data", data, "--out", out,
                             log=top / "log", before=jump)  # fmt: skip
        assert status == 0, text
        require_equal(alone, out)
        seconds = [line["seconds"] for line in _lines(out)]
        assert seconds == sorted(seconds) and seconds[-1] < 600, seconds
    return Row("wall clock jumps by up to ± 10 years", 5, "nothing", "nothing: durations are "
               "measured by another clock")  # fmt: skip


def two(top: Path, rng: random.Random) -> Row:
    """A second process wants the folder of a run that is training."""
    data, alone = whole(top, RESIDENT)
    out, tried, example = top / "shared", 0, ""

    def wait() -> None:
        while not (top / "go on").exists():
            time.sleep(0.1)

    first = start(f"{TINY} --steps {STEPS} {RESIDENT} --data", data, "--out", out,
                  log=top / "first", before=at_step(4, wait))  # fmt: skip
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.1)
    for words in ("train --quiet --resume --out", f"{TINY} --steps 3 --data {data} --out") * 3:
        status, text = ended(words, out, log=top / "log")
        assert status == 2 and text, (status, text)
        tried += 1
        example = text if "in use" in text else example
    (top / "go on").touch()
    first.join()
    assert first.exitcode == 0, said(top / "first")
    require_equal(alone, out)
    return Row("two runs on one folder", tried, "nothing", _short(example))


def readonly(top: Path, rng: random.Random) -> Row:
    """Data on a file system that cannot be written to, on disk and resident."""
    tried = 0
    for how in (RESIDENT, ON_DISK):
        data, alone = whole(top / how.split()[1], how)
        subprocess.run(["mount", "--bind", data, data], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", data], check=True)
        try:
            out = top / f"readonly{tried}"
            status, text = ended(f"{TINY} --steps {STEPS} {how} --data", data, "--out", out,
                                 log=top / "log")  # fmt: skip
            assert status == 0, text
            require_equal(alone, out)
            inside = ended(f"{TINY} --steps 2 --data", data, "--out", data / "run", log=top / "log")
            assert inside[0] == 2, inside
        finally:
            subprocess.run(["umount", data], check=True)
        tried += 1
    return Row("read-only data", tried, "nothing", "nothing; a run folder in there is refused: "
               + _short(inside[1]))  # fmt: skip


def changing(top: Path, rng: random.Random) -> Row:
    """Data on disk that changes under the run: files removed, cut, replaced; shards too."""
    data, alone = whole(top, ON_DISK)
    kept = {p: (p.read_bytes(), p.stat()) for p in data.iterdir()}

    def remove() -> None:
        for path in kept:
            path.unlink()

    def cut() -> None:
        for path in kept:
            os.truncate(path, 50)

    def replace() -> None:
        for path in kept:
            Image.new("RGB", (8, 9), "red").save(path)

    def pipes() -> None:
        for path in kept:
            path.unlink()
            os.mkfifo(path)

    tried = 0
    for change in (remove, cut, replace, pipes):
        out = top / change.__name__
        # without workers nothing was decoded ahead, so the next batch meets the change
        status, text = ended(
            f"{TINY} --steps {STEPS} --workers 0 --resident-gb 0 --data", data, "--out", out,
            log=top / "log", before=at_step(6, change),
        )  # fmt: skip
        assert status == 1 and "was readable when the run began" in text, (change, status, text)
        for path, (content, status_before) in kept.items():
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            os.utime(path, ns=(status_before.st_atime_ns, status_before.st_mtime_ns))
        finished(out, top / "log")
        require_equal(alone, out)
        tried += 1
    tried += _changing_shard(data, top)
    fault = "files or a shard on disk removed, cut, replaced or made pipes while training"
    return Row(fault, tried, AGAIN, _short(text))


def _changing_shard(data: Path, top: Path) -> int:
    def write(order: Sequence[Path]) -> None:
        with tarfile.open(top / "shards.tar", "w") as tar:
            for path in order:
                member = tarfile.TarInfo(path.name)
                member.size = path.stat().st_size
                tar.addfile(member, io.BytesIO(path.read_bytes()))

    files = sorted(data.iterdir())
    write(files)
    words = f"{TINY} --steps {STEPS} --workers 0 --resident-gb 0 --data {top / 'shards.tar'} --out"
    assert ended(words, top / "shard", log=top / "log")[0] == 0
    status, text = ended(words, top / "moved", log=top / "log",
                         before=at_step(6, lambda: write(files[::-1])))  # fmt: skip
    assert status == 1 and "has changed since it was listed" in text, text
    finished(top / "moved", top / "log")  # names and sizes are the same: it is the same data
    require_equal(top / "shard", top / "moved")
    return 1


def _short(text: str) -> str:
    text = re.sub(r"/\S*/(?=[\w.-]+)", "", text)
    return text if len(text) < 150 else text[:147] + "…"


# --------------------------------------------------------------------------------------- the table

FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (kill, full, flips, nan, stop, clock, two, readonly, changing)
}  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    lines = ["| fault | times tried | lost | said |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def main(names: list[str]) -> None:
    if "--inside" not in names:
        command = ["unshare", "-Urm", sys.executable, __file__, "--inside", *names]
        sys.exit(subprocess.run(command).returncode)
    names = [name for name in names if name != "--inside"]
    known = [*FAULTS, *fault_ranks.FAULTS, *fuzz.KINDS]
    if set(names) - set(known):
        sys.exit(f"{__doc__}\nRows: {' '.join(known)}")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in names or known:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="faults-") as top:
            rng = random.Random(name)
            if name in FAULTS:
                made = FAULTS[name](Path(top), rng)
            elif name in fault_ranks.FAULTS:
                fault, tried, lost, told = fault_ranks.FAULTS[name](Path(top), rng)
                made = Row(fault, tried, lost, _short(told))
            else:
                made = Row(*fuzz.row(name, top))
        rows.append(made)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))
    if not names:
        text = PAGE.read_text(encoding="utf-8")
        parts = re.split(r"(<!-- faults -->|<!-- end -->)", text)
        parts[2] = f"\n{table(rows)}\n"
        PAGE.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
