"""Conformal p-values, thresholds for a false-alarm rate, and false-discovery control over a batch.

The rates hold for any score and any distribution, as long as new in-distribution images are exchangeable with the
calibration images, and the calibration images were used for nothing else. A false alarm is an in-distribution image
that is flagged. From n calibration scores there are three guarantees:

- marginal: the expected rate, over calibration sets and images, is at most ``false_alarm``. The rate of one calibration
  set varies around it as a beta distribution and exceeds it about half of the time (:func:`false_alarm_interval`);
- with ``confidence``: the rate of all but a share 1 - confidence of the calibration sets is at most ``false_alarm``;
- over a batch, :func:`benjamini_hochberg`: the expected share of false alarms among the flagged is at most ``fdr``.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, floor, log1p
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv

from maple.errors import UsageError
from maple.stats.arrays import as_array, check_values, list_rows

# Tolerance for rounding: conformal p-values lie on a grid, often exactly on the line of Benjamini and Hochberg, and the
# beta distribution is accurate to about this many digits.
_ROUNDING = 1e-12
_MOST_IMAGES = 1e15  # up to which numbers of images are exact as floats


def conformal_p_values(scores: ArrayLike, calibration_scores: ArrayLike) -> np.ndarray:
    """p = (1 + #{calibration scores >= score}) / (n + 1): small where few in-distribution images score as high.

    For an image exchangeable with the n calibration images, P(p <= a) <= a, whatever the score and its distribution.

    >>> conformal_p_values([0.5, 2.0, 9.0], [1.0, 2.0, 3.0])
    array([1.  , 0.75, 0.25])
    """
    return p_values_of(as_array(scores), sort_scores(calibration_scores))


def conformal_threshold(calibration_scores: ArrayLike, false_alarm: float, confidence: float | None = None) -> float:
    """The score above which an image is flagged, for a false-alarm rate of at most ``false_alarm``.

    It is the (k + 1)-th largest of the n calibration scores: k of them lie above. Over calibration sets, the
    false-alarm rate of such a threshold is distributed as

        rate ~ Beta(k + 1, n - k),  mean (k + 1) / (n + 1)

    for continuous scores, and is smaller with ties. Without ``confidence``, k is the largest number whose mean rate is
    at most ``false_alarm``: then ``score > threshold`` exactly where the p-value is at most ``false_alarm``. With
    ``confidence``, k is the largest number for which P(rate <= false_alarm) >= confidence.

    Infinite (nothing is flagged) with fewer than :func:`min_calibration_images` calibration images.

    >>> conformal_threshold([3.0, 1.0, 2.0, 4.0], false_alarm=0.4)
    3.0
    >>> conformal_threshold(np.arange(1000.0), 0.05), conformal_threshold(np.arange(1000.0), 0.05, confidence=0.95)
    (950.0, 961.0)
    """
    ordered = sort_scores(calibration_scores)
    k = count_allowed(len(ordered), false_alarm, confidence)
    return float(ordered[len(ordered) - 1 - k]) if k >= 0 else float("inf")


def min_calibration_images(false_alarm: float, confidence: float | None = None) -> int:
    """The least number of calibration images with which any image can be flagged.

    >>> min_calibration_images(0.05), min_calibration_images(0.05, confidence=0.95)
    (19, 59)
    """
    _check_rates(false_alarm, confidence)
    # No calibration score lies above the threshold: 1 / (n + 1) <= a, or 1 - (1 - a)^n >= confidence.
    guess = 1 / false_alarm - 1 if confidence is None else log1p(-confidence) / log1p(-false_alarm)
    if guess > _MOST_IMAGES:
        raise UsageError(f"false-alarm rate {false_alarm}: give one that fewer than {_MOST_IMAGES:.0e} images attain")
    numbers = range(ceil(guess) + 2)  # rounding moves the guess by one at most
    return bisect_left(numbers, True, key=lambda n: count_allowed(n, false_alarm, confidence) >= 0)


def false_alarm_interval(
    n_images: int, false_alarm: float, confidence: float | None = None, share: float = 0.9
) -> tuple[float, float]:
    """The interval of false-alarm rates that holds the central ``share`` of calibration sets of ``n_images`` images.

    Quantiles of the beta distribution of :func:`conformal_threshold`, for rates over infinitely many new images; (0, 0)
    where there are too few calibration images to flag anything.

    >>> low, high = false_alarm_interval(1000, 0.05)
    >>> print(f"{low:.3f} to {high:.3f}")
    0.039 to 0.062
    """
    check_rate(share, "share", 0.9)
    k = count_allowed(n_images, false_alarm, confidence)
    if k < 0:
        return 0.0, 0.0
    low, high = betaincinv(k + 1, n_images - k, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def p_values_of(scores: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    n_at_least = len(ordered) - np.searchsorted(ordered, scores, side="left")
    return (1 + n_at_least) / (len(ordered) + 1)


def count_allowed(n: int, false_alarm: float, confidence: float | None = None) -> int:
    """How many of n calibration scores may lie above the threshold, exactly; -1 where even 0 are too many.

    >>> count_allowed(99, 0.05), count_allowed(98, 0.05), count_allowed(10, 0.05)
    (4, 3, -1)
    """
    _check_rates(false_alarm, confidence)
    if confidence is not None:  # P(rate <= false_alarm) falls with k: the last k before it falls too low
        least = confidence * (1 - _ROUNDING)
        return bisect_left(range(n), True, key=lambda k: bool(betainc(k + 1, n - k, false_alarm) < least)) - 1
    k = floor(false_alarm * (n + 1))  # possibly one too many: the loop corrects it, and rounding
    while k >= 0 and (1 + k) / (n + 1) > false_alarm:
        k -= 1
    return k


def flagging_levels(n: int, confidence: float) -> np.ndarray:
    """The false-alarm rate from which an image is flagged with ``confidence`` (n + 1,), by its number k of calibration
    scores at or above its own: the inverse of :func:`count_allowed`, infinite where all n are.

    Without confidence that rate is the p-value itself, (k + 1) / (n + 1).

    >>> levels = flagging_levels(99, confidence=0.95)
    >>> [count_allowed(99, float(level) + 1e-9, confidence=0.95) for level in levels[:3]]
    [0, 1, 2]
    """
    k = np.arange(n)
    return np.r_[betaincinv(k + 1, n - k, confidence), np.inf]


def sort_scores(scores: ArrayLike) -> np.ndarray:
    return np.sort(check_values(scores, "calibration_scores", may_be_empty=True))


def _check_rates(false_alarm: float, confidence: float | None) -> None:
    check_rate(false_alarm, "false-alarm rate", 0.05)
    if confidence is not None:
        check_rate(confidence, "confidence", 0.95)


def check_rate(rate: float, what: str, example: float) -> None:
    if not 0 < rate < 1:
        raise UsageError(f"{what} {rate}: give a share between 0 and 1, such as {example}")


# ---------------------------------------------------------------------------------------------------------- batches


def benjamini_hochberg(p_values: ArrayLike, fdr: float) -> np.ndarray:
    """Which of m images to flag (m,), with an expected share of at most ``fdr`` false alarms among the flagged.

    With p_(1) <= ... <= p_(m) and k the largest number with p_(k) <= fdr k / m, the k images of smallest p-value are
    flagged. For conformal p-values that share one calibration set, whose images are exchangeable with the
    in-distribution images of the batch, the expected share of these among the flagged (the false-discovery rate, 0
    where none is flagged) is at most fdr m0 / m, m0 of the m images being in-distribution (Bates et al., 2023: such
    p-values are positively dependent).

    >>> benjamini_hochberg([0.01, 0.9, 0.03, 0.2], fdr=0.1)
    array([ True, False,  True, False])
    """
    p = as_array(p_values).astype(np.float64)
    check_rate(fdr, "false-discovery rate", 0.1)
    if len(missing := np.flatnonzero(np.isnan(p))):
        where = f"{len(missing)} of {len(p)} p-values are NaN ({list_rows(missing)})"
        raise UsageError(f"{where}: calibrate with in-distribution images first")
    if not ((p >= 0) & (p <= 1)).all():
        raise UsageError("p-values must lie between 0 and 1: give p-values, not scores")
    ordered = np.sort(p)
    below = np.flatnonzero(ordered <= _line(np.arange(1, len(p) + 1), len(p), fdr))
    return p <= ordered[below[-1]] if len(below) else np.zeros(len(p), dtype=bool)


def can_flag(n_calibration: int, n_images: int, fdr: float, n_flagged: int = 1) -> bool:
    """Whether :func:`benjamini_hochberg` can flag ``n_flagged`` of ``n_images`` images at all.

    No conformal p-value is below 1 / (n + 1): flagging k of m images takes n + 1 >= m / (fdr k) calibration images.

    >>> can_flag(999, 100, fdr=0.1), can_flag(998, 100, fdr=0.1), can_flag(998, 100, fdr=0.1, n_flagged=2)
    (True, False, True)
    """
    check_rate(fdr, "false-discovery rate", 0.1)
    return n_images == 0 or bool(1 / (n_calibration + 1) <= _line(n_flagged, n_images, fdr))


def _line(k: Any, m: int, fdr: float) -> Any:
    """fdr k / m, with a tolerance for rounding."""
    return fdr * k / m * (1 + _ROUNDING)
