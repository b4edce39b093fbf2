"""G-Means: K-Means that splits clusters until each is Gaussian along its bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import numpy as np
from scipy.special import log_ndtr

from maple.errors import UsageError
from maple.stats.clustering._bisect import Cut, GrowingMeans, random_halves
from maple.stats.clustering._means import cluster_means
from maple.stats.clustering._starts import bisect_points

_SMALLEST_NORMAL_SAMPLE = 8  # below this sample size the tail of the Anderson-Darling statistic is not tabulated


def anderson_darling(sample: np.ndarray) -> float:
    """Anderson-Darling statistic against the normal family, corrected for mean and variance estimated from the sample.

    With y the standardised, sorted sample,

        A^2 = -n - 1/n sum_i (2 i - 1) (log Phi(y_i) + log Phi(-y_{n+1-i}))

    and the correction is A^2 (1 + 0.75 / n + 2.25 / n^2) (Stephens 1986, the form whose tail is tabulated; Hamerly &
    Elkan print the older 1 + 4 / n - 25 / n^2). The logarithms are finite for any outlier.

    Args:
        sample: (n,), not constant.

    >>> quantiles = np.array([-1.5, -1.0, -0.7, -0.3, 0.0, 0.3, 0.7, 1.0, 1.5])
    >>> round(anderson_darling(quantiles), 2)
    0.12
    """
    n = len(sample)
    y = np.sort(sample).astype(np.float64)
    y = (y - y.mean()) / y.std(ddof=1)
    weights = 2 * np.arange(1, n + 1) - 1
    statistic = -n - float(weights @ (log_ndtr(y) + log_ndtr(-y[::-1]))) / n
    return statistic * (1 + 0.75 / n + 2.25 / n**2)


def anderson_darling_critical_value(significance: float) -> float:
    """The value that the corrected statistic of a normal sample exceeds with probability ``significance`` (<= 0.1).

    Inverts the tail p = exp(1.2937 - 5.709 A + 0.0186 A^2) of D'Agostino & Stephens (1986, table 4.9).

    >>> round(anderson_darling_critical_value(0.05), 3), round(anderson_darling_critical_value(1e-4), 3)
    (0.753, 1.851)
    """
    a, b, c = 0.0186, -5.709, 1.2937 - math.log(significance)
    return (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)


@dataclass(eq=False, repr=False)
class GMeans(GrowingMeans):
    """K-Means that splits clusters until each is Gaussian (Hamerly & Elkan 2003).

    A cluster is bisected by 2-Means, its points are projected onto the vector between the two centres, and the
    bisection is kept if an Anderson-Darling test rejects normality of the projection. K-Means over all points follows
    each round.

    In many dimensions that vector overfits the points it is tested on: along it, 5,000 points of one Gaussian in 640
    dimensions look like two clusters. Unlike in the paper, the vector is fitted to a random half of the points and
    tested on the other half, and vice versa, each at half the significance. This keeps the level in any dimension; a
    cluster of fewer than 16 points is not split.

    Clusters may have any covariance, but only deviations along the bisection are detected.

    Args: those of :class:`XMeans`, and ``significance``, the largest probability of splitting a Gaussian cluster, up to
    0.1. Attributes: those of :class:`XMeans` but for ``bic_``.

    >>> rng = np.random.default_rng(0)
    >>> one_long_cluster = rng.standard_normal((200, 2)) * [10.0, 1.0]
    >>> GMeans(random_state=0).fit(one_long_cluster).n_clusters_
    1
    >>> GMeans(random_state=0).fit(np.concatenate([one_long_cluster, one_long_cluster + [0.0, 40.0]])).n_clusters_
    2
    """

    significance: float = 1e-4

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters of ``X`` (n, D); float32 stays float32. ``y`` is ignored."""
        if not isinstance(self.significance, Real) or not 0 < self.significance <= 0.1:
            raise UsageError(f"significance is {self.significance!r}: give a probability above 0 and at most 0.1")
        return super().fit(X)

    def _gain(self, cut: Cut, room: int, random: np.random.RandomState) -> float:
        statistics = (self._statistic(*halves, random) for halves in random_halves(cut.points, random))
        return max(statistics) - anderson_darling_critical_value(self.significance / 2)

    def _statistic(self, fitted: np.ndarray, tested: np.ndarray, random: np.random.RandomState) -> float:
        """Anderson-Darling statistic of ``tested`` along the vector between the two clusters of ``fitted``.

        0 if there are too few points or no spread.
        """
        if min(len(fitted), len(tested)) < _SMALLEST_NORMAL_SAMPLE:
            return 0.0
        sides = bisect_points(fitted, n_init=self.n_init, max_iter=self.max_iter, random_state=random)
        if sides is None:
            return 0.0
        first, second = cluster_means(fitted, sides)
        sample = (tested - first) @ (second - first)  # (n,)
        rounding = 8 * np.finfo(sample.dtype).eps * np.abs(sample).max()
        return anderson_darling(sample) if np.ptp(sample) > rounding else 0.0
