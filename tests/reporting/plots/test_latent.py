"""Projections draw every point with labels apart; contributions are bars as long as their values."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

from drawings import check_plot, words
from maple.reporting.gallery.store import Projection
from maple.reporting.plots import CLASS_COLOURS, Plot, plot_contributions, plot_projection, shared_limits


def draw(points: np.ndarray, class_ids: np.ndarray, names: Mapping[int, str], colours: Mapping[int, str]) -> Plot:
    projection = Projection("after", points, class_ids, class_ids, (), (0.5, 0.25), len(points))
    return plot_projection("t", projection, names, colours, shared_limits([projection]))


def dots_of(plot: Plot) -> str:
    """The path of the dots of the first colour."""
    paths = [path for path in check_plot(plot).iter("path") if "var(--c0)" in path.get("style", "")]
    (dots,) = [path.attrib["d"] for path in paths if "stroke-linecap: round" in path.attrib["style"]]
    return dots


def places_of(plot: Plot) -> np.ndarray:
    """Where the dots of the first colour are drawn (2 n, 2)."""
    return np.array(re.findall(r"[-.\d]+", dots_of(plot)), float).reshape(-1, 2)


def test_projection_names_coloured_classes_only(rng: np.random.Generator) -> None:
    points, class_ids = rng.normal(size=(60, 2)), np.repeat([0, 1, -1], 20)
    plot = draw(points, class_ids, {0: "a", 1: "b"}, {0: CLASS_COLOURS[0]})
    shown = words(check_plot(plot))
    assert any(re.fullmatch(r"1\s+a", word) for word in shown) and not any(word.endswith("b") for word in shown)
    assert "var(--c0)" in plot.svg and "var(--rest)" in plot.svg
    assert "axis 1: 50 % of the variance" in shown


def test_projection_draws_every_point(rng: np.random.Generator) -> None:
    points = rng.normal(size=(500, 2))
    zeros = np.zeros(500, int)
    plot = draw(points, zeros, {0: "a"}, {0: CLASS_COLOURS[0]})
    assert dots_of(plot).count("M") == 500
    assert len(plot.svg) < 40_000


def test_projections_share_their_axes(rng: np.random.Generator) -> None:
    before, after = rng.normal(size=(50, 2)), 4 * rng.normal(size=(50, 2)) + 3
    zeros = np.zeros(50, int)
    pair = [
        Projection(name, points, zeros, zeros, (), (0.5, 0.25), 50) for name, points in (("b", before), ("a", after))
    ]
    (x0, x1), (y0, y1) = shared_limits(pair)
    points = np.concatenate([before, after])
    assert (points > (x0, y0)).all() and (points < (x1, y1)).all()
    drawn = [plot_projection("t", each, {0: "a"}, {0: CLASS_COLOURS[0]}, shared_limits(pair)) for each in pair]
    spans = [np.ptp(places_of(plot)[:, 0]) for plot in drawn]
    assert spans[1] / spans[0] == pytest.approx(np.ptp(after[:, 0]) / np.ptp(before[:, 0]), rel=1e-3)


def test_one_point_far_out_does_not_press_the_others_together(rng: np.random.Generator) -> None:
    points = np.concatenate([rng.normal(size=(200, 2)), [[1000.0, 0.0]]])
    x = places_of(draw(points, np.zeros(201, int), {0: "a"}, {0: CLASS_COLOURS[0]}))[:, 0]
    assert np.ptp(x[:-2]) > 0.3 * np.ptp(x)  # the last two are the ends of that dot, at the border


def test_labels_do_not_cover_each_other(rng: np.random.Generator) -> None:
    points, class_ids = np.repeat(rng.normal(size=(20, 2)), 10, axis=0), np.arange(200) % 10  # all on one spot
    names, colours = {i: f"class {i}" for i in range(10)}, dict(enumerate(CLASS_COLOURS))
    plot = draw(points, class_ids, names, colours)
    labels = [
        text for group in check_plot(plot).iter("g") if group.get("class") == "label" for text in group.iter("text")
    ]
    heights = sorted(float(re.findall(r"[-.\d]+", text.attrib["transform"])[-1]) for text in labels)
    assert len(heights) == 10
    assert min(np.diff(heights)) > 10  # the size of the letters


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
    assert set(parts) < set(shown) and {"Navicula", "<b>Nitzschia</b>", "expected of a known image"} < set(shown)
    unit = bar_lengths(plot, "--blue")[-3] / 9
    for colour, values in (("--blue", near), ("--orange", far)):
        lengths = bar_lengths(plot, colour)[-3:]  # below the legend
        np.testing.assert_allclose(lengths / unit, values, rtol=1e-3)


def test_contributions_of_one_cluster_and_of_nothing() -> None:
    assert "var(--orange)" not in plot_contributions(["component 1"], [1], [("only", [2.0])]).svg
    check_plot(plot_contributions(["component 1"], [1], [("only", [0.0])]))
