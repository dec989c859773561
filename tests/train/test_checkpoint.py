"""Checkpoints are complete or absent, whatever happens while they are written."""

import os
import random
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forked import fork
from negchain.files import FileRefused
from negchain.train import checkpoint
from negchain.train.checkpoint import load_latest, replacing, save


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((200,), float(step)), "step": step}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.stem.removeprefix("step-")) for p in folder.glob("step-*.pt"))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_round_trip_of_a_real_training_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loss": OrderedDict(chain=torch.arange(7, dtype=torch.int32)),
        "rng": torch.Generator().manual_seed(3).get_state(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "plain": [1, 2.5, "µ", None, True, (1, 2), {"a": []}, 2**80, float("inf")],
    }
    save(tmp_path, state, step=12, keep=1)
    loaded = load_latest(tmp_path)
    assert loaded is not None and loaded.step == 12 and loaded.warnings == []
    # state_dict() of a module carries version metadata as an attribute, which is not part of it.
    assert same(state, loaded.state)


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "missing") is None
    (tmp_path / "step-5.pt.txt").write_text("not one of ours")
    assert load_latest(tmp_path) is None


def test_keeps_the_last_k_and_cleans_up(tmp_path: Path) -> None:
    for name in (".step-000000001.pt.0f.tmp", ".best.pt.0f.tmp"):
        (tmp_path / name).write_bytes(b"left by a killed process")
    for step in (5, 10, 20, 1_000_000_000):
        save(tmp_path, state_of(step), step, keep=2)
    assert steps_in(tmp_path) == [20, 1_000_000_000]  # by number, not by name
    assert sorted(os.listdir(tmp_path)) == ["step-000000020.pt", "step-1000000000.pt"]
    loaded = load_latest(tmp_path)
    assert loaded is not None and loaded.step == 1_000_000_000


def test_old_ones_go_only_after_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state_of(1), 1, keep=1)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, state_of(2), 2, keep=1)
    assert os.listdir(tmp_path) == ["step-000000001.pt"]


def test_what_torch_says_is_not_taken_for_what_was_handled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C writes a checkpoint too: an error of torch's has it for a context."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("torch's own")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(RuntimeError, match="torch's own"):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            save(tmp_path, state_of(2), 2, keep=1)


def test_write_order_is_file_rename_folder_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state_of(1), 1, keep=1)
    calls: list[str] = []
    real_sync, real_replace, real_unlink = os.fsync, os.replace, Path.unlink

    def fsync(descriptor: int) -> None:
        calls.append(f"sync {'folder' if os.path.isdir(f'/proc/self/fd/{descriptor}') else 'file'}")
        real_sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        calls.append("rename")
        real_replace(source, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        calls.append(f"delete {path.name}")
        real_unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(Path, "unlink", unlink)
    save(tmp_path, state_of(2), 2, keep=1)
    assert calls == ["sync file", "rename", "sync folder", "delete step-000000001.pt"]


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), 1, keep=2)
    path = save(tmp_path, state_of(2), 2, keep=2)
    good = path.read_bytes()
    places = np.random.default_rng(0).integers(0, len(good), size=60).tolist()
    for place in [0, len(good) - 1, len(good) - 70, *places]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        loaded = load_latest(tmp_path)
        assert loaded is not None and loaded.step == 1
        assert len(loaded.warnings) == 1 and str(path) in loaded.warnings[0]
    for length in [0, 1, 71, 72, 73, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        loaded = load_latest(tmp_path)
        assert loaded is not None and loaded.step == 1 and "damaged" in loaded.warnings[0]
    path.write_bytes(good)
    loaded = load_latest(tmp_path)
    assert loaded is not None and loaded.step == 2 and loaded.warnings == []


def test_a_damaged_newest_one_is_never_kept_instead_of_a_good_one(tmp_path: Path) -> None:
    save(tmp_path, state_of(80), 80, keep=2)
    save(tmp_path, state_of(100), 100, keep=2).write_bytes(b"damaged")
    save(tmp_path, state_of(90), 90, keep=1)  # the run resumed at 80
    assert steps_in(tmp_path) == [90]


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, state_of(1), 1, keep=2).write_bytes(b"x")
    with pytest.raises(FileRefused, match="the only checkpoint in .* is damaged"):
        load_latest(tmp_path)
    save(tmp_path, state_of(2), 2, keep=2).write_bytes(b"y" * 5000)
    with pytest.raises(FileRefused, match="all 2 checkpoints .* are damaged"):
        load_latest(tmp_path)


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state_of(1), 1, keep=2)
    now = checkpoint.CHECKPOINT_SCHEMA
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SCHEMA", now + 1)
    with pytest.raises(FileRefused, match=f"schema {now} and this version reads {now + 1}"):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, {"b": np.float32(1)}]}, r"state\['a'\]\[1\]\['b'\] is of type float32"),
        ({"a": {1, 2}}, r"state\['a'\] is of type set"),
        ({"a": {(1, 2): 3}}, "key of type tuple"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(
    tmp_path: Path, state: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=place):
        save(tmp_path, state, 1, keep=1)
    assert os.listdir(tmp_path) == []


def test_foreign_pickles_are_not_executed(tmp_path: Path) -> None:
    """Even with a right checksum: `weights_only` is what stands between a file and `os.system`."""
    import hashlib
    import io

    buffer = io.BytesIO()
    torch.save({"schema": 1, "step": 1, "state": Exploit(str(tmp_path / "owned"))}, buffer)
    archive = buffer.getvalue()
    footer = b"\nsha256:" + hashlib.sha256(archive).hexdigest().encode()
    (tmp_path / "step-000000001.pt").write_bytes(archive + footer)
    with pytest.raises(FileRefused, match="more than tensors"):
        load_latest(tmp_path)
    assert not (tmp_path / "owned").exists()


class Exploit:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_replacing_leaves_the_old_file_when_the_body_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def _save_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        save(folder, {"step": step, "weights": torch.full((300_000,), float(step))}, step, 2)


def test_kill_9_while_saving(tmp_path: Path) -> None:
    """At every moment of death a complete checkpoint is there."""
    save(tmp_path, {"step": 0, "weights": torch.zeros(300_000)}, 0, keep=2)
    rng, last, cut_short = random.Random(0), 0, 0
    for _ in range(20):
        child = fork(_save_for_ever, tmp_path, last)
        time.sleep(rng.uniform(0.02, 0.1))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        cut_short += any(tmp_path.glob(".step-*.tmp"))
        loaded = load_latest(tmp_path)
        assert loaded is not None and loaded.warnings == []
        assert loaded.step >= last and loaded.state["step"] == loaded.step
        assert (loaded.state["weights"] == loaded.step).all()
        last = loaded.step
    assert last > 0 and cut_short > 0  # the kills did fall into the writing
    # Kills between rename and pruning leave extra files (more than one after several such kills in
    # a row); the next save that completes removes them all.
    save(tmp_path, {"step": last + 1}, last + 1, 2)
    assert len(os.listdir(tmp_path)) == 2, os.listdir(tmp_path)
