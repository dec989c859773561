"""The folder of a run: one owner at a time, nothing overwritten, nothing half-written.

    config.json     the resolved settings, written once
    metrics.jsonl   one JSON object a line, appended
    tensorboard/    the same numbers as TensorBoard events, or what --logger names
    checkpoints/    see `checkpoint`
    summary.json    written at the end: its absence means unfinished
    report.html, artifacts.npz    written by others
    .lock           held while a process trains here

Nothing in the folder may lead outside it (see `negchain.files`).
When a process dies, metrics may be ahead of the last checkpoint. `truncate_after` takes them back
to the step from which the run continues, so that they equal those of an uninterrupted run.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

from negchain.files import (
    FileRefused,
    is_plain,
    naming,
    open_plain,
    parse_object,
    read_arrays,
    read_object,
    real_folder,
    replacing,
)
from negchain.train.config import ConfigError, TrainConfig, from_saved
from negchain.train.loggers import Logger, open_logger

Metric = float | int | str | None

RUNS = Path("runs")  # where runs without --out go
METRICS_LIMIT = 16 << 20  # bytes of metrics that are read whole
LINE_LIMIT = 64 << 10  # bytes of one line of them

_OURS = ("config.json", "metrics.jsonl", "tensorboard", "checkpoints", "summary.json",
         "report.html", "artifacts.npz", "logger.json")  # fmt: skip


def is_run(path: str | Path) -> bool:
    """Whether `path` is the folder of a run: it holds a config.json."""
    return is_plain(Path(path) / "config.json")


def require_run(path: Path) -> None:
    """Refuse a path that is no run folder."""
    if not is_run(path):
        within = path.is_dir() and any(is_run(each) for each in path.iterdir())
        remedy = f"runs are within it: {path}/*/" if within else "give a folder negchain train made"
        raise ConfigError(f"{path} holds no run (no config.json); {remedy}")


def load_run_config(path: Path) -> TrainConfig:
    """The settings of a run folder, less what only the command line may say (`own_settings`)."""
    require_run(path)
    values = read_object(path / "config.json")
    try:
        return own_settings(from_saved(values))
    except ConfigError as error:  # no option of the command line is meant
        raise ConfigError(f"{path / 'config.json'}: {error}") from None


def own_settings(config: TrainConfig) -> TrainConfig:
    """Settings of a file that others may have written, without those that fetch or write.

    >>> own_settings(TrainConfig(data="cifar10", download=True, root="/home/them")).root
    'data'
    """
    return replace(
        config, download=TrainConfig.download, root=TrainConfig.root, out=None,
        logger="none" if config.logger == "none" else TrainConfig.logger,
    )  # fmt: skip


def default_out(*, method: str, data: str, seed: int) -> Path:
    """Make and return a new folder, e.g. runs/2026-11-15_143210_emc2_digits_seed0.

    It is made here, not only named, so that two processes in one second get two folders.
    """
    source = re.sub(r"[^\w.]+", "-", Path(data).name).strip("-.")[:40] or "data"
    name = f"{datetime.now():%Y-%m-%d_%H%M%S}_{method}_{source}_seed{seed}"
    with _writing_in(RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = RUNS / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _writing_in(folder: Path, option: str = "--out") -> Iterator[None]:
    """Refuse a folder in which nothing can be written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error  # not the name of a file that was only tried
        raise ConfigError(f"cannot write in {folder} ({why}); choose another {option}") from error


