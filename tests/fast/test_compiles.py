"""Every kernel compiles for a Hopper GPU, here and now: the GPU tests run more rarely."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import negchain

pytest.importorskip("triton")


def compiled(which: str) -> dict[str, Any]:
    """What `compile_cases` compiled, in a process whose driver is a stand-in."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_cases.py")), which],
        env={**os.environ, "PYTHONPATH": str(Path(negchain.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_default_losses_compile() -> None:
    names = {name.rsplit(".", 1)[-1] for name in compiled("quick")["compiled"]}
    wanted = {"prepare_kernel", "rows_kernel", "in_batch_kernel", "commit_kernel", "finish_kernel"}
    assert names >= wanted


@pytest.mark.slow
def test_every_kernel_compiles() -> None:
    found = compiled("all")
    assert found["left"] == [] and len(found["compiled"]) > 20
    spilled = {name: size for name, size in found["stack"].items() if size > 256}
    assert not spilled, "bytes of each thread that do not fit into registers"
