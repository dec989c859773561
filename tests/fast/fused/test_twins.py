"""The fused path equals its readable twin (taxonomy 12), and the comparison would notice if not.

Without a GPU the kernels run under Triton's interpreter, all in one process of its own; see
`fused_cases` for the cases, and `fused_play` for what may differ and the share of rows near a tie.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from interpreter import interpreted

pytest.importorskip("triton")

from fused_cases import QUICK  # noqa: E402


def cases_found(which: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        interpreted(Path(__file__).with_name("fused_cases.py"), which)
    )
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return cases_found("fast")


def is_wrong(name: str, told: list[str]) -> bool:
    """A case tells of nothing; a planted bug of something that is no crash."""
    return bool(told) != name.startswith("planted: ") or "Traceback" in "".join(told)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_twins_agree_unless_a_bug_is_planted(found, name) -> None:
    assert not is_wrong(name, found[name]), found[name]


@pytest.mark.slow
def test_every_other_case() -> None:
    told = cases_found("slow")
    assert len(told) > len(QUICK)
    assert {name: text for name, text in told.items() if is_wrong(name, text)} == {}
