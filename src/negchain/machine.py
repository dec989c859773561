"""What a record says of the machine, and of the source that ran on it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from negchain.printable import counted

PACKAGES = ("negchain", "torch", "torchvision", "timm", "transformers", "sentence-transformers",
            "open_clip_torch", "triton", "numpy", "scikit-learn")  # fmt: skip


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and commit, for JSON."""
    return {"versions": versions(), "hardware": hardware(device), "commit": commit()}


def hardware(device: torch.device) -> str:
    """The GPU by name, with the CPU beside it."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text() if listed.exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    name = named[1].strip() if named else platform.processor() or platform.machine()
    threads = counted(torch.get_num_threads(), "thread", "threads")
    cpu = f"{counted(os.cpu_count() or 1, 'core', 'cores')} of {name}, {threads}"
    return f"{torch.cuda.get_device_name()}, {cpu}" if device.type == "cuda" else cpu


def versions() -> dict[str, str]:
    """Of Python, and of the packages that decide what a run computes and how fast."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """The commit of the source, with its subject, which a rebase keeps; "+changes" if src/ has any.

    For a copy without its .git, the variable NEGCHAIN_COMMIT says it.
    """
    here = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip()

    if told := os.environ.get("NEGCHAIN_COMMIT"):
        return told
    if not (here / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    changes = git("status", "--porcelain", "--", "src")
    return git("log", "-1", "--format=%h (%s)") + (" +changes" if changes else "")
