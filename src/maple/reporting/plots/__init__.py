"""The plots of the report, each an inline SVG that follows the page: its colours, its font, light and dark.

A plot is a function from plain numbers to a :class:`Plot`. Matplotlib draws; :func:`inline_svg` makes the drawing part
of a page. Equal numbers give equal text, so that reports can be compared byte for byte.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from maple.evaluation.evaluate import Reliability
from maple.stats.metrics import spaced_rows
from maple.text import percent, shorten

# Matplotlib writes these colours, the page puts its own in their place.
INK, MUTED, GRID, CARD, REST, BLUE, ORANGE, GREEN, PINK = (f"#0{i}0{i}0{i}" for i in range(1, 10))
CLASS_COLOURS = tuple(f"#0{i}1{i}2{i}" for i in range(10))
_PAGE_COLOURS = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    CARD: "var(--card)",
    REST: "var(--rest)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PINK: "var(--pink)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(CLASS_COLOURS)},
}
# The page's light colours, for drawings that stand alone.
LIGHT = {
    "ink": "#1c2329",
    "muted": "#626d77",
    "line": "#e1e3e5",
    "card": "#ffffff",
    "rest": "#c3c8cd",
    "blue": "#0069a8",
    "orange": "#d55e00",
    "green": "#00815e",
    "pink": "#a8528a",
    "c0": "#0072b2",
    "c1": "#b87400",
    "c2": "#008f68",
    "c3": "#b85f90",
    "c4": "#d55e00",
    "c5": "#2f8fc6",
    "c6": "#6a3d9a",
    "c7": "#8f7e00",
    "c8": "#7a5130",
    "c9": "#6f7780",
}
_DOTTED = (0, (2, 3))
LEGEND_ROW = 0.2  # inches, of a legend above the axes
MIN_BIN_IMAGES = 10  # a bin with fewer is a dot beside the line
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud, and takes the page's font
    "svg.hashsalt": "maple",
    "text.parse_math": False,  # a class may be called $x$
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}

# ---------------------------------------------------------------------------------------------------------------------
# From Matplotlib to the page


@dataclass(frozen=True)
class Plot:
    """A drawing and the words that stand for it where it cannot be seen."""

    svg: Markup
    alt: str


Arguments = ParamSpec("Arguments")


def as_plot(draw: Callable[Arguments, tuple[Figure, str]]) -> Callable[Arguments, Plot]:
    """Turn a function that returns a figure and its description into one that returns a :class:`Plot`."""

    @wraps(draw)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Plot:
        with rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has the glyph
            figure, alt = draw(*args, **kwargs)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return Plot(inline_svg(buffer.getvalue(), alt), alt)

    return wrapper


def inline_svg(text: str, alt: str) -> Markup:
    """A Matplotlib SVG file as an element of the page: own ids, the page's colours, no namespaces, a description."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    prefix = hashlib.sha256((alt + text).encode("utf-8", "replace")).hexdigest()[:8]
    used = set(re.findall(r"(?<=[(\"])#([^)\"]+)", text))  # in url(#..) and href="#.."

    def rename(match: re.Match[str]) -> str:
        if match[1].startswith("label"):
            return ' class="label"'
        return f' id="{prefix}-{match[1]}"' if match[1] in used else ""

    def restyle(match: re.Match[str]) -> str:
        """Inside a tag only, so that text on the plot stays as it is."""
        tag = re.sub(r"font-family: [^;\"]*;? ?", "", match[0])
        tag = re.sub(r' id="([^"]*)"', rename, tag)
        tag = re.sub(r"(?<=url\(#)|(?<=href=\"#)", f"{prefix}-", tag)
        return re.sub(r"#[0-9a-f]{6}", lambda colour: _PAGE_COLOURS.get(colour[0], colour[0]), tag)

    text = re.sub(r"<[^>]*>", restyle, text)
    view = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {view[0] if view else ""} role="img" aria-label="{Markup.escape(alt)}">'
    text = re.sub(r"<svg [^>]*>", lambda _: opening, text, count=1)
    return Markup(re.sub(r">\s+<", "><", text).strip())


