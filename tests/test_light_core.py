"""`pip install negchain` needs torch and numpy, and nobody waits for what is not used.

Times are CPU seconds of a child process, each the least of a few attempts. Where neighbours on the
host take a core's speed by half, they double: the limit then follows what typer alone takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
EXTRAS = ("PIL", "pyarrow", "rich", "safetensors", "scipy", "sklearn", "tensorboard",
          "threadpoolctl", "timm", "torchvision", "typer")  # fmt: skip


def child(code: str) -> tuple[int, str, float]:
    """Exit status, output and CPU seconds of a Python process."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
    )
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    return done.returncode, done.stdout + done.stderr, spent


def seconds(code: str, attempts: int = 3, enough: float = 0.0) -> float:
    best = float("inf")
    for _ in range(attempts):
        _, _, spent = child(code)
        best = min(best, spent)
        if best <= enough:
            break
    return best


def cli(words: str) -> str:
    return f"from negchain.__main__ import main; import sys; sys.argv[1:] = {words.split()}; main()"


def test_the_core_needs_torch_and_numpy_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {text.split(">")[0] for text in project["dependencies"]}
    assert needed == {"numpy", "torch"}
    extras = project["optional-dependencies"]
    assert {"timm", "typer", "pillow"} <= {text.split(">")[0] for text in extras["train"]}
    assert extras["dev"][0].startswith("negchain[train,")


def test_losses_train_without_the_extras() -> None:
    status, said, _ = child(
        BLOCK.format(blocked=EXTRAS)
        + "import torch, negchain\n"
        + "z = torch.randn(8, 4, requires_grad=True)\n"
        + "negchain.InfoNCELoss(beta=5.0)(z, z + 0.1, torch.arange(8)).backward()\n"
        + "print([name for name in negchain.__all__ if not hasattr(negchain, name)])\n"
    )
    assert status == 0, said
    assert "[]" in said


@pytest.mark.parametrize("absent", ["typer", "timm"])
def test_the_tool_says_which_extra_to_install(absent: str) -> None:
    status, said, _ = child(BLOCK.format(blocked=(absent,)) + cli("train --steps 1 --quiet"))
    assert status == 2 and "Traceback" not in said
    assert "pip install 'negchain[train]'" in said


def test_ctrl_c_during_the_imports_is_answered() -> None:
    press = "import sys\nclass Finder:\n  def find_spec(self, name, *a):\n"
    press += "    if name == 'typer': raise KeyboardInterrupt\nsys.meta_path.insert(0, Finder())\n"
    status, said, _ = child(press + cli("train"))
    assert status == 130 and said.strip() == "stopped before the start"


def test_importing_negchain_is_quick() -> None:
    _, said, _ = child("import sys, negchain; print([m for m in sys.modules if m == 'torch'])")
    assert said.strip() == "[]"
    clock = "from time import process_time as t; import torch; a = t(); import negchain; "
    spent = (float(child(clock + "negchain.EMC2Loss; print(t() - a)")[1]) for _ in range(2))
    assert any(seconds <= 0.2 for seconds in spent)


@pytest.mark.parametrize(
    "words",
    ["--help", "--version", "train --help", "train --metod emc2", "train --method ecm2"]
    + ["train --data /nowhere", "compare --data /nowhere"],
)
def test_help_and_refusals_come_at_once(words: str) -> None:
    limit = max(0.8, 8 * child("import typer.main")[2])  # `train --help` takes about 5 times that
    assert seconds(cli(words), enough=limit) <= limit


@pytest.mark.parametrize("file", ["corpus.jsonl", "captions.csv"])
def test_refusals_about_texts_come_before_torch(file: str, tmp_path: Path) -> None:
    """Its import takes seconds, and the first word of a run waits for the same checks."""
    (tmp_path / file).write_text("image,caption\n")
    option = "--encoder" if file == "corpus.jsonl" else "--text-encoder"
    words = f"train --data {tmp_path} {option} all-MiniLM-L6-v2"
    status, said, _ = child(BLOCK.format(blocked=("torch",)) + cli(words))
    assert status == 2 and "'all-MiniLM-L6-v2' is no folder; nothing is fetched" in said


def test_the_names_of_the_package() -> None:
    import negchain

    assert set(negchain.__all__) <= set(dir(negchain))
    assert all(hasattr(negchain, name) for name in negchain.__all__)
    assert set(negchain._ELSEWHERE) < set(negchain.__all__) - set(negchain.losses.__all__)
    with pytest.raises(AttributeError, match="no attribute 'EMC3Loss'"):
        negchain.EMC3Loss  # noqa: B018
    assert negchain.losses.EMC2Loss is negchain.EMC2Loss


def test_type_checkers_of_users_see_our_types() -> None:
    assert (ROOT / "src/negchain/py.typed").exists()  # else mypy takes every name for Any
