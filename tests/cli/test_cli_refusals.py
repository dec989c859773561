"""What cannot work is refused before it starts: exit status 2, one sentence, nothing touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tool_runs import TINY, negchain, picture_folder, snapshot

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert negchain("train", TINY, "--steps 3 --data", pictures, "--out", out) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refusal(capsys: Capture, *arguments: object) -> str:
    """The one sentence a command line is refused with."""
    capsys.readouterr()
    assert negchain(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    (line,) = said.err.splitlines()
    assert line.startswith("refused: ")
    return line.removeprefix("refused: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("train --method ecm2", "did you mean 'emc2'"),
        ("train --preset stl10-b33", "did you mean 'stl10-b32'"),
        ("train --encoder resnet81", "did you mean 'resnet18'"),
        ("train --recipe simclr-stl11", "did you mean 'simclr-stl10'"),
        ("train --data digit", "did you mean digits"),
        ("train --data no/such/folder", "--data"),
        ("train --optimizer adm", "did you mean 'adam'"),
        ("train --device gpu", "--device must be one of auto, cpu, cuda"),
        ("train --metod emc2", "--method"),
        ("train --batch-size many", "--batch-size"),
        ("train --batch-size 1", "--batch-size must be from 2"),
        ("train --batch-size 2000", "samples and the data set has 1438; lower it to 1438"),
        ("train --lr nan", "--lr must be above 0"),
        ("train --lr fast", "got 'fast'"),
        ("train --config nowhere.json", "nowhere.json cannot be read or written (No such file"),
        ("compare --out /proc/nowhere/duel", "choose another"),
        ("train --out /proc/nowhere/run", "cannot write in /proc"),
        ("train --beta -1", "--beta must be above 0"),
        ("train --steps 0", "--steps must be from 1"),
        ("train --burn-in 1.5", "--burn-in must be a share of the proposals, at least 0"),
        ("train --batch-size 32 --burn-in 62", "got 62, and --batch-size 32 with --proposal both"),
        ("train --batch-size 32 --burn-in 31 --proposal batch", "--proposal batch has 31; lower"),
        ("compare --methods dcl,emc2 --burn-in 126 --out duel", "--proposal both has 126; lower"),
        ("train --method dcl --burn-in 0.5", "--burn-in belongs to --method emc2"),
        ("train --method dcl --denominator all", "--method infonce"),
        ("train --gamma 0.5", "--gamma belongs to --method sogclr"),
        ("train --epochs 2 --steps 9", "give one of them"),
        ("train --subset 10 --batch-size 20", "--subset leaves 10"),
        ("train --preset imagenet100-b256", "needs --data PATH"),
        ("train --encoder resnet18 --augmentations 1", "--augmentations must be from 2"),
        ("train --resume", "--resume needs --out"),
        ("train --resume --out nowhere", "nowhere"),
        ("train extra", "extra); data go with --data"),
        ("evaluate", "RUN"),
        ("evaluate nowhere", "nowhere holds no run"),
        ("report nowhere --out page.html", "nowhere"),
        ("embed nowhere --data digits --out a.npz", "nowhere holds no run"),
        ("embed nowhere --data digits", "--out"),
        ("compare --methods emc2,dlc", "did you mean 'dcl'"),
        ("compare --methods infonce,simclr", "--methods names infonce twice"),
        ("reproduce stl10 --data nowhere", "--data 'nowhere' is neither a folder"),
        ("reproduce stationarity --seeds 0", "--seeds must be at least 1, got 0"),
        ("reproduce stl10 --epochs 0", "--epochs must be at least 1, got 0"),
        ("reproduce theory --methods foo", "--methods must be one of infonce"),
        ("reproduce stationarity --settings foo", "--settings must be one of paper"),
        ("compare --seeds 0", "--seeds must be at least 1"),
        ("trian", "train"),
    ],
)
def test_a_wrong_word(
    arguments: str, says: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refusal(capsys, arguments)
    assert list(tmp_path.iterdir()) == []  # not even an empty folder stays behind


def test_a_folder_as_encoder_of_pictures_and_a_file_as_data(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    said = refusal(capsys, "train --encoder", tmp_path, "--data", pictures)
    assert "is a folder, as texts take (captions: --text-encoder)" in said
    (tmp_path / "corpus.jsonl").write_text("{}")
    said = refusal(capsys, "train --encoder", tmp_path, "--data", tmp_path / "corpus.jsonl")
    assert "is another file; name its folder" in said
    (tmp_path / "config.json").write_text("[1")
    said = refusal(capsys, "train --config", tmp_path)
    assert f"--config {tmp_path / 'config.json'} must hold JSON" in said
    (tmp_path / "config.json").write_text('{"batch_sise": 3}')
    said = refusal(capsys, "train --config", tmp_path)
    assert f"--config {tmp_path / 'config.json'}: the setting" in said
    (tmp_path / "config.json").write_text("{}")
    said = refusal(capsys, "train --preset stl10-b32 --config", tmp_path)
    assert "--preset and --config both hold settings to start from; give one of them" in said


def test_gpu_without_a_gpu(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cuda needs a GPU" in refusal(capsys, "train --device cuda")


def test_what_is_refused_late_leaves_no_run_behind(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    options = "--steps 2 --augmentations 2 --resident-gb 0 --data"
    said = refusal(capsys, "train", TINY, options, pictures, "--out", out)
    assert "--resident-gb" in said and not out.exists()
    options = "--steps 2 --encoder vgg11 --image-size 8 --batch-size 4 --quiet --data"
    said = refusal(capsys, "train", options, pictures, "--out", out)
    assert "does not take" in said and not out.exists()


def test_an_unwritable_out_is_noticed_before_decoding(
    pictures: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the way: rights would not stop root, who runs these tests elsewhere."""
    monkeypatch.setattr("negchain.tasks.load", lambda *_: pytest.fail("the data was read"))
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        said = refusal(capsys, "train", TINY, "--steps 2 --data", pictures, "--out", out)
        assert f"cannot write in {tmp_path / 'file'}" in said and "choose another --out" in said
    assert (tmp_path / "file").read_text() == "mine"