def standalone_svg(plot: Plot) -> str:
    """The drawing as a file of its own: light colours on white, and namespaces for programs other than browsers."""

    def restyle(match: re.Match[str]) -> str:
        tag = match[0].replace(" href=", " xlink:href=")
        return re.sub(r"var\(--(\w+)\)", lambda name: LIGHT[name[1]], tag)

    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening, drawing = re.sub(r"<[^>]*>", restyle, str(plot.svg)).split(">", 1)
    opening = opening.replace("<svg", f'<svg {namespaces} font-family="sans-serif"')
    return f'{opening}><rect width="100%" height="100%" fill="{LIGHT["card"]}"/>{drawing}\n'


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _tick(share: float, _: float) -> str:
    return percent(share, exact=True)


def _percent_axes(*axes: Axes) -> None:
    for each in axes:
        each.xaxis.set_major_formatter(_tick)
        each.yaxis.set_major_formatter(_tick)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@dataclass(frozen=True)
class Line:
    """How a method is drawn: never told apart by colour alone."""

    label: str
    colour: str
    dashes: str

    def style(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes}


@as_plot
def plot_reliability(curves: Sequence[tuple[Line, Reliability]]) -> tuple[Figure, str]:
    """Accuracy against confidence, and below how many images have which confidence."""
    figure = Figure(figsize=(4.6, 5.3), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=_DOTTED)
    for order, (line, curve) in enumerate(curves):
        count = np.array(curve.count)
        full = count > 0
        solid = count >= MIN_BIN_IMAGES
        confidence, accuracy = np.array(curve.confidence), np.array(curve.accuracy)
        share = count / max(count.sum(), 1)
        upper.plot(confidence[solid], accuracy[solid], label=line.label, zorder=3 - order / 10, **line.style())
        # Bins with few images scatter: no line goes through them, and large dots are the ones to trust.
        upper.scatter(
            confidence[full],
            accuracy[full],
            s=8 + 90 * share[full],
            alpha=np.where(solid, 1.0, 0.4)[full],
            color=line.colour,
            linewidths=0,
            clip_on=False,
            zorder=3 - order / 10,
        )
        lower.stairs(share, curve.edges, linewidth=1.6, clip_on=False, **line.style())
    upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share that is right")
    upper.annotate("too cautious", (0.22, 0.66), color=MUTED, ha="center", fontsize=9, gid="label")
    upper.annotate("too sure", (0.80, 0.22), color=MUTED, ha="center", fontsize=9, gid="label")
    _legend_above(upper, n_columns=2)
    lower.set(xlabel="probability given to the class", ylabel="images", ylim=(0, None))
    lower.yaxis.set_major_locator(MaxNLocator(2))
    _percent_axes(upper, lower)
    names = ", ".join(line.label for line, _ in curves)
    return figure, f"Reliability diagram of {names}: the nearer to the diagonal, the better calibrated"


@as_plot
def plot_coverage(curves: Sequence[tuple[Line, Sequence[float], Sequence[float]]]) -> tuple[Figure, str]:
    """Errors among the images that are kept, against their share, the most certain first; one line per method."""
    figure, axes = _axes(4.6, 3.9)
    top = 0.0
    for order, (line, kept, accuracy) in enumerate(curves):
        rows = spaced_rows(len(kept), MAX_VERTICES)
        share, errors = np.array(kept)[rows], 1 - np.array(accuracy)[rows]
        axes.plot(share, errors, label=line.label, zorder=3 - order / 10, **line.style())
        bulk = errors[share >= 0.05]  # the error of a handful of images says nothing
        top = max(top, float(bulk.max(initial=0.0)))
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * top or 1), xlabel="images left to the machine, most certain first")
    axes.set_ylabel("wrong among them")
    axes.legend(loc="upper left")
    _percent_axes(axes)
    return figure, f"Errors against the share of images kept, of {', '.join(line.label for line, *_ in curves)}"


