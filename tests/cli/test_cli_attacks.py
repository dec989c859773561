"""Run folders come from other people: they lead nowhere outside, run nothing, take no memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from negchain.cli.compare import launch
from negchain.train import checkpoint, run_folder
from negchain.train.run_folder import read_metrics
from tool_runs import TINY, negchain, picture_folder, snapshot

Capture = pytest.CaptureFixture[str]
SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    options = "--steps 4 --checkpoint-every 2 --data"
    assert negchain("train", TINY, options, pictures, "--out", out) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def said(capsys: Capture, status: int, *arguments: object) -> str:
    """What a command says; it ends with `status` and without a traceback."""
    capsys.readouterr()
    assert negchain(*arguments) == status, capsys.readouterr().err
    both = capsys.readouterr()
    text = " ".join((both.out + both.err).split())
    assert "Traceback" not in text and "NEGCHAIN_DEBUG" not in text
    return text


COMMANDS = ("train --quiet --resume --out", "evaluate", "report")


def command(name: str, run: Path, tmp_path: Path) -> tuple[object, ...]:
    return (name, run, "--out", tmp_path / "page.html") if name == "report" else (name, run)


# ---- links ------------------------------------------------------------------------------------

LINKS = [".lock", "metrics.jsonl", "summary.json", "artifacts.npz", "evaluation.json",
         "report.html", ".metrics.jsonl.tmp", ".evaluation.json.tmp", ".artifacts.npz.tmp",
         ".summary.json.tmp", ".report.html.tmp", ".config.json.tmp"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "which"), [(name, COMMANDS["evaluation" in name]) for name in LINKS]
)
def test_a_link_in_a_run_folder_changes_nothing_outside(
    name: str, which: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    negchain(*command(which, run, tmp_path))
    assert snapshot(outside) == {"victim": b"mine"}


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_folder_that_is_a_link_is_refused(
    name: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    outside = tmp_path / "outside"
    shutil.move(run / name, outside)
    (outside / "step-000000001.pt").write_text("mine")
    (outside / ".step-000000001.pt.tmp").write_text("mine")
    (run / name).symlink_to(outside)
    before = snapshot(outside)
    assert "a folder of its own" in said(capsys, 2, "train --quiet --resume --steps 6 --out", run)
    if name == "checkpoints":
        assert "a folder of its own" in said(capsys, 2, "evaluate", run)
    assert snapshot(outside) == before


def test_a_new_run_follows_no_link_either(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    out, victim = tmp_path / "run", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine")
    (out / ".lock").symlink_to(victim)
    assert "it is a link" in said(capsys, 2, "train", TINY, "--data", pictures, "--out", out)
    (out / ".lock").unlink()
    (out / "metrics.jsonl").symlink_to(tmp_path / "not there yet")
    assert "already holds" in said(capsys, 2, "train", TINY, "--data", pictures, "--out", out)
    assert victim.read_text() == "mine" and not (tmp_path / "not there yet").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "summary.json", "artifacts.npz",
                                  "checkpoints/step-000000004.pt", ".lock"])  # fmt: skip
def test_a_pipe_in_a_run_folder_is_not_waited_for(name: str, run: Path, tmp_path: Path) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)

    def waited(number: int, frame: object) -> None:
        raise AssertionError("it waits for somebody to write")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(60)
    try:
        for words in ("evaluate", "train --quiet --resume --out"):
            assert negchain(words, run) in (0, 2)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- nothing is run, nothing is fetched -------------------------------------------------------


def test_runs_of_compare_import_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for module in ("rich", "timm", "json", "ctypes"):
        (here / f"{module}.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    log = tmp_path / "log"
    assert launch(["--help"], log).wait() == 0, log.read_text()
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("words", ["evaluate", "train --quiet --resume --out", "train --config"])
def test_a_foreign_config_fetches_nothing(
    words: str, run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*arguments: object, **named: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("urllib.request.urlopen", fetched)
    monkeypatch.chdir(tmp_path)
    config = json.loads((run / "config.json").read_text())
    elsewhere = tmp_path / "elsewhere" / "made"
    config |= {"data": "cifar10", "download": True, "root": str(elsewhere)}
    (run / "config.json").write_text(json.dumps(config))
    text = said(capsys, 2, words, run)
    assert "--download" in text or "--root" in text
    assert not elsewhere.parent.exists() and not (tmp_path / "data").exists()


def test_a_foreign_config_does_not_choose_where_weights_come_from(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "pretrained": "timm"}))
    assert "give --pretrained as well" in said(capsys, 2, "train --config", run)
    shutil.rmtree(run / "checkpoints")
    assert "--pretrained again" in said(capsys, 2, "train --quiet --resume --out", run)


# ---- memory -----------------------------------------------------------------------------------


def with_footer(archive: bytes) -> bytes:
    return archive + b"\nsha256:" + hashlib.sha256(archive).hexdigest().encode()


def test_a_checkpoint_that_expands_is_refused(run: Path, capsys: Capture) -> None:
    """Written by hand with compression, which `torch.save` never uses and `torch.load` reads."""
    plain, packed = io.BytesIO(), io.BytesIO()
    content = {"schema": checkpoint.CHECKPOINT_SCHEMA, "step": 9, "state": {}}
    torch.save({**content, "bomb": torch.zeros(64 << 20, dtype=torch.uint8)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    packed.seek(0)
    assert torch.load(packed, weights_only=True)["step"] == 9
    assert len(packed.getvalue()) < 1 << 20
    (run / "checkpoints" / "step-000000009.pt").write_bytes(with_footer(packed.getvalue()))
    text = said(capsys, 0, "evaluate", run)
    assert "compressed" in text and "step 4 is used instead" in text


def test_a_small_file_does_not_choose_a_huge_model(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a config.json nor a checkpoint makes a model larger than the run's own files."""
    large = "resnet50"
    monkeypatch.setattr("negchain.encoders._feature_dim", lambda *a: pytest.fail("it was built"))
    newest = run / "checkpoints" / "step-000000004.pt"
    newest.write_bytes(checkpoint_of(encoder_config={**TINY_CONFIG, "name": large}, encoder={}))
    assert "resnet50 has 105 MB of weights and the file has 0 MB" in said(
        capsys, 2, "evaluate", run
    )
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "encoder": large}))
    assert "cannot be of the encoder" in said(capsys, 2, "train --quiet --resume --out", run)


