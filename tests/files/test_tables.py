"""Rows as CSV, read back by Python's own reader."""

from __future__ import annotations

import csv
import io

import pytest

from maple.files.tables import to_csv


@pytest.mark.parametrize("text", ["a,b", 'a"b', "a\nb", " a ", "", "é–ß", "'"])
def test_any_text_comes_back(text):
    written = to_csv([{"file": text, "n": 1}], ["file", "n"])
    assert list(csv.reader(io.StringIO(written, newline=""))) == [[text, "1"]]


def test_a_carriage_return_begins_no_row():
    written = to_csv([{"file": "a\rb"}, {"file": "c"}], ["file"])
    assert [row for (row,) in csv.reader(io.StringIO(written, newline=""))] == ["a\\rb", "c"]


def test_columns_have_the_order_that_is_asked_for_and_missing_ones_are_empty():
    rows = [{"a": 1, "b": 2.5}, {"b": None}]
    assert to_csv(rows, ["b", "a"], header=True).splitlines() == ["b,a", "2.5,1", ","]


def test_a_column_that_was_not_asked_for_is_an_error():
    with pytest.raises(ValueError, match="score"):
        to_csv([{"score": 1}], ["file"])
