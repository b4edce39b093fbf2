"""Means of points: sums of squares, bisection by 2-Means in the leading components, and Lloyd's iterations.

Shapes: n points, D dimensions, k clusters.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state

from maple.stats.arrays import row_blocks

_BLOCK = 1024  # rows converted to float64 at a time
_N_COMPONENTS = 16  # principal components used for bisection
_EXTRA, _N_ITER = 8, 2  # further components and rounds of the subspace iteration that finds them
_TOLERANCE = 1e-4  # of the mean variance, by which centres still move when K-Means stops
_CANCELLED = 1e-8  # share of a sum of squares below which a difference is computed anew
_SMALL_PRODUCT = 2**16  # elements of the larger factor


def within_sum_of_squares(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Sum of ||x - mu||^2 over all points, mu being the centre of the point's cluster, in float64 by blocks of rows.

    Args:
        points: (n, D), float32 or float64; never copied as a whole.
        labels: (n,) rows of ``centers``.
        centers: (k, D).

    >>> within_sum_of_squares(np.array([[0.0, 0.0], [2.0, 0.0]]), np.array([0, 0]), np.array([[1.0, 0.0]]))
    2.0
    """
    total = 0.0
    wide = centers.astype(np.float64)
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        residuals = points[rows].astype(np.float64)  # (block, D)
        residuals -= wide[labels[rows]]
        total += float(np.vdot(residuals, residuals))
    return total


