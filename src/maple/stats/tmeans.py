"""T-Means: K-Means that cuts a cluster where two Gaussians of a tied covariance describe held-out points better."""

from __future__ import annotations

import math

import numpy as np

from maple.stats._bisect import GrowingMeans, bisect_points, random_halves
from maple.stats.covariance import IMAGES_PER_COMPONENT, RELATIVE_FLOOR, principal_axes, whitening
from maple.stats.gaussians import squared_distances
from maple.stats.moments import Moments

EXPLAINED_VARIANCE = 0.95  # share of a class's variance in the components that are whitened, as detectors keep


def held_out_gain(points: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> float:
    """Log-likelihood per held-out point that clusters gain over one, as a detector sees both; above 0, they pay.

    As for a detector, each cluster c is a Gaussian with the share n_c / n of the points, all have one covariance Sigma,
    an image belongs to the nearest of them, and only principal components that explain 95 % of the variance count (the
    first n / 10 of them at most, where points are few):

        mean over held-out x of  max_c [log(n_c / n) - (x - mu_c)' Sigma^-1 (x - mu_c) / 2] - log det Sigma / 2,

    for the clusters less for all points as one. Since they were held out, there is no penalty for parameters: a cut
    that fits nothing but noise loses.

    Within its components no linear map of the points changes this. So length, which a criterion for spherical clusters
    takes for several clusters, is no evidence: the halves of one Gaussian, of any covariance, pay log 2 for saying
    which half, and gain log(1 / (1 - 2 / pi)) / 2 for being narrower; in all they lose 0.19. Two equal Gaussians gain
    from a distance of 3.04 deviations on.

    Args:
        points: (n, D); where they have no variance, nothing is gained.
        labels: (n,) clusters 0..k-1 of the points, each with a point.
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
    :func:`held_out_gain`. No variance counts as less than ``floor``.
    """
    moments = Moments(int(labels.max()) + 1, points.shape[1]).update(points, labels)
    matrix, log_determinant = whitening(moments.within_covariance, floor)
    distances = squared_distances(held_out @ matrix, moments.means @ matrix)  # (m, k)
    log_joint = np.log(moments.counts / moments.n_images) - distances / 2
    return float(log_joint.max(axis=1).mean() - log_determinant / 2)


class TMeans(GrowingMeans):
    """K-Means that cuts a cluster where two Gaussians of a tied covariance describe held-out points better than one.

    This is the question that a detector with one covariance for all clusters asks of a split, see
    :func:`held_out_gain`. One half of the points, drawn at random, is cut in two by 2-Means and the other half judges,
    both ways round; the cut is kept if they gain on average. K-Means over all points follows each round.

    Clusters may have any covariance, but only the cuts that 2-Means proposes are judged: clusters that lie apart in a
    direction of little variance are not seen.

    Args:
        max_clusters: clusters at most.
        min_cluster_size: points per cluster at least; smaller clusters are not made.
        n_init: starts of each cut in two.
        max_iter: iterations of each K-Means run at most.
        random_state: seed; the same seed gives the same clusters.

    Attributes: those of :class:`XMeans` but for ``bic_``.

    >>> rng = np.random.default_rng(0)
    >>> one_long_cluster = rng.standard_normal((200, 2)) * [10.0, 1.0]
    >>> TMeans(random_state=0).fit(one_long_cluster).n_clusters_
    1
    >>> TMeans(random_state=0).fit(np.concatenate([one_long_cluster, one_long_cluster + [0.0, 40.0]])).n_clusters_
    2
    """

    def _gain(self, points: np.ndarray, labels: np.ndarray, room: int, random: np.random.RandomState) -> float:
        halves = random_halves(points, random)
        return sum(self._judged(*pair, random) for pair in (halves, halves[::-1]))

    def _judged(self, fitted: np.ndarray, held_out: np.ndarray, random: np.random.RandomState) -> float:
        """What the cut of ``fitted`` gains on ``held_out``; minus infinity where ``fitted`` cannot be cut."""
        sides = bisect_points(fitted, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        return -math.inf if sides is None else held_out_gain(fitted, sides, held_out)
