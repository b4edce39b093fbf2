"""X-Means: K-Means with the number of clusters chosen by the Bayesian information criterion."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from maple.stats.clustering._bisect import Cut, GrowingMeans, _Model
from maple.stats.clustering._leading import Leading
from maple.stats.clustering._means import cluster_sums, scatter_within, within_sum_of_squares


def spherical_log_likelihood(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Log-likelihood of points under k spherical Gaussians that share one variance, each point in its own cluster.

    A point of cluster c, which holds n_c of the n points, contributes log(n_c / n) + log N(x; mu_c, sigma^2 I), with

        sigma^2 = sum ||x - mu||^2 / (D (n - k)).

    Pelleg & Moore print sigma^2 without the factor 1/D, which makes it D times too large: their density has one
    variance *per dimension*. Two related errors are in their log-likelihood: the constant is n D / 2 log(2 pi), not
    n / 2 log(2 pi), and the exponents sum to D (n - k) / 2 over all clusters, not to (n_c - k) / 2 for each. This
    function evaluates the density itself.

    The variance is bounded below by the rounding error of the points, so that repeated points give a finite result.

    Args:
        points: (n, D).
        labels: (n,) rows of ``centers``.
        centers: (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> round(spherical_log_likelihood(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]])), 4)
    -8.8346
    """
    squares = within_sum_of_squares(points, labels, centers)
    counts = np.bincount(labels, minlength=len(centers))
    return _log_likelihood(squares, counts, points.shape[1], _variance_floor(points))


def _log_likelihood(squares: float, counts: np.ndarray, dimension: int, floor: float) -> float:
    """The log-likelihood from the sum of squared distances to the centres and the sizes of the clusters (k,)."""
    n = int(counts.sum())
    variance = max(squares / (dimension * max(n - len(counts), 1)), floor)
    present = counts[counts > 0]
    log_shares = float(present @ np.log(present / n))
    return log_shares - 0.5 * n * dimension * math.log(2 * math.pi * variance) - 0.5 * squares / variance


def bic(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Bayesian information criterion in the sign of Pelleg & Moore: log-likelihood - p / 2 log n; higher is better.

    p = k (D + 1) counts k - 1 shares, k D coordinates and one variance, as in the paper. For differences from the
    paper see :func:`spherical_log_likelihood`. ``points`` (n, D), ``labels`` (n,), ``centers`` (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> one = bic(points, np.array([0, 0, 0, 0]), np.array([[5.0]]))
    >>> two = bic(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]]))
    >>> two > one
    True
    """
    squares = within_sum_of_squares(points, labels, centers)
    counts = np.bincount(labels, minlength=len(centers))
    return _criterion(squares, counts, points.shape[1], _variance_floor(points))


def _criterion(squares: float, counts: np.ndarray, dimension: int, floor: float) -> float:
    penalty = 0.5 * len(counts) * (dimension + 1) * math.log(counts.sum())
    return _log_likelihood(squares, counts, dimension, floor) - penalty


def _variance_floor(points: np.ndarray, squares: float | None = None) -> float:
    """The square of a few rounding errors of a typical coordinate: smaller variances are numerical noise.

    ``squares`` is the sum of the squared coordinates, where it is known.
    """
    if squares is None:
        squares = within_sum_of_squares(points, np.zeros(len(points), np.int64), np.zeros((1, points.shape[1])))
    return max((4 * float(np.finfo(points.dtype).eps)) ** 2 * squares / points.size, np.finfo(np.float64).tiny)


class XMeans(GrowingMeans):
    """K-Means with the number of clusters chosen by the Bayesian information criterion (Pelleg & Moore 2000).

    Starting from one cluster, each round bisects every cluster, keeps the bisections that raise the criterion on that
    cluster's points, and runs K-Means over all points from the new centres, until nothing is split or
    ``max_clusters`` is reached. The result is the visited model with the highest criterion over all points, improved by
    K-Means from several starts.

    One look-ahead is added to the published algorithm. For four clusters at the corners of a square, no single
    bisection pays: it explains half of the variance, and encoding the half costs as much. So the halves of a rejected
    bisection are bisected too, as often as ``max_clusters`` allows, before the cluster is accepted as one.

    The criterion assumes spherical clusters of equal variance (see :func:`bic`): an elongated cluster is split along
    its length. Use :class:`TMeans` for clusters that share one covariance, :class:`GMeans` for individual ones.

    Args:
        max_clusters: largest number of clusters.
        min_cluster_size: smallest number of points per cluster.
        n_init: initialisations of each bisection; the result gets twice as many, unless its clusters are clear.
        max_iter: largest number of iterations of each K-Means run.
        random_state: seed.

    Attributes:
        labels_: (n,) int64, cluster of each point.
        cluster_centers_: (k, D).
        n_clusters_: k.
        inertia_: sum of squared distances to the centres.
        bic_: criterion of the result, higher is better.
        n_iter_: iterations of the last K-Means run; 1 for a single cluster.
        n_features_in_: D.

    >>> rng = np.random.default_rng(0)
    >>> corners = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    >>> points = np.repeat(corners, 50, axis=0) + rng.standard_normal((200, 2))
    >>> model = XMeans(random_state=0).fit(points)
    >>> model.n_clusters_, sorted(np.bincount(model.labels_).tolist())
    (4, [50, 50, 50, 50])
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        points = self._grow(X)
        self.bic_ = _criterion(self.inertia_, np.bincount(self.labels_), points.shape[1], _variance_floor(points))
        return self

    def _gain(self, cut: Cut, room: int, random: np.random.RandomState) -> float:
        gain = _split_gain(cut)
        while gain <= 0 and 2 * len(cut.sums) <= room:
            labels = self._bisect_each(cut, random)
            if labels.max() + 1 == len(cut.sums):
                break
            cut = cut._replace(labels=labels, sums=cluster_sums(cut.points, labels))
            gain = _split_gain(cut)
        return gain

    def _bisect_each(self, cut: Cut, random: np.random.RandomState) -> np.ndarray:
        """Labels (n,) after bisecting every cluster that can be bisected."""
        finer = cut.labels.copy()
        for j in range(len(cut.sums)):
            rows = np.flatnonzero(cut.labels == j)
            sides = self._bisect(cut.components[rows], random)
            if sides is not None:
                finer[rows[sides == 1]] = finer.max() + 1
        return finer

    def _score(self, leading: Leading, model: _Model) -> float:
        points, squares = leading.points, float(leading.squares.sum())
        within = scatter_within(points, model.labels, model.sums, squares)
        return _criterion(within, np.bincount(model.labels), points.shape[1], _variance_floor(points, squares))


def _split_gain(cut: Cut) -> float:
    """What the criterion gains if points are several clusters instead of one."""
    whole, floor = np.zeros_like(cut.labels), _variance_floor(cut.points, cut.squares)

    def criterion(labels: np.ndarray, sums: np.ndarray) -> float:
        within = scatter_within(cut.points, labels, sums, cut.squares)
        return _criterion(within, np.bincount(labels), cut.points.shape[1], floor)

    return criterion(cut.labels, cut.sums) - criterion(whole, cut.sums.sum(axis=0, keepdims=True))
