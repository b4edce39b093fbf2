"""Inline and standalone SVG: colours of the page, text as text, names never markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from drawings import check_plot, words
from maple.reporting.plots import BLUE, LIGHT, Line, plot_quantiles, plot_roc, plot_scores, standalone_svg
from maple.reporting.plots._figure import legend_above, make_axes, percent_axes, percent_tick


def test_text_stays_text_and_colours_are_the_page_s() -> None:
    plot = plot_roc("near", [(Line("MAPLE", BLUE, "-"), [0, 0.1, 1], [0, 0.9, 1])], 0.05)
    drawing = check_plot(plot)
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
    drawing = check_plot(plot_scores(name, [0, 1, 2], [3, 1], [1, 3], 1.5))
    assert name in drawing.attrib["aria-label"]
    assert any(name[:20] in text for text in words(drawing))
    assert not list(drawing.iter("script"))


def test_a_drawing_may_stand_alone() -> None:
    plot = plot_scores("var(--ink) href=", [0, 1, 2], [3, 1], [1, 3], 1.5)
    drawing = ElementTree.fromstring(standalone_svg(plot))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    tags = re.sub(r' aria-label="[^"]*"', "", " ".join(re.findall(r"<[^>]*>", standalone_svg(plot))))
    assert "var(" not in tags and LIGHT["blue"] in tags and " href=" not in tags
    assert "unknown: var(--ink) href=" in "".join(drawing.itertext())


def test_axes_in_percent_and_a_legend_above_them() -> None:
    figure, axes = make_axes(4.0, 3.0)
    assert figure.get_size_inches().tolist() == [4.0, 3.0]
    axes.plot([0, 1], [0, 1], label="line")
    percent_axes(axes)
    legend_above(axes, n_columns=1)
    figure.draw_without_rendering()
    ticks = [tick.get_text() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels()]
    assert all(text.endswith(" %") for text in ticks) and percent_tick(0.125, 0) == "12.5 %"
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().y0 >= axes.get_window_extent().y1 - 5
