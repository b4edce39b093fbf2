"""Draw the figures of docs/explanation.md, from embeddings to a decision, from simulated points.

    python benchmarks/figures.py --out docs/images

Each figure is an SVG file, drawn from seeded points with the functions of the package. Equal seeds and versions
give equal bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from scipy.stats import chi2

from maple.decisions.conformal import conformal_threshold
from maple.detectors.scores import TAIL, fit_surprise
from maple.reporting.plots import LIGHT
from maple.stats.chi_square import log_chi_square_tail
from maple.stats.gaussians import Gaussians, fit_gaussians
from maple.stats.moments import Moments

CLASS_COLOURS = (LIGHT["c0"], LIGHT["c4"])
FALSE_ALARM = 0.05
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "maple",
    "path.simplify": False,  # which would take dots for nothing
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LIGHT["rest"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlecolor": LIGHT["ink"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "legend.frameon": False,
}


class Points(NamedTuple):
    """Two classes in the plane; the second has two clusters. All share one covariance."""

    train: np.ndarray  # (N, 2)
    clusters: np.ndarray  # (N,)
    cluster_to_class: np.ndarray  # (M,)


def draw_points(rng: np.random.Generator, per_cluster: int = 150) -> Points:
    means = np.array([[-2.6, -0.6], [2.2, 1.9], [3.0, -2.2]])
    root = np.array([[1.0, 0.0], [0.75, 0.55]])
    clusters = np.repeat(np.arange(len(means)), per_cluster)
    return Points(rng.normal(size=(len(clusters), 2)) @ root.T + means[clusters], clusters, np.array([0, 1, 1]))


def fit_points(points: Points) -> Gaussians:
    n_clusters = len(points.cluster_to_class)
    return fit_gaussians(Moments(n_clusters, 2).update(points.train, points.clusters), pca=False)


# --- the pictures ----------------------------------------------------------------------------------------------------


def distances(rng: np.random.Generator) -> Figure:
    """One Gaussian per class, and one per cluster: where the nearest one is as far as half, 95 and 99.9 % of points."""
    points = draw_points(rng)
    by_class = points._replace(clusters=points.cluster_to_class[points.clusters], cluster_to_class=np.arange(2))
    figure = Figure(figsize=(8.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    draw_distances(left, by_class, "One Gaussian per class")
    draw_distances(right, points, "One Gaussian per cluster")
    return figure


def draw_distances(axes: Axes, points: Points, title: str) -> None:
    gaussians = fit_points(points)
    x, y = np.linspace(-7, 7, 90), np.linspace(-5.5, 5.5, 70)
    grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    nearest = gaussians.squared_distances(grid).min(axis=1).reshape(len(y), len(x))
    levels = chi2.ppf([0.5, 0.95, 0.999], df=2)
    lines = axes.contour(x, y, nearest, levels=levels, colors=LIGHT["muted"], linewidths=1, linestyles=["-", "--", ":"])
    axes.clabel(lines, fmt=dict(zip(levels, ("50 %", "95 %", "99.9 %"))), fontsize=7.5)
    for class_id, colour in enumerate(CLASS_COLOURS):
        draw_dots(axes, points.train[points.cluster_to_class[points.clusters] == class_id], colour)
    strange = np.array([[2.6, 0.0]])
    squared = float(gaussians.squared_distances(strange).min())
    axes.plot(*strange.T, marker="x", color=LIGHT["ink"], markersize=8, markeredgewidth=2)
    label = f"d² = {squared:.1f}, typicality {np.exp(log_chi_square_tail(squared, 2)):.2g}"
    axes.set(title=title, xlabel=f"cross: {label}", xticks=[], yticks=[], aspect="equal")


def draw_dots(axes: Axes, dots: np.ndarray, colour: str) -> None:
    """Dots as one path of zero-length strokes with round ends: a tenth of the bytes of as many markers."""
    outline = Outline(np.repeat(dots, 2, axis=0), np.tile([Outline.MOVETO, Outline.LINETO], len(dots)))
    axes.add_patch(PathPatch(outline, edgecolor=colour, facecolor="none", linewidth=2.2, capstyle="round", alpha=0.7))
    axes.autoscale_view()


def tail(rng: np.random.Generator, dimensions: int = 8, n_clusters: int = 5) -> Figure:
    """Squared distances of fresh points to their own cluster, their law, and the tail beyond one of them."""
    means = 4 * rng.normal(size=(n_clusters, dimensions))
    clusters = np.arange(20_000) % n_clusters
    train, fresh = (rng.normal(size=(len(clusters), dimensions)) + means[clusters] for _ in range(2))
    gaussians = fit_gaussians(Moments(n_clusters, dimensions).update(train, clusters), pca=False)
    own = gaussians.squared_distances(fresh)[np.arange(len(fresh)), clusters]
    figure = Figure(figsize=(8.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    filled: Any = {"density": True, "histtype": "stepfilled", "color": LIGHT["rest"]}
    left.hist(own, bins=np.linspace(0, 30, 61), label="fresh points, own cluster", **filled)
    x = np.linspace(0, 30, 400)
    left.plot(x, chi2.pdf(x, dimensions), color=LIGHT["c0"], linewidth=2, label=f"chi-square, K = {dimensions}")
    seen = 15.0
    beyond = x[x >= seen]
    left.fill_between(beyond, chi2.pdf(beyond, dimensions), color=LIGHT["c4"], alpha=0.7, linewidth=0)
    share = float(np.exp(log_chi_square_tail(seen, dimensions)))
    left.annotate(
        f"d² = {seen:.0f}: typicality {share:.3f}",
        (seen + 0.8, chi2.pdf(seen + 0.8, dimensions) / 2),
        xytext=(17, 0.05),
        arrowprops={"arrowstyle": "-", "color": LIGHT["muted"]},
    )
    left.set(title="Squared distance", xlabel="d²", yticks=[], xlim=(0, 30))
    left.legend(loc="upper right")
    typicality = np.exp(log_chi_square_tail(own, dimensions))
    right.hist(typicality, bins=20, range=(0, 1), **filled)
    right.axhline(1, color=LIGHT["c0"], linewidth=2)
    right.set(title="Typicality is uniform", xlabel="typicality", xlim=(0, 1), yticks=[])
    return figure


def threshold(rng: np.random.Generator, n: int = 200) -> Figure:
    """Scores of calibration images, the threshold at 5 %, and scores of unknown images."""
    known, unknown = rng.gamma(4.0, size=n), 6 + rng.gamma(5.0, size=120)
    limit = conformal_threshold(known, FALSE_ALARM)
    figure = Figure(figsize=(8.2, 2.9), layout="constrained")
    axes = figure.subplots()
    filled: Any = {"bins": np.linspace(0, 22, 67), "histtype": "stepfilled", "alpha": 0.7}
    axes.hist(known, color=LIGHT["c0"], label=f"{n} calibration images", **filled)
    axes.hist(unknown, color=LIGHT["c4"], label="unknown images, not used here", **filled)
    axes.axvline(limit, color=LIGHT["ink"], linewidth=1.5)
    above = int((known > limit).sum())
    note = f"threshold: {above} of {n} calibration\nscores lie above, ({above} + 1) / ({n} + 1) ≤ 5 %"
    axes.annotate(note, (limit, 0.74), xycoords=("data", "axes fraction"), xytext=(6, 0), textcoords="offset points")
    axes.set(xlabel="score", ylabel="images", xlim=(0, 22))
    axes.legend(loc="upper left", bbox_to_anchor=(0.62, 0.7))
    return figure


def fused(rng: np.random.Generator, n: int = 400) -> Figure:
    """The surprise of a score, and two surprises that are added."""
    scores = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.45], [0.0, 0.9]])
    surprises = [fit_surprise(column) for column in scores.T]
    figure = Figure(figsize=(8.2, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    x = np.linspace(-3, 6, 400)
    joint = float(surprises[0].scores[-1])
    left.plot(x, surprises[0](x), color=LIGHT["c0"], linewidth=2)
    left.plot([joint], [-np.log(TAIL)], "o", color=LIGHT["ink"], markersize=5)
    left.annotate(
        "from here on an exponential tail:\nfar images never tie",
        (joint, -np.log(TAIL)),
        xytext=(-2.6, 4.6),
        arrowprops={"arrowstyle": "-", "color": LIGHT["muted"]},
    )
    left.set(title="Surprise of one score", xlabel="score", ylabel="−log share of known images above", ylim=(0, 12))
    strange = np.array([[2.6, 2.5], [0.2, 4.2], [3.6, 0.6]])
    first, second = (surprise(column) for surprise, column in zip(surprises, scores.T))
    total = np.linspace(0, 14, 50)
    for level in (4, 8, 12):
        right.plot(total, level - total, color=LIGHT["rest"], linewidth=1)
    draw_dots(right, np.column_stack([first, second]), LIGHT["c0"])
    odd = np.column_stack([surprise(column) for surprise, column in zip(surprises, strange.T)])
    right.plot(*odd.T, "x", color=LIGHT["c4"], markersize=8, markeredgewidth=2)
    right.set(title="Two of them, added", xlabel="surprise of one", ylabel="surprise of the other")
    right.set(xlim=(0, 12), ylim=(0, 12), aspect="equal")
    return figure


PICTURES: dict[str, Callable[[np.random.Generator], Figure]] = {
    "explain_distances": distances,
    "explain_tail": tail,
    "explain_threshold": threshold,
    "explain_fused": fused,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        with matplotlib.rc_context(STYLE):
            figure = draw(np.random.default_rng(arguments.seed))
            metadata = {"Date": None} if arguments.format == "svg" else None
            figure.savefig(arguments.out / f"{name}.{arguments.format}", dpi=110, metadata=metadata)


if __name__ == "__main__":
    main()