def test_long_metrics_take_little_memory(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "METRICS_LIMIT", 1 << 20)
    line = {"step": 1, "loss": 1.0, "epoch": 1.0, "samples": 8, "seconds": 0.1, "lr": 1}
    last = {**line, "step": 2, "global_loss": 1.5}
    with open(run / "metrics.jsonl", "w") as file:
        file.write(f"{json.dumps(line)}\n" * 44_000 + f"{json.dumps(last)}\n")
    assert (run / "metrics.jsonl").stat().st_size > 3 << 20
    found = read_metrics(run)
    assert len(found) < 15_000 and found[-1] == last  # evaluations are always read
    said(capsys, 0, "report", run, "--out", tmp_path / "page.html")
    (run / "metrics.jsonl").write_bytes(b'{"step": 1' + b" " * (1 << 20) + b"}\n")
    assert read_metrics(run) == []  # no line of ours has a megabyte


def test_arrays_nobody_reads_take_no_memory(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("negchain.files.ARRAYS_LIMIT", 5 << 20)
    np.savez_compressed(run / "artifacts.npz", unread=np.zeros(6 << 20, np.uint8))
    text = said(capsys, 2, "report", run, "--out", tmp_path / "page.html")
    assert "artifacts.npz" in text and "MB" in text


# ---- the terminal -----------------------------------------------------------------------------

NASTY = ["[/]", "[bold]x", "\x1b[2J\x1b]0;owned\x07", "a\nb", "\udcff", "[link=x]"]


@pytest.mark.parametrize("name", NASTY)
def test_names_are_shown_as_text(name: str, tmp_path: Path, capsys: Capture) -> None:
    data = picture_folder(tmp_path / f"p{name}")
    (data / f"{name}broken.png").parent.mkdir(exist_ok=True, parents=True)
    (data / f"{name}broken.png").write_bytes(b"no picture")
    text, out = TINY + " --steps 2 --data", tmp_path / f"run{name}"
    if "\udcff" in name:
        assert "must be UTF-8, got" in said(capsys, 2, "train", text, data, "--out", out)
        assert not out.exists()
        out = tmp_path / "run"
    assert negchain("train", text, data, "--out", out) == 0
    both = capsys.readouterr()
    shown = both.out + both.err
    assert not re.search(r"[^\n -\U0010ffff]", shown)
    if name.isprintable():
        assert f"p{name}" in shown.replace("\n", "") and f"{name}broken.png" in shown
    assert negchain("evaluate", out) == 0 and negchain("evaluate", tmp_path / f"no{name}") == 2
    assert negchain("embed", out, "--data", data, "--out", tmp_path / f"x{name}.npz") == 0
    assert negchain("export", out, "--out", tmp_path / f"model{name}") == 0
    both = capsys.readouterr()
    assert not re.search(r"[^\n -\U0010ffff]", both.out + both.err)


# ---- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evaluate", "embed", "duplicates", "export"])
def test_a_command_says_that_it_stepped_back(
    name: str, run: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    newest = run / "checkpoints" / "step-000000004.pt"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    out = tmp_path / ("found.html" if name == "duplicates" else "found.npz")
    given = [] if name == "evaluate" else ["--out", out]
    given += ["--data", pictures] if name in ("embed", "duplicates") else []
    text = said(capsys, 0, name, run, *given)
    assert "skipped because it is damaged" in text and "step 2 is used instead" in text


def test_embed_takes_the_checkpoint_it_is_given(
    run: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    def embeddings(*option: str) -> np.ndarray:
        assert negchain("embed", run, "--data", pictures, "--out", tmp_path / "x.npz", *option) == 0
        with np.load(tmp_path / "x.npz") as found:
            return np.asarray(found["embeddings"])

    assert np.array_equal(embeddings("--checkpoint 4"), embeddings())
    assert not np.array_equal(embeddings("--checkpoint 2"), embeddings())
    given = ["--data", pictures, "--out", tmp_path / "x.npz", "--checkpoint 3"]
    assert "no checkpoint '3'; it has 2, 4" in said(capsys, 2, "embed", run, *given)


def archive_of(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return with_footer(buffer.getvalue())


def checkpoint_of(**state: object) -> bytes:
    return archive_of({"schema": checkpoint.CHECKPOINT_SCHEMA, "step": 4, "state": state})


TINY_CONFIG = {"name": "small-cnn", "image_size": 8, "channels": 3, "norm": "batch",
               "projection": "paper", "embedding_dim": None, "seed": 0,
               "small_stem": True}  # fmt: skip

MALFORMED: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "config empty": ("config.json", b""),
    "config cut": ("config.json", b'{"method": "em'),
    "config a list": ("config.json", b"[1, 2]"),
    "config a number": ("config.json", b"7"),
    "config no utf-8": ("config.json", b'{"method": "\xff"}'),
    "config deep": ("config.json", b"[" * 200_000),
    "config huge number": ("config.json", b'{"batch_size": ' + b"9" * 6000 + b"}"),
    "config wrong type": ("config.json", b'{"batch_size": "many"}'),
    "config unknown key": ("config.json", b'{"batch_sise": 3}'),
    "config null": ("config.json", b'{"method": null}'),
    "config nan": ("config.json", b'{"beta": NaN}'),
    "config nul": ("config.json", b'{"data": "a\\u0000b"}'),
    "config surrogate": ("config.json", b'{"data": "\\ud800"}'),
    "summary empty": ("summary.json", b""),
    "summary a list": ("summary.json", b"[]"),
    "summary binary": ("summary.json", bytes(range(256))),
    "metrics a list": ("metrics.jsonl", b"[1]\n[2]\n"),
    "metrics binary": ("metrics.jsonl", b"\xff\xfe\n\x00\n"),
    "metrics text": ("metrics.jsonl", b'{"step": "one", "loss": []}\n{"step": {}}\n'),
    "metrics deep": ("metrics.jsonl", b'{"step": ' + b"[" * 30_000 + b"\n{}\n"),
    "artifacts empty": ("artifacts.npz", b""),
    "artifacts text": ("artifacts.npz", b"hello"),
    "artifacts cut": ("artifacts.npz", b"PK\x03\x04" + b"\0" * 40),
    "checkpoint empty": ("checkpoints/step-000000004.pt", b""),
    "checkpoint text": ("checkpoints/step-000000004.pt", b"x" * 500),
    "checkpoint no zip": ("checkpoints/step-000000004.pt", with_footer(b"x" * 500)),
    "checkpoint a list": ("checkpoints/step-000000004.pt", lambda: archive_of([1])),
    "checkpoint no state": ("checkpoints/step-000000004.pt", lambda: archive_of({"schema": 2})),
    "checkpoint other step": (
        "checkpoints/step-000000004.pt",
        lambda: archive_of({"schema": checkpoint.CHECKPOINT_SCHEMA, "step": 5, "state": {}}),
    ),
    "checkpoint bare": ("checkpoints/step-000000004.pt", lambda: checkpoint_of()),
    "checkpoint no weights": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config=TINY_CONFIG, encoder={}),
    ),
    "checkpoint wrong weights": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config=TINY_CONFIG, encoder={"a": torch.ones(2)}),
    ),
    "checkpoint unknown encoder": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config={**TINY_CONFIG, "name": "no-net"}, encoder={}),
    ),
    "checkpoint text for numbers": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config={**TINY_CONFIG, "channels": "x"}, encoder={}),
    ),
    "checkpoint huge picture": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config={**TINY_CONFIG, "image_size": 10**7}, encoder={}),
    ),
    "checkpoint nameless": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config={**TINY_CONFIG, "name": 5}, encoder={}),
    ),
    "checkpoint config of lists": (
        "checkpoints/step-000000004.pt",
        lambda: checkpoint_of(encoder_config=[1, 2], encoder=[3]),
    ),
}


READ_BY = {"config": (0, 1, 2), "summary": (2,), "metrics": (0, 2), "artifacts": (2,),
           "checkpoint": (0, 1)}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "which"),
    [(case, COMMANDS[n]) for case in MALFORMED for n in READ_BY[case.split()[0]]],
)
def test_malformed_files_end_in_a_sentence(
    case: str, which: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    name, content = MALFORMED[case]
    (run / name).write_bytes(content if isinstance(content, bytes) else content())
    capsys.readouterr()
    status = negchain(*command(which, run, tmp_path))
    text = capsys.readouterr().err
    assert status in (0, 2), text  # 0: the file is not needed, or there is another to go back to
    assert "Traceback" not in text and "NEGCHAIN_DEBUG" not in text and "stopped" not in text
    if status == 2:
        (line,) = [line for line in text.splitlines() if line.startswith("refused: ")]
        assert len(line) > 30
