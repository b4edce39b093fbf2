"""Plots of an evaluation (calibration, coverage, ROC curves, scores, chi-square Q-Q plot) and of suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from maple.evaluation.results import Reliability
from maple.reporting.plots._figure import as_plot, legend_above, make_axes, percent_axes, percent_tick
from maple.reporting.plots._style import BLUE, DOTTED, INK, LEGEND_ROW, MAX_VERTICES, MUTED, ORANGE, REST, Line
from maple.stats.metrics import spaced_rows, wilson_interval
from maple.text import percent, shorten_middle, shorten_names

MIN_BIN_IMAGES = 10  # a bin with fewer is drawn as a dot beside the line
BIN_IMAGES = 50  # on average in a bin, or three bins are drawn as one

Curve = tuple[Line, Sequence[float], Sequence[float]]  # how it is drawn, x, y


@as_plot
def plot_reliability(curves: Sequence[tuple[Line, Reliability]]) -> tuple[Figure, str]:
    """Accuracy against confidence, and below it the share of images by confidence."""
    figure = Figure(figsize=(4.6, 5.3), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DOTTED)
    for order, (line, fine) in enumerate(curves):
        curve = _coarse(fine)
        share = np.array(curve.count) / max(sum(curve.count), 1)
        _draw_bins(upper, line, curve, share, zorder=3 - order / 10)
        lower.stairs(share, curve.edges, linewidth=1.6, clip_on=False, **line.style())
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    upper.annotate("underconfident", (0.22, 0.66), color=MUTED, ha="center", fontsize=9, gid="label")
    upper.annotate("overconfident", (0.80, 0.22), color=MUTED, ha="center", fontsize=9, gid="label")
    legend_above(upper, n_columns=2)
    lower.set(xlabel="predicted probability", ylabel="images", ylim=(0, None))
    lower.yaxis.set_major_locator(MaxNLocator(2))
    percent_axes(upper, lower)
    names = ", ".join(line.label for line, _ in curves)
    return figure, f"Reliability diagram of {names}: the nearer to the diagonal, the better calibrated"


def _coarse(curve: Reliability) -> Reliability:
    """The curve, or with few images three bins as one: many bins of a handful each are dots and intervals only."""
    count = np.array(curve.count)
    if sum(curve.count) >= BIN_IMAGES * len(count) or len(count) % 3:
        return curve
    thirds = count.reshape(-1, 3)
    total = thirds.sum(axis=1)

    def mean(values: Sequence[float]) -> list[float]:
        weighted = np.where(thirds > 0, np.array(values).reshape(-1, 3) * thirds, 0.0)  # an empty bin has no mean
        return (weighted.sum(axis=1) / np.maximum(total, 1)).tolist()

    return replace(
        curve,
        edges=list(curve.edges[::3]),
        count=total.tolist(),
        confidence=mean(curve.confidence),
        accuracy=mean(curve.accuracy),
    )


def _draw_bins(axes: Axes, line: Line, curve: Reliability, share: np.ndarray, zorder: float) -> None:
    """A line through the bins with enough images; a dot for every bin, as large as its share, with its interval."""
    count = np.array(curve.count)
    confidence, accuracy = np.array(curve.confidence), np.array(curve.accuracy)
    full, solid = count > 0, count >= MIN_BIN_IMAGES
    axes.plot(confidence[solid], accuracy[solid], label=line.label, zorder=zorder, **line.style())
    low, high = wilson_interval(accuracy[full], count[full])
    axes.vlines(confidence[full], low, high, color=line.colour, linewidth=0.9, alpha=0.6, zorder=zorder - 0.5)
    axes.scatter(
        confidence[full],
        accuracy[full],
        s=8 + 90 * share[full],
        alpha=np.where(solid, 1.0, 0.4)[full],  # type: ignore[arg-type]  # one per dot
        color=line.colour,
        linewidths=0,
        clip_on=False,
        zorder=zorder,
    )


@as_plot
def plot_coverage(curves: Sequence[Curve]) -> tuple[Figure, str]:
    """Error rate among the images kept, most certain first, against their share (x: share kept, y: accuracy)."""
    figure, axes = make_axes(4.6, 3.7 + LEGEND_ROW * len(curves))
    top = 0.0
    for order, (line, kept, accuracy) in enumerate(curves):
        rows = spaced_rows(len(kept), MAX_VERTICES)
        share, errors = np.array(kept)[rows], 1 - np.array(accuracy)[rows]
        axes.plot(share, errors, label=line.label, zorder=3 - order / 10, **line.style())
        bulk = errors[share >= 0.05]  # the error rate of a handful of images is noise
        top = max(top, float(bulk.max(initial=0.0)))
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * top or 1), xlabel="coverage: share of images kept, most certain first")
    axes.set_ylabel("error rate of the images kept")
    legend_above(axes, n_columns=1)
    percent_axes(axes)
    return figure, f"Error rate against coverage, of {', '.join(line.label for line, *_ in curves)}"


@as_plot
def plot_roc(name: str, curves: Sequence[Curve], false_alarm: float) -> tuple[Figure, str]:
    """Share of unknown images detected against share of known images flagged, one line per method."""
    figure, axes = make_axes(4.4, 3.6 + LEGEND_ROW * (len(curves) + 1))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DOTTED)
    for order, (line, ind, ood) in enumerate(curves):
        axes.plot(ind, ood, label=line.label, zorder=3 - order / 10, **line.style())  # the first on top
    axes.axvline(false_alarm, color=MUTED, linewidth=1, label=f"{percent(false_alarm)} false alarms")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="known images flagged", ylabel="unknown images detected")
    legend_above(axes, n_columns=1)
    percent_axes(axes)
    return figure, f"ROC curve for {name}: {'; '.join(line.label for line, *_ in curves)}"


@as_plot
def plot_scores(
    name: str, edges: Sequence[float], ind: Sequence[int], ood: Sequence[int], threshold: float | None
) -> tuple[Figure, str]:
    """Histograms of the scores of known and unknown images, with the threshold."""
    edges, (ind, ood) = _merge_bins(edges, (ind, ood), threshold)
    figure, axes = make_axes(4.4, 3.6 + LEGEND_ROW * (2 if threshold is None else 3))
    end = max(_end_of_bulk(edges, ind), _end_of_bulk(edges, ood), edges[0] if threshold is None else threshold)
    top, unknown = 0.0, name if name.startswith("unknown") else f"unknown: {name}"
    for counts, label, colour, dashes in ((ind, "known", BLUE, "-"), (ood, unknown, ORANGE, "--")):
        share = np.array(counts) / max(sum(counts), 1)
        top = max(top, float(share.max()))
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
        axes.stairs(share, edges, color=colour, linewidth=1.6, label=shorten_middle(label, 48), linestyle=dashes)
    if threshold is not None:
        axes.axvline(threshold, color=INK, linewidth=1.2, label="threshold")
    beyond = "; last bar: all above" if end == edges[-1] else ""
    axes.set(xlim=(edges[0], end), ylim=(0, 1.03 * top or 1), xlabel=f"score (higher: more unusual{beyond})")
    axes.set_ylabel("share of images")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(percent_tick)
    legend_above(axes, n_columns=1)
    return figure, f"Histogram of the MAPLE scores of known images and of {name}"


def _merge_bins(
    edges: Sequence[float], sets: Sequence[Sequence[int]], threshold: float | None
) -> tuple[list[float], list[list[int]]]:
    """Neighbouring bins joined until those in view are few enough for the smaller set: 2 n^(1/3) (Rice's rule).

    >>> _merge_bins([0, 1, 2, 3, 4], [[4, 4, 0, 0], [0, 0, 3, 1]], None)
    ([0, 1, 2, 3, 4], [[4, 4, 0, 0], [0, 0, 3, 1]])
    >>> _merge_bins(list(range(9)), [[1, 0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 1]], None)
    ([0, 3, 6, 8], [[2, 1, 0], [0, 1, 1]])
    """
    ends = [_end_of_bulk(edges, counts) for counts in sets]
    in_view = int(np.searchsorted(edges, max(*ends, edges[0] if threshold is None else threshold)))
    wanted = 2 * min(max(sum(counts), 1) for counts in sets) ** (1 / 3)
    starts = list(range(0, len(edges) - 1, max(1, round(in_view / wanted))))
    merged = [np.add.reduceat(np.asarray(counts), starts).tolist() for counts in sets]
    return [*(edges[i] for i in starts), edges[-1]], merged


def _end_of_bulk(edges: Sequence[float], counts: Sequence[int], share: float = 0.985) -> float:
    """The first edge with nearly all counts below it: all sets share their bins, and one of them may reach far out."""
    below = np.cumsum(counts) / max(sum(counts), 1)
    return edges[1 + int(np.searchsorted(below, min(share, below[-1])))]


@as_plot
def plot_quantiles(theoretical: Sequence[float], observed: Sequence[float], degrees: int) -> tuple[Figure, str]:
    """Squared distances against the chi-square quantiles they follow if the clusters are Gaussian."""
    figure, axes = make_axes(4.4, 3.9)
    end = max(theoretical)
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1.2, linestyle=DOTTED, label="Gaussian")
    axes.plot(theoretical, observed, "o", color=BLUE, markersize=3.2, markeredgewidth=0, label="test images")
    axes.set(xlabel=f"chi-square quantile ({degrees} degrees of freedom)", ylabel="squared distance")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(loc="upper left")
    return figure, "Chi-square Q-Q plot of the squared distances: on the dotted line the clusters are Gaussian"


class Panel(NamedTuple):
    """One measure of all rows, ours and the reference; NaN where there is none."""

    title: str
    values: Sequence[float]  # one per row
    spreads: Sequence[float]
    others: Sequence[float]


@as_plot
def plot_rows(
    rows: Sequence[str], panels: Sequence[Panel], ours: str, other: str, stacked: bool = False
) -> tuple[Figure, str]:
    """One dot per row in each panel, with its spread, and a ring for the reference; ``stacked``: below each other."""
    down, across = (len(panels), 1) if stacked else (1, len(panels))
    names = shorten_names(rows, 20 if stacked else 26)
    room = 2.9 + 0.065 * max(map(len, names)) if stacked else 1.9 + 2.0 * across
    figure = Figure(figsize=(room, 0.35 + (0.35 + 0.27 * len(rows)) * down))
    figure.set_layout_engine(ConstrainedLayoutEngine(wspace=0.08))  # so that labels of neighbours stay apart
    places = np.arange(len(rows), dtype=float)
    has_others = any(np.isfinite(panel.others).any() for panel in panels)
    for axes, panel in zip(figure.subplots(down, across, sharey=True, squeeze=False).flat, panels):
        values, others = np.array(panel.values, float), np.array(panel.others, float)
        axes.hlines(places, np.fmin(values, others), np.fmax(values, others), color=REST, linewidth=1.2)
        axes.errorbar(values, places, xerr=panel.spreads, fmt="o", color=BLUE, markersize=5, elinewidth=1.6, label=ours)
        if has_others:
            axes.plot(others, places, "o", color=ORANGE, markerfacecolor="none", markersize=6, label=other)
        axes.set_title(panel.title, fontsize=9)
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.tick_params(axis="y", length=0)
    axes.set_yticks(places, names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    about = f"{', '.join(panel.title for panel in panels)} of {', '.join(rows)}: {ours} as dots"
    if not has_others:
        return figure, about
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    return figure, f"{about}, {other} as rings"
