"""Imports go one way: what a part of the package may import, and who may import Triton."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import negchain

ROOT = Path(negchain.__file__).parent
TOOL = ("train", "tasks", "report", "cli", "bench", "reproduce")
# What a part must not import, not even inside a function; types are free.
NEVER = {
    "fast": ("losses", "data", "encoders", *TOOL),
    "weights": ("losses", "data", "encoders", *TOOL),
    "augment": ("losses", "data", *TOOL),
    "data": ("losses", "encoders", *TOOL),
    "losses": ("data", "encoders", *TOOL),
    "integrations": TOOL,
    "report": ("losses", "cli", "bench", "reproduce"),
    "tasks": ("report", "cli", "bench", "reproduce"),
    "train": ("cli", "bench", "reproduce"),
    "bench": ("cli", "report", "reproduce"),
    "reproduce": ("cli", "report"),
    **dict.fromkeys(("rng", "pool", "objective"), ("losses", "data", "encoders", *TOOL)),
    **dict.fromkeys(("encoders", "evaluation", "neighbours", "optim"), ("losses", "data", *TOOL)),
    **dict.fromkeys(("chunked", "exact", "diagnostics", "emc2_plain", "methods"), TOOL),
    **dict.fromkeys(("files", "machine", "printable", "progress"), ("losses", "data", *TOOL)),
    "export": ("report", "cli", "bench", "reproduce"),
}
FREE = {"__init__", "__main__", "cli"}  # what nobody imports, and the names `negchain` hands out


def imports(path: Path, package: str = "", *, lazy: bool = True) -> set[str]:
    """What a file of a package imports, without `if TYPE_CHECKING:`; `lazy`: in functions too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typed or (isinstance(node, ast.FunctionDef) and not lazy):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def files() -> dict[str, tuple[Path, str]]:
    """Every module with its file, and the package that its relative imports begin at."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        package = ".".join(("negchain", *path.parent.relative_to(ROOT).parts))
        name = package if path.name == "__init__.py" else f"{package}.{path.stem}"
        found[name] = path, package
    return found


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def wrong(module: str, imported: set[str]) -> list[str]:
    """What a module must not import."""
    never = NEVER.get(part_of(module), ())
    ours = {name for name in imported if name.split(".")[0] == "negchain"}
    return [f"{module} imports {name}" for name in sorted(ours) if part_of(name) in never]


def test_imports_go_one_way() -> None:
    assert {part_of(module) for module in files()} == {*NEVER, *FREE}
    assert [w for module, file in files().items() for w in wrong(module, imports(*file))] == []


@pytest.mark.parametrize(
    "line",
    ["from ..cli import train", "import negchain.cli", "from negchain import cli",
     "from .. import cli", "def f():\n    from negchain.cli.train import command"],
)  # fmt: skip
def test_a_planted_import_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "page.py").write_text(line)
    found = imports(tmp_path / "page.py", "negchain.report")
    assert wrong("negchain.report.page", found)


def test_no_modules_import_each_other() -> None:
    """Types and what functions import apart."""
    known, graph = files(), dict[str, set[str]]()
    for module, (path, package) in known.items():
        graph[module] = set()
        for name in imports(path, package, lazy=False):
            while name and name not in known:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names them
    assert graph["negchain.report.page"]


def test_only_fast_imports_triton() -> None:
    having = {
        name
        for name, (path, package) in files().items()
        if any(module.split(".")[0] == "triton" for module in imports(path, package))
    }
    assert having and {part_of(name) for name in having} == {"fast"}


def test_types_are_free(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n")
    assert imports(path) == {"b.c"} and imports(path, lazy=False) == set()
