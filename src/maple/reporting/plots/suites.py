"""The results of a suite beside those of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from maple.reporting.plots._style import BLUE, ORANGE, REST
from maple.reporting.plots._svg import as_plot
from maple.text import shorten


class Panel(NamedTuple):
    """One measure of all rows, ours and the reference; NaN where there is none."""

    title: str
    values: Sequence[float]  # one per row
    spreads: Sequence[float]
    others: Sequence[float]


@as_plot
def plot_rows(rows: Sequence[str], panels: Sequence[Panel], ours: str, other: str) -> tuple[Figure, str]:
    """One dot per row in each panel, with its spread, and a ring for the reference."""
    figure = Figure(figsize=(1.9 + 2.0 * len(panels), 0.7 + 0.27 * len(rows)), layout="constrained")
    places = np.arange(len(rows), dtype=float)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        values, others = np.array(panel.values, float), np.array(panel.others, float)
        axes.hlines(places, np.fmin(values, others), np.fmax(values, others), color=REST, linewidth=1.2)
        axes.errorbar(values, places, xerr=panel.spreads, fmt="o", color=BLUE, markersize=5, elinewidth=1.6, label=ours)
        axes.plot(others, places, "o", color=ORANGE, markerfacecolor="none", markersize=6, label=other)
        axes.set_title(panel.title, fontsize=9)
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(axis="y", length=0)
    axes.set_yticks(places, [shorten(row, 26) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    names = ", ".join(panel.title for panel in panels)
    return figure, f"{names} of {', '.join(rows)}: {ours} as dots, {other} as rings"
