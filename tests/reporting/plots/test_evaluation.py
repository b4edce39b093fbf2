"""Plots of an evaluation: legends clear of lines, empty bins left out, axes that fit the data."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from drawings import check_plot, words
from maple.evaluation.results import Reliability
from maple.reporting.plots import (
    BLUE,
    ORANGE,
    Line,
    Panel,
    plot_coverage,
    plot_quantiles,
    plot_reliability,
    plot_roc,
    plot_rows,
    plot_scores,
)


@pytest.mark.parametrize("threshold", [None, 0.0, 2.0])
def test_scores_with_and_without_threshold(threshold: float | None) -> None:
    shown = words(check_plot(plot_scores("far", [0, 1, 2], [0, 0], [0, 3], threshold)))
    assert ("threshold" in shown) == (threshold is not None)


def test_shares_of_scores_end_above_the_highest_bar_and_never_far_beyond_all_images() -> None:
    def top_ticks(ind: list[int], ood: list[int]) -> list[float]:
        shown = words(check_plot(plot_scores("far", [0, 1, 2, 3, 4], ind, ood, 2.5)))
        return sorted(float(text.split()[0]) for text in shown if text.endswith("%"))

    assert top_ticks([9, 0, 0, 0], [0, 0, 3, 3])[-1] == 100
    assert top_ticks([7, 6, 6, 6], [6, 6, 6, 7])[-1] <= 28


def test_no_line_can_lie_on_a_legend() -> None:
    steep = (Line("MAPLE, chi-square tail, AUROC 0.123", BLUE, "-"), [0, 0.9, 1], [0, 0.1, 1])
    for plot, names in (
        (plot_roc("near", [steep, steep], 0.05), [steep[0].label, "5 % false alarms"]),
        (plot_scores("near", [0, 1, 2], [9, 0], [0, 9], 1.5), ["known", "unknown: near", "threshold"]),
    ):
        drawing = check_plot(plot)
        height = {"".join(text.itertext()): float(text.attrib["y"]) for text in drawing.iter("text")}
        highest_tick = min(y for text, y in height.items() if text.endswith("%"))
        assert all(height[name] < highest_tick for name in names)


def test_few_images_have_few_bars() -> None:
    edges, rng = np.linspace(0, 10, 51), np.random.default_rng(0)
    ind, ood = (np.histogram(rng.normal(mean, 1.5, size=225), edges)[0].tolist() for mean in (4, 6))

    def bars(factor: int) -> int:
        counts = [[factor * n for n in each] for each in (ind, ood)]
        drawing = check_plot(plot_scores("far", edges.tolist(), *counts, 7.0))
        (outline,) = [p for p in drawing.iter("path") if "var(--blue)" in p.get("style", "") and p.get("clip-path")][
            1:2
        ]
        return outline.attrib["d"].count("L") // 2

    assert 8 <= bars(1) <= 16 and bars(1000) >= 35


def test_a_set_called_unknown_is_not_said_twice() -> None:
    shown = words(check_plot(plot_scores("unknown", [0, 1, 2], [9, 0], [0, 9], None)))
    assert "unknown" in shown and "unknown: unknown" not in shown


def test_reliability_shows_the_interval_of_each_bin() -> None:
    few, many = (Reliability([0, 0.5, 1], [0, n], [math.nan, 0.8], [math.nan, 0.7]) for n in (10, 1000))

    def height(curve: Reliability) -> float:
        drawing = check_plot(plot_reliability([(Line("MAPLE", BLUE, "-"), curve)]))
        lines = [p.attrib["d"] for p in drawing.iter("path") if "stroke-width: 0.9" in p.get("style", "")]
        (ends,) = [np.array(re.findall(r"[-.\d]+", line), float).reshape(-1, 2) for line in lines]
        return float(np.ptp(ends[:, 1]))

    assert height(few) > 5 * height(many) > 0


def test_scores_leave_out_the_far_end_of_other_sets() -> None:
    edges = np.linspace(0, 100, 51).tolist()
    ind, ood = [50, 50] + 48 * [0], [20, 50, 30] + 47 * [0]
    ticks = [float(text) for text in words(check_plot(plot_scores("near", edges, ind, ood, 3.0))) if text.isdigit()]
    assert max(ticks) <= 6


def test_reliability_of_few_images_has_fewer_bins() -> None:
    def n_intervals(n: int) -> int:
        share = [i / 15 for i in range(16)]
        curve = Reliability(share, [n] * 15, [0.5] * 15, share[1:])
        drawing = check_plot(plot_reliability([(Line("MAPLE", BLUE, "-"), curve)]))
        return sum("stroke-width: 0.9" in each.get("style", "") for each in drawing.iter("path"))

    assert (n_intervals(15), n_intervals(100)) == (5, 15)


def test_reliability_leaves_out_empty_bins() -> None:
    nan = float("nan")
    curve = Reliability([0, 0.5, 1], [0, 9], [nan, 0.8], [nan, 0.7])
    plot = plot_reliability([(Line("MAPLE", BLUE, "-"), curve), (Line("softmax", ORANGE, "--"), curve)])
    drawing = check_plot(plot)
    assert "nan" not in plot.svg
    height = {"".join(text.itertext()): float(text.attrib["y"]) for text in reversed(list(drawing.iter("text")))}
    assert max(height["MAPLE"], height["softmax"]) < height["100 %"]  # above all lines, which may pass anywhere below


def test_coverage_ignores_the_error_rate_of_a_handful_of_images() -> None:
    kept, accuracy = np.arange(1, 101) / 100, np.full(100, 0.9)
    accuracy[0] = 0.0  # the single most certain image is wrong
    plot = plot_coverage([(Line("MAPLE", BLUE, "-"), kept.tolist(), accuracy.tolist())])
    shares = [float(text.split()[0]) for text in words(check_plot(plot)) if text.endswith("%")]
    assert sorted(shares)[-1] == 100 and "MAPLE" in words(check_plot(plot))
    assert max(share for share in shares if share < 20) <= 11  # of the error rates


def test_the_legend_of_the_coverage_is_above_all_lines() -> None:
    """A method that is often wrong has a line at the top, where the legend would cover it."""
    lines = [Line(name, BLUE, "-") for name in ("MAPLE", "softmax", "MAPLE, chi-square tail")]
    drawing = check_plot(plot_coverage([(line, [0.5, 1.0], [0.1, 0.1]) for line in lines]))
    ticks = [place for text, place in _places(drawing) if text.endswith("%")]
    legend = [place for text, place in _places(drawing) if text in {line.label for line in lines}]
    assert len(legend) == 3 and max(legend) < min(ticks)


def _places(drawing: ElementTree.Element) -> list[tuple[str, float]]:
    """Each text with the y of its baseline, which grows downwards."""
    found = []
    for text in drawing.iter("text"):
        if (moved := re.search(r"translate\([-\d.]+ ([-\d.]+)\)", text.attrib.get("transform", ""))) is not None:
            found.append(("".join(text.itertext()), float(moved[1])))
        elif "y" in text.attrib:
            found.append(("".join(text.itertext()), float(text.attrib["y"])))
    return found


def test_rows_with_and_without_a_reference() -> None:
    panels = [Panel("AUROC", [0.9, 0.8], [0.01, 0.0], [0.88, math.nan]), Panel("ECE", [0.1, 0.2], [0, 0], [0.1, 0.1])]
    drawing = check_plot(plot_rows(["MAPLE", "<b>"], panels, "ours", "the paper"))
    assert {"MAPLE", "<b>", "AUROC", "ECE", "ours", "the paper"} <= set(words(drawing))


def test_quantiles_name_their_degrees_of_freedom() -> None:
    drawing = check_plot(plot_quantiles([1.0, 2.0, 3.0], [1.5, 2.5, 9.0], 4))
    assert {"Gaussian", "test images", "chi-square quantile (4 degrees of freedom)"} <= set(words(drawing))
