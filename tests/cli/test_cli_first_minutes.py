"""What a new user meets first: what was chosen, how far it is, and how to go on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negchain import __version__
from negchain.cli import run
from negchain.data import DataBundle, ImageSet
from negchain.progress import Progress
from negchain.tasks.image_judge import ImageJudge
from negchain.tasks.images import small_stem
from negchain.train.pretrained import load_trained
from negchain.train.resolve import resolve
from negchain.train.step import TrainStep
from tool_runs import DIGITS, TINY, class_folder, metrics_of, negchain, picture_folder, state_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "probed"
    data = class_folder(tmp_path_factory.mktemp("data") / "classes")
    options = TINY.replace("--eval-every 0", "--eval-every 1 --keep-checkpoints 1")
    assert negchain("train", options, "--epochs 4 --data", data, "--out", out) == 0
    return out


def test_version(capsys: Capture) -> None:
    assert negchain("--version") == 0
    assert capsys.readouterr().out.strip() == f"negchain {__version__}"


def test_the_terminal_speaks_in_words(probed: Path, capsys: Capture) -> None:
    """No key of a file (knn1, global_loss, samples_per_second) stands in what is printed."""
    capsys.readouterr()
    assert negchain("evaluate", probed, "--device cpu") == 0
    said = capsys.readouterr().out
    files = [
        json.loads((probed / f"{name}.json").read_text()) for name in ("summary", "evaluation")
    ]
    keys = [key for file in files for key in file if not key.isalpha()]  # "probe" is a word
    assert keys and [key for key in keys if re.search(rf"\b{key}\b", said)] == []
    assert "1-NN accuracy" in said and "Global loss, exact" in said


@pytest.mark.parametrize("command", ["embed", "duplicates", "export", "evaluate", "train"])
def test_ctrl_c_is_answered_with_a_word(
    command: str,
    probed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """While reading, decoding, encoding or writing: nothing is left, and no traceback."""

    def pressed(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / f"new.{'html' if command == 'duplicates' else 'npz'}"
    given = [probed] if command != "train" else ["--encoder small-cnn --device cpu"]
    given += ["--data", tmp_path] * (command in ("embed", "duplicates"))
    given += ["--data digits"] * (command == "train") + ["--out", out] * (command != "evaluate")
    given += ["--format onnx"] * (command == "export")
    places = ("trained.load_run_encoder", "pretrained.load_trained", "start.load")
    for place in places:
        monkeypatch.setattr(f"negchain.train.{place}", pressed)
    assert negchain(command, *given) == 130
    said = capsys.readouterr().err.strip()
    first = "first step; give the same command again"
    assert said == f"stopped before the {first if command == 'train' else 'end'}"
    assert not out.exists()


def test_ctrl_c_while_the_program_ends_shows_no_traceback() -> None:
    """Torch takes a second to tidy up after the last word."""
    code = (
        "import atexit, signal; from negchain.cli import main; "
        "atexit.register(signal.raise_signal, signal.SIGINT); main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("negchain") and done.stderr == ""


def test_progress_is_alive_when_redirected(
    pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation of 100 s before the first step is not taken for the speed of steps, 1 s."""
    now = [0.0]

    def takes(seconds: float, what: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            now[0] += seconds
            return what(*arguments)

        return timed

    monkeypatch.setattr(ImageJudge, "before", takes(100.0, ImageJudge.before))
    monkeypatch.setattr(TrainStep, "__call__", takes(1.0, TrainStep.__call__))
    monkeypatch.setattr("negchain.cli.train.Progress", lambda show: Progress(show, lambda: now[0]))
    options = TINY.replace("--quiet", "") + " --steps 3 --data"
    assert negchain("train", options, pictures, "--out", tmp_path / "run") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "/3 steps" in line]
    assert said[:2] == ["evaluating: 0/3 steps", "training: 0/3 steps"]
    assert said[2] == "training: 1/3 steps, 2 s left"