def test_pages_and_features_into_a_file_in_the_way(
    run: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("mine")
    for command, name in (("embed", "a.npz"), ("duplicates", "a.html"), ("report", "a.html")):
        words = [command, run, "--out", tmp_path / "file" / name]
        words += ["--data", pictures] if command == "embed" else []
        said = refusal(capsys, *words)
        assert "cannot be read or written" in said and "choose another" in said, command
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder.html").mkdir()
    said = refusal(capsys, "report", run, "--out", tmp_path / "folder.html")
    assert f"{tmp_path / 'folder.html'} cannot be read or written (Is a directory)" in said


def test_an_evaluation_is_shown_though_it_cannot_be_kept(run: Path, capsys: Capture) -> None:
    """A colleague's run folder is often read-only; root, who runs these tests, may write there."""
    (run / "evaluation.json").mkdir()
    capsys.readouterr()
    assert negchain("evaluate", run) == 2
    said = capsys.readouterr()
    assert "Global loss, exact" in said.out
    assert f"{run / 'evaluation.json'} cannot be read or written" in said.err


def test_what_a_user_made_is_not_written_over(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """Not the table that is read, not one beside a page, and no page in the place of a picture."""
    mine = tmp_path / "photos.csv"
    mine.write_text("path,label\n1.png,cat\n")
    for words, says in (
        ("embed RUN --data CSV --out CSV", "must not be what --data reads"),
        ("duplicates RUN --out HTML", "would be overwritten, and it is no table of duplicates"),
        ("report RUN --out CSV", "must end in .html, got 'photos.csv'"),
    ):
        places = {"RUN": run, "CSV": mine, "HTML": mine.with_suffix(".html")}
        assert says in refusal(capsys, *(places.get(word, word) for word in words.split()))
    assert mine.read_text() == "path,label\n1.png,cat\n"
    for _ in range(2):  # its own table is replaced
        assert negchain("duplicates", run, "--out", tmp_path / "twins.html") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "already holds a run"),
        ("--resume --method dcl", "--method was 'emc2' and is now 'dcl'"),
        ("--resume --batch-size 4", "--batch-size was 8 and is now 4"),
        ("--resume --data digits", "--data was"),
        ("--resume --seed 1", "--seed was 0 and is now 1"),
        ("--resume --steps 2", "--steps was 3 and is now 2"),
        ("--resume --epochs 9", "set by --steps"),
        ("--resume --carried cached", "--carried was 'encode'"),
    ],
)
def test_another_run_is_not_touched(
    options: str, says: str, run: Path, pictures: Path, capsys: Capture
) -> None:
    before = snapshot(run)
    assert says in refusal(capsys, "train", options, "--out", run)
    assert snapshot(run) == before


