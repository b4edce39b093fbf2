"""The training history: losses, accuracy, clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from maple.reporting.plots._figure import as_plot, make_axes, percent_tick
from maple.reporting.plots._style import BLUE, DASHED, GREEN, ORANGE, PINK

_LOSSES = (  # column of the history, label, colour, dashes
    ("cross_entropy", "cross-entropy", BLUE, "-"),
    ("triplet", "triplet loss", GREEN, ":"),
    ("validation_loss", "validation loss", ORANGE, "--"),
)


@as_plot
def plot_losses(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Training and validation loss per epoch; ``events`` are the epochs with relabelling."""
    figure, axes = make_axes(3.7, 3.0)
    for column, label, colour, dashes in _LOSSES:
        if np.isfinite(history[column]).any():
            axes.plot(history["epoch"], history[column], color=colour, linestyle=dashes, label=label, **_dot(history))
    if axes.lines:
        axes.legend()
    _draw_epochs(axes, events)
    axes.set(ylim=(0, None), ylabel="loss")
    return figure, "Losses per epoch"


@as_plot
def plot_accuracy(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Validation accuracy per epoch."""
    figure, axes = make_axes(3.7, 3.0)
    axes.plot(history["epoch"], history["validation_accuracy"], color=BLUE, **_dot(history))
    _draw_epochs(axes, events)
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter(percent_tick)
    return figure, "Validation accuracy per epoch"


@as_plot
def plot_clusters(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Number of clusters per epoch."""
    figure, axes = make_axes(3.7, 3.0)
    axes.step(history["epoch"], history["clusters"], where="post", color=BLUE, **_dot(history))
    _draw_epochs(axes, events)
    axes.set_ylabel("clusters")
    axes.set_ylim(0, 1.08 * float(np.nan_to_num(history["clusters"]).max(initial=1.0)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, "Number of clusters per epoch"


def _draw_epochs(axes: Axes, events: Sequence[int]) -> None:
    """The axis of epochs, with a dashed line at each relabelling event."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for epoch in events:
        axes.axvline(epoch, color=PINK, linewidth=1.4, linestyle=DASHED, zorder=1.5)


def _dot(history: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A marker if there is a single epoch, which makes no line."""
    return {"marker": "o"} if len(history["epoch"]) == 1 else {}