def test_compare_says_which_run_of_how_many_and_repeats_none(
    pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs in this process; in processes of their own in test_cli_outputs.py."""

    def launch(arguments: list[str], log: Path) -> Any:
        status = run(["train", *arguments])
        return SimpleNamespace(returncode=status, poll=lambda: status)

    monkeypatch.setattr("negchain.cli.compare.launch", launch)
    options = TINY.replace("--quiet", "") + " --methods simclr,dcl --steps 2 --data"
    page = tmp_path / "duel" / "report.html"
    assert negchain("compare", options, pictures, "--out", page.parent) == 0
    said = capsys.readouterr()
    assert "run 1 of 2: infonce-seed0" in said.err and "run 2 of 2: dcl-seed0" in said.err
    assert "DCL (1 seed)" in said.out and "Global loss," in said.out
    assert "infonce" in page.read_text() and "dcl" in page.read_text()
    metrics = page.parent / "dcl-seed0" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    page.unlink()
    assert negchain("compare", options, pictures, "--out", page.parent) == 0  # only the page
    assert metrics.stat().st_mtime_ns == before and page.exists()


def test_images_that_sit_out_are_counted(tmp_path: Path, capsys: Capture) -> None:
    data = picture_folder(tmp_path / "pictures", count=27)
    assert negchain("train", TINY, "--steps 2 --data", data, "--out", tmp_path / "run") == 0
    assert "every epoch leaves out 3 of 27 images" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written_is_refused_before_decoding(
    pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*arguments: object) -> None:
        raise AssertionError("it decoded first")

    monkeypatch.setattr("negchain.tasks.images.load_images", decoded)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run", Path("/proc/nowhere/run")):
        assert negchain("train", TINY, "--data", pictures, "--out", out) == 2
        assert "choose another --out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("side", "size", "small"), [(20, 64, True), (200, 64, False), (200, 65, None)]
)
def test_the_stem_is_chosen_by_the_pictures(side: int, size: int, small: bool | None) -> None:
    one = ImageSet(("a",), None, torch.zeros(1, 3, size, size, dtype=torch.uint8))
    data = DataBundle("pictures", one, None, None, (), (), "0" * 16, native=side)
    config = resolve(None, {"encoder": "resnet18", "image_size": size})
    chosen, notes = small_stem(config, data)
    assert chosen is bool(small)
    said = " ".join(notes)
    assert ("--stem large takes a quarter (32 px) to a sixteenth" in said) is (small is True)
    assert ("--stem small sees more and takes 8 to 16 times" in said) is (small is False)


def test_the_stem_is_said_and_built(tmp_path: Path, capsys: Capture) -> None:
    data = picture_folder(tmp_path / "pictures", count=4, side=200)
    options = "--encoder resnet18 --recipe none --batch-size 2 --steps 1 --probe-samples 2 --quiet"
    options += " --device cpu --workers 0 --eval-every 0 --image-size 64 --data"
    assert negchain("train", options, data, "--out", tmp_path / "run") == 0
    assert "--stem small sees more" in " ".join(capsys.readouterr().err.split())
    assert load_trained(tmp_path / "run")[0].encoder_config["small_stem"] is False


def test_a_tag_alone_loads_no_weights_and_that_is_said(tmp_path: Path, capsys: Capture) -> None:
    data = picture_folder(tmp_path / "pictures", count=4, side=32)
    options = "--encoder resnet10t.c3_in1k --recipe none --batch-size 2 --steps 1 --probe-samples 2"
    options += " --quiet --device cpu --workers 0 --eval-every 0 --data"
    assert negchain("train", options, data, "--out", tmp_path / "run") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "resnet10t.c3_in1k names weights, which only --pretrained timm loads" in said


# ---- going on from what exists ----------------------------------------------------------------


def test_a_run_is_extended(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    options = "--epochs 2 --checkpoint-every 2 --data"
    assert negchain("train", TINY, options, pictures, "--out", out) == 0
    assert negchain("train --quiet --resume --epochs 4 --out", out) == 0
    assert "extended from 6 to 12 steps" in " ".join(capsys.readouterr().err.split())
    assert state_of(out)["step"] == 12 and metrics_of(out)[-1]["step"] == 12
    assert json.loads((out / "config.json").read_text())["epochs"] == 4
    assert json.loads((out / "summary.json").read_text())["step"] == 12
    rates = {line["step"]: line["lr"] for line in metrics_of(out)}
    assert rates[12] == pytest.approx(0) and rates[8] > 0


def test_a_config_repeats_a_run(pictures: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    options = "--method sogclr --gamma 0.3 --seed 3 --steps 3 --data"
    assert negchain("train", TINY, options, pictures, "--out", first) == 0
    for source in (first / "config.json", first):
        second = tmp_path / source.name.replace(".", "-") / "again"
        assert negchain("train --quiet --config", source, "--out", second) == 0
        assert metrics_of(first) == metrics_of(second)
        a, b = (state_of(path)["encoder"] for path in (first, second))
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert negchain("train --quiet --seed 4 --config", first, "--out", tmp_path / "c") == 0
    assert metrics_of(tmp_path / "c") != metrics_of(first)


def test_a_run_starts_from_another(pictures: Path, tmp_path: Path, capsys: Capture) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert negchain("train", TINY, "--steps 3 --data", pictures, "--out", first) == 0
    options = ("--steps 1 --lr 1e-9 --weight-decay 0 --method dcl --data", pictures)
    arguments = (*options, "--pretrained", first, "--out", second)
    assert negchain("train", TINY, *arguments) == 0
    said = capsys.readouterr()
    assert "weights from" in said.err and "pretrained encoder" in said.out
    assert "Pretrained encoder" not in (first / "report.html").read_text()
    assert negchain("evaluate", second) == 0  # beside the weights it began with, not fresh ones
    told = [json.loads((second / f"{n}.json").read_text()) for n in ("summary", "evaluation")]
    assert told[0]["untrained_global_loss"] == told[1]["untrained_global_loss"]
    a, b = (load_trained(path)[0].backbone.state_dict() for path in (first, second))
    weights = [name for name in a if a[name].is_floating_point() and "running" not in name]
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in weights)


def test_patience_says_by_what_it_chose_and_a_damaged_choice_says_what_else(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = DIGITS.replace("--eval-every 0", "--eval-every 1")
    once = "--subset 96 --epochs 9 --patience 1 --lr 0.05 --out"
    assert negchain("train", options, once, run) == 0
    said, page = capsys.readouterr().out, (run / "report.html").read_text()
    assert "1 evaluation found nothing better" in said
    assert said.count("the best by validation") == page.count("the best by validation")
    assert ("the best by validation" in said) == ("kept: the encoder of step" in said)
    lines = [line for line in metrics_of(run) if "probe_validation" in line]
    assert len(lines) == len([line for line in metrics_of(run) if "probe" in line]) > 1
    kept = max(lines, key=lambda line: line["probe_validation"])  # the first of equals
    summary = json.loads((run / "summary.json").read_text())
    assert [summary[n] for n in ("best_step", "probe")] == [kept["step"], kept["probe"]]

    def leaves(*told: object) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as reader:  # negchain evaluate RUN | head -1
        reader.setattr("negchain.cli.inspect.result", leaves)
        negchain("evaluate", run)
    told = [json.loads((run / f"{n}.json").read_text()) for n in ("summary", "evaluation")]
    assert told[0]["best_step"] == told[1]["step"] and told[0]["probe"] == told[1]["probe"]
    best = run / "checkpoints" / "best.pt"
    best.write_bytes(best.read_bytes()[:-1])
    assert negchain("evaluate", run) == 2
    assert "--checkpoint latest" in capsys.readouterr().err
    best.unlink()
    assert negchain("evaluate", run) == 2
    assert "which --checkpoint may name" in capsys.readouterr().err


def test_the_best_checkpoint_is_kept_and_evaluated(probed: Path, capsys: Capture) -> None:
    lines = {line["step"]: line for line in metrics_of(probed) if "probe" in line and line["step"]}
    scores = {step: -line["global_loss"] for step, line in lines.items()}  # few validation pictures
    expected = max(scores, key=lambda step: scores[step])
    files = {path.name for path in (probed / "checkpoints").iterdir()}
    assert files == {"best.pt", f"step-{max(scores):09d}.pt"}
    assert negchain("evaluate", probed, "--checkpoint best") == 0
    found = json.loads((probed / "evaluation.json").read_text())
    assert found["step"] == expected and found["probe"] == pytest.approx(lines[expected]["probe"])
    capsys.readouterr()
    assert negchain("evaluate", probed, f"--checkpoint {max(scores)}") == 0
    assert negchain("evaluate", probed, "--checkpoint 3") == 2
    assert "no checkpoint '3'; it has" in " ".join(capsys.readouterr().err.split())
