"""Means of points: sums by cluster, sums of squares, and Lloyd's iterations.

Shapes: n points, D dimensions, k clusters, K leading components.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maple.stats.clustering._leading import Leading
from maple.stats.clustering._starts import TOLERANCE

_BLOCK = 1024  # rows summed at a time, in the dtype of the points; blocks are added in float64
_CANCELLED = 2.0**13  # rounding errors of a sum of squares, below which a difference is computed anew


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
    residuals = np.empty((min(_BLOCK, len(points)), points.shape[1]))  # (block, D)
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        block = residuals[: len(labels[rows])]
        np.subtract(points[rows], wide[labels[rows]], out=block)
        total += float(np.vdot(block, block))
    return total


def scatter_within(points: np.ndarray, labels: np.ndarray, sums: np.ndarray, squares: float) -> float:
    """Sum of ||x - mu||^2, mu being the mean of the point's cluster, from the sums s_c of the n_c points of each.

    It is q - sum ||s_c||^2 / n_c with q = sum ||x||^2. Where the difference is within the rounding errors of q, the
    points are read again.

    Args:
        points: (n, D).
        labels: (n,) clusters 0..k-1, none empty.
        sums: (k, D) of the points of each cluster.
        squares: q.

    >>> points, labels = np.array([[0.0], [2.0], [10.0], [12.0]]), np.array([0, 0, 1, 1])
    >>> scatter_within(points, labels, cluster_sums(points, labels), squares=248.0)
    4.0
    """
    within = squares - float((np.vecdot(sums, sums) / np.bincount(labels)).sum())
    if within > _CANCELLED * np.finfo(points.dtype).eps * squares:
        return within
    return within_sum_of_squares(points, labels, cluster_means(points, labels))


def _members(labels: np.ndarray, n_clusters: int, dtype: np.dtype) -> np.ndarray:
    """Membership (k, n): 1 where a point belongs to a cluster."""
    return (labels == np.arange(n_clusters)[:, None]).astype(dtype)


def cluster_sums(points: np.ndarray, labels: np.ndarray, n_clusters: int | None = None) -> np.ndarray:
    """Sums (k, D) of the points of the clusters 0..k-1, in float64.

    Blocks of rows are summed in the dtype of the points; centre float32 points whose mean is large.
    """
    sums = np.zeros((int(labels.max()) + 1 if n_clusters is None else n_clusters, points.shape[1]))
    for start in range(0, len(points), _BLOCK):
        rows = slice(start, start + _BLOCK)
        sums += _members(labels[rows], len(sums), points.dtype) @ points[rows]
    return sums


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
        sums += _members(labels[rows], n_clusters, np.dtype(np.float64)) @ points[rows].astype(np.float64)
    return (sums / np.bincount(labels)[:, None]).astype(points.dtype)


class Lloyd(NamedTuple):
    """A run of K-Means."""

    labels: np.ndarray  # (n,) int64
    sums: np.ndarray  # (k, D) of the points of each cluster
    n_iter: int

    @property
    def counts(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=len(self.sums))


def lloyd(leading: Leading, labels: np.ndarray, sums: np.ndarray, max_iter: int) -> Lloyd:
    """K-Means of centred points from given clusters, until the labels stay or the centres hardly move.

    A cluster that loses all its points keeps its centre.

    Args:
        leading: the points (n, D).
        labels: (n,) clusters 0..k-1 to start from, each with a point; -1 for points that belong to none yet.
        sums: (k, D) of the points of each cluster.
        max_iter: largest number of iterations.
    """
    points, sums = leading.points, sums.copy()
    still = TOLERANCE * leading.squares.sum() / points.size  # as in scikit-learn
    counts = np.bincount(labels[labels >= 0], minlength=len(sums)).astype(np.float64)
    centers, n_iter, moved = sums / counts[:, None], 0, np.inf
    while True:
        before, labels = labels, leading.nearest(centers)
        changed = np.flatnonzero(labels != before)
        if not len(changed):
            break
        _move_sums(sums, counts, points, before, labels, changed)
        if moved <= still or n_iter == max_iter:
            break
        n_iter += 1
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centers)
        moved, centers = float(((means - centers) ** 2).sum()), means
    return Lloyd(labels, sums, max(n_iter, 1))


def _move_sums(
    sums: np.ndarray, counts: np.ndarray, points: np.ndarray, before: np.ndarray, after: np.ndarray, rows: np.ndarray
) -> None:
    """Move the points at ``rows`` between the sums (k, D) and counts (k,) of their clusters, in place."""
    for start in range(0, len(rows), _BLOCK):
        some = rows[start : start + _BLOCK]
        steps = _members(after[some], len(sums), points.dtype) - _members(before[some], len(sums), points.dtype)
        sums += steps @ points[some]
        counts += steps.sum(axis=1)
