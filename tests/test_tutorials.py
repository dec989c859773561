"""Tutorials are true: their commands run, in order, as a reader would type them.

Trainings are cut to an epoch, and of a comparison one run is made, in this process; `-m slow` runs
everything as it stands.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from negchain.cli import run

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
QUICK = " --epochs 1 --probe-samples 8 --quiet --device cpu --workers 0 --eval-every 0"


def follow(page: Path, quick: bool) -> list[str]:
    """Type what a page says; returns the commands."""
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "tutorial"}
    typed = []
    for block in re.finditer(r"^```(python|sh)\n(.*?)^```", text, re.S | re.M):
        language, source = block.groups()
        if language == "python":
            line = text[: block.start(2)].count("\n")
            exec(compile("\n" * line + source, str(page), "exec"), namespace)
            continue
        for command in source.splitlines():
            if command.startswith("negchain"):
                typed.append(command)
                if quick:
                    command = re.sub(
                        r"^negchain compare --methods \S+ --seeds 3", "negchain train", command
                    ).replace("--out runs/ten", "--out runs/ten/emc2-seed0")
                    command += QUICK if command.startswith("negchain train") else ""
                assert run(shlex.split(command)[1:]) == 0, command
    return typed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_holiday_photos() -> None:
    follow(ROOT / "docs/tutorials/holiday_photos.md", quick=True)
    with open("duplicates.csv", newline="") as file:
        pairs = {frozenset(row[1:3]) for row in list(csv.reader(file))[1:]}
    copies = {"temple-13.png", "sent by mail.jpg", "thumbnail.png"}
    assert frozenset({"IMG_0001.png", "flower-22.png"}) in pairs
    assert {frozenset({a, b}) for a in copies for b in copies if a < b} <= pairs
    assert Path("duplicates.html").exists() and Path("holidays.csv").exists()


def test_ten_classes(capfd: pytest.CaptureFixture[str]) -> None:
    follow(ROOT / "docs/tutorials/ten_classes.md", quick=True)
    said = capfd.readouterr().out
    assert "raw pixels" in said and "untrained encoder" in said
    page = Path("emc2.html").read_text()
    assert "digit 7" in page


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_as_it_stands(page: Path) -> None:
    assert follow(page, quick=False)


def test_every_tutorial_is_followed() -> None:
    assert {page.stem for page in TUTORIALS} == {"holiday_photos", "ten_classes"}


NOTEBOOK = ROOT / "docs/tutorials/first_plot.ipynb"


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in this process, with a shorter training; as it stands below."""
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    assert source.count("epochs=20, eval_every=4") == 1
    source = source.replace("epochs=20, eval_every=4", "steps=3, eval_every=0, probe_samples=32")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(source, str(NOTEBOOK), "exec"), namespace)
    assert namespace["figure"].axes[1].collections and namespace["summary"]["step"] == 3
    plt.close("all")
    assert any("image/png" in out.get("data", {}) for c in cells for out in c["outputs"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_the_notebook_as_it_stands() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert any(
        "image/png" in o.get("data", {}) for c in notebook.cells for o in c.get("outputs", [])
    )
