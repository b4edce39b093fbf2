"""Contributions: bars as long as their values."""

from __future__ import annotations

import re

import numpy as np

from drawings import check_plot, words
from maple.reporting.plots import Plot, plot_contributions


def bar_lengths(plot: Plot, colour: str) -> np.ndarray:
    """Widths of the filled rectangles of one colour, from the first on the page to the last."""
    paths = [
        path.attrib["d"] for path in check_plot(plot).iter("path") if f"fill: var({colour})" in path.get("style", "")
    ]
    corners = [np.array(re.findall(r"[-.\d]+", path), float).reshape(-1, 2) for path in paths]
    bars = sorted((corner for corner in corners if len(corner) == 4), key=lambda corner: corner[0, 1])
    return np.array([np.ptp(corner[:, 0]) for corner in bars])


def test_contributions_are_bars_as_long_as_their_values() -> None:
    parts, near, far = ["component 3", "component 1", "5 others"], [9.0, 4.0, 6.0], [1.0, 16.0, 6.0]
    plot = plot_contributions(parts, [1, 1, 5], [("Navicula", near), ("<b>Nitzschia</b>", far)])
    shown = words(check_plot(plot))
    assert set(parts) < set(shown) and {"Navicula", "<b>Nitzschia</b>", "expected"} < set(shown)
    unit = bar_lengths(plot, "--blue")[-3] / 9
    for colour, values in (("--blue", near), ("--orange", far)):
        lengths = bar_lengths(plot, colour)[-3:]  # below the legend
        np.testing.assert_allclose(lengths / unit, values, rtol=1e-3)


def test_contributions_of_one_cluster_and_of_nothing() -> None:
    assert "var(--orange)" not in plot_contributions(["component 1"], [1], [("only", [2.0])]).svg
    check_plot(plot_contributions(["component 1"], [1], [("only", [0.0])]))