@as_plot
def plot_roc(
    name: str, curves: Sequence[tuple[Line, Sequence[float], Sequence[float]]], false_alarm: float
) -> tuple[Figure, str]:
    """Unknown images caught against known images flagged, one line per method."""
    figure, axes = _axes(4.4, 3.6 + LEGEND_ROW * (len(curves) + 1))
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=_DOTTED)
    for order, (line, ind, ood) in enumerate(curves):
        axes.plot(ind, ood, label=line.label, zorder=3 - order / 10, **line.style())  # the first on top
    axes.axvline(false_alarm, color=MUTED, linewidth=1, label=f"{percent(false_alarm)} false alarms")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), xlabel="known images flagged", ylabel="unknown images caught")
    _legend_above(axes, n_columns=1)
    _percent_axes(axes)
    return figure, f"ROC curve for {name}: {'; '.join(line.label for line, *_ in curves)}"


@as_plot
def plot_scores(
    name: str, edges: Sequence[float], ind: Sequence[int], ood: Sequence[int], threshold: float | None
) -> tuple[Figure, str]:
    """How the scores of known and unknown images are distributed, and where the threshold lies."""
    figure, axes = _axes(4.4, 3.6 + LEGEND_ROW * (2 if threshold is None else 3))
    end = max(_end_of_bulk(edges, ind), _end_of_bulk(edges, ood), edges[0] if threshold is None else threshold)
    top = 0.0
    for counts, label, colour, dashes in ((ind, "known", BLUE, "-"), (ood, f"unknown: {name}", ORANGE, "--")):
        share = np.array(counts) / max(sum(counts), 1)
        top = max(top, float(share.max()))
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.25, linewidth=0)
        axes.stairs(share, edges, color=colour, linewidth=1.6, label=shorten(label, 40), linestyle=dashes)
    if threshold is not None:
        axes.axvline(threshold, color=INK, linewidth=1.2, label="threshold")
    axes.set(xlim=(edges[0], end), ylim=(0, 1.03 * top or 1), xlabel="score: more unusual to the right")
    axes.set_ylabel("share of images")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(_tick)
    _legend_above(axes, n_columns=1)
    return figure, f"Histogram of the MAPLE scores of known images and of {name}"


def _end_of_bulk(edges: Sequence[float], counts: Sequence[int], share: float = 0.985) -> float:
    """The first edge with nearly all counts to its left: bins are common to all sets, and one may reach far out."""
    below = np.cumsum(counts) / max(sum(counts), 1)
    return edges[1 + int(np.searchsorted(below, min(share, below[-1])))]


@as_plot
def plot_quantiles(theoretical: Sequence[float], observed: Sequence[float], degrees: int) -> tuple[Figure, str]:
    """Squared distances against what they would be if the clusters were Gaussian."""
    figure, axes = _axes(4.4, 3.9)
    end = max(theoretical)
    axes.plot([0, end], [0, end], color=MUTED, linewidth=1.2, linestyle=_DOTTED, label="Gaussian")
    axes.plot(theoretical, observed, "o", color=BLUE, markersize=3.2, markeredgewidth=0, label="test images")
    axes.set(xlabel=f"chi-square quantile ({degrees} degrees of freedom)", ylabel="squared distance")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(loc="upper left")
    return figure, "Chi-square Q-Q plot of the squared distances: on the dotted line the clusters are Gaussian"


# ---------------------------------------------------------------------------------------------------------------------
# Latent space


@as_plot
def plot_projection(
    title: str,
    points: np.ndarray,  # (n, 2)
    class_ids: np.ndarray,  # (n,)
    cluster_ids: np.ndarray,  # (n,)
    names: Mapping[int, str],
    colours: Mapping[int, str],
    explained: tuple[float, float],
) -> tuple[Figure, str]:
    """Images in the plane of the two main axes; classes without a colour are grey, those with one have their name."""
    figure, axes = _axes(5.0, 4.7)
    rest = ~np.isin(class_ids, list(colours))
    _dots(axes, points[rest], REST, 2.2)
    labels, places = [], []
    for class_id, colour in colours.items():
        own = class_ids == class_id
        if own.any():
            _dots(axes, points[own], colour, 3.2)
            _mark_clusters(axes, points[own], cluster_ids[own], colour)
            labels.append((shorten(names.get(class_id, str(class_id)), 18), colour))
            places.append(np.median(points[own], axis=0))
    axes.margins(0.06)
    axes.autoscale_view()
    for (label, colour), (x, y) in zip(labels, _spread(np.array(places).reshape(-1, 2), axes)):
        axes.text(x, y, label, color=colour, ha="center", va="center", weight="bold", gid="label")
    axes.set(title=title, xlabel=f"axis 1: {percent(explained[0])} of the variance", xticks=[], yticks=[])
    axes.set_ylabel(f"axis 2: {percent(explained[1])}")
    return figure, f"{title}: {len(points)} images on the two main axes of the latent space, by class"


