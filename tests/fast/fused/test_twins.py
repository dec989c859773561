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

from fused_cases import CASES, FAULTS, INVALID, PLANTED, PROMISES, SLOW, TILES  # noqa: E402
from fused_play import Case  # noqa: E402


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def cases_found(which: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(
        interpreted(Path(__file__).with_name("fused_cases.py"), which)
    )
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return cases_found("fast")


@pytest.mark.parametrize("name", names(CASES))
def test_a_small_batch_equals_its_twin(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("name", names(TILES))
def test_tiles_equal_panels(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", names(INVALID))
def test_a_bad_row_changes_no_state(found, name, fault) -> None:
    assert found[f"{fault}: {name}"] == []


@pytest.mark.parametrize("name", [promise.__name__ for promise in PROMISES])
def test_promises(found, name) -> None:
    assert found[name] == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(found, name) -> None:
    told = found[f"planted: {name}"]
    assert told and "Traceback" not in "".join(told)


@pytest.mark.slow
def test_every_combination() -> None:
    told = cases_found("slow")
    assert told.keys() == set(names(SLOW))
    assert {name: text for name, text in told.items() if text} == {}
