"""Imports go one way: what a folder of the package may import, and who may import Triton."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import negchain

ROOT = Path(negchain.__file__).parent
# What a part must not import, not even inside a function; types are free.
NEVER = {
    "fast": ("losses", "train", "report", "cli", "bench"),
    "weights": ("losses", "train", "report", "cli", "bench", "data", "encoders"),
    "augment": ("losses", "train", "report", "cli", "bench"),
    "data": ("losses", "train", "report", "cli", "bench"),
    "losses": ("train", "report", "cli", "bench", "data", "encoders"),
    "report": ("cli", "bench"),
    "train": ("cli", "bench"),
    "encoders": ("losses", "train", "report", "cli", "bench"),
    "integrations": ("train", "report", "cli", "bench"),
    "draws": ("losses", "weights", "train", "report", "cli", "bench"),
}


def imports(path: Path) -> set[str]:
    """Modules a file imports when it runs: not those under `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.py"))]


@pytest.mark.parametrize("part", NEVER)
def test_imports_go_one_way(part: str) -> None:
    wrong = []
    for name in files():
        if name.removesuffix(".py").split("/")[0] != part:
            continue
        for module in imports(ROOT / name):
            words = module.split(".")
            if words[0] == "negchain" and words[1] in NEVER[part]:
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_only_fast_imports_triton() -> None:
    having = {n for n in files() if any(m.split(".")[0] == "triton" for m in imports(ROOT / n))}
    assert having and [name for name in having if not name.startswith("fast/")] == []


def test_types_are_free(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n")
    assert imports(path) == {"b.c"}