def _dots(axes: Axes, points: np.ndarray, colour: str, size: float) -> None:
    """Many points as one path of zero-length strokes with round ends: a tenth of the bytes of as many markers."""
    if len(points):
        outline = Outline(np.repeat(points, 2, axis=0), np.tile([Outline.MOVETO, Outline.LINETO], len(points)))
        axes.add_patch(
            PathPatch(outline, edgecolor=colour, facecolor="none", linewidth=size, capstyle="round", alpha=0.75)
        )
        axes.update_datalim(points)


def _mark_clusters(axes: Axes, points: np.ndarray, cluster_ids: np.ndarray, colour: str) -> None:
    """A ring at the mean of each cluster of a class that has several."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Explanations


@as_plot
def plot_contributions(
    parts: Sequence[str], usual: Sequence[float], clusters: Sequence[tuple[str, Sequence[float]]]
) -> tuple[Figure, str]:
    """What squared distances are made of: one bar per part and cluster, and a tick where a cluster's own images end."""
    below, above, body = 0.5, 0.1 + 0.21 * (len(clusters) + 1), 0.36 * len(parts)  # inches
    total = below + above + body
    figure = Figure(figsize=(4.6, total))  # places are given: there may be hundreds, and a layout engine takes its time
    axes = figure.add_axes((0.25, below / total, 0.72, body / total))
    height = 0.8 / len(clusters)
    places = np.arange(len(parts), dtype=float)
    drawn: list[Any] = []
    for order, ((name, values), colour) in enumerate(zip(clusters, (BLUE, ORANGE))):
        middle = places - 0.4 + height * (order + 0.5)
        drawn.append(axes.barh(middle, values, 0.86 * height, color=colour, label=shorten(name, 48)))
    drawn.append(axes.vlines(usual, places - 0.46, places + 0.46, color=INK, linewidth=1.6, label="usual"))
    axes.set_yticks(places, parts)
    axes.set(xlim=(0, None), ylim=(len(parts) - 0.5, -0.5), xlabel="part of the squared distance")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=drawn, loc="upper left", borderaxespad=0.1)
    names = " and ".join(name for name, _ in clusters)
    return figure, f"Parts of the squared distance to {names}: {', '.join(parts)}"


# ---------------------------------------------------------------------------------------------------------------------
# Training


