"""T-Means: K-Means that splits a cluster if two Gaussians of tied covariance raise the held-out likelihood."""

from __future__ import annotations

import math

import numpy as np

from maple.stats.clustering._bisect import Cut, GrowingMeans, random_halves
from maple.stats.clustering._starts import bisect_points
from maple.stats.covariance import IMAGES_PER_COMPONENT, RELATIVE_FLOOR, principal_axes, whitening
from maple.stats.gaussians import squared_distances
from maple.stats.moments import Moments

EXPLAINED_VARIANCE = 0.95  # share of the variance of a class that PCA keeps before whitening; as in detectors


def held_out_gain(points: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> float:
    """Gain in log-likelihood per held-out point of several clusters over one; positive if splitting pays.

    The model is that of a detector: each cluster c is a Gaussian with prior n_c / n, all share one covariance Sigma, an
    image belongs to its most likely cluster, and only the principal components that explain 95 % of the variance are
    used (at most the first n / 10 of them). The gain is the difference of

        mean over held-out x of  max_c [log(n_c / n) - (x - mu_c)' Sigma^-1 (x - mu_c) / 2] - log det Sigma / 2,

    between the clusters and a single cluster. Held-out points need no penalty for parameters: a split that fits only
    noise lowers the likelihood.

    Within the components the gain is invariant under linear maps of the points. So elongation, which a criterion for
    spherical clusters mistakes for several clusters, is no evidence: the halves of one Gaussian, of any covariance,
    cost log 2 for the assignment and gain log(1 / (1 - 2 / pi)) / 2 for the smaller variance, a loss of 0.19 in total.
    Two equal Gaussians gain if their means are more than 3.04 standard deviations apart.

    Args:
        points: (n, D); without variance the gain is 0.
        labels: (n,) clusters 0..k-1 of the points, none empty.
        held_out: (m, D).

    >>> rng = np.random.default_rng(0)
    >>> points, held_out = rng.standard_normal((2, 4000, 1))
    >>> round(held_out_gain(points, (points[:, 0] > 0).astype(int), held_out), 1)
    -0.2
    >>> apart, held_out_apart = (x + 6 * (np.arange(4000) % 2)[:, None] for x in (points, held_out))
    >>> held_out_gain(apart, np.arange(4000) % 2, held_out_apart) > 0
    True
    """
    whole = np.zeros_like(labels)
    moments = Moments(1, points.shape[1]).update(points, whole)
    variances, axes = principal_axes(moments.total_covariance, EXPLAINED_VARIANCE)
    if len(variances) == 0:
        return 0.0
    floor = RELATIVE_FLOOR * variances[0]
    axes = axes[:, : max(1, len(points) // IMAGES_PER_COMPONENT)]
    points, held_out = (points - moments.mean) @ axes, (held_out - moments.mean) @ axes  # (n, K), (m, K)
    split, unsplit = (tied_log_likelihood(points, clusters, held_out, floor) for clusters in (labels, whole))
    return split - unsplit


def tied_log_likelihood(points: np.ndarray, labels: np.ndarray, held_out: np.ndarray, floor: float) -> float:
    """Mean log-likelihood of ``held_out`` (m, D) under the Gaussians of ``points`` (n, D), up to a constant.

    One Gaussian per cluster of ``labels`` (n,), one covariance for all, each image in its most likely cluster; see
    :func:`held_out_gain`. Variances are bounded below by ``floor``.
    """
    moments = Moments(int(labels.max()) + 1, points.shape[1]).update(points, labels)
    matrix, log_determinant = whitening(moments.within_covariance, floor)
    distances = squared_distances(held_out @ matrix, moments.means @ matrix)  # (m, k)
    log_joint = np.log(moments.counts / moments.n_images) - distances / 2
    return float(log_joint.max(axis=1).mean() - log_determinant / 2)


class TMeans(GrowingMeans):
    """K-Means that splits a cluster if two Gaussians of tied covariance give held-out points a higher likelihood.

    The criterion is the model of a detector with one covariance for all clusters, see :func:`held_out_gain`. A random
    half of the points is bisected by 2-Means and evaluated on the other half, and vice versa; the bisection is kept if
    the mean gain is positive. K-Means over all points follows each round.

    Clusters may have any covariance, but only bisections proposed by 2-Means are tested: clusters separated along a
    direction of small variance are not found.

    Args and attributes: those of :class:`XMeans` but for ``bic_``.

    >>> rng = np.random.default_rng(0)
    >>> one_long_cluster = rng.standard_normal((200, 2)) * [10.0, 1.0]
    >>> TMeans(random_state=0).fit(one_long_cluster).n_clusters_
    1
    >>> TMeans(random_state=0).fit(np.concatenate([one_long_cluster, one_long_cluster + [0.0, 40.0]])).n_clusters_
    2
    """

    def _gain(self, cut: Cut, room: int, random: np.random.RandomState) -> float:
        return sum(self._judged(*halves, random) for halves in random_halves(cut.points, random))

    def _judged(self, fitted: np.ndarray, held_out: np.ndarray, random: np.random.RandomState) -> float:
        """Gain on ``held_out`` of the bisection of ``fitted``; minus infinity if ``fitted`` cannot be bisected."""
        sides = bisect_points(fitted, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        return -math.inf if sides is None else held_out_gain(fitted, sides, held_out)
