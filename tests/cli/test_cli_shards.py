"""Training on shards and saved data sets: as on a folder of the same pictures, also if stopped."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tool_runs import (
    TINY,
    assert_same,
    assert_same_run,
    interrupt_at,
    metrics_of,
    negchain,
    picture_folder,
    state_of,
)

# 24 pictures, batches of 8: the fifth step is in the middle of an epoch
TRAIN = TINY + " --steps 10 --resident-gb 0 --data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "plain")


@pytest.fixture(params=["shards", "saved"])
def source(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    pictures = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
    if request.param == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        table = {"image": [{"bytes": content, "path": None} for _, content in pictures]}
        kinds = datasets.Features({"image": datasets.Image()})
        datasets.Dataset.from_dict(table, features=kinds).save_to_disk(tmp_path / "saved")
        return tmp_path / "saved"
    (tmp_path / "shards").mkdir()
    for shard in range(3):
        with tarfile.open(tmp_path / "shards" / f"{shard}.tar", "w") as tar:
            for name, content in pictures[8 * shard : 8 * shard + 8]:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return tmp_path / "shards"


def test_a_stopped_run_ends_as_one_on_the_folder(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    assert negchain("train", TRAIN, folder, "--out", tmp_path / "plain") == 0
    assert negchain("train", TRAIN, source, "--out", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=4)
        assert negchain("train", TRAIN, source, "--out", tmp_path / "halves") == 130
    assert negchain("train --quiet --resume --out", tmp_path / "halves") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    assert_same(metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "whole"))
    plain, whole = (state_of(tmp_path / name)["encoder"] for name in ("plain", "whole"))
    assert_same(plain, whole)
    assert negchain("embed", tmp_path / "whole", "--data", source, "--out", tmp_path / "e.npz") == 0
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == files  # left alone
