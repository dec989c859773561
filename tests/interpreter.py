"""Triton's interpreter in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
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
        done.add(langs)
        if scope is not None:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = once
