"""The components of a squared distance, for explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from maple.reporting.plots._style import BLUE, INK, ORANGE
from maple.reporting.plots._svg import as_plot
from maple.text import shorten


@as_plot
def plot_contributions(
    parts: Sequence[str], usual: Sequence[float], clusters: Sequence[tuple[str, Sequence[float]]]
) -> tuple[Figure, str]:
    """Contributions to the squared distance: one bar per part and cluster, and a tick at the expected value."""
    below, above, body = 0.5, 0.1 + 0.21 * (len(clusters) + 1), 0.36 * len(parts)  # inches
    total = below + above + body
    figure = Figure(figsize=(4.6, total))  # fixed places: a layout engine is too slow for hundreds of figures
    axes = figure.add_axes((0.25, below / total, 0.72, body / total))
    height = 0.8 / len(clusters)
    places = np.arange(len(parts), dtype=float)
    drawn: list[Any] = []
    for order, ((name, values), colour) in enumerate(zip(clusters, (BLUE, ORANGE))):
        middle = places - 0.4 + height * (order + 0.5)
        drawn.append(axes.barh(middle, values, 0.86 * height, color=colour, label=shorten(name, 48)))
    drawn.append(axes.vlines(usual, places - 0.46, places + 0.46, color=INK, linewidth=1.6, label="expected"))
    axes.set_yticks(places, parts)
    axes.set(xlim=(0, None), ylim=(len(parts) - 0.5, -0.5), xlabel="contribution to the squared distance")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=drawn, loc="upper left", borderaxespad=0.1)
    names = " and ".join(name for name, _ in clusters)
    return figure, f"Contributions to the squared distance to {names}: {', '.join(parts)}"
