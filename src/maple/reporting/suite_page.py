"""The page of a suite: the table with our best figures marked, its drawings, and its provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from maple.evaluation.paper.columns import describe_columns, figure_kind, split_images
from maple.evaluation.paper.rows import Row, Training
from maple.evaluation.paper.suites import PAPER
from maple.evaluation.paper.tables import SuiteResults, best_cells, made_with, table_cells
from maple.evaluation.results import Results
from maple.reporting.page import render_page
from maple.reporting.plots import BLUE, Line, Panel, Plot, plot_quantiles, plot_reliability, plot_rows
from maple.reporting.record import read_run
from maple.reporting.sections import draw_projections
from maple.text import join_names

_PLOTTED = ("accuracy", "ece", "auroc", "gaussian_error")  # kinds of figures that get a panel
_MAX_PANELS = 5

Drawing = tuple[str, Plot]  # caption and plot


class Network(NamedTuple):
    """A trained network of a suite: its run folder and its results."""

    folder: Path
    results: Results


def draw_suite(found: SuiteResults, networks: Mapping[Training, Network]) -> list[Drawing]:
    """The figure that a suite stands for, from ``networks`` of one seed, and a plot of its rows."""
    drawn: dict[str, Drawing] = {}
    titles: dict[str, list[str]] = {}  # of the rows that share a network, by drawing
    for row in found.suite.rows(found.profile):
        for about, plot in _draw_row(found, row, networks):
            drawn[plot.svg] = about, plot
            titles.setdefault(plot.svg, []).append(row.title)
    once = [(join_names(titles[svg]) + about, plot) for svg, (about, plot) in drawn.items()]
    return [*once, *_draw_rows(found)]


def _draw_row(found: SuiteResults, row: Row, networks: Mapping[Training, Network]) -> list[Drawing]:
    """The drawings of one row; captions go behind its title."""
    figure, (folder, results) = found.suite.figure, networks[row.training]
    if figure in ("latent", "clusters"):
        plots = draw_projections(read_run(folder))
        return [(f": {plot.alt}", plot) for plot in (plots if figure == "clusters" else plots[-1:])]
    if figure == "calibration" and (judged := results.methods[row.method].classification):
        return [("", plot_reliability([(Line(row.title, BLUE, "-"), judged.reliability)]))]
    if figure == "qq":
        plot = plot_quantiles(results.qq_theoretical, results.qq_observed, results.n_components)
        return [(f", {results.n_components} components", plot)]
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
    return [(caption, plot_rows([row.title for row in rows], panels, "ours", theirs))]


def render_suite(found: SuiteResults, drawings: list[Drawing]) -> str:
    """The page as HTML."""
    headings, lines = table_cells(found)
    return render_page(
        "suite.html.j2",
        {
            "title": found.suite.title,
            "subtitle": found.suite.subtitle,
            "headings": headings if found.suite.columns else [],
            "lines": lines,
            "best": best_cells(found),
            "reference": found.suite.reference,
            "has_aupr": any("AUPR" in heading for heading in headings),
            "simulated": found.profile.simulated,
            "plots": [{"caption": caption, "svg": plot.svg} for caption, plot in drawings],
            "profile": f"{found.profile_text}.",
            "seeds": ", ".join(map(str, found.seeds)),
            "made": made_with(found.provenance),
            "command": found.provenance.command,
            "trainings": found.provenance.trainings,
        },
    )
