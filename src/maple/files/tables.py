"""Rows of a table as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from maple.types import SET_SEPARATOR

Row = dict[str, Any]  # of a table, by column


def to_csv(rows: Iterable[Row], columns: Sequence[str], header: bool = False) -> str:
    """Rows as CSV.

    >>> to_csv([{"file": "a.png", "prediction_set": ["cat", "dog"]}], ["file", "prediction_set"], header=True)
    'file,prediction_set\\na.png,cat | dog\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return SET_SEPARATOR.join(value)
    return value.replace("\r", "\\r") if isinstance(value, str) else value  # Python does not quote \r
