"""The latent space: embeddings on its two main axes, and the components of a squared distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from maple.reporting.gallery.store import Projection
from maple.reporting.plots._figure import as_plot, make_axes
from maple.reporting.plots._style import BLUE, CARD, INK, LEGEND_ROW, ORANGE, REST
from maple.text import percent, shorten_middle

_LETTER = np.array([0.026, 0.055])  # width and height of a digit of a label, as shares of the axes
_SHORT = 20  # characters of names that leave room for two in a row of the legend

Limits = tuple[tuple[float, float], tuple[float, float]]  # of x and y


def shared_limits(projections: Iterable[Projection], margin: float = 0.06) -> Limits:
    """Limits for all projections, so that they can be compared: of all points, but of few that lie far out.

    A side ends at half the width of the middle 96 % of the points beyond them; points further out would press all
    others together.
    """
    points = np.concatenate([each.points for each in projections])  # (n, 2)
    bulk = np.quantile(points, (0.02, 0.98), axis=0)
    reach = 0.5 * (bulk[1] - bulk[0])
    low, high = np.maximum(points.min(axis=0), bulk[0] - reach), np.minimum(points.max(axis=0), bulk[1] + reach)
    pad = margin * np.where(high > low, high - low, 1.0)
    (x0, y0), (x1, y1) = (low - pad).tolist(), (high + pad).tolist()
    return (x0, x1), (y0, y1)


@as_plot
def plot_projection(
    title: str, shown: Projection, names: Mapping[int, str], colours: Mapping[int, str], limits: Limits
) -> tuple[Figure, str]:
    """One dot per image, at the border if it lies outside; classes with a colour have a number, all others are grey.

    The legend below says the name of each number: names at the dots would cover them.
    """
    present = {class_id: colour for class_id, colour in colours.items() if (shown.class_ids == class_id).any()}
    labels = [f"{i}  {names.get(class_id, str(class_id))}" for i, class_id in enumerate(present, 1)]
    n_columns = 2 if max(map(len, labels), default=0) <= _SHORT + 4 else 1
    figure, axes = make_axes(5.0, 4.7 + LEGEND_ROW * -(-len(labels) // n_columns))
    axes.set(xlim=limits[0], ylim=limits[1])
    points = np.clip(shown.points, *np.transpose(limits))
    _draw_dots(axes, points[~np.isin(shown.class_ids, list(colours))], REST, 2.2)
    places = np.zeros((len(present), 2))
    for i, (class_id, colour) in enumerate(present.items()):
        own = shown.class_ids == class_id
        _draw_dots(axes, points[own], colour, 3.2)
        _mark_clusters(axes, points[own], shown.cluster_ids[own], colour)
        places[i] = np.median(points[own], axis=0)
    n_digits = np.array([len(str(i + 1)) for i in range(len(present))])
    for i, (colour, (x, y)) in enumerate(zip(present.values(), _spread(places, n_digits, axes)), 1):
        axes.text(x, y, str(i), color=colour, ha="center", va="center", weight="bold", fontsize=11, gid="label")
    _name_numbers(figure, labels, list(present.values()), n_columns)
    axes.set(title=title, xlabel=f"axis 1: {percent(shown.explained[0])} of the variance", xticks=[], yticks=[])
    axes.set_ylabel(f"axis 2: {percent(shown.explained[1])}")
    return figure, f"{title}: {len(shown.points)} images on the two main axes of the latent space, by class"


def _name_numbers(figure: Figure, labels: Sequence[str], colours: Sequence[str], n_columns: int) -> None:
    """The legend: a dot of the colour of each class, its number and its name."""
    dots = [Line2D([], [], color=colour, marker="o", markersize=6, linestyle="") for colour in colours]
    shown = [shorten_middle(label, 48) for label in labels]
    if dots:
        figure.legend(dots, shown, loc="outside lower left", ncols=n_columns, handletextpad=0.2, labelspacing=0.35)


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
    drawn.append(
        axes.vlines(usual, places - 0.46, places + 0.46, color=INK, linewidth=1.6, label="expected of a known image")
    )
    axes.set_yticks(places, parts)
    axes.set(xlim=(0, None), ylim=(len(parts) - 0.5, -0.5), xlabel="contribution to the squared distance")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=drawn, loc="upper left", borderaxespad=0.1)
    names = " and ".join(name for name, _ in clusters)
    return figure, f"Contributions to the squared distance to {names}: {', '.join(parts)}"