def scatter_within(points: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Sums of ||x - mu||^2 with mu the mean of all points, and the mean of the point's cluster; one pass, in float64.

    With q = sum ||x||^2 and the sums s_c of n_c points, they are q - ||s||^2 / n and q - sum ||s_c||^2 / n_c. Where
    these differences cancel half of the digits, the points are read again.

    >>> scatter_within(np.array([[0.0], [2.0], [10.0], [12.0]]), np.array([0, 0, 1, 1]))
    (104.0, 4.0)
    """
    counts = np.bincount(labels)
    whole, sums = 0.0, np.zeros((len(counts), points.shape[1]))
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        wide = points[rows].astype(np.float64)
        sums += _members(labels[rows], len(counts), np.float64) @ wide
        whole += float(np.vdot(wide, wide))
    total = sums.sum(axis=0)
    around_mean = whole - float(total @ total) / len(points)
    within = whole - float((np.vecdot(sums, sums) / counts).sum())
    if min(around_mean, within) > _CANCELLED * whole:
        return around_mean, within
    one = np.zeros_like(labels)
    exact = [within_sum_of_squares(points, each, cluster_means(points, each)) for each in (one, labels)]
    return exact[0], exact[1]


def _members(labels: np.ndarray, n_clusters: int, dtype: Any) -> np.ndarray:
    """Membership (k, n): 1 where a point belongs to a cluster."""
    return (labels == np.arange(n_clusters)[:, None]).astype(dtype)


def cluster_means(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Means (k, D) of the clusters 0..k-1, summed in float64, in the dtype of the points; none may be empty.

    >>> cluster_means(np.array([[0.0], [2.0], [5.0]]), np.array([0, 0, 1]))
    array([[1.],
           [5.]])
    """
    n_clusters = int(labels.max()) + 1
    sums = np.zeros((n_clusters, points.shape[1]))
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        sums += _members(labels[rows], n_clusters, np.float64) @ points[rows].astype(np.float64)
    return (sums / np.bincount(labels)[:, None]).astype(points.dtype)


def bisect_points(
    points: np.ndarray, *, n_init: int = 4, max_iter: int = 100, random_state: Any = None
) -> np.ndarray | None:
    """Bisect points by 2-Means: labels (n,) in {0, 1}, or ``None`` if all points are equal.

    2-Means runs in the 16 leading principal components: an exact rotation in up to 16 dimensions, and many times
    faster in 640. The best cut lies along them: the first component is the relaxed solution of 2-Means (Ding & He, ICML
    2004). The first of ``n_init`` initialisations is +- sqrt(2 lambda / pi) along that component, the means of the two
    halves of a Gaussian of variance lambda (Hamerly & Elkan); the others are drawn by k-means++. The bisection with the
    smallest inertia is kept.

    >>> bisect_points(np.array([[0.0, 1.0], [0.0, 1.1], [5.0, 1.0]]), random_state=0)
    array([0, 0, 1])
    """
    if (points == points[0]).all():
        return None
    random = check_random_state(random_state)
    centered = points - cluster_means(points, np.zeros(len(points), np.int64))
    projection, deviation = leading_projection(centered, min(_N_COMPONENTS, *points.shape), random)
    first = np.zeros((2, projection.shape[1]))
    first[:, 0] = np.array([-1, 1]) * deviation * math.sqrt(2 / math.pi)
    starts = [first, *(draw_two(projection, random) for _ in range(n_init - 1))]
    sides, _ = max((two_means(projection, start, max_iter) for start in starts), key=lambda found: found[1])
    if sides.all() or not sides.any():  # so alike that both centres rounded to one
        sides = projection[:, 0] > projection[:, 0].mean()
    # the first point always gets label 0, so that labels do not depend on the order of the centres
    return (sides != sides[0]).astype(np.int64)


def two_means(centered: np.ndarray, centers: np.ndarray, max_iter: int) -> tuple[np.ndarray, float]:
    """Sides (n,) of the plane between two means, from given centres (2, D), and the sum of squares they explain.

    The means of centred points are opposite: with the sum s of m of the n points, they are s / m and -s / (n - m), and
    explain ||s||^2 / m + ||s||^2 / (n - m). One iteration is two products with a vector.

    >>> two_means(np.array([[-3.0], [-1.0], [4.0]]), np.array([[-1.0], [1.0]]), max_iter=10)
    (array([False, False,  True]), 24.0)
    """
    n, still = len(centered), _TOLERANCE * float(np.vdot(centered, centered)) / centered.size
    for _ in range(max_iter):
        sides = centered @ (centers[1] - centers[0]) > (centers[1] @ centers[1] - centers[0] @ centers[0]) / 2
        m = int(np.count_nonzero(sides))
        total = sides.astype(centered.dtype) @ centered
        if m in (0, n):
            return sides, 0.0
        means = np.stack([-total / (n - m), total / m])
        moved, centers = float(((means - centers) ** 2).sum()), means
        if moved <= still:
            break
    return sides, float(total @ total) * (1 / m + 1 / (n - m))


def leading_projection(
    centered: np.ndarray, n_components: int, random: np.random.RandomState
) -> tuple[np.ndarray, float]:
    """Float64 projection (n, K) of centred points (n, D) to leading principal components, and the first deviation.

    Subspace iteration on X'X with a Rayleigh-Ritz step: five products with X, and factorisations of D x K only.

    >>> points = np.random.default_rng(0).normal(size=(200, 3)) * [9, 3, 1]
    >>> projection, deviation = leading_projection(points - points.mean(axis=0), 2, np.random.RandomState(0))
    >>> projection.shape, bool(abs(deviation - points.std(axis=0)[0]) < 0.1)
    ((200, 2), True)
    """
    width = min(n_components + _EXTRA, centered.shape[1])
    basis = random.standard_normal((centered.shape[1], width)).astype(centered.dtype)
    for _ in range(_N_ITER):
        basis = np.linalg.qr(_times_gram(centered, basis))[0]
    inside = centered @ basis  # (n, K + extra)
    variances, axes = np.linalg.eigh((inside.T @ inside).astype(np.float64))
    leading = axes[:, ::-1][:, :n_components].astype(centered.dtype)
    projection = (inside @ leading).astype(np.float64)
    return projection - projection.mean(axis=0), math.sqrt(max(variances[-1], 0.0) / len(centered))


def _times_gram(points: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """X'X B (D, K), each block of X read once."""
    product = np.zeros_like(basis)
    for rows in row_blocks(*points.shape, elements=_SMALL_PRODUCT, min_rows=32):
        product += points[rows].T @ (points[rows] @ basis)
    return product


def draw_two(points: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    """Two points (2, D) as centres by greedy k-means++: the second drawn by its squared distance, best of two draws."""
    first = points[random.randint(len(points))]
    squares = _squared_distances_to(points, first)
    total = squares.sum()
    if total <= 0:
        return np.stack([first, first])
    drawn = np.searchsorted(np.cumsum(squares), random.uniform(size=2) * total)
    drawn = np.minimum(drawn, len(points) - 1)
    left = [np.minimum(squares, _squared_distances_to(points, points[i])).sum() for i in drawn]
    return np.stack([first, points[drawn[int(np.argmin(left))]]])


def _squared_distances_to(points: np.ndarray, center: np.ndarray) -> np.ndarray:
    difference = points - center
    return np.vecdot(difference, difference)


class Lloyd(NamedTuple):
    """A run of K-Means."""

    labels: np.ndarray  # (n,) int64
    centers: np.ndarray  # (k, D)
    n_iter: int


def lloyd(centered: np.ndarray, centers: np.ndarray, max_iter: int) -> Lloyd:
    """K-Means from given centres (k, D) on centred points (n, D), until the labels stay or the centres hardly move.

    The nearest centre is that of the largest x c' - ||c||^2 / 2: points must be centred, so that float32 does not
    cancel. A centre without points stays where it is.

    >>> lloyd(np.array([[-1.0], [-2.0], [3.0]]), np.array([[0.0], [1.0]]), max_iter=10).labels
    array([0, 0, 1])
    """
    still = _TOLERANCE * float(np.vdot(centered, centered)) / centered.size  # as in scikit-learn
    labels = np.full(len(centered), -1)
    sums, counts = np.zeros(centers.shape), np.zeros(len(centers))
    for n_iter in range(1, max_iter + 1):  # noqa: B007
        before, labels = labels, _affinity(centered, centers).argmax(axis=1)
        changed = np.flatnonzero(labels != before)
        if not len(changed):
            break
        _move_sums(sums, counts, centered, before, labels, changed)
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centers)
        moved = float(((means - centers) ** 2).sum())
        centers = means.astype(centered.dtype)
        if moved <= still:
            break
    return Lloyd(_affinity(centered, centers).argmax(axis=1), centers, n_iter)


def _affinity(centered: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """x c' - ||c||^2 / 2 (n, k), in blocks small enough for BLAS kernels without packing: twice as fast."""
    affinity = np.empty((len(centered), len(centers)), centered.dtype)
    transposed = np.ascontiguousarray(centers.T)
    for rows in row_blocks(*centered.shape, elements=_SMALL_PRODUCT, min_rows=32):
        np.matmul(centered[rows], transposed, out=affinity[rows])
    return np.subtract(affinity, np.vecdot(centers, centers) / 2, out=affinity)


def _move_sums(
    sums: np.ndarray, counts: np.ndarray, points: np.ndarray, before: np.ndarray, after: np.ndarray, rows: np.ndarray
) -> None:
    """Move the points at ``rows`` between the sums (k, D) and counts (k,) of their clusters, in place, in float64."""
    for start in range(0, len(rows), _BLOCK):
        some = rows[start : start + _BLOCK]
        steps = _members(after[some], len(counts), np.float64) - _members(before[some], len(counts), np.float64)
        sums += steps @ points[some].astype(np.float64)
        counts += steps.sum(axis=1)
