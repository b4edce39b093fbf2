"""The history as a table."""

from __future__ import annotations

import csv
import io

from maple.training.history import COLUMNS, history_csv


def test_own_terms_come_last_and_missing_ones_are_empty():
    rows = list(csv.DictReader(io.StringIO(history_csv([{"epoch": 1, "brier": 0.5}, {"epoch": 2, "other": 0.25}]))))
    assert tuple(rows[0]) == (*COLUMNS, "brier", "other")
    assert [(row["epoch"], row["brier"], row["other"]) for row in rows] == [("1", "0.5", ""), ("2", "", "0.25")]
