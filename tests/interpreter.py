"""Triton's interpreter in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import negchain


def interpreted(*command: str | Path) -> str:
    """What a Python script (or `-m module ...`) prints under the interpreter."""
    pytest.importorskip("triton")
    source = Path(negchain.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_under_interpreter(file: str) -> None:
    """Run the functions of a test file that are named `interpreted_...`."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-o", "python_functions=interpreted_*")
    interpreted("-m", "pytest", file, *options)
