"""The page of a suite: the table with our best figures marked, its drawings, and its provenance."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import count, groupby
from pathlib import Path
from typing import NamedTuple

from maple.evaluation.paper.columns import GROUPS, describe_columns, figure_kind, split_images
from maple.evaluation.paper.rows import Row, Training
from maple.evaluation.paper.suites import PAPER
from maple.evaluation.paper.tables import SuiteResults, best_cells, made_with, table_cells
from maple.evaluation.results import Results
from maple.reporting.page import render_page
from maple.reporting.plots import BLUE, Line, Panel, Plot, plot_quantiles, plot_reliability, plot_rows
from maple.reporting.record import read_run
from maple.reporting.sections import draw_projections
from maple.text import join_names

_TOPICS = {
    "classes": ("accuracy", "softmax_accuracy", "ece", "nll", "share"),
    "unknown": ("auroc", "mean_auroc", "fused_auroc", "aupr", "fpr95_ood_positive", "fpr95_ind_positive"),
    "cost": ("parameters", "minutes", "latency_ms"),
    "gaussians": ("gaussian_error", "gaussian_error_per_component", "components", "clusters"),
}
_PLOTTED = ("accuracy", "ece", "auroc", "gaussian_error")  # kinds of figures that get a panel
_MAX_PANELS = 5

_MAX_CELLS = 4  # beside the name of a row: what a window of 420 pixels has room for
_PIXELS_PER_POINT = 1.5  # the largest a drawing gets on the page


class Drawing(NamedTuple):
    """A drawing of a suite; ``narrow`` takes its place where the window is too narrow for it."""

    caption: str
    plot: Plot
    narrow: Plot | None = None


class Network(NamedTuple):
    """A trained network of a suite: its run folder and its results."""

    folder: Path
    results: Results


def draw_suite(found: SuiteResults, networks: Mapping[Training, Network]) -> list[Drawing]:
    """The figure that a suite stands for, from ``networks`` of one seed, and a plot of its rows."""
    drawn: dict[str, Drawing] = {}
    titles: dict[str, list[str]] = {}  # of the rows that share a network, by drawing
    for row in found.suite.rows(found.profile):
        for each in _draw_row(found, row, networks):
            drawn[each.plot.svg] = each
            titles.setdefault(each.plot.svg, []).append(row.title)
    once = [each._replace(caption=join_names(titles[svg]) + each.caption) for svg, each in drawn.items()]
    return [*once, *_draw_rows(found)]


def _draw_row(found: SuiteResults, row: Row, networks: Mapping[Training, Network]) -> list[Drawing]:
    """The drawings of one row; captions go behind its title."""
    figure, (folder, results) = found.suite.figure, networks[row.training]
    if figure in ("latent", "clusters"):
        plots = draw_projections(read_run(folder))
        return [Drawing(f": {plot.alt}", plot) for plot in (plots if figure == "clusters" else plots[-1:])]
    if figure == "calibration" and (judged := results.methods[row.method].classification):
        return [Drawing("", plot_reliability([(Line(row.title, BLUE, "-"), judged.reliability)]))]
    if figure == "qq":
        plot = plot_quantiles(results.qq_theoretical, results.qq_observed, results.n_components)
        return [Drawing(f", {results.n_components} components", plot)]
    return []


def _draw_rows(found: SuiteResults) -> list[Drawing]:
    """Dots for our figures, and rings for those of the paper where it has any."""
    columns, rows = describe_columns(found.suite.columns), found.rows
    clean = [name for name in columns if split_images(name)[0] != "corrupted"]
    chosen = [name for name in clean if figure_kind(name)[0] in _PLOTTED][:_MAX_PANELS]
    if not chosen:
        return []
    panels = [
        Panel(
            columns[name].title,
            [row.mean(name) for row in rows],
            [row.spread(name) for row in rows],
            [row.paper.get(name, math.nan) for row in rows],
        )
        for name in chosen
    ]
    theirs = "the paper" if found.suite.reference == PAPER else found.suite.reference
    has_theirs = any(math.isfinite(value) for panel in panels for value in panel.others)
    caption = f"Dots: ours. Rings: {theirs}." if has_theirs else "Our figures; the table has the same ones."
    wide, narrow = (
        plot_rows([row.title for row in rows], panels, "ours", theirs, stacked) for stacked in (False, True)
    )
    return [Drawing(caption, wide, narrow if len(panels) > 1 else None)]


def split_table(found: SuiteResults) -> list[list[int]]:
    """Cells of the table that are shown beside each other, so that no window hides any of them.

    Columns of one topic stay together as far as there is room, and a published figure beside ours.
    """
    compared = {name for row in found.rows for name in row.paper}
    widths = {name: 1 + (name in compared) for name in describe_columns(found.suite.columns)}
    if sum(widths.values()) <= _MAX_CELLS:
        return [list(range(1, 1 + sum(widths.values())))]
    cells, blocks = count(1), []
    for _, topic in groupby(widths, _topic):
        for block in _share_out([widths[name] for name in topic]):
            blocks.append([next(cells) for _ in range(sum(block))])
    return blocks


def _topic(column: str) -> str:
    """What a column is about: columns with the same answer belong together."""
    kind, detail = figure_kind(column)
    if kind in GROUPS:
        kind = detail
    return next((topic for topic, kinds in _TOPICS.items() if kind in kinds), kind)


def _share_out(widths: list[int]) -> list[list[int]]:
    """Neighbours in as few parts as there must be, of about the same width.

    >>> _share_out([2, 2]), _share_out([1, 2, 2, 2]), _share_out([2, 2, 2])
    ([[2, 2]], [[1, 2], [2, 2]], [[2, 2], [2]])
    """
    mean = sum(widths) / math.ceil(sum(widths) / _MAX_CELLS)
    parts: list[list[int]] = [[]]
    for width in widths:
        filled = sum(parts[-1])
        if filled and (filled + width > _MAX_CELLS or filled + width / 2 > mean):
            parts.append([])
        parts[-1].append(width)
    return parts


def render_suite(found: SuiteResults, drawings: list[Drawing]) -> str:
    """The page as HTML."""
    headings, lines = table_cells(found)
    return render_page(
        "suite.html.j2",
        {
            "title": found.suite.title,
            "subtitle": found.suite.subtitle,
            "headings": headings,
            "blocks": split_table(found) if found.suite.columns else [],
            "lines": lines,
            "best": best_cells(found),
            "reference": found.suite.reference,
            "has_aupr": any("AUPR" in heading for heading in headings),
            "simulated": found.profile.simulated,
            "drawings": drawings,
            "widths": [_width(drawing.plot) for drawing in drawings],
            "profile": f"{found.profile_text}.",
            "seeds": ", ".join(map(str, found.seeds)),
            "made": made_with(found.provenance),
            "command": found.provenance.command,
            "trainings": found.provenance.trainings,
        },
    )


def _width(plot: Plot) -> int:
    """The largest width of a drawing in pixels: with few panels its letters would be those of a headline."""
    box = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', plot.svg)
    assert box is not None  # Matplotlib writes it
    return round(_PIXELS_PER_POINT * float(box[1]))
