"""Chi-square distribution of squared distances: log tail, quantiles, and goodness of fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammainc, gammaincinv, gammaln, log_ndtr

from maple.errors import UsageError
from maple.stats.arrays import check_finite


def log_chi_square_tail(squared_distances: ArrayLike, degrees_of_freedom: int) -> np.ndarray:
    """log P(X >= d²) of a chi-square variable, finite for any d², and strictly decreasing where P(X < d²) > 1e-308.

    With a = k/2 and z = d²/2 the tail is Q(a, z). Up to its mean, Q = 1 - P with P from SciPy. Beyond, the finite sum
    exp(-z) sum_i z^i / Gamma(i + 1) over i = a-1, a-2, ... down to 0 (even k) or 1/2 (odd k, plus erfc(sqrt z)): its
    first term is the largest and is factored out, so that only its logarithm is needed.

    >>> log_chi_square_tail([0.0, 11.0, 1e5], 11).round(3)
    array([ 0.0000000e+00, -8.1400000e-01, -4.9955269e+04])
    """
    half = np.minimum(np.asarray(squared_distances, dtype=np.float64) / 2, 1e300)  # keeps infinity finite
    if degrees_of_freedom < 1 or int(degrees_of_freedom) != degrees_of_freedom:
        raise UsageError(f"degrees_of_freedom is {degrees_of_freedom}: give a whole number of at least 1")
    shape = degrees_of_freedom / 2
    far = half > shape
    log_tail = np.log1p(-gammainc(shape, np.where(far, 0.0, half))) + 0.0  # never -0
    if far.any():
        log_tail = np.asarray(log_tail)
        log_tail[far] = _log_far_tail(half[far], int(degrees_of_freedom))
    return log_tail


def _log_far_tail(half: np.ndarray, degrees_of_freedom: int) -> np.ndarray:
    """The finite sum for z > k/2, whose terms decrease (Horner scheme from the last term)."""
    odd = degrees_of_freedom % 2
    log_erfc = np.log(2) + log_ndtr(-np.sqrt(2 * half)) if odd else -np.inf
    if degrees_of_freedom == 1:
        return np.asarray(log_erfc)
    first = degrees_of_freedom / 2 - 1
    total = np.ones_like(half)
    for i in np.arange(odd / 2 + 1, first + 1):  # the ratio of the terms i - 1 and i is i / z
        total *= i / half
        total += 1
    log_sum = first * np.log(half) - gammaln(first + 1) - half + np.log(total)
    return np.logaddexp(log_sum, log_erfc)


def chi_square_quantiles(n: int, degrees_of_freedom: float) -> np.ndarray:
    """The n chi-square quantiles at (i - 1/2) / n, i = 1..n: the expected values of n sorted squared distances.

    >>> chi_square_quantiles(3, 2).round(4)
    array([0.3646, 1.3863, 3.5835])
    """
    if degrees_of_freedom <= 0:
        raise UsageError(f"degrees_of_freedom is {degrees_of_freedom}: give the number of components, at least 1")
    return 2 * gammaincinv(degrees_of_freedom / 2, (np.arange(n) + 0.5) / n)


def gaussian_test(squared_distances: Any, degrees_of_freedom: float) -> float:
    """Deviation from Gaussian: mean absolute difference between observed and theoretical chi-square quantiles.

    ``1/N sum_i |d2_(i) - q((i - 1/2) / N)|`` with d2_(i) the sorted squared Mahalanobis distances to the nearest
    (or the own) cluster and q the quantile function of the chi-square distribution. Zero is perfectly Gaussian.

    >>> gaussian_test([5.0, 1.0, 2.0], degrees_of_freedom=2) == gaussian_test([1.0, 2.0, 5.0], degrees_of_freedom=2)
    True
    >>> round(gaussian_test([1.0, 2.0, 5.0], degrees_of_freedom=2), 4)
    0.8885
    """
    observed = np.sort(check_finite(squared_distances, "squared_distances"))
    return float(np.abs(observed - chi_square_quantiles(len(observed), degrees_of_freedom)).mean())


def qq_points(squared_distances: Any, degrees_of_freedom: float, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Theoretical and observed quantiles for a Q-Q plot, at most ``points``, evenly spread along the axis.

    Thinning evenly by rank would leave the tail, the part of interest, almost empty. The smallest and the largest
    distance are always kept.

    >>> theoretical, observed = qq_points([5.0, 1.0, 2.0], degrees_of_freedom=2)
    >>> observed
    array([1., 2., 5.])
    """
    if points < 2:
        raise UsageError(f"points is {points}: give at least 2")
    observed = np.sort(check_finite(squared_distances, "squared_distances"))
    theoretical = chi_square_quantiles(len(observed), degrees_of_freedom)
    if len(observed) > points:
        wanted = np.linspace(theoretical[0], theoretical[-1], points)
        kept = np.unique(np.searchsorted(theoretical, wanted).clip(max=len(observed) - 1))
        theoretical, observed = theoretical[kept], observed[kept]
    return theoretical, observed
