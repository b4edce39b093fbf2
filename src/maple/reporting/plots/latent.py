"""The latent space: embeddings on its two main axes, and the components of a squared distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from maple.reporting.gallery.store import Projection
from maple.reporting.plots._figure import as_plot, make_axes
from maple.reporting.plots._style import BLUE, CARD, INK, ORANGE, REST
from maple.text import percent, shorten_middle, shorten_names

MAX_LABEL = 22  # characters of a class
_LETTER = np.array([0.021, 0.055])  # width and height of a letter of a label, as shares of the axes

Limits = tuple[tuple[float, float], tuple[float, float]]  # of x and y


def shared_limits(projections: Iterable[Projection], margin: float = 0.06) -> Limits:
    """Limits that hold all points, so that projections drawn with them can be compared."""
    points = np.concatenate([each.points for each in projections])  # (n, 2)
    low, high = points.min(axis=0), points.max(axis=0)
    pad = margin * np.where(high > low, high - low, 1.0)
    (x0, y0), (x1, y1) = (low - pad).tolist(), (high + pad).tolist()
    return (x0, x1), (y0, y1)


@as_plot
def plot_projection(
    title: str, shown: Projection, names: Mapping[int, str], colours: Mapping[int, str], limits: Limits
) -> tuple[Figure, str]:
    """One dot per image; classes with a colour are labelled, all others are grey."""
    figure, axes = make_axes(5.0, 4.7)
    axes.set(xlim=limits[0], ylim=limits[1])
    rest = ~np.isin(shown.class_ids, list(colours))
    _draw_dots(axes, shown.points[rest], REST, 2.2)
    labels, places = [], []
    for class_id, colour in colours.items():
        own = shown.class_ids == class_id
        if own.any():
            _draw_dots(axes, shown.points[own], colour, 3.2)
            _mark_clusters(axes, shown.points[own], shown.cluster_ids[own], colour)
            labels.append((names.get(class_id, str(class_id)), colour))
            places.append(np.median(shown.points[own], axis=0))
    texts = shorten_names([name for name, _ in labels], MAX_LABEL)
    widths = np.array([len(text) for text in texts])
    for text, (_, colour), (x, y) in zip(texts, labels, _spread(np.array(places).reshape(-1, 2), widths, axes)):
        axes.text(x, y, text, color=colour, ha="center", va="center", weight="bold", fontsize=9, gid="label")
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


def _spread(places: np.ndarray, n_letters: np.ndarray, axes: Axes, rounds: int = 200) -> np.ndarray:
    """Move labels (n, 2) into the axes, and apart vertically until none covers another."""
    low, high = np.transpose([axes.get_xlim(), axes.get_ylim()])
    unit = (places - low) / (high - low)
    half = np.minimum(_LETTER[0] * n_letters / 2, 0.5)  # (n,)
    unit[:, 0] = np.clip(unit[:, 0], half, 1 - half)
    rank = np.arange(len(unit))
    for _ in range(rounds):
        gap = unit[:, None] - unit[None]  # (n, n, 2)
        close = (np.abs(gap[..., 0]) < np.add.outer(half, half)) & (np.abs(gap[..., 1]) < _LETTER[1])
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
        drawn.append(axes.barh(middle, values, 0.86 * height, color=colour, label=shorten_middle(name, 48)))
    drawn.append(axes.vlines(usual, places - 0.46, places + 0.46, color=INK, linewidth=1.6, label="expected"))
    axes.set_yticks(places, parts)
    axes.set(xlim=(0, None), ylim=(len(parts) - 0.5, -0.5), xlabel="contribution to the squared distance")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=drawn, loc="upper left", borderaxespad=0.1)
    names = " and ".join(name for name, _ in clusters)
    return figure, f"Contributions to the squared distance to {names}: {', '.join(parts)}"
