"""What validation and calibration images teach: one temperature, conformal p-values, a threshold.

The temperature is fitted on *validation* images; p-values and thresholds come from *calibration* images, which may not
have chosen anything else: only then does the stated false-alarm rate hold.
"""

from __future__ import annotations

from math import ceil, floor, log

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from maple.errors import DataError, UsageError
from maple.gaussian import as_array, log_posterior

TEMPERATURE_RANGE = (1e-3, 1e6)
# Deviation of the prior on log T: within a factor of ten of 1. It weighs as much as one image, hence it decides only
# where the images say nothing.
LOG_TEMPERATURE_DEVIATION = log(10)


def fit_temperature(
    squared_distances: np.ndarray, labels: np.ndarray, log_weights: np.ndarray, cluster_to_class: np.ndarray
) -> float:
    """The temperature T of the class posterior with the least negative log-likelihood on validation images.

    ``squared_distances`` (N, M), ``labels`` (N,) class ids, ``log_weights`` and ``cluster_to_class`` (M,) as for
    :func:`maple.gaussian.log_posterior`. Images of unknown classes (-1, or without a cluster) are left out. Minimises

        sum over images of -log p(label | e, T) + (log T)² / 2 s²,  s = log 10

    in log T. The last term is worth less than one image; it keeps T finite where all images are right (the likelihood
    alone wants T = 0) or none is (T = infinity). Logits work too: a softmax is the case d² = -2 logits, weights 0.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(20000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # exactly softmax-distributed
    >>> bool(abs(fit_temperature(-2 * 5 * logits, labels, np.zeros(3), np.arange(3)) - 5) < 0.2)
    True
    """
    labels = as_array(labels)
    known = np.isin(labels, cluster_to_class)
    if not known.any():
        raise DataError("no validation image has a label among the known classes, which a temperature needs: add some")
    squared_distances, labels = as_array(squared_distances)[known], labels[known]
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        posterior = log_posterior(squared_distances, log_weights, cluster_to_class, np.exp(log_temperature))
        return float(-posterior[rows, labels].sum() + (log_temperature / LOG_TEMPERATURE_DEVIATION) ** 2 / 2)

    # A grid finds the valley, whatever the scale of the distances; Brent finds its floor.
    grid = np.log(np.geomspace(*TEMPERATURE_RANGE, num=28))
    best = int(np.argmin([loss(point) for point in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6}).x))


def conformal_p_values(scores: ArrayLike, calibration_scores: ArrayLike) -> np.ndarray:
    """p = (1 + #{calibration scores >= score}) / (n + 1): small where few in-distribution images score as high.

    For an image exchangeable with the n calibration images, P(p <= a) <= a, whatever the score and its distribution.

    >>> conformal_p_values([0.5, 2.0, 9.0], [1.0, 2.0, 3.0])
    array([1.  , 0.75, 0.25])
    """
    ordered = _sorted_scores(calibration_scores)
    n_at_least = len(ordered) - np.searchsorted(ordered, as_array(scores), side="left")
    return (1 + n_at_least) / (len(ordered) + 1)


def conformal_threshold(calibration_scores: ArrayLike, false_alarm: float) -> float:
    """The threshold with ``score > threshold`` exactly where the p-value is at most ``false_alarm``.

    Infinite (nothing is out-of-distribution) when there are too few calibration images for so small a rate:
    see :func:`min_calibration_images`.

    >>> conformal_threshold([3.0, 1.0, 2.0, 4.0], false_alarm=0.4)
    3.0
    """
    n_allowed = _allowed_above(len(ordered := _sorted_scores(calibration_scores)), false_alarm)
    if n_allowed < 0:
        return float("inf")
    return float(ordered[len(ordered) - 1 - n_allowed]) if n_allowed < len(ordered) else float("-inf")


def min_calibration_images(false_alarm: float) -> int:
    """The least number of calibration images with which an image can be called out-of-distribution at all.

    >>> min_calibration_images(0.05)
    19
    """
    _check_rate(false_alarm)
    guess = ceil(1 / false_alarm) - 1
    return guess if 1 / (guess + 1) <= false_alarm else guess + 1


def _allowed_above(n: int, false_alarm: float) -> int:
    """The largest k with (1 + k) / (n + 1) <= false_alarm, to the last bit; -1 if there is none."""
    _check_rate(false_alarm)
    k = floor(false_alarm * (n + 1))  # one too many, which the loop takes back unless rounding already did
    while k >= 0 and (1 + k) / (n + 1) > false_alarm:
        k -= 1
    return k


def _check_rate(false_alarm: float) -> None:
    if not 0 < false_alarm <= 1:
        raise UsageError(f"a false-alarm rate lies above 0 and at most at 1, not at {false_alarm}")


def _sorted_scores(scores: ArrayLike) -> np.ndarray:
    ordered = np.sort(as_array(scores).astype(np.float64))
    if len(ordered) and np.isnan(ordered[-1]):  # NaN sorts last
        raise DataError(f"{int(np.isnan(ordered).sum())} of {len(ordered)} calibration scores are NaN: leave them out")
    return ordered
