"""Files other people prepared: never followed, waited for or read without bound."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import fork
from negchain.files import (
    DiskFull,
    FileRefused,
    naming,
    open_plain,
    read_arrays,
    read_object,
    read_table,
    read_text,
    real_folder,
    replacing,
)
from negchain.train import checkpoint


def test_a_new_file_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a.json", ".a.json.tmp"):  # its name, and the name temporary files had once
        (folder / name).symlink_to(victim)
    with replacing(folder / "a.json") as file:
        file.write(b"new")
    assert victim.read_text() == "mine"
    assert (folder / "a.json").read_text() == "new" and not (folder / "a.json").is_symlink()


def test_an_error_names_the_file_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, replacing(tmp_path / "nowhere" / "a.json"):
        pass
    assert caught.value.filename == str(tmp_path / "nowhere" / "a.json")


def test_nor_if_its_passing_name_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "known")
    victim, guessed = tmp_path / "victim", tmp_path / ".a.known.tmp"
    victim.write_text("mine")
    for make in (guessed.symlink_to, guessed.hardlink_to):
        make(victim)
        with pytest.raises(FileExistsError), replacing(tmp_path / "a") as file:
            file.write(b"new")
        assert victim.read_text() == "mine" and guessed.exists()
        guessed.unlink()


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        first.write(b"1" * 10)
        second.write(b"2")
    assert (tmp_path / "a").read_bytes() == b"1" * 10
    assert os.listdir(tmp_path) == ["a"]


MODES: list[tuple[str, str]] = [("rb", "pipe"), ("ab", "pipe"), ("a+b", "pipe"), ("rb", "link"),
                                ("ab", "link"), ("a+b", "link"), ("rb", "folder")]  # fmt: skip


def test_rows_are_those_of_a_csv_and_none_is_endless(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbfA;b\r1,5;2\r\n\n3;4;;\n5")
    rows = [(2, {"a": "1,5", "b": "2"}), (4, {"a": "3", "b": "4"}), (5, {"a": "5", "b": ""})]
    assert read_table(file, ("a",)) == rows
    with pytest.raises(ValueError, match="t.csv .* names the columns a and c, got a, b; name them"):
        read_table(file, ("a", "c"))
    file.write_bytes(b"a,b\n1,2,3\n")
    with pytest.raises(ValueError, match="line 2 of t.csv has 3, not 2; put quotes"):
        read_table(file, ())
    file.write_bytes(b"path,label\n")
    os.truncate(file, 8 << 30)  # zeros, which take no room on a disk
    with pytest.raises(ValueError, match="more than 4,194,304 characters; save it as such"):
        read_table(file, ())


@pytest.mark.parametrize(("mode", "kind"), MODES)
def test_only_plain_files_are_opened(mode: str, kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "a", tmp_path / "target"
    target.write_text("mine")
    make: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(target),
        "folder": path.mkdir,
    }
    make[kind]()

    def attempt() -> None:
        with pytest.raises(FileRefused, match="must be a plain file"):
            open_plain(path, mode)  # type: ignore[arg-type]

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "it waits for somebody to write"
    assert target.read_text() == "mine"


def test_a_file_under_two_names_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    os.link(tmp_path / "victim", tmp_path / ".lock")
    with pytest.raises(FileRefused, match="hard link"):
        open_plain(tmp_path / ".lock", "a+b")
    assert read_text(tmp_path / ".lock") == "mine"  # reading harms nobody


def test_a_file_that_has_just_lost_its_name_is_no_hard_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.fstat

    def late(descriptor: int) -> os.stat_result:
        (tmp_path / "a").unlink()
        return found(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", late)
        file = open_plain(tmp_path / "a", "ab")
    with file:
        assert found(file.fileno()).st_nlink == 0


def test_a_folder_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileRefused, match="a folder of its own"):
        real_folder(tmp_path / "checkpoints")


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    with open(tmp_path / "big", "wb") as file:
        file.truncate(10**12)
    with pytest.raises(FileRefused, match="at most 64 MB are read"):
        read_text(tmp_path / "big")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5, b"1" * 10**5])
def test_json_that_is_none_is_a_sentence(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(FileRefused) as caught:
        read_object(tmp_path / "a.json")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# ---- arrays -----------------------------------------------------------------------------------


def npz(path: Path, **arrays: object) -> Path:
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path


def test_arrays_come_back(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "names": np.array(["cat", "µ"]),
        "none": np.zeros((0, 3), np.float32),
        "one": np.array(3.5),
    }
    found = read_arrays(npz(tmp_path / "a.npz", **arrays))
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def claiming(shape: tuple[int, ...], content: bytes, kind: str = "|u1") -> bytes:
    """An .npy whose header promises more than it holds."""
    buffer = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)  # type: ignore[arg-type]
    return buffer.getvalue() + content


def test_arrays_that_expand_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("negchain.files.ARRAYS_LIMIT", 5 << 20)
    path = npz(tmp_path / "bomb.npz", nobody_reads_me=np.zeros(6 << 20, np.uint8))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(FileRefused, match="more than 5 MB"):
        read_arrays(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        b"not a zip at all" * 100,
        claiming((10**15,), b"x"),
        claiming((-1,), b"x"),
        claiming((9,), b"only 5"),
        claiming((10**9,), b"", "<U0"),
    ],
)
def test_arrays_that_are_none_are_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    if content.startswith(b"\x93NUMPY"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", content)
    else:
        path.write_bytes(content)
    with pytest.raises(FileRefused, match="must be an .npz of plain arrays"):
        read_arrays(path)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileRefused, match="plain arrays"):
        read_arrays(tmp_path / "a.npz")


# ---- a full disk ------------------------------------------------------------------------------


def test_a_limit_on_the_size_of_files_is_no_full_disk(tmp_path: Path) -> None:
    """The process may write files of 4 kB only (`ulimit -f`)."""
    here, there = multiprocessing.Pipe()

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            checkpoint.save(tmp_path, {"a": torch.zeros(10**6)}, 3, keep=1)
        except DiskFull as error:
            there.send(str(error))

    child = fork(write)
    child.join()
    assert child.exitcode == 0 and here.poll()
    said = here.recv()
    assert "step-000000003.pt" in said and "raise the limit (ulimit -f)" in said
    assert "full" not in said
    assert os.listdir(tmp_path) == []


def test_no_space_left_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(DiskFull, match=r"a could not be written .*free some space"):
        with replacing(tmp_path / "a") as file:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_full_disk_in_the_words_of_safetensors(tmp_path: Path) -> None:
    said = 'IoError(Os { code: 28, message: "No space left on device" })'
    with pytest.raises(DiskFull, match=r"model could not be written \(No space"):
        with naming(tmp_path / "model"):
            raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="else"), naming(tmp_path / "model"):
        raise RuntimeError("something else")
