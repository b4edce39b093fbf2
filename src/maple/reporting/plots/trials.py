"""The course of a search: the criterion by trial, and against each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from maple.evaluation.trials import CRITERIA, Choices, Space, Span, Trial
from maple.reporting.plots import BLUE, GREEN, MUTED, ORANGE, as_plot
from maple.text import compact

COLUMNS = 3  # of the picture


@as_plot
def plot_trials(criterion: str, space: Space, trials: Sequence[Trial], best: int) -> tuple[Figure, str]:
    """The criterion by trial, and each parameter against it; the best trial is ringed everywhere."""
    rows = -(-len(space) // COLUMNS)
    figure = Figure(figsize=(9.4, 3.3 + 2.5 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, COLUMNS, height_ratios=[3.3] + rows * [2.5])
    finished = [trial for trial in trials if trial.state == "finished"]
    values = np.array([trial.criteria[criterion] for trial in finished])  # (T,)
    low, top = values.min(), _end_of_axis(values)
    margin = 0.08 * (top - low) or 0.05 * abs(top) or 1.0
    dots = _Dots(values, top, top + margin, [trial.number for trial in finished].index(best))
    upper = figure.add_subplot(grid[0, :], ylim=(low - margin, top + 2 * margin))
    _draw_course(upper, trials, np.array([trial.number for trial in finished]), dots)
    upper.set(xlabel="trial", ylabel=criterion)
    upper.set_title(CRITERIA[criterion], pad=26)
    for place, (name, found) in enumerate(space.items()):
        axes = figure.add_subplot(grid[1 + place // COLUMNS, place % COLUMNS], sharey=upper)
        _draw_parameter(axes, found, [trial.settings[name] for trial in finished], dots)
        axes.set(xlabel=name, ylabel="" if place % COLUMNS else criterion)
        axes.tick_params(labelleft=place % COLUMNS == 0)
    return figure, f"{criterion} by trial, and against {', '.join(space)}; trial {best} is the best"


def _end_of_axis(values: np.ndarray) -> float:
    """The largest value to draw as it is: an outlier must not flatten all other trials.

    >>> _end_of_axis(np.array([1.0, 2.0, 3.0])), _end_of_axis(np.array([1.0, 2.0, 2.5, 900.0]))
    (3.0, 2.5)
    """
    best, middle = values.min(), np.median(values)
    near = values[values <= best + 5 * (middle - best)]
    return float(near.max()) if middle > best else float(values.max())


@dataclass(frozen=True, eq=False)
class _Dots:
    """The finished trials as they are drawn in every panel."""

    values: np.ndarray  # (T,)
    top: float  # the largest value drawn as it is
    ceiling: float  # where those beyond are
    best: int  # row

    def draw(self, axes: Axes, x: np.ndarray, named: bool = False) -> None:
        """A dot per trial, a triangle for those beyond the end of the axis, a ring around the best."""
        beyond = self.values > self.top
        style: dict[str, Any] = {"color": BLUE, "markeredgewidth": 0}
        axes.plot(x[~beyond], self.values[~beyond], "o", markersize=4.5, label="finished" if named else None, **style)
        axes.plot(x[beyond], np.full(beyond.sum(), self.ceiling), "^", markersize=5.5, **style)
        ring: dict[str, Any] = {"mfc": "none", "mec": ORANGE, "mew": 2, "ms": 10, "zorder": 4}
        axes.plot(x[self.best], self.values[self.best], "o", label="best" if named else None, **ring)


def _draw_course(axes: Axes, trials: Sequence[Trial], numbers: np.ndarray, dots: _Dots) -> None:
    """Criterion by trial, the best so far, and marks for trials that were stopped."""
    so_far = np.minimum.accumulate(dots.values)
    ends = np.append(numbers, max(trial.number for trial in trials))
    lowest = np.minimum(np.append(so_far, so_far[-1]), dots.ceiling)
    axes.step(ends, lowest, where="post", color=GREEN, linewidth=1.6, label="best so far")
    dots.draw(axes, numbers, named=True)
    stopped = [trial.number for trial in trials if trial.state in ("pruned", "diverged", "failed")]
    if stopped:
        axes.plot(stopped, np.full(len(stopped), dots.ceiling), "x", color=MUTED, markersize=5, label="stopped early")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=4, columnspacing=1.2, handlelength=1.6)


def _draw_parameter(axes: Axes, found: Choices | Span, settings: Sequence[Any], dots: _Dots) -> None:
    """Criterion against one option; where it takes few values, with a bar at the median of each."""
    if isinstance(found, Span):
        dots.draw(axes, np.array(settings, dtype=float))
        if found.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return
    places = np.array([found.values.index(setting) for setting in settings])
    for place in np.unique(places):
        middle = min(float(np.median(dots.values[places == place])), dots.ceiling)
        axes.hlines(middle, place - 0.28, place + 0.28, color=MUTED, linewidth=1.6)
    dots.draw(axes, places)
    axes.set_xticks(range(len(found.values)), [compact(value) for value in found.values])
    axes.set_xlim(-0.5, len(found.values) - 0.5)
