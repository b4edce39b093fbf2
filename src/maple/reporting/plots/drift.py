"""Scores of new images against those of the calibration images, and the drift test along a stream."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from maple.reporting.plots._figure import as_plot, legend_above, percent_tick
from maple.reporting.plots._style import BLUE, DASHED, DOTTED, GREEN, INK, MAX_VERTICES, ORANGE, PINK
from maple.stats.metrics import spaced_rows
from maple.text import percent

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@as_plot
def plot_drift(
    calibration_scores: np.ndarray,  # (n,)
    scores: np.ndarray,  # (N,)
    threshold: float,
    expected_share: float,
    log_martingale: np.ndarray | None,  # (t,), of a stream
    level: float,
) -> tuple[Figure, str]:
    """Survival functions of the scores of calibration and new images; for a stream, its conformal test martingale.

    On the left the widest vertical gap is the Kolmogorov-Smirnov distance, and the share flagged is read off at the
    threshold. On the right the test rejects "no drift" at ``level`` when the martingale reaches ``1 / level``.
    """
    n_panels = 1 if log_martingale is None else 2
    figure = Figure(figsize=(4.7 * n_panels, 3.9), layout="constrained")
    left, *others = figure.subplots(1, n_panels, squeeze=False)[0]
    share = float((scores > threshold).mean())
    _draw_survival(left, calibration_scores, scores, threshold)
    left.set_title(f"{percent(share)} of the new images flagged, {percent(expected_share)} expected", pad=26)
    alt = f"Scores of {len(scores)} new images against calibration images"
    if log_martingale is None:
        return figure, alt
    (right,) = others
    alarms = np.flatnonzero(log_martingale >= -math.log(level))[:1]  # (0,) or (1,)
    _draw_martingale(right, log_martingale, level, alarms)
    right.set_title("".join(f"alarm at image {row + 1:,} of the stream" for row in alarms) or "no alarm so far", pad=26)
    return figure, f"{alt}, and test martingale of the stream"


def _draw_survival(axes: Axes, calibration_scores: np.ndarray, scores: np.ndarray, threshold: float) -> None:
    pooled = np.concatenate([calibration_scores, scores])
    ends = [np.quantile(each, 0.985, method="higher") for each in (calibration_scores, scores)]
    low, high = float(pooled.min()), float(max(*ends, threshold if math.isfinite(threshold) else pooled.min()))
    margin = 0.04 * (high - low) or 1.0
    low, high = low - margin, high + margin
    for values, label, colour, dashes in (
        (calibration_scores, "calibration images", BLUE, "-"),
        (scores, "new images", ORANGE, "--"),
    ):
        ordered = np.sort(values)
        rows = spaced_rows(len(ordered), MAX_VERTICES)
        x = np.concatenate([[low], ordered[rows], [max(high, ordered[-1])]])
        y = np.concatenate([[1], 1 - (rows + 1) / len(ordered), [0]])
        axes.step(x, y, where="post", color=colour, linestyle=dashes, label=label)
    if math.isfinite(threshold):
        axes.axvline(threshold, color=INK, linewidth=1.2, label="threshold")
    axes.set(xlim=(low, high), ylim=(0, 1.02), xlabel="score (higher: more unusual)")
    axes.set_ylabel("share of images with a higher score")
    axes.yaxis.set_major_formatter(percent_tick)
    legend_above(axes)


def _draw_martingale(axes: Axes, log_martingale: np.ndarray, level: float, alarms: np.ndarray) -> None:
    rows = np.unique(
        np.concatenate([spaced_rows(len(log_martingale), MAX_VERTICES), [int(log_martingale.argmax())], alarms])
    ).astype(int)
    powers = np.concatenate([[0], log_martingale[rows] / math.log(10)])  # of ten; it starts at 1
    axes.plot(np.concatenate([[0], rows + 1]), powers, color=GREEN, label="martingale")
    alarm = -math.log10(level)
    axes.axhline(alarm, color=PINK, linewidth=1.4, linestyle=DASHED, label=f"alarm at {1 / level:,.0f}")
    for row in alarms:
        axes.axvline(row + 1, color=PINK, linewidth=1.2, linestyle=DOTTED, label=f"image {row + 1:,}")
    axes.set(xlabel="images of the stream", ylabel="test martingale (no drift: stays near 1)")
    axes.set_xlim(0, 1.02 * (len(log_martingale) + 1))
    axes.set_ylim(min(-1.0, 1.1 * powers.min()), 1.1 * max(alarm, powers.max()))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: "10" + f"{value:.0f}".translate(_SUPERSCRIPTS) if value else "1")
    legend_above(axes)
