"""A run folder has one owner, loses nothing and never shows half a file."""

import io
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from negchain.files import DiskFull
from negchain.train import run_folder
from negchain.train.presets import ConfigError
from negchain.train.run_folder import (
    RunFolder,
    default_out,
    is_run,
    read_metrics,
    require_run,
)

CONFIG = '{"beta": 5.0, "data": "µ"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def snapshot(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_run_from_start_to_end(folder: Path) -> None:
    assert not is_run(folder)
    with RunFolder.create(folder, config=CONFIG) as run:
        assert (
            folder / "config.json"
        ).read_text() == CONFIG and run.checkpoints == folder / "checkpoints"
        run.log({"step": 10, "loss": 1.25, "global_loss": float("nan")})
        line = (folder / "metrics.jsonl").read_text()  # there before the run ends
        assert line == '{"step": 10, "loss": 1.25, "global_loss": null}\n'
        run.log({"step": 20, "loss": float("-inf"), "knn1": 0.5})
        run.sync()
        run.write_summary({"knn1": 0.5, "last": {"loss": float("inf"), "all": [1, float("nan")]}})
    assert read_metrics(folder)[1] == {"step": 20, "loss": None, "knn1": 0.5}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {"knn1": 0.5, "last": {"loss": None, "all": [1, None]}}
    assert not list(folder.rglob("*.tmp"))


def test_a_run_is_not_overwritten(folder: Path) -> None:
    RunFolder.create(folder, config=CONFIG).close()
    before = snapshot(folder)
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        RunFolder.create(folder, config="{}")
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["report.html", "metrics.jsonl", "summary.json"])
def test_other_peoples_files_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"already holds {name}"):
        RunFolder.create(tmp_path, config=CONFIG)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_with_unrelated_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, config=CONFIG).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_places_that_cannot_be_a_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match="choose another --out"):
            RunFolder.create(path, config=CONFIG)
    assert file.read_text() == "x" and os.listdir(tmp_path) == ["file"]


HOLDER = """
import sys, time
from pathlib import Path
from negchain.train.run_folder import RunFolder
run = RunFolder.resume(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_one_owner_at_a_time(folder: Path) -> None:
    RunFolder.create(folder, config=CONFIG).close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        before = snapshot(folder)
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
            RunFolder.resume(folder)
        assert snapshot(folder) == before
    finally:
        holder.kill()  # -9: the lock goes with the process
        holder.communicate()
    RunFolder.resume(folder).close()


def test_truncate_after_takes_metrics_back_to_the_checkpoint(folder: Path) -> None:
    with RunFolder.create(folder, config=CONFIG) as run:
        for step in (10, 20, 30, 40):
            run.log({"step": step, "loss": step / 10})
        run.write_summary({})
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2')  # cut short by kill -9
    with RunFolder.resume(folder) as run:
        run.truncate_after(20)
        assert not (folder / "summary.json").exists()
        run.log({"step": 30, "loss": -3.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(folder)] == [(10, 1), (20, 2), (30, -3)]


def test_truncate_leaves_a_clean_file_alone(folder: Path) -> None:
    with RunFolder.create(folder, config=CONFIG) as run:
        run.truncate_after(0)  # no metrics yet
        run.log({"step": 10})
    inode = (folder / "metrics.jsonl").stat().st_ino
    with RunFolder.resume(folder) as run:
        run.truncate_after(10)
    assert (folder / "metrics.jsonl").stat().st_ino == inode


def test_tensorboard_shows_the_resumed_run_only_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # event files are read by name, and number 10 of a process and second comes before number 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with RunFolder.create(folder, config=CONFIG) as run:
        for step in (10, 20, 30):
            run.log({"step": step, "loss": 1.0, "knn1": float("nan")})
    with RunFolder.resume(folder) as run:
        run.truncate_after(20)
        run.log({"step": 30, "loss": 2.0})
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 1), (20, 1), (30, 2)]
    assert events.Tags()["scalars"] == ["loss"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.integers(0, 50), max_size=12),
    cut=st.integers(0, 60),
    junk=st.sampled_from([b"", b"\n", b"null\n", b'{"loss": 1}\n', b"\xff\xfe\n", b"[", b"\0" * 9]),
    step=st.integers(0, 50),
)
@example(steps=[10, 20], cut=1, junk=b"", step=50)  # only the newline of the last line is missing
def test_whatever_the_file_holds_only_good_lines_up_to_the_step_stay(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cut: int, junk: bytes, step: int
) -> None:
    path = tmp_path_factory.mktemp("run")
    (path / "config.json").write_text("{}")
    content = b"".join(b'{"step": %d, "loss": 0.5}\n' % s for s in steps)
    content = content[: max(0, len(content) - cut)] + junk
    (path / "metrics.jsonl").write_bytes(content)
    whole = [s["step"] for s in read_metrics(path)]
    with RunFolder.resume(path) as run:
        run.truncate_after(step)
    left = (path / "metrics.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in left.splitlines()] == [
        s for s in whole if isinstance(s, int) and s <= step
    ]
    assert left == b"" or left.endswith(b"\n")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_folder, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def test_default_out_is_new_every_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(now=lambda: datetime(2026, 11, 15, 14, 32, 10))
    monkeypatch.setattr(run_folder, "datetime", now)
    paths = [default_out(method="emc2", data="/my pics/", seed=3) for _ in range(3)]
    name = "2026-11-15_143210_emc2_my-pics_seed3"
    assert [p.name for p in paths] == [name, f"{name}-2", f"{name}-3"]
    for path in paths:
        RunFolder.create(path, config=CONFIG).close()


@pytest.mark.parametrize("data", ["/", "..", "日本語 写真", "a" * 300, "x/../..", "-", "\n"])
def test_default_out_makes_a_sane_name_of_any_path(runs: Path, data: str) -> None:
    path = default_out(method="dcl", data=data, seed=0)
    assert path.parent == runs and path.is_dir() and len(path.name) < 100
    assert " " not in path.name and path.name.isprintable()


def test_default_out_under_a_file_is_refused(runs: Path) -> None:
    runs.write_text("x")
    with pytest.raises(ConfigError, match="choose another --out"):
        default_out(method="dcl", data="digits", seed=0)
    runs.unlink()
    runs.symlink_to(runs.parent / "nowhere")
    with pytest.raises(ConfigError, match="choose another --out"):
        default_out(method="dcl", data="digits", seed=0)


def test_a_full_disk_is_told_by_the_write_that_failed_and_not_by_closing(folder: Path) -> None:
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFull, match="metrics.jsonl could not be written"):
        with RunFolder.create(folder, config="{}") as run:
            run._metrics = io.BufferedWriter(Full())
            run.log({"step": 1, "loss": 0.5})
    RunFolder.resume(folder).close()  # it was let go of


def test_a_folder_of_runs_says_where_they_are(folder: Path) -> None:
    with RunFolder.create(folder, config=CONFIG):
        require_run(folder)
    with pytest.raises(ValueError, match=r"holds no run .*runs are within it: .*runs/\*/$"):
        require_run(folder.parent)
