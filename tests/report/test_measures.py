"""How a page writes numbers."""

from __future__ import annotations

import pytest

from negchain.report.measures import number

COUNTS = {
    999.9: "999.9", 999.96: "1k", 1004.0: "1k", 999_400.0: "999k", 999_500.0: "1M",
    999_950.0: "1M", 9.994e8: "999M", 9.995e8: "1G", 9.994e11: "999G", 9.995e11: "1T",
    2.5e12: "2.5T", 9.994e14: "999T",
}  # fmt: skip
"""Counts beside the border of a unit, as the page and its script write them."""


@pytest.mark.parametrize("value", COUNTS)
def test_a_count_that_rounds_to_the_next_unit_has_that_unit(value: float) -> None:
    """9.995e11 was "1e+03G"."""
    assert number(value, "count") == COUNTS[value]
    assert number(-value, "count") == f"−{COUNTS[value]}"


def test_a_count_beyond_all_units_is_a_power_of_ten() -> None:
    assert number(9.995e14, "count") == "9.995e+14" and number(1e18, "count") == "1e+18"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.94, "59.9 s"), (59.97, "1 min 0 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 0 min")],
)
def test_seconds_that_round_to_a_minute_are_one(seconds: float, text: str) -> None:
    assert number(seconds, "seconds") == text
