"""X-Means: K-Means with the number of clusters chosen by the Bayesian information criterion."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from maple.stats._bisect import GrowingMeans, cluster_means, within_sum_of_squares


def spherical_log_likelihood(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Log-likelihood of points under k spherical Gaussians that share one variance, each point in its own cluster.

    A point of cluster c, which holds n_c of the n points, contributes log(n_c / n) + log N(x; mu_c, sigma^2 I), with

        sigma^2 = sum ||x - mu||^2 / (D (n - k)).

    Pelleg & Moore print sigma^2 without the 1/D, which makes it D times too large: the density they write down has
    one variance *per dimension*. Two slips in their log-likelihood go with it: the constant is n D / 2 log(2 pi), not
    n / 2 log(2 pi), and the exponents add up to D (n - k) / 2 over all clusters, not to (n_c - k) / 2 for each. Here
    the density is evaluated as it stands.

    The variance is kept above the rounding error of the points, so that repeated points give a finite number.

    Args:
        points: (n, D).
        labels: (n,) rows of ``centers``.
        centers: (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> round(spherical_log_likelihood(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]])), 4)
    -8.8346
    """
    n, dimension = points.shape
    counts = np.bincount(labels, minlength=len(centers))
    counts = counts[counts > 0]
    squares = within_sum_of_squares(points, labels, centers)
    variance = max(squares / (dimension * max(n - len(centers), 1)), _variance_floor(points))
    log_shares = float(counts @ np.log(counts / n))
    return log_shares - 0.5 * n * dimension * math.log(2 * math.pi * variance) - 0.5 * squares / variance


def bic(points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
    """Bayesian information criterion in the sign of Pelleg & Moore: log-likelihood - p / 2 log n; higher is better.

    p = k (D + 1) counts k - 1 shares, k D coordinates and one variance, as they do. What differs from their page is in
    :func:`spherical_log_likelihood`. ``points`` (n, D), ``labels`` (n,), ``centers`` (k, D).

    >>> points = np.array([[-1.0], [1.0], [9.0], [11.0]])
    >>> one = bic(points, np.array([0, 0, 0, 0]), np.array([[5.0]]))
    >>> two = bic(points, np.array([0, 0, 1, 1]), np.array([[0.0], [10.0]]))
    >>> two > one
    True
    """
    n, dimension = points.shape
    free_parameters = len(centers) * (dimension + 1)
    return spherical_log_likelihood(points, labels, centers) - 0.5 * free_parameters * math.log(n)


def _variance_floor(points: np.ndarray) -> float:
    """The square of a few rounding errors of a typical coordinate: smaller variances are noise of the arithmetic."""
    mean_square = float(np.vdot(points, points)) / points.size
    return max((4 * np.finfo(points.dtype).eps) ** 2 * mean_square, np.finfo(np.float64).tiny)


class XMeans(GrowingMeans):
    """K-Means with the number of clusters chosen by the Bayesian information criterion (Pelleg & Moore 2000).

    From one cluster on, each round cuts every cluster in two and keeps the cuts that raise the criterion of that
    cluster's points, then runs K-Means over all points from the new centres, until nothing is cut or there are
    ``max_clusters``. Of the models so passed, the one with the highest criterion over all points is the result.

    One look-ahead is added. Clusters at the corners of a square, say, are worth finding, but no single cut is: half the
    variance is gained, and as much lost by saying which half. So where a cut is rejected, its halves are cut
    too, as often as ``max_clusters`` leaves room for, before the cluster is declared to be one.

    The criterion assumes spherical clusters of equal variance (see :func:`bic`): an elongated cluster is cut into
    several along its length. Use :class:`TMeans` where all may have one covariance, :class:`GMeans` where each may have
    its own.

    Args:
        max_clusters: clusters at most.
        min_cluster_size: points per cluster at least; smaller clusters are not made.
        n_init: starts of each cut in two.
        max_iter: iterations of each K-Means run at most.
        random_state: seed; the same seed gives the same clusters.

    Attributes:
        labels_: (n,) int64, cluster of each point.
        cluster_centers_: (k, D).
        n_clusters_: k.
        inertia_: sum of squared distances to the centres.
        bic_: criterion of the result, higher is better.
        n_iter_: iterations of the K-Means run that placed the centres; 1 for a single cluster.
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
        self.bic_ = bic(points, self.labels_, self.cluster_centers_)
        return self

    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        whole = np.zeros_like(labels)
        as_one = bic(points, whole, cluster_means(points, whole))
        gain = bic(points, labels, cluster_means(points, labels)) - as_one
        while gain <= 0 and 2 * (labels.max() + 1) <= room:
            finer = self._bisect_each(points, labels, random)
            if finer.max() == labels.max():
                break
            labels = finer
            gain = bic(points, labels, cluster_means(points, labels)) - as_one
        return gain

    def _bisect_each(self, points: np.ndarray, labels: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Labels (n,) after every cluster that can be cut is cut."""
        finer = labels.copy()
        for j in range(labels.max() + 1):
            rows = np.flatnonzero(labels == j)
            sides = self._bisect(points[rows], random)
            if sides is not None:
                finer[rows[sides == 1]] = finer.max() + 1
        return finer

    def _score(self, points: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> float:
        return bic(points, labels, centers)
