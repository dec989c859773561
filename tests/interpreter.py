"""Triton's interpreter in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import negchain


def interpreted(*command: str | Path) -> str:
    """What a Python script (or `-m module ...`) prints under the interpreter."""
    pytest.importorskip("triton")
    path = [Path(negchain.__file__).parents[1], Path(__file__).parent]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        },
        capture_output=True,
        text=True,
        timeout=1800,  # on a machine that others use too
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_under_interpreter(file: str, marks: str = "not slow and not gpu") -> None:
    """Run the functions of a test file that are named `interpreted_...` and have these marks."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "interpreter")
    options += ("-o", "python_functions=interpreted_*", "-m", marks)
    interpreted("-m", "pytest", file, *options)


def pytest_configure() -> None:
    """Where this module is a plugin: of the process above."""
    hurry()


def hurry() -> None:
    """A third of the interpreter's time: patch the language once per launch, check no overflow."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch_lang, done = interpreter.interpreter_builder, interpreter._patch_lang, set()
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def once(fn: Any) -> Any:
        langs = frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)
        if langs in done:
            return None
        scope = patch_lang(fn)
        # as Triton 3.7 has it: numpy 2.4 makes no number of an array of one, Triton 3.6 asks for it
        tl.core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        done.add(langs)
        if scope is not None:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = once


@contextlib.contextmanager
def changed(module: ModuleType, old: str, new: str) -> Iterator[ModuleType]:
    """A copy of a module of kernels with a planted bug: `new` in the place of `old`."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, (old, source.count(old))
    name = f"planted_{abs(hash((old, new)))}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        planted = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(planted)
        yield planted