@as_plot
def plot_losses(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Training and validation loss per epoch."""
    figure, axes = _axes(3.7, 3.0)
    drawn = (
        ("cross_entropy", "cross-entropy", BLUE, "-"),
        ("triplet", "triplet loss", GREEN, ":"),
        ("validation_loss", "validation loss", ORANGE, "--"),
    )
    for column, label, colour, dashes in drawn:
        if np.isfinite(history[column]).any():
            axes.plot(history["epoch"], history[column], color=colour, linestyle=dashes, label=label, **_dot(history))
    if axes.lines:
        axes.legend()
    _epoch_axis(axes, events)
    axes.set(ylim=(0, None), ylabel="loss")
    return figure, "Losses per epoch"


@as_plot
def plot_accuracy(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Validation accuracy per epoch."""
    figure, axes = _axes(3.7, 3.0)
    axes.plot(history["epoch"], history["validation_accuracy"], color=BLUE, **_dot(history))
    _epoch_axis(axes, events)
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter(_tick)
    return figure, "Validation accuracy per epoch"


@as_plot
def plot_clusters(history: Mapping[str, np.ndarray], events: Sequence[int]) -> tuple[Figure, str]:
    """Number of clusters per epoch."""
    figure, axes = _axes(3.7, 3.0)
    axes.step(history["epoch"], history["clusters"], where="post", color=BLUE, **_dot(history))
    _epoch_axis(axes, events)
    axes.set_ylabel("clusters")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, "Number of clusters per epoch"


def _epoch_axis(axes: Axes, events: Sequence[int]) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for epoch in events:
        axes.axvline(epoch, color=PINK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1.5)


def _dot(history: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A single epoch makes no line, so that it gets a dot."""
    return {"marker": "o"} if len(history["epoch"]) == 1 else {}


# ---------------------------------------------------------------------------------------------------------------------
# Drift

MAX_VERTICES = 600  # of a line
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@as_plot
def plot_drift(
    calibration_scores: np.ndarray,  # (n,)
    scores: np.ndarray,  # (N,)
    threshold: float,
    expected_share: float,
    log_wealth: np.ndarray,  # (t,)
    level: float,
) -> tuple[Figure, str]:
    """How many images score higher, among the new and the calibration images; and the wealth of a bet against no drift.

    On the left the widest vertical gap is the Kolmogorov-Smirnov distance, and the share flagged is read off at the
    threshold.
    """
    figure = Figure(figsize=(9.4, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    share = float((scores > threshold).mean())
    _draw_shares_above(left, calibration_scores, scores, threshold)
    left.set_title(f"{percent(share)} of the new images flagged, {percent(expected_share)} expected", pad=26)
    alarms = np.flatnonzero(log_wealth >= -math.log(level))[:1]  # (0,) or (1,)
    _draw_wealth(right, log_wealth, level, alarms)
    right.set_title("".join(f"alarm at image {row + 1:,} of the stream" for row in alarms) or "no alarm so far", pad=26)
    return figure, f"Scores of {len(scores)} new images against calibration images, and wealth along the stream"


def _draw_shares_above(axes: Axes, calibration_scores: np.ndarray, scores: np.ndarray, threshold: float) -> None:
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
        above = 1 - (rows + 1) / len(ordered)
        axes.step(
            np.concatenate([[low], ordered[rows], [max(high, ordered[-1])]]),
            np.concatenate([[1], above, [0]]),
            where="post",
            color=colour,
            linestyle=dashes,
            label=label,
        )
    if math.isfinite(threshold):
        axes.axvline(threshold, color=INK, linewidth=1.2, label="threshold")
    axes.set(xlim=(low, high), ylim=(0, 1.02), xlabel="score: more unusual to the right")
    axes.set_ylabel("share of images that score higher")
    axes.yaxis.set_major_formatter(_tick)
    _legend_above(axes)


def _draw_wealth(axes: Axes, log_wealth: np.ndarray, level: float, alarms: np.ndarray) -> None:
    rows = np.unique(
        np.concatenate([spaced_rows(len(log_wealth), MAX_VERTICES), [int(log_wealth.argmax())], alarms])
    ).astype(int)
    powers = np.concatenate([[0], log_wealth[rows] / math.log(10)])  # it starts at 1
    axes.plot(np.concatenate([[0], rows + 1]), powers, color=GREEN, label="wealth")
    alarm = -math.log10(level)
    axes.axhline(alarm, color=PINK, linewidth=1.4, linestyle=(0, (5, 3)), label=f"alarm at {1 / level:,.0f}")
    for row in alarms:
        axes.axvline(row + 1, color=PINK, linewidth=1.2, linestyle=_DOTTED, label=f"image {row + 1:,}")
    axes.set(xlabel="images of the stream", ylabel="wealth of a bet against no drift")
    axes.set_xlim(0, 1.02 * (len(log_wealth) + 1))
    axes.set_ylim(min(-1.0, 1.1 * powers.min()), 1.1 * max(alarm, powers.max()))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: "10" + f"{value:.0f}".translate(_SUPERSCRIPTS) if value else "1")
    _legend_above(axes)


class Panel(NamedTuple):
    """One figure of several rows, ours and those of others; NaN where there is none."""

    title: str
    values: Sequence[float]  # one per row
    spreads: Sequence[float]
    others: Sequence[float]


@as_plot
def plot_rows(rows: Sequence[str], panels: Sequence[Panel], ours: str, other: str) -> tuple[Figure, str]:
    """A dot per row in each panel, with its spread, beside a ring for what others found."""
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


def _legend_above(axes: Axes, n_columns: int = 3) -> None:
    """Between title and axes, where no line can pass through it."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=n_columns, columnspacing=1.2, handlelength=1.6)
