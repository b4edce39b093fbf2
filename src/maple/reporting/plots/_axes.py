"""Axes, ticks and legends that several plots share."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maple.text import percent


def make_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one plot; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def percent_tick(share: float, _: float) -> str:
    return percent(share, exact=True)


def percent_axes(*axes: Axes) -> None:
    for each in axes:
        each.xaxis.set_major_formatter(percent_tick)
        each.yaxis.set_major_formatter(percent_tick)


def legend_above(axes: Axes, n_columns: int = 3) -> None:
    """A legend between title and axes, so that no line crosses it."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=n_columns, columnspacing=1.2, handlelength=1.6)
