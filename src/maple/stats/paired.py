"""Differences between two methods on the same images, with their standard errors.

Accuracy and NLL are means over images, AUROC nearly so: the difference of two methods is then a mean of differences
d_n, whose standard error is the deviation of d over the root of N. Images that are easy or hard for both methods
cancel, so that the error is smaller than those of the two figures apart.

Letters for shapes: N images, I in-distribution and O out-of-distribution ones.
"""

from __future__ import annotations

from math import hypot, nan, sqrt
from typing import Any, NamedTuple

import numpy as np

from maple.stats.arrays import check_lengths, check_unit, check_values
from maple.stats.metrics import bin_index


class Difference(NamedTuple):
    """The figure of the first method minus that of the second."""

    value: float
    error: float  # standard error; NaN for a single image


def mean_difference(first: Any, second: Any) -> Difference:
    """The difference of the means of two contributions (N,) per image.

    >>> mean_difference([1, 1, 1, 0], [1, 0, 1, 0])
    Difference(value=0.25, error=0.25)
    """
    first, second = check_values(first, "first"), check_values(second, "second")
    check_lengths(first=first, second=second)
    with np.errstate(invalid="ignore"):  # infinite contributions: the error is NaN
        return Difference(float(np.mean(first - second)), _error(first - second))


def calibration_difference(
    first: tuple[Any, Any], second: tuple[Any, Any], bins: int = 15, draws: int = 100, seed: int = 0
) -> Difference:
    """The difference of two expected calibration errors; each argument is confidences (N,) and correctness (N,).

    The error is that of a bootstrap over the images, the same draws for both methods: gaps within a bin that are due to
    chance change their sign from sample to sample, which no formula for a mean covers.

    >>> calibration_difference(([0.9, 0.7, 0.6], [1, 0, 1]), ([0.9, 0.7, 0.6], [1, 0, 1]))
    Difference(value=0.0, error=0.0)
    """
    (index, gaps), (other_index, other_gaps) = (_binned_gaps(*given, bins) for given in (first, second))
    check_lengths(first=gaps, second=other_gaps)
    n = len(gaps)
    rng = np.random.default_rng(seed)

    def difference(weights: np.ndarray) -> float:
        return _calibration_error(index, weights * gaps, bins) - _calibration_error(
            other_index, weights * other_gaps, bins
        )

    drawn = [difference(np.bincount(rng.integers(0, n, n), minlength=n)) for _ in range(draws)]
    return Difference(difference(np.ones(n)), float(np.std(drawn, ddof=1)))


def _binned_gaps(confidence: Any, correct: Any, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each image (N,) and its correctness minus its confidence (N,)."""
    confidence, correct = check_unit(confidence, "confidence"), check_values(correct, "correct")
    check_lengths(confidence=confidence, correct=correct)
    return bin_index(confidence, bins), correct - confidence


def _calibration_error(index: np.ndarray, gaps: np.ndarray, bins: int) -> float:
    return float(np.abs(np.bincount(index, weights=gaps, minlength=bins)).sum() / len(gaps))


def auroc_difference(first: tuple[Any, Any], second: tuple[Any, Any]) -> Difference:
    """The difference of two AUROC; each argument is the scores of the IND (I,) and of the OOD (O,) images.

    The contribution of an image is its rank among the images of the other set (DeLong et al. 1988,
    https://doi.org/10.2307/2531595); both sets contribute to the error.

    >>> auroc_difference(([0, 1, 2], [1, 3]), ([0, 1, 2], [1, 3]))
    Difference(value=0.0, error=0.0)
    """
    (ind, ood), (other_ind, other_ood) = _placements(*first), _placements(*second)
    check_lengths(first=ind, second=other_ind)
    check_lengths(first=ood, second=other_ood)
    return Difference(float(ood.mean() - other_ood.mean()), hypot(_error(ind - other_ind), _error(ood - other_ood)))


def _placements(ind_scores: Any, ood_scores: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each IND image the share of OOD images above it (I,), for each OOD image that of IND images below it (O,)."""
    ind, ood = check_values(ind_scores, "ind_scores"), check_values(ood_scores, "ood_scores")
    return 1 - _share_below(ood, ind), _share_below(ind, ood)


def _share_below(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of values below each level, ties counting half."""
    ordered = np.sort(values)
    below, up_to = (np.searchsorted(ordered, levels, side=side) for side in ("left", "right"))
    return (below + up_to) / (2 * len(ordered))


def _error(differences: np.ndarray) -> float:
    """The standard error of the mean of differences (N,)."""
    n = len(differences)
    return float(np.std(differences, ddof=1)) / sqrt(n) if n > 1 else nan
