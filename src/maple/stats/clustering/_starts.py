"""K-Means from several starts at once, among the leading components of points: bisections, and better local optima.

Shapes: n points, D dimensions, K components, k clusters, S starts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from maple.stats.arrays import row_blocks
from maple.stats.clustering._leading import Leading

TOLERANCE = 1e-4  # of the mean variance, by which centres still move when K-Means stops
_BRIEF, _LONG = 8, 25  # iterations after which the best start goes on alone: of a bisection, of more clusters


def bisect_points(
    points: np.ndarray, *, n_init: int = 4, max_iter: int = 100, random_state: Any = None
) -> np.ndarray | None:
    """Bisect points by 2-Means: labels (n,) in {0, 1}, or ``None`` if all points are equal.

    2-Means runs in the leading principal components: an exact rotation in up to 24 dimensions, and many times faster in
    640. The best cut lies along them: the first component is the relaxed solution of 2-Means (Ding & He, ICML 2004).

    >>> bisect_points(np.array([[0.0, 1.0], [0.0, 1.1], [5.0, 1.0]]), random_state=0)
    array([0, 0, 1])
    """
    if (points == points[0]).all():
        return None
    random = check_random_state(random_state)
    centered = points - points.mean(axis=0, dtype=np.float64).astype(points.dtype)
    return bisect_components(Leading.of(centered, random).inside, n_init, max_iter, random)


def bisect_components(
    components: np.ndarray, n_init: int, max_iter: int, random: np.random.RandomState
) -> np.ndarray | None:
    """Bisect points (n, K) by 2-Means, the best of ``n_init`` starts: labels (n,), or ``None`` if all are equal.

    The first start is +- sqrt(2 lambda / pi) along the first principal component, the means of the two halves of a
    Gaussian of variance lambda (Hamerly & Elkan); the others are drawn by k-means++.
    """
    if (components == components[0]).all():
        return None
    centered = components - components.mean(axis=0)
    variances, axes = np.linalg.eigh((centered.T @ centered).astype(np.float64) / len(centered))
    ahead = axes[:, -1] * math.sqrt(2 * max(variances[-1], 0.0) / math.pi)
    starts = [np.stack([-ahead, ahead]), *(draw_centers(centered, 2, random) for _ in range(n_init - 1))]
    sides = two_means(centered, np.stack(starts).astype(centered.dtype), max_iter)
    if sides.all() or not sides.any():  # so alike that both centres rounded to one
        sides = centered @ axes[:, -1] > 0
    # the first point always gets label 0, so that labels do not depend on the order of the centres
    return (sides != sides[0]).astype(np.int64)


def two_means(centered: np.ndarray, centers: np.ndarray, max_iter: int) -> np.ndarray:
    """Sides (n,) of the plane between the two means that explain most, from S pairs of centres (S, 2, K) at once.

    The means of centred points are opposite: with the sum s of m of the n points, they are s / m and -s / (n - m), and
    explain ||s||^2 / m + ||s||^2 / (n - m). One iteration is two products.

    >>> two_means(np.array([[-3.0], [-1.0], [4.0]]), np.array([[[-1.0], [1.0]]]), max_iter=10)
    array([False, False,  True])
    """
    n, still = len(centered), TOLERANCE * float(np.vdot(centered, centered)) / centered.size
    with_one = np.column_stack([centered, np.ones(n, centered.dtype)])  # products with it count, too
    for n_iter in range(1, max_iter + 1):
        directions = centers[:, 1] - centers[:, 0]  # (S, K)
        middle = np.vecdot(directions, centers[:, 0] + centers[:, 1]) / 2
        sides = np.column_stack([directions, -middle]) @ with_one.T > 0  # (S, n)
        totals = sides.astype(centered.dtype) @ with_one  # (S, K + 1)
        totals, m = totals[:, :-1], totals[:, -1:]
        means = np.stack([-totals / np.maximum(n - m, 1), totals / np.maximum(m, 1)], axis=1)
        moved, centers = ((means - centers) ** 2).sum(axis=(1, 2)), means
        best = int(np.vecdot(means[:, 1] - means[:, 0], totals).argmax())
        if (moved <= still).all():
            break
        if n_iter == _BRIEF:
            centers = centers[[best]]
    return sides[best]


def many_means(points: np.ndarray, given: np.ndarray, n_init: int, max_iter: int, random: Any) -> np.ndarray:
    """K-Means of points (n, K) from given centres (k, K) and ``n_init`` draws of k-means++: the best labels (n,) int64.

    All starts take some iterations, the best of them those until its centres hardly move.
    """
    n, still = len(points), TOLERANCE * float(np.vdot(points, points)) / points.size
    with_one = np.column_stack([points, np.ones(n, points.dtype)])  # products with it count, too
    starts = [given.astype(points.dtype), *(draw_centers(points, len(given), random) for _ in range(n_init))]
    centers = np.stack(starts)  # (S, k, K)
    for n_iter in range(1, max_iter + 1):
        totals, gains = np.zeros((*centers.shape[:2], with_one.shape[1])), np.zeros(len(centers))
        for rows in row_blocks(n, centers.size // centers.shape[2]):
            affinity = _affinities(with_one[rows], centers)  # (S, k, block)
            largest = affinity.max(axis=1, keepdims=True)
            gains += largest.sum(axis=(1, 2))
            members = (affinity == largest).astype(points.dtype).reshape(-1, affinity.shape[2])
            totals += (members @ with_one[rows]).reshape(totals.shape)
        sums, counts = totals[:, :, :-1], totals[:, :, -1:]
        means = np.where(counts > 0, sums / np.maximum(counts, 1), centers).astype(points.dtype)
        moved, centers = ((means - centers) ** 2).sum(axis=(1, 2)), means
        if (moved <= still).all():
            break
        if n_iter == _LONG:
            centers = centers[[int(gains.argmax())]]
    best = centers[[int(gains.argmax())]] if len(centers) > 1 else centers
    found = [_affinities(with_one[rows], best)[0].argmax(axis=0) for rows in row_blocks(n, len(given))]
    return np.concatenate(found)


def _affinities(with_one: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """x c' - ||c||^2 / 2 of points with a column of ones (n, K + 1) for S times k centres: (S, k, n)."""
    flat = centers.reshape(-1, centers.shape[2])
    with_half = np.column_stack([flat, -np.vecdot(flat, flat) / 2])
    return (with_half @ with_one.T).reshape(*centers.shape[:2], -1)


def draw_centers(points: np.ndarray, n_clusters: int, random: np.random.RandomState) -> np.ndarray:
    """Some points (k, K) as centres by greedy k-means++: drawn by their squared distances, the better of two draws."""
    norms = np.vecdot(points, points)
    rows = [random.randint(len(points))]
    squares = _squared_distances_to(points, norms, rows)[:, 0]
    while len(rows) < n_clusters:
        cumulated = np.cumsum(squares, dtype=np.float64)
        drawn = np.searchsorted(cumulated, random.uniform(size=2) * cumulated[-1])
        drawn = np.minimum(drawn, len(points) - 1)
        left = np.minimum(squares[:, None], _squared_distances_to(points, norms, drawn))
        better = int(left.sum(axis=0).argmin())
        rows.append(drawn[better])
        squares = left[:, better]
    return points[rows]


def _squared_distances_to(points: np.ndarray, norms: np.ndarray, rows: Any) -> np.ndarray:
    """From all points to some of them: (n, m)."""
    return np.maximum(norms[:, None] - 2 * points @ points[rows].T + norms[rows], 0)
