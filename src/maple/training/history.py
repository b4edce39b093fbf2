"""The history of a training: one row per epoch."""

from __future__ import annotations

import csv
import io
from typing import Any

COLUMNS = (
    "epoch",
    "learning_rate",
    "loss",
    "cross_entropy",
    "triplet",
    "prototype",
    "validation_accuracy",
    "validation_loss",
    "clusters",
    "spread",
    "relabelled",
    "relabel_shift",
    "relabel_seconds",
    "images",
    "cpu_seconds",
    "seconds",
)
History = list[dict[str, Any]]  # keys are COLUMNS and the loss terms of the recipe


def history_csv(history: History) -> str:
    """The history as CSV text; loss terms that only some recipe has come last.

    >>> print(history_csv([{"epoch": 1, "loss": 0.5, "my_term": 0.25}]).splitlines()[1])
    1,,0.5,,,,,,,,,,,,,,0.25
    """
    further = dict.fromkeys(name for row in history for name in row if name not in COLUMNS)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *further], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()
