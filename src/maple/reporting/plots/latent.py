"""The latent space: embeddings on its two main axes, and the components of a squared distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from maple.reporting.gallery.store import Projection
from maple.reporting.plots._figure import as_plot, make_axes
from maple.reporting.plots._style import BLUE, CARD, INK, ORANGE, REST
from maple.text import percent, shorten


@as_plot
def plot_projection(
    title: str, shown: Projection, names: Mapping[int, str], colours: Mapping[int, str]
) -> tuple[Figure, str]:
    """One dot per image; classes with a colour are labelled, all others are grey."""
    figure, axes = make_axes(5.0, 4.7)
    rest = ~np.isin(shown.class_ids, list(colours))
    _draw_dots(axes, shown.points[rest], REST, 2.2)
    labels, places = [], []
    for class_id, colour in colours.items():
        own = shown.class_ids == class_id
        if own.any():
            _draw_dots(axes, shown.points[own], colour, 3.2)
            _mark_clusters(axes, shown.points[own], shown.cluster_ids[own], colour)
            labels.append((shorten(names.get(class_id, str(class_id)), 18), colour))
            places.append(np.median(shown.points[own], axis=0))
    axes.margins(0.06)
    axes.autoscale_view()
    for (label, colour), (x, y) in zip(labels, _spread(np.array(places).reshape(-1, 2), axes)):
        axes.text(x, y, label, color=colour, ha="center", va="center", weight="bold", gid="label")
    axes.set(title=title, xlabel=f"axis 1: {percent(shown.explained[0])} of the variance", xticks=[], yticks=[])
    axes.set_ylabel(f"axis 2: {percent(shown.explained[1])}")
    return figure, f"{title}: {len(shown.points)} images on the two main axes of the latent space, by class"


def _draw_dots(axes: Axes, points: np.ndarray, colour: str, size: float) -> None:
    """Many points as one path of zero-length strokes with round ends: a tenth of the bytes of as many markers."""
    if len(points):
        outline = Outline(np.repeat(points, 2, axis=0), np.tile([Outline.MOVETO, Outline.LINETO], len(points)))
        axes.add_patch(
            PathPatch(outline, edgecolor=colour, facecolor="none", linewidth=size, capstyle="round", alpha=0.75)
        )
        axes.update_datalim(points)


def _mark_clusters(axes: Axes, points: np.ndarray, cluster_ids: np.ndarray, colour: str) -> None:
    """A ring at the mean of each cluster of a class with several."""
    clusters = np.unique(cluster_ids)
    if len(clusters) > 1:
        x, y = np.transpose([points[cluster_ids == cluster].mean(axis=0) for cluster in clusters])
        axes.plot(x, y, "o", markersize=8, markerfacecolor=CARD, markeredgecolor=colour, markeredgewidth=2.2)


def _spread(places: np.ndarray, axes: Axes, rounds: int = 60) -> np.ndarray:
    """Move labels apart vertically until none covers another."""
    low, high = np.transpose([axes.get_xlim(), axes.get_ylim()])
    unit = (places - low) / (high - low)
    rank = np.arange(len(unit))
    for _ in range(rounds):
        gap = unit[:, None] - unit[None]  # (n, n, 2)
        close = (np.abs(gap[..., 0]) < 0.2) & (np.abs(gap[..., 1]) < 0.055)
        above = np.sign(gap[..., 1] + 1e-9 * np.subtract.outer(rank, rank))  # ties go by order; 0 for itself
        unit[:, 1] = np.clip(unit[:, 1] + 0.006 * (close * above).sum(axis=1), 0.03, 0.97)
    return unit * (high - low) + low


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