def test_a_folder_that_changed_since(
    finished: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, out = tmp_path / "pictures", tmp_path / "run"
    shutil.copytree(pictures, data)
    assert negchain("train", TINY, "--steps 2 --data", data, "--out", out) == 0
    shutil.copy(data / "000.png", data / "added.png")
    before = snapshot(out)
    said = refusal(capsys, "train --quiet --resume --out", out)
    assert "another data set" in said and "files were added" in said
    assert "delete" not in said  # no other checkpoint would do, and this one is worth keeping
    assert f"--pretrained {out}" in said
    assert snapshot(out) == before


def test_only_damaged_checkpoints(run: Path, capsys: Capture) -> None:
    for file in (run / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    before = snapshot(run)
    for command in ("train --quiet --resume --out", "evaluate"):
        assert "damaged" in refusal(capsys, command, run)
    assert snapshot(run) == before


def test_a_damaged_checkpoint_before_a_good_one(
    pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    options = "--steps 6 --checkpoint-every 2 --keep-checkpoints 3 --data"
    assert negchain("train", TINY, options, pictures, "--out", out) == 0
    newest = out / "checkpoints" / "step-000000006.pt"
    good, metrics = newest.read_bytes(), (out / "metrics.jsonl").read_text()
    newest.write_bytes(good[:-1] + b"?")
    capsys.readouterr()
    assert negchain("train --quiet --resume --out", out) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "continuing after step 4 of 6" in said and "skipped because it is damaged" in said
    assert len((out / "metrics.jsonl").read_text().splitlines()) == len(metrics.splitlines())


def test_embed_refuses_before_it_writes(
    run: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    said = refusal(capsys, "embed", run, "--data", pictures, "--out", tmp_path / "a.txt")
    assert ".npz, .csv, .parquet" in said and not (tmp_path / "a.txt").exists()
    said = refusal(capsys, "embed", run, "--data digits --out", tmp_path / "a.npz")
    assert "3 channels" in said and not (tmp_path / "a.npz").exists()


def test_export_refuses_before_it_writes(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "not empty" in refusal(capsys, "export", run, "--out", run)
    for form, words in (("timm", "timm has no small-cnn"), ("tflite", "must be one of timm")):
        assert words in refusal(capsys, "export", run, "--format", form, "--out", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_evaluate_needs_labels(run: Path, pictures: Path, capsys: Capture) -> None:
    assert "has no labels" in refusal(capsys, "evaluate", run, "--data", pictures)


def test_compare_takes_no_other_run_for_its_own(
    finished: Path, pictures: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(finished, tmp_path / "emc2-seed0")
    options = TINY.replace("--quiet", "") + " --methods emc2 --steps 4 --data"
    said = refusal(capsys, "compare", options, pictures, "--out", tmp_path)
    assert "--steps was 3 and is now 4" in said
