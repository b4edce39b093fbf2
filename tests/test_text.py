"""Numbers and names for people: one way to write each."""

from __future__ import annotations

import pytest

from maple.text import number, percent


@pytest.mark.parametrize(
    ("share", "measured", "chosen"),
    [
        (0.0, "0 %", "0 %"),
        (0.05, "5 %", "5 %"),
        (0.12345, "12.3 %", "12.345 %"),
        (0.0004, "< 0.1 %", "0.04 %"),
        (0.9996, "> 99.9 %", "99.96 %"),
        (0.1 + 0.2, "30 %", "30 %"),
        (1.0, "100 %", "100 %"),
        (float("nan"), "–", "–"),
    ],
)
def test_shares(share: float, measured: str, chosen: str) -> None:
    assert (percent(share), percent(share, exact=True)) == (measured, chosen)


def test_numbers() -> None:
    assert number(-0.5) == "-0.500" and number(float("-inf")) == "-∞" and number(123.456) == "123.46"
