"""Rows of a suite: our results as dots, those of the paper as rings."""

from __future__ import annotations

import math

from drawings import check_plot, words
from maple.reporting.plots import Panel, plot_rows


def test_rows_with_and_without_a_reference() -> None:
    panels = [Panel("AUROC", [0.9, 0.8], [0.01, 0.0], [0.88, math.nan]), Panel("ECE", [0.1, 0.2], [0, 0], [0.1, 0.1])]
    drawing = check_plot(plot_rows(["MAPLE", "<b>"], panels, "ours", "the paper"))
    assert {"MAPLE", "<b>", "AUROC", "ECE", "ours", "the paper"} <= set(words(drawing))
