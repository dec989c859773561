"""`negchain reproduce` as a stranger uses it: own data, own record, refusals, and what it says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from negchain.cli import run
from negchain.reproduce import accuracy, common, cost
from negchain.reproduce.common import Row
from negchain.reproduce.pages import colour

PAGE = "<!-- table stl10 -->\nas it was\n<!-- end -->\n"
STL10 = ["reproduce", "stl10", "--settings", "b8-none", "--methods", "dcl", "--seeds", "1"]
SHIPPED, OWN = Path("records/reproduce/stl10.jsonl"), Path("runs/reproduce/stl10.jsonl")


def row_of(job: Row, images: int = 20, **more: Any) -> Row:
    point = {"step": 3, "samples": 24, "seconds": 1.0, "loss": 2.0, "embedding_variance": 0.5}
    point |= {"probe": 0.5, "knn1": 0.4, "global_loss": 3.0}
    config = {"epochs": 1, "images": images}
    return {"job": job, "complete": True, "curve": [point], "config": config, "wall": 69.4, **more}


def photos(folder: Path, count: int = 10) -> None:
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")):
        (folder / split / name).mkdir(parents=True)
        for number in range(count if split == "train" else 1):
            pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype="uint8")
            Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A fresh clone with photos beside it, in which a run takes no time; the jobs that ran."""
    ran: list[Row] = []

    def one(name: str, job: Row, deadline: float) -> Row | None:
        if time.time() >= deadline:
            return None
        ran.append(job)
        return row_of(job)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "one", one)
    photos(Path("photos"))
    SHIPPED.parent.mkdir(parents=True)
    settings = {"preset": "stl10-b32", "batch_size": 8, "device": "auto", "data": "/tmp/photos"}
    job = {"seed": 0, "setting": "b8-none", "method": "dcl", "settings": settings}
    SHIPPED.write_text(json.dumps(row_of(job)) + "\n")
    Path("docs").mkdir()
    Path("docs/results.md").write_text(PAGE)
    return ran


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_own_runs_stay_out_of_the_shipped_record(clone: list[Row], capsys) -> None:  # type: ignore[no-untyped-def]
    """They went into it as one more seed, and page and figures were rewritten without a word."""
    before = SHIPPED.read_bytes()
    assert run([*STL10, "--data", "photos"]) == 0
    assert len(clone) == 1 and SHIPPED.read_bytes() == before
    assert Path("docs/results.md").read_text() == PAGE and not Path("docs/figures").exists()
    said = told(capsys)
    assert f"stl10: 0 of 1 run is in {OWN}, 1 to make" in said
    assert "1/1 stl10 b8-none DCL seed 0: 69 s" in said
    assert f"record: {OWN} figure: runs/reproduce/stl10-probe.svg" in said and "page:" not in said
    assert run([*STL10, "--data", "./photos"]) == 0 and len(clone) == 1
    said = told(capsys)
    assert f"1 of 1 run is in {OWN}, none to make; another --out makes them again" in said


