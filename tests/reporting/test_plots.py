"""Plots: inline SVG that takes the page's colours, keeps text as text, and never trips over odd data or names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import maple.reporting.plots
from maple.evaluation.evaluate import Reliability
from maple.reporting.plots import (
    BLUE,
    CLASS_COLOURS,
    LIGHT,
    ORANGE,
    Line,
    Plot,
    plot_accuracy,
    plot_clusters,
    plot_contributions,
    plot_drift,
    plot_losses,
    plot_projection,
    plot_quantiles,
    plot_reliability,
    plot_roc,
    plot_scores,
    standalone_svg,
)


def check(plot: Plot) -> ElementTree.Element:
    """One well-formed element that belongs on any page: described, without fixed colours or outside addresses."""
    drawing = ElementTree.fromstring(plot.svg)
    assert drawing.tag == "svg"
    assert drawing.attrib.keys() == {"viewBox", "role", "aria-label"}
    assert drawing.attrib["aria-label"] == plot.alt
    tags = re.sub(r' aria-label="[^"]*"', "", " ".join(re.findall(r"<[^>]*>", plot.svg)))
    assert not re.findall(r"#[0-9a-f]{6}\b", tags)  # all colours are the page's
    assert "http" not in tags and "<metadata" not in tags
    ids = set(re.findall(r' id="([^"]*)"', tags))
    used = set(re.findall(r'(?:url\(|href=")#([^)"]*)', tags))
    assert used == ids  # each is there, none is left over
    return drawing


def words(drawing: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in drawing.iter("text")]


@pytest.fixture
def history() -> dict[str, np.ndarray]:
    columns = ("epoch", "cross_entropy", "triplet", "validation_loss", "validation_accuracy", "clusters")
    return {name: np.arange(1.0, 5.0) for name in columns}


def test_text_stays_text_and_colours_are_the_page_s() -> None:
    plot = plot_roc("near", [(Line("MAPLE", BLUE, "-"), [0, 0.1, 1], [0, 0.9, 1])], 0.05)
    drawing = check(plot)
    assert {"MAPLE", "known images flagged", "5 % false alarms"} <= set(words(drawing))
    assert "var(--blue)" in plot.svg and "var(--ink)" in plot.svg


def test_equal_numbers_give_equal_text_and_different_plots_share_no_ids() -> None:
    one, again = (plot_quantiles([1, 2, 3], [1, 2, 4], 2) for _ in range(2))
    other = plot_quantiles([1, 2, 3], [1, 2, 5], 2)
    assert one == again
    ids = [set(re.findall(r' id="([^"]*)"', plot.svg)) for plot in (one, other)]
    assert ids[0] and not ids[0] & ids[1]


@pytest.mark.parametrize("name", ["<script>", "$x$", 'a"b', "#010101", "url(#x)", "珪藻", ' id="label"', "x" * 200])
def test_names_are_never_markup(name: str) -> None:
    drawing = check(plot_scores(name, [0, 1, 2], [3, 1], [1, 3], 1.5))
    assert name in drawing.attrib["aria-label"]
    assert any(name[:20] in text for text in words(drawing))
    assert not list(drawing.iter("script"))


@pytest.mark.parametrize("threshold", [None, 0.0, 2.0])
def test_scores_with_and_without_threshold(threshold: float | None) -> None:
    shown = words(check(plot_scores("far", [0, 1, 2], [0, 0], [0, 3], threshold)))
    assert ("threshold" in shown) == (threshold is not None)


def test_shares_of_scores_end_above_the_highest_bar_and_never_far_beyond_all_images() -> None:
    def top_ticks(ind: list[int], ood: list[int]) -> list[float]:
        shown = words(check(plot_scores("far", [0, 1, 2, 3, 4], ind, ood, 2.5)))
        return sorted(float(text.split()[0]) for text in shown if text.endswith("%"))

    assert top_ticks([9, 0, 0, 0], [0, 0, 3, 3])[-1] == 100
    assert top_ticks([7, 6, 6, 6], [6, 6, 6, 7])[-1] <= 28


def test_no_line_can_lie_on_a_legend() -> None:
    steep = (Line("MAPLE, chi-square tail, AUROC 0.123", BLUE, "-"), [0, 0.9, 1], [0, 0.1, 1])
    for plot, names in (
        (plot_roc("near", [steep, steep], 0.05), [steep[0].label, "5 % false alarms"]),
        (plot_scores("near", [0, 1, 2], [9, 0], [0, 9], 1.5), ["known", "unknown: near", "threshold"]),
    ):
        drawing = check(plot)
        height = {"".join(text.itertext()): float(text.attrib["y"]) for text in drawing.iter("text")}
        highest_tick = min(y for text, y in height.items() if text.endswith("%"))
        assert all(height[name] < highest_tick for name in names)


def test_scores_leave_out_the_far_end_of_other_sets() -> None:
    edges = np.linspace(0, 100, 51).tolist()
    ind, ood = [50, 50] + 48 * [0], [20, 50, 30] + 47 * [0]
    ticks = [float(text) for text in words(check(plot_scores("near", edges, ind, ood, 3.0))) if text.isdigit()]
    assert max(ticks) <= 6


def test_reliability_leaves_out_empty_bins() -> None:
    nan = float("nan")
    curve = Reliability([0, 0.5, 1], [0, 9], [nan, 0.8], [nan, 0.7])
    plot = plot_reliability([(Line("MAPLE", BLUE, "-"), curve), (Line("softmax", ORANGE, "--"), curve)])
    drawing = check(plot)
    assert "nan" not in plot.svg
    height = {"".join(text.itertext()): float(text.attrib["y"]) for text in reversed(list(drawing.iter("text")))}
    assert max(height["MAPLE"], height["softmax"]) < height["100 %"]  # above all lines, which may pass anywhere below


def test_projection_names_coloured_classes_only(rng: np.random.Generator) -> None:
    points, class_ids = rng.normal(size=(60, 2)), np.repeat([0, 1, -1], 20)
    plot = plot_projection("t", points, class_ids, class_ids, {0: "a", 1: "b"}, {0: CLASS_COLOURS[0]}, (0.5, 0.25))
    shown = words(check(plot))
    assert "a" in shown and "b" not in shown
    assert "var(--c0)" in plot.svg and "var(--rest)" in plot.svg
    assert "axis 1: 50 % of the variance" in shown


def test_projection_draws_every_point(rng: np.random.Generator) -> None:
    points = rng.normal(size=(500, 2))
    zeros = np.zeros(500, int)
    plot = plot_projection("t", points, zeros, zeros, {0: "a"}, {0: CLASS_COLOURS[0]}, (0.5, 0.25))
    (dots,) = [path for path in check(plot).iter("path") if "var(--c0)" in path.get("style", "")]
    assert dots.attrib["d"].count("M") == 500
    assert "stroke-linecap: round" in dots.attrib["style"]
    assert len(plot.svg) < 40_000


def test_labels_do_not_cover_each_other(rng: np.random.Generator) -> None:
    points, class_ids = np.repeat(rng.normal(size=(20, 2)), 10, axis=0), np.arange(200) % 10  # all on one spot
    names, colours = {i: f"class {i}" for i in range(10)}, dict(enumerate(CLASS_COLOURS))
    plot = plot_projection("t", points, class_ids, class_ids, names, colours, (0.5, 0.25))
    labels = [text for group in check(plot).iter("g") if group.get("class") == "label" for text in group.iter("text")]
    heights = sorted(float(re.findall(r"[-.\d]+", text.attrib["transform"])[-1]) for text in labels)
    assert len(heights) == 10
    assert min(np.diff(heights)) > 10  # the size of the letters


def bar_lengths(plot: Plot, colour: str) -> np.ndarray:
    """Widths of the filled rectangles of one colour, from the first on the page to the last."""
    paths = [path.attrib["d"] for path in check(plot).iter("path") if f"fill: var({colour})" in path.get("style", "")]
    corners = [np.array(re.findall(r"[-.\d]+", path), float).reshape(-1, 2) for path in paths]
    bars = sorted((corner for corner in corners if len(corner) == 4), key=lambda corner: corner[0, 1])
    return np.array([np.ptp(corner[:, 0]) for corner in bars])


def test_contributions_are_bars_as_long_as_their_values() -> None:
    parts, near, far = ["component 3", "component 1", "5 others"], [9.0, 4.0, 6.0], [1.0, 16.0, 6.0]
    plot = plot_contributions(parts, [1, 1, 5], [("Navicula", near), ("<b>Nitzschia</b>", far)])
    shown = words(check(plot))
    assert set(parts) < set(shown) and {"Navicula", "<b>Nitzschia</b>", "usual"} < set(shown)
    unit = bar_lengths(plot, "--blue")[-3] / 9
    for colour, values in (("--blue", near), ("--orange", far)):
        lengths = bar_lengths(plot, colour)[-3:]  # below the legend
        np.testing.assert_allclose(lengths / unit, values, rtol=1e-3)


def test_contributions_of_one_cluster_and_of_nothing() -> None:
    assert "var(--orange)" not in plot_contributions(["component 1"], [1], [("only", [2.0])]).svg
    check(plot_contributions(["component 1"], [1], [("only", [0.0])]))


@pytest.mark.parametrize("draw", [plot_losses, plot_accuracy, plot_clusters])
def test_history_marks_events(draw, history: dict[str, np.ndarray]) -> None:
    without, marked = draw(history, []), draw(history, [2, 3])
    check(without)
    check(marked)
    assert without.svg.count("var(--pink)") == 0 and marked.svg.count("var(--pink)") == 2


@pytest.mark.parametrize("draw", [plot_losses, plot_accuracy, plot_clusters])
def test_history_of_one_epoch_and_of_nothing_known(draw, history: dict[str, np.ndarray]) -> None:
    check(draw({name: values[:1] for name, values in history.items()}, []))
    check(draw({name: values * (1 if name == "epoch" else np.nan) for name, values in history.items()}, [1]))


def test_drift_shows_shares_threshold_and_alarm(rng: np.random.Generator) -> None:
    log_wealth = np.concatenate([np.zeros(40), np.linspace(0, 20, 60)])
    alarm = int(np.argmax(log_wealth >= np.log(100))) + 1
    plot = plot_drift(rng.normal(size=200), np.repeat([0.0, 9.0], 50), 2.0, 0.05, log_wealth, 0.01)
    shown = words(check(plot))
    assert "50 % of the new images flagged, 5 % expected" in shown
    assert {"calibration images", "new images", "threshold", "wealth", "alarm at 100", f"image {alarm}"} <= set(shown)
    assert f"alarm at image {alarm} of the stream" in shown
    quiet = words(check(plot_drift(rng.normal(size=20), rng.normal(size=9), np.inf, 0.0, np.zeros(9), 0.01)))
    assert "threshold" not in quiet and "no alarm so far" in quiet


@pytest.mark.parametrize("scores", [np.ones(1), np.ones(7), np.array([-3.0, 1e6])])
def test_drift_of_few_and_of_equal_scores(scores: np.ndarray) -> None:
    for wealth in (np.full(len(scores), -2.0), np.full(len(scores), 2000.0)):
        check(plot_drift(np.ones(5), scores, 1.0, 0.05, wealth, 0.05))


def test_drift_of_many_images_is_a_small_drawing(rng: np.random.Generator) -> None:
    plot = plot_drift(rng.normal(size=5000), rng.normal(size=50_000), 2.0, 0.05, rng.normal(size=50_000), 0.01)
    check(plot)
    assert len(plot.svg) < 200_000


def test_a_drawing_may_stand_alone() -> None:
    plot = plot_scores("var(--ink) href=", [0, 1, 2], [3, 1], [1, 3], 1.5)
    drawing = ElementTree.fromstring(standalone_svg(plot))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    tags = re.sub(r' aria-label="[^"]*"', "", " ".join(re.findall(r"<[^>]*>", standalone_svg(plot))))
    assert "var(" not in tags and LIGHT["blue"] in tags and " href=" not in tags
    assert "unknown: var(--ink) href=" in "".join(drawing.itertext())


def test_colours_are_those_of_the_pages() -> None:
    folder = Path(maple.reporting.plots.__file__).parent / "templates"
    pages = [text for path in folder.iterdir() if "--blue: #" in (text := path.read_text(encoding="utf-8"))]
    assert pages
    for page in pages:
        light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", page.partition("@media")[0]))
        assert LIGHT.items() <= light.items()