class RunFolder:
    """A run folder held by this process; use `create` or `resume`, then as a context manager.

    >>> import tempfile
    >>> with RunFolder.create(Path(tempfile.mkdtemp()) / "a", config='{"beta": 5.0}') as run:
    ...     run.log({"step": 10, "loss": 1.5, "knn1": float("nan")})
    >>> read_metrics(run.path)
    [{'step': 10, 'loss': 1.5, 'knn1': None}]
    """

    def __init__(self, path: Path, lock: BinaryIO | None) -> None:
        """Take over `path`, whose `.lock` file is open and locked as `lock`.

        None: rank 0 holds it, and this rank writes nothing there.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock = lock
        self._metrics: BinaryIO | None = None
        self.logger_settings = TrainConfig()
        """The run's: its --logger and --name count."""
        self._logger: Logger | None = None
        self._purge_step: int | None = None

    @classmethod
    def create(cls, path: Path, *, config: str) -> Self:
        """Start a run in `path`, new or holding nothing of ours, with `config` as config.json."""
        refuse_taken(path)
        run = cls(path, _locked(path))
        try:
            refuse_taken(path)  # another process may have run here before the lock was ours
            run.rewrite_config(config)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Take up the run in `path`; call `truncate_after` with the checkpoint's step next."""
        for name in ("checkpoints", "tensorboard"):
            if os.path.lexists(path / name):
                real_folder(path / name)
        return cls(path, _locked(path))

    def rewrite_config(self, text: str) -> None:
        """Write config.json, when a run begins or is extended."""
        with replacing(self.path / "config.json") as file:
            file.write(text.encode())

    def log(self, record: Mapping[str, Metric]) -> None:
        """Append one line of metrics, which names its `step`; non-finite numbers become null."""
        assert isinstance(record["step"], int)
        clean: dict[str, Metric] = _finite(record)
        with naming(self.path / "metrics.jsonl"):
            if self._metrics is None:
                self._metrics = open_plain(self.path / "metrics.jsonl", "ab")
            self._metrics.write(json.dumps(clean, allow_nan=False).encode() + b"\n")
            self._metrics.flush()
        numbers = {k: v for k, v in clean.items() if k != "step" and isinstance(v, int | float)}
        with naming(self.path / self.logger_settings.logger):
            if self._logger is None:
                self._logger = open_logger(self.logger_settings, self.path, self._purge_step)
            self._logger.log(numbers, record["step"])

    def sync(self) -> None:
        """Force the metrics to the disk; before a checkpoint, so that it never runs ahead."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())

    def truncate_after(self, step: int) -> None:
        """Go back to `step`: drop later metrics, half-written lines and the summary."""
        if self._lock is None:
            return
        assert self._metrics is None and self._logger is None, "truncate before logging"
        self._purge_step = step + 1
        (self.path / "summary.json").unlink(missing_ok=True)
        path = self.path / "metrics.jsonl"
        if path.exists() and not all(_until(line, step) for line in _lines(path)):
            with replacing(path) as file:
                file.writelines(line for line in _lines(path) if _until(line, step))

    def keep_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Write artifacts.npz; what it has of the encoder before training (`before_`) stays."""
        import numpy as np  # a tenth of a second, which the command line can do without

        path, first = self.path / "artifacts.npz", dict[str, Any]()
        with contextlib.suppress(FileRefused):  # missing, or damaged: written anew
            old = read_arrays(path)
            first = {name: array for name, array in old.items() if name.startswith("before_")}
        with replacing(path) as file:
            np.savez_compressed(file, **{**first, **arrays})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished; non-finite numbers become null."""
        with replacing(self.path / "summary.json") as file:
            file.write(json.dumps(_finite(summary), indent=2, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the files and let go of the folder."""
        try:
            if self._metrics is not None:
                with contextlib.suppress(OSError):  # `log` has said what could not be written
                    self._metrics.close()
            if self._logger is not None:
                with naming(self.path / "tensorboard"):
                    self._logger.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close it; an error of the block goes before one of closing."""
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self.close()


def read_metrics(path: str | Path) -> list[dict[str, Metric]]:
    """Return the complete lines of a run's metrics; also while it is still being written.

    Of a very long file evenly chosen lines, and evaluations.
    """
    file = Path(path) / "metrics.jsonl"
    if not file.exists():
        return []
    every = 1 + file.stat().st_size // METRICS_LIMIT
    room = 2 * METRICS_LIMIT  # bytes; a hostile file may call every line an evaluation
    found = []
    for number, line in enumerate(_lines(file)):
        if number % every == 0 or b'"global_loss"' in line:
            if record := _parsed(line):
                found.append(record)
            room -= len(line)
            if room < 0:
                break
    return found


def last_metrics(path: str | Path) -> dict[str, Metric]:
    """The last complete line of a run's metrics; empty while there is none."""
    file = Path(path) / "metrics.jsonl"
    if not file.exists():
        return {}
    with open_plain(file) as content:
        content.seek(max(0, os.fstat(content.fileno()).st_size - LINE_LIMIT))
        lines = content.read(LINE_LIMIT).splitlines(keepends=True)
    return next((record for line in reversed(lines) if (record := _parsed(line))), {})


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a file one by one; those above `LINE_LIMIT` in pieces."""
    with open_plain(file) as content:
        while line := content.readline(LINE_LIMIT):
            yield line


def _until(line: bytes, step: int) -> bool:
    found = _parsed(line)
    return found is not None and found["step"] <= step


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):  # half-written, or the next line would be appended to it
        return None
    record = parse_object(line)
    return record if record is not None and isinstance(record.get("step"), int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_taken(path: Path) -> None:
    """Refuse a path that is no folder, and a folder that holds something a run would write."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out must be a folder and {path} is a file; choose another --out")
    if is_run(path):
        raise ConfigError(
            f"{path} already holds a run; add --resume to continue it or choose another --out"
        )
    if taken := [name for name in _OURS if os.path.lexists(path / name)]:
        raise ConfigError(
            f"{path} already holds {taken[0]}, which a run would overwrite; choose another --out"
        )


def _locked(path: Path) -> BinaryIO:
    """Make the folder if need be and lock it, or refuse.

    A POSIX record lock, not flock(2): forked data loader workers do not inherit it, so a killed
    trainer's folder is free at once although its workers take seconds to notice.
    """
    with _writing_in(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = open_plain(path / ".lock", "a+b")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read(32).decode(errors="replace").strip()
        lock.close()
        raise ConfigError(
            f"{path} is in use by process {owner or 'unknown'}; wait for it or choose another --out"
        ) from error
    with naming(path / ".lock"):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
    return lock


def check_writable(path: Path, option: str = "--out") -> None:
    """Refuse a folder that could not be made or written to, before there is anything to write."""
    try:
        str(path).encode()  # as TensorBoard's writer and JSON want it
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name of a run folder must be UTF-8, got {path}; choose another {option}"
        ) from None
    there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
    with _writing_in(there, option):
        if not there.is_dir():
            raise NotADirectoryError("it is no folder")
        with tempfile.TemporaryFile(dir=there):
            pass
