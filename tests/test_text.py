"""Numbers, counts and names as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maple.text import join_names, number, percent, plural, printable, shorten, shorten_list


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


def test_counts() -> None:
    assert plural(0, "file") == "0 files" and plural(1, "file") == "1 file" and plural(1000, "class") == "1,000 classes"


def test_lists_of_names() -> None:
    assert join_names([]) == shorten_list([]) == ""
    assert shorten_list(["a", "b"], limit=2) == "a, b" and shorten_list(["a", "b", "c"], limit=2) == "a, b and 1 more"


@given(st.text(), st.integers(1, 30))
def test_cut_text_keeps_its_start(text: str, length: int) -> None:
    cut = shorten(text, length)
    assert cut == text if len(text) <= length else len(cut) == length and text.startswith(cut[:-1])


@given(st.text(), st.integers(1, 30))
def test_untrusted_text_is_printable(text: str, length: int) -> None:
    shown = printable(text, length)
    assert shown.isprintable() and len(shown) == min(len(text), length)