@pytest.mark.parametrize(
    "given", [["--redraw"], ["--data", "photos", "--out", "records/reproduce"]]
)
def test_the_page_is_renewed_from_the_shipped_record_only(
    given: list[str], clone: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose data may lie elsewhere by now: its run is not made again."""
    words = STL10[:2] if "--redraw" in given else STL10
    assert run([*words, *given]) == 0 and not clone
    assert "| b8-none | DCL | 1 | 1 |" in Path("docs/results.md").read_text()
    assert Path("docs/figures/stl10-probe.svg").exists()
    said = told(capsys)
    assert f"record: {SHIPPED}" in said and "page: docs/results.md" in said


def test_redraw_reads_own_records_where_none_is_shipped(clone: list[Row]) -> None:
    assert run([*STL10, "--data", "photos"]) == 0
    figure = Path("runs/reproduce/stl10-probe.svg")
    figure.unlink()
    SHIPPED.unlink()
    SHIPPED.parent.rmdir()
    assert run([*STL10[:2], "--redraw"]) == 0 and figure.exists()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("--data photos", "--data cats", "has photos; for cats give another --out"),
        ("--data photos", "--data b/photos", "photos of 20 images; for b/photos of 22 give"),
        ("--data photos --quick", "--quick", "has photos, --quick; for digits, --quick give"),
        ("--data photos --quick", "--data photos", "has photos, --quick; for photos give"),
    ],
)
def test_runs_on_other_data_do_not_enter_a_record(
    first: str, second: str, said: str, clone: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their mean and that of the others were one number."""
    photos(Path("cats"))
    photos(Path("b/photos"), 11)
    assert run([*STL10, *first.split(), "--out", "own"]) == 0
    before = Path("own/stl10.jsonl").read_bytes()
    assert run([*STL10, *second.split(), "--out", "own"]) == 2
    assert said in told(capsys) and Path("own/stl10.jsonl").read_bytes() == before


def test_quick_results_say_what_they_are(clone: list[Row], capsys) -> None:  # type: ignore[no-untyped-def]
    """Digits at b = 16 were called b32-none, as the paper's."""
    assert run(["reproduce", "stl10", "--quick", "--methods", "dcl", "--device", "cpu"]) == 0
    words = "--quick: small sizes and few steps; these are no results"
    assert capsys.readouterr().out.startswith(f"{words}\n\n| setting |")
    assert words in Path("runs/quick/stl10-probe.svg").read_text()
    assert run(["reproduce", "time", "--quick", "--redraw"]) == 2
    assert "run `negchain reproduce cost --quick --out runs/quick` first" in told(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stl10 --redraw --methods dcl", "--redraw takes all runs of a record, and --methods"),
        ("stl10 --redraw --settings b8-none", "and --settings chooses runs to make; leave one"),
        ("stl10 --redraw --seeds 1", "and --seeds chooses"),
        ("stl10 --redraw --epochs 1", "and --epochs chooses"),
        ("stl10 --redraw --data photos", "and --data chooses"),
        ("stl10 --redraw --download", "and --download chooses"),
        ("theory --settings zzz", "--settings changes nothing in theory; leave it out"),
        ("theory --epochs 2", "--epochs changes nothing in theory"),
        ("stationarity --quick --epochs 2", "--epochs changes nothing in stationarity --quick"),
        ("burn-in --methods dcl --data photos", "--methods dcl is in no run of burn-in"),
        ("stl10 --data photos --methods full+gradient", "'full gradient' is of stationarity only"),
        ("theory --methods full+gradient", "'full gradient' is of stationarity only, got theory"),
        ("stl10 --data photos --settings b32-non", "got 'b32-non'; did you mean 'b32-none'?"),
        ("stl10 --data photos --settings b33", "--settings must be one of b32-none, b32-none-both"),
        ("stl10 --data empty", "holds 0 readable images"),
        ("stl10 --data broken", "holds 0 readable images and 1 unreadable"),
        ("stl10 --data photos", "as many images to train on as a batch, got 20 for 32"),
        ("stationarity --data few", "as many images to train on as a batch, got 2 for 4"),
        ("stl10 --data photos --device gpu", "--device must be one of auto, cpu, cuda, got 'gpu'"),
        (
            "stl10 --data photos --figures photos/train/cat/0.png",
            "no folder); choose another --fig",
        ),
    ],
)
def test_what_would_fail_or_do_nothing_is_refused_before_any_run(
    words: str, said: str, clone: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options were ignored in silence, and data that cannot be used failed in each of 273 runs."""
    for name in ("empty", "broken", "few"):
        Path(name).mkdir()
    Path("broken/a.png").write_bytes(b"no picture")
    for number in range(2):
        os.link("photos/train/cat/0.png", f"few/{number}.png")
    given = [word.replace("+", " ") for word in words.split()]
    assert run(["reproduce", *given]) == 2 and not clone
    assert said in told(capsys) and not Path("runs").exists()


def test_cuda_without_a_gpu_is_refused_once(clone: list[Row], monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["reproduce", "theory", "--device", "cuda"]) == 2 and not clone
    assert "--device cuda needs a GPU and none is visible" in told(capsys)


def test_runs_for_which_no_time_is_left_are_counted(clone: list[Row], capsys) -> None:  # type: ignore[no-untyped-def]
    assert run([*STL10, "--data", "photos", "--minutes", "0"]) == 0 and not clone
    assert "1 of 1 run is missing: --minutes 0 left no time; the same" in told(capsys)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_is_told_what_is_kept(
    number: int, clone: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = common.one

    def one(name: str, job: Row, deadline: float) -> Row | None:
        if clone:
            os.kill(os.getpid(), number)
            time.sleep(5)
        return real(name, job, deadline)

    monkeypatch.setattr(common, "one", one)
    words = ["infonce,dcl" if word == "dcl" else word for word in STL10]
    assert run([*words, "--data", "photos"]) == 130
    assert f"stopped early; finished runs are in {OWN}, and the same command goes" in told(capsys)
    assert len(common.read_rows(OWN)) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_tell_how_far_they_are_and_leave_ctrl_c_to_us(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A long run was silent, and Ctrl-C ended in its traceback."""

    def one(name: str, job: Row, deadline: float) -> Row:
        common.tell(0.25)
        return {"job": job, "ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN}

    monkeypatch.setattr(common, "one", one)
    monkeypatch.setattr(common, "CONTEXT", multiprocessing.get_context("fork"))
    moves: list[float] = []
    waiting = [("stl10", {"seed": 0})]
    found = common._side_by_side(waiting, time.time() + 60, 1, pytest.fail, moves.append)
    assert [row["ignored"] for _, row in found] == [True] and 0.25 in moves
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def test_progress_moves_within_a_run(tmp_path: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    def one(name: str, job: Row, deadline: float) -> Row:
        common.tell(0.5)
        return {"job": job, "wall": 1.0}

    monkeypatch.setattr(common, "one", one)
    options = common.Options(device="cpu")
    given: dict[str, Any] = {"minutes": 1, "processes": 1}
    job = {"seed": 0, "beta": 5.0, "lr": 0.001, "method": "full gradient", "steps": 9}
    assert common.perform([("stationarity", job)], options, tmp_path, **given) == (0, 0)
    said = told(capsys)
    assert "reproduce: 0/1 run done," in said
    assert "1/1 stationarity full gradient beta 5 lr 0.001 seed 0: 1 s" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": {"seed": 0, "setting": "b8-none"}}, "have job.method"),
        ({"job": 3}, "have job.seed"),
        ({"curve": None}, "have curve.samples"),
        ({"curve": []}, "have curve.samples"),
        ({"curve": [{"step": 3, "probe": 0.5}]}, "have curve.samples"),
        ({"curve": [{"samples": 3, "probe": "high"}]}, "have numbers in its curve"),
        ({"config": {}}, "have config.epochs"),
    ],
)
def test_a_line_that_is_no_run_is_named_before_a_figure_is_lost(
    change: Row, said: str, clone: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended in KeyErrors; figures of the experiments before it were overwritten."""
    other = SHIPPED.with_name("imagenet100.jsonl")
    row = json.loads(SHIPPED.read_text())
    other.write_text(json.dumps({"record": "imagenet100"}) + "\n" + json.dumps({**row, **change}))
    assert run(["reproduce", "stl10", "imagenet100", "--redraw", "--figures", "drawn"]) == 2
    words = told(capsys)
    assert f"line 2 of {other} must {said}, got" in words and "delete the line" in words
    assert not Path("drawn").exists() and Path("docs/results.md").read_text() == PAGE


def test_a_line_of_stationarity_that_is_no_run_is_named(clone: list[Row], capsys) -> None:  # type: ignore[no-untyped-def]
    path = SHIPPED.with_name("stationarity.jsonl")
    job = {"seed": 0, "encoder": "mlp", "beta": 5.0, "lr": 0.1, "method": "dcl"}
    path.write_text(json.dumps({"job": job, "curve": [{"step": 0}]}) + "\n")
    assert run(["reproduce", "stationarity", "--redraw"]) == 2
    assert f"line 1 of {path} must have curve.exact_loss" in told(capsys)


def test_time_says_which_record_it_lacks(clone: list[Row], capsys) -> None:  # type: ignore[no-untyped-def]
    """It said that its records hold nothing to compare yet."""
    assert run(["reproduce", "time", "--redraw"]) == 2
    record = SHIPPED.with_name("cost.jsonl")
    remedy = "run `negchain reproduce cost --out records/reproduce` first"
    assert f"there is no record {record}; {remedy}" in told(capsys)


@pytest.mark.parametrize("name", ["stl10", "finite-augmentations"])
def test_without_labels_no_empty_figure_is_drawn(
    name: str, clone: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def one(name: str, job: Row, deadline: float) -> Row:
        row = row_of(job)
        return {**row, "curve": [{k: v for k, v in row["curve"][0].items() if k in KEPT}]}

    KEPT = ("step", "samples", "embedding_variance")
    monkeypatch.setattr(common, "one", one)
    Path("heap").mkdir()
    for number in range(256):
        os.link("photos/train/cat/0.png", f"heap/{number}.png")
    setting = "b8-none" if name == "stl10" else "b256-none"
    words = ["reproduce", name, "--settings", setting, "--methods", "dcl", "--seeds", "1"]
    assert run([*words, "--data", "heap"]) == 0
    said = told(capsys)
    assert "note: heap has no labels, so there is no probe and no 1-NN" in said
    assert f"{name}: no figure, as no run has a linear probe or 1-NN" in said
    assert not list(Path("runs").glob("**/*.svg"))


def test_time_takes_runs_without_labels() -> None:
    """It was a KeyError."""
    rows = []
    for method in ("infonce", "emc2"):
        job = {"seed": 0, "setting": "b32-none", "method": method, "settings": {}}
        rows += [{"job": {**job, "kind": "step"}, "ms": [2.0], "record": "cost"}]
        rows += [row_of(job, record="stl10")]
        del rows[-1]["curve"][0]["probe"]
    assert cost.time_table(rows) == "" and cost.time_draw(rows) == {}


def test_warnings_of_torchs_profiler_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cost` showed "Memory block of unknown size"; torch reads this when it is imported."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert run(["reproduce", "theory", "--epochs", "1"]) == 2
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def drawn(label: str, rows: list[Row]) -> Any:
    (first, _) = accuracy.draw("name", label, rows).values()
    return first


def test_lines_that_are_hard_to_tell_apart_differ_in_more_than_hue() -> None:
    """i-SIR's orange and EMC²'s vermilion; burn-ins had matplotlib's red beside its green."""
    job = {"seed": 0, "setting": "b32-none", "method": "emc2", "settings": {}}
    methods = drawn("method", [row_of(job), row_of({**job, "method": "isir"})]).axes[0].lines
    assert [line.get_linestyle() for line in methods] == ["-", "--"]
    assert len({line.get_marker() for line in methods}) == 2
    names = ["ours", *(f"P = {steps}" for steps in (48, 0, 32, 16))]
    figure = drawn("burn-in", [row_of({**job, "burn-in": name}) for name in names])
    *blues, ours = [line.get_color() for line in figure.axes[0].lines]
    assert [sum(tint[:3]) for tint in blues] == sorted((sum(t[:3]) for t in blues), reverse=True)
    assert ours == colour("emc2") and all(tint[2] > max(tint[:2]) for tint in blues)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [
        "P = 0",
        "P = 16",
        "P = 32",
        "P = 48",
        "ours",
    ]
    assert legend._ncols == 5  # in one line: else it reads column by column


def test_axes_say_what_they_show_in_one_notation() -> None:
    """Some panels had thousands and others 1e6 in a corner; accuracies were "linear probe"."""
    job = {"seed": 0, "setting": "b32-none", "method": "emc2", "settings": {}}
    row = row_of(job)
    longer = {**row, "config": {"epochs": 100}, "curve": [{**row["curve"][0], "samples": 1.2e6}]}
    for axis, last in zip(drawn("method", [row, longer]).axes, (24, 1_200_000), strict=True):
        assert axis.get_xlabel() == "samples seen, thousands"
        assert axis.get_ylabel() == "linear probe accuracy"
        assert axis.xaxis.get_major_formatter()(last, 0) == f"{last / 1000:g}"


def test_stored_augmentations_have_the_methods_in_the_order_of_other_figures() -> None:
    job = {"seed": 0, "setting": "b256-none", "settings": {"augmentations": 2}}
    rows = [
        row_of({**job, "method": method, "augmentations": f"{method}, 2"})
        for method in ("emc2", "isir", "dcl", "infonce")
    ]
    (legend,) = drawn("augmentations", rows).legends
    shown = [text.get_text() for text in legend.texts]
    assert shown == ["InfoNCE", "DCL", "EMC²", "EMC² i-SIR"]
