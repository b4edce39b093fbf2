"""How good are classes, probabilities and scores? Pure functions on arrays; torch tensors are accepted.

Two families. *Classification*: what is said about N labelled images. *Detection*: how well a score, higher for
out-of-distribution (OOD) images, separates them from in-distribution (IND) ones; these functions take the scores of
both sets and never mind any increasing transform of them. All refuse empty and NaN input with a sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from maple.errors import DataError, UsageError

# Float32 softmax sums may exceed 1 by this much; such probabilities are clipped, others refused.
_PROBABILITY_SLACK = 1e-5

# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _as_array(values: Any) -> np.ndarray:
    """A float64 array of lists, arrays, or tensors of any device and precision, with gradients or without."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values, dtype=np.float64)


def _check(values: Any, name: str, ndim: int = 1) -> np.ndarray:
    """The array with ``ndim`` dimensions, at least one row and no NaN."""
    array = _as_array(values)
    if array.ndim != ndim:
        raise UsageError(f"{name} has the shape {array.shape}: give an array with {ndim} dimension(s)")
    if array.size == 0:
        raise DataError(f"{name} is empty: give at least one image")
    if missing := int(np.isnan(array).sum()):
        raise DataError(f"{name} holds {missing} NaN among {array.size} values: find the images they come from")
    return array


def _check_finite(values: Any, name: str) -> np.ndarray:
    """The vector without infinities either."""
    array = _check(values, name)
    if infinite := int(np.isinf(array).sum()):
        raise DataError(f"{name} holds {infinite} infinite values among {array.size}: find the images they come from")
    return array


def _check_unit(values: Any, name: str, ndim: int = 1) -> np.ndarray:
    """Probabilities, clipped to [0, 1] where rounding left it."""
    array = _check(values, name, ndim)
    if outside := int(((array < -_PROBABILITY_SLACK) | (array > 1 + _PROBABILITY_SLACK)).sum()):
        raise DataError(f"{name} holds {outside} values outside [0, 1]: give probabilities, not logits or scores")
    return np.clip(array, 0.0, 1.0)


def _check_ids(values: Any, name: str, n_classes: int | None = None) -> np.ndarray:
    """Integer ids; with ``n_classes``, ids of those classes."""
    array = _check(values, name)
    ids = array.astype(np.int64)
    if not np.array_equal(ids, array):
        raise DataError(f"{name} holds values that are not whole numbers: give class ids")
    if n_classes is not None and (wrong := int(((ids < 0) | (ids >= n_classes)).sum())):
        raise DataError(f"{name} holds {wrong} ids outside 0..{n_classes - 1}: leave out images of unknown class")
    return ids


def _check_correct(values: Any) -> np.ndarray:
    """Right or wrong per image, as booleans."""
    array = _check(values, "correct")
    if not np.isin(array, (0.0, 1.0)).all():
        raise DataError("correct holds values other than 0 and 1: give whether each image was classified correctly")
    return array.astype(bool)


def _check_lengths(**arrays: np.ndarray) -> None:
    """Refuse arrays about different numbers of images."""
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise UsageError(f"the numbers of images differ ({lengths}): give one entry per image in each")


def _check_level(level: float, name: str) -> None:
    if not 0 < level <= 1:
        raise UsageError(f"{name} is {level}: give a share above 0 and at most 1")


# ---------------------------------------------------------------------------------------------------------------------
# Classification


def accuracy(predicted: Any, labels: Any) -> float:
    """Share of images whose predicted class is their label: ``mean(predicted == label)``.

    Both are *class* ids (N,), so that cluster ids must have been mapped to classes before.

    >>> accuracy([0, 1, 2, 2], [0, 1, 1, 2])
    0.75
    """
    predicted, labels = _check_ids(predicted, "predicted"), _check_ids(labels, "labels")
    _check_lengths(predicted=predicted, labels=labels)
    return float((predicted == labels).mean())


def confusion_matrix(labels: Any, predicted: Any, n_classes: int) -> np.ndarray:
    """Counts (C, C): entry (i, j) is the number of images of class i that were called j.

    >>> confusion_matrix([0, 0, 1, 2], [0, 1, 1, 2], 3)
    array([[1, 1, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """
    labels = _check_ids(labels, "labels", n_classes)
    predicted = _check_ids(predicted, "predicted", n_classes)
    _check_lengths(labels=labels, predicted=predicted)
    return np.bincount(labels * n_classes + predicted, minlength=n_classes**2).reshape(n_classes, n_classes)


def per_class_accuracy(confusion: Any) -> np.ndarray:
    """Share of each class's images that were called right (C,); NaN for classes without images.

    >>> per_class_accuracy([[3, 1], [0, 0]])
    array([0.75,  nan])
    """
    counts = _check(confusion, "confusion", ndim=2)  # (C, C)
    totals = counts.sum(axis=1)
    return np.divide(np.diag(counts), totals, out=np.full(len(totals), np.nan), where=totals > 0)


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Accuracy against confidence in B bins of equal width; NaN in empty bins."""

    edges: np.ndarray  # (B + 1,) from 0 to 1
    count: np.ndarray  # (B,) images per bin
    accuracy: np.ndarray  # (B,)
    confidence: np.ndarray  # (B,) mean confidence


def reliability_curve(confidence: Any, correct: Any, bins: int = 15) -> ReliabilityCurve:
    """Accuracy and mean confidence in exactly ``bins`` bins (0, 1/B], (1/B, 2/B], .., the first with 0 as well.

    >>> curve = reliability_curve([0.2, 0.5, 0.9, 1.0], [0, 1, 1, 1], bins=2)
    >>> curve.count, curve.accuracy, curve.confidence
    (array([2, 2]), array([0.5, 1. ]), array([0.35, 0.95]))
    """
    if bins < 1:
        raise UsageError(f"bins is {bins}: give at least 1")
    confidence, correct = _check_unit(confidence, "confidence"), _check_correct(correct)
    _check_lengths(confidence=confidence, correct=correct)
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.maximum(np.searchsorted(edges, confidence, side="left") - 1, 0)  # edge i closes bin i - 1
    count = np.bincount(index, minlength=bins)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(index, weights=values, minlength=bins)
        return np.divide(total, count, out=np.full(bins, np.nan), where=count > 0)

    return ReliabilityCurve(edges, count, mean(correct), mean(confidence))


def expected_calibration_error(confidence: Any, correct: Any, bins: int = 15) -> float:
    """How far confidence is from accuracy: ``sum_b n_b / N |acc(b) - conf(b)|`` over bins of equal width.

    >>> round(expected_calibration_error([0.2, 0.5, 0.9, 1.0], [0, 1, 1, 1], bins=2), 12)
    0.1
    """
    curve = reliability_curve(confidence, correct, bins)
    gaps = np.abs(curve.accuracy - curve.confidence)
    return float(np.nansum(curve.count * gaps) / curve.count.sum())


def calibration_floor(confidence: Any, bins: int = 15, draws: int = 100, seed: int = 0) -> float:
    """The ECE that these confidences would score on average if they were perfectly calibrated.

    With finitely many images the accuracy of a bin differs from its confidence by chance, and an absolute difference
    never averages out: images that are right with exactly the probability stated do not have an ECE of 0.

    >>> round(calibration_floor(np.full(10_000, 0.8)), 3)  # sqrt(2 p (1 - p) / (pi n)) = 0.0032
    0.003
    """
    confidence = np.sort(_check_unit(confidence, "confidence"))  # so that the order of the images does not matter
    right = np.random.default_rng(seed).random((draws, len(confidence))) < confidence  # (draws, N)
    return float(np.mean([expected_calibration_error(confidence, row, bins) for row in right]))


def negative_log_likelihood(probabilities: Any, labels: Any, *, log: bool = False) -> float:
    """Minus the mean log-probability of the true class: ``-1/N sum_n log p[n, y_n]``.

    ``log=True`` says that logarithms are given, which keeps tiny probabilities finite. Rows need not sum to one: with
    the log chi-square tail per class this is the paper's NLL of P_MD. A true class of probability 0 costs infinity.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.1, 0.9]], [0, 1]), 4)
    0.3993
    >>> negative_log_likelihood([[-2000.0, -1.0]], [0], log=True)
    2000.0
    """
    name = "log-probabilities" if log else "probabilities"
    table = _check(probabilities, name, ndim=2) if log else _check_unit(probabilities, name, ndim=2)  # (N, C)
    labels = _check_ids(labels, "labels", table.shape[1])
    _check_lengths(**{name: table, "labels": labels})
    chosen = table[np.arange(len(labels)), labels]  # (N,)
    if log and (above := int((chosen > _PROBABILITY_SLACK).sum())):
        raise DataError(f"{name} holds {above} values above 0: give logarithms of probabilities, not logits")
    with np.errstate(divide="ignore"):
        return 0.0 - float(np.mean(chosen if log else np.log(chosen)))  # 0 - 0 is 0, where -0 would print a sign


def brier_score(probabilities: Any, labels: Any) -> float:
    """Squared error of the probability vector: ``1/N sum_n sum_c (p[n, c] - 1[y_n = c])^2``, from 0 to 2.

    >>> round(brier_score([[0.5, 0.5], [0.1, 0.9]], [0, 1]), 12)
    0.26
    """
    table = _check_unit(probabilities, "probabilities", ndim=2)  # (N, C)
    labels = _check_ids(labels, "labels", table.shape[1])
    _check_lengths(probabilities=table, labels=labels)
    # Expanded so that no one-hot matrix is made: sum_c p_c^2 - 2 p_y + 1.
    return float(np.mean((table**2).sum(axis=1) - 2 * table[np.arange(len(labels)), labels] + 1))


def accuracy_above(confidence: Any, correct: Any, level: float) -> tuple[float, float]:
    """Accuracy of the images whose confidence is above ``level``, and the share of images that is.

    Where nothing is kept the accuracy is NaN.

    >>> accuracy_above([0.95, 0.85, 0.6, 0.3], [1, 1, 0, 0], level=0.5)
    (0.6666666666666666, 0.75)
    """
    confidence, correct = _check(confidence, "confidence"), _check_correct(correct)
    _check_lengths(confidence=confidence, correct=correct)
    kept = confidence > level
    return (float(correct[kept].mean()) if kept.any() else math.nan), float(kept.mean())


def coverage_curve(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    """Shares k / N of the most confident images, and the accuracy among them, (N,) each.

    Images of equal confidence count as if in random order, so that the order in the arrays never matters. Confidence
    may be anything that ranks images.

    >>> share, accuracy = coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1])
    >>> share, accuracy.round(2)
    (array([0.25, 0.5 , 0.75, 1.  ]), array([1.  , 1.  , 0.67, 0.75]))
    """
    confidence, correct = _check(confidence, "confidence"), _check_correct(correct)
    _check_lengths(confidence=confidence, correct=correct)
    _, group = np.unique(-confidence, return_inverse=True)  # groups of ties, most confident first
    ends = np.cumsum(np.bincount(group))
    errors = np.cumsum(np.bincount(group, weights=~correct))
    kept = np.arange(1, len(confidence) + 1)
    expected = np.interp(kept, np.r_[0, ends], np.r_[0.0, errors])  # inside a tie errors arrive evenly
    return kept / len(confidence), 1 - expected / kept


def spaced_rows(n: int, points: int) -> np.ndarray:
    """All of n rows, or ``points`` of them, evenly spaced, the first and the last among them.

    >>> spaced_rows(3, 9), spaced_rows(9, 3)
    (array([0, 1, 2]), array([0, 4, 8]))
    """
    return np.unique(np.linspace(0, n - 1, min(n, points)).round().astype(int))


def coverage_at(share: Any, accuracy: Any, error: float) -> float:
    """The largest share of images that can be kept with at most this error among them; 0 where there is none.

    >>> coverage_at(*coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), error=0.25)
    1.0
    >>> coverage_at(*coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), error=0.1)
    0.5
    """
    _check_level(error, "error")
    good = np.asarray(share)[np.asarray(accuracy) >= 1 - error - 1e-12]
    return float(good.max(initial=0.0))


def aurc(confidence: Any, correct: Any) -> float:
    """Area under the risk-coverage curve: the error among the k most confident images, averaged over k = 1..N.

    ``1/N sum_k errors(k) / k``; see :func:`coverage_curve`.

    >>> round(aurc([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), 4)
    0.1458
    """
    return float(1 - coverage_curve(confidence, correct)[1].mean())


# ---------------------------------------------------------------------------------------------------------------------
# Detection. IND and OOD scores, higher = more OOD.


def _check_scores(ind_scores: Any, ood_scores: Any) -> tuple[np.ndarray, np.ndarray]:
    return _check(ind_scores, "ind_scores"), _check(ood_scores, "ood_scores")


def auroc(ind_scores: Any, ood_scores: Any) -> float:
    """Probability that an OOD image scores higher than an IND image, ties counting half.

    ``1/(n m) sum_ij 1[o_j > i_i] + 1/2 1[o_j = i_i]``: the area under the ROC curve, in O(n log n).

    >>> auroc([0.0, 1.0, 2.0], [1.0, 3.0])
    0.75
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    ind = np.sort(ind)
    below, up_to = np.searchsorted(ind, ood, side="left"), np.searchsorted(ind, ood, side="right")
    return float((below + up_to).mean() / (2 * len(ind)))


def _flagged(ind: np.ndarray, ood: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores, falling, and how many IND and OOD images score at least each of them."""
    thresholds, inverse = np.unique(np.concatenate([ind, ood]), return_inverse=True)
    n = len(thresholds)

    def at_least(index: np.ndarray) -> np.ndarray:
        return np.cumsum(np.bincount(index, minlength=n)[::-1])

    return thresholds[::-1], at_least(inverse[: len(ind)]), at_least(inverse[len(ind) :])


def roc_curve(ind_scores: Any, ood_scores: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of IND flagged, share of OOD flagged, and the threshold, from nothing flagged to everything.

    One point per distinct score t, where ``score >= t`` is flagged, after the point (0, 0) at t = infinity.

    >>> roc_curve([0.0, 1.0], [1.0, 2.0])
    (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]), array([inf,  2.,  1.,  0.]))
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    thresholds, ind_flagged, ood_flagged = _flagged(ind, ood)
    return np.r_[0, ind_flagged] / len(ind), np.r_[0, ood_flagged] / len(ood), np.r_[np.inf, thresholds]


def aupr_out(ind_scores: Any, ood_scores: Any) -> float:
    """Area under the precision-recall curve with OOD as the positive class, as average precision.

    ``sum_k (R_k - R_{k-1}) P_k`` over the distinct thresholds, falling; depends on the sizes of the two sets.

    >>> round(aupr_out([0.0, 1.0, 2.0], [1.0, 3.0]), 4)
    0.75
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    _, ind_flagged, ood_flagged = _flagged(ind, ood)
    precision = ood_flagged / (ind_flagged + ood_flagged)
    return float(np.sum(np.diff(ood_flagged, prepend=0) * precision) / len(ood))


def aupr_in(ind_scores: Any, ood_scores: Any) -> float:
    """The same with IND as the positive class: the two sets swap their places and the scores their sign.

    >>> round(aupr_in([0.0, 1.0, 2.0], [1.0, 3.0]), 4)
    0.8056
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    return aupr_out(-ood, -ind)


def fpr95_ood_positive(ind_scores: Any, ood_scores: Any, *, level: float = 0.95) -> float:
    """Share of IND images flagged when (at least) 95 % of the OOD images are caught: OOD is the positive class.

    ``P(ind >= t)`` with t the largest threshold such that ``P(ood >= t) >= level``: the convention of OpenOOD,
    pytorch-ood and torch-uncertainty. Never compare with `fpr95_ind_positive`.

    >>> fpr95_ood_positive([0.0, 1.0, 2.0, 3.0], [2.5, 3.5, 4.5])
    0.25
    """
    _check_level(level, "level")
    ind, ood = _check_scores(ind_scores, ood_scores)
    caught = math.ceil(level * len(ood) - 1e-9)  # 1e-9: 0.55 * 100 rounds to just above 55
    threshold = np.sort(ood)[len(ood) - caught]
    return float((ind >= threshold).mean())


def fpr95_ind_positive(ind_scores: Any, ood_scores: Any, *, level: float = 0.95) -> float:
    """Share of OOD images accepted when (at least) 95 % of the IND images are accepted: IND is the positive class.

    ``P(ood <= t)`` with t the smallest threshold such that ``P(ind <= t) >= level``: the convention of NINCO and
    Mahalanobis++. Never compare with `fpr95_ood_positive`.

    >>> round(fpr95_ind_positive([0.0, 1.0, 2.0, 3.0], [2.5, 3.5, 4.5]), 4)
    0.3333
    """
    ind, ood = _check_scores(ind_scores, ood_scores)
    return fpr95_ood_positive(-ood, -ind, level=level)


# ---------------------------------------------------------------------------------------------------------------------
# Gaussian test


def chi_square_quantiles(n: int, degrees_of_freedom: float) -> np.ndarray:
    """The n chi-square quantiles at (i - 1/2) / n, i = 1..n: what n sorted squared distances should be.

    >>> chi_square_quantiles(3, 2).round(4)
    array([0.3646, 1.3863, 3.5835])
    """
    if degrees_of_freedom <= 0:
        raise UsageError(f"degrees_of_freedom is {degrees_of_freedom}: give the number of components, at least 1")
    return 2 * gammaincinv(degrees_of_freedom / 2, (np.arange(n) + 0.5) / n)


def gaussian_test(squared_distances: Any, degrees_of_freedom: float) -> float:
    """How far from Gaussian? Mean absolute difference between observed and theoretical chi-square quantiles.

    ``1/N sum_i |d2_(i) - q((i - 1/2) / N)|`` with d2_(i) the sorted squared Mahalanobis distances to the nearest
    (or the own) cluster and q the quantile function of the chi-square distribution. Zero is perfectly Gaussian.

    >>> gaussian_test([5.0, 1.0, 2.0], degrees_of_freedom=2) == gaussian_test([1.0, 2.0, 5.0], degrees_of_freedom=2)
    True
    >>> round(gaussian_test([1.0, 2.0, 5.0], degrees_of_freedom=2), 4)
    0.8885
    """
    observed = np.sort(_check_finite(squared_distances, "squared_distances"))
    return float(np.abs(observed - chi_square_quantiles(len(observed), degrees_of_freedom)).mean())


def qq_points(squared_distances: Any, degrees_of_freedom: float, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Theoretical and observed quantiles for a Q-Q plot, at most ``points``, evenly spread along the axis.

    Thinning evenly by rank would leave the tail, which is what such a plot is read for, almost empty; the smallest
    and the largest distance are always kept.

    >>> theoretical, observed = qq_points([5.0, 1.0, 2.0], degrees_of_freedom=2)
    >>> observed
    array([1., 2., 5.])
    """
    if points < 2:
        raise UsageError(f"points is {points}: give at least 2")
    observed = np.sort(_check_finite(squared_distances, "squared_distances"))
    theoretical = chi_square_quantiles(len(observed), degrees_of_freedom)
    if len(observed) > points:
        wanted = np.linspace(theoretical[0], theoretical[-1], points)
        kept = np.unique(np.searchsorted(theoretical, wanted).clip(max=len(observed) - 1))
        theoretical, observed = theoretical[kept], observed[kept]
    return theoretical, observed


# ---------------------------------------------------------------------------------------------------------------------
# Several runs


def mean_and_deviation(values: Any) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1) over runs; the deviation of a single run is NaN.

    >>> mean_and_deviation([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    array = _check(values, "values")
    return float(array.mean()), (float(array.std(ddof=1)) if len(array) > 1 else math.nan)


def format_spread(values: Any, digits: int = 3) -> str:
    """Mean and deviation as people write them.

    >>> format_spread([0.90, 0.92, 0.94]), format_spread([0.9])
    ('0.920 ± 0.020', '0.900')
    """
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f}" if math.isnan(deviation) else f"{mean:.{digits}f} ± {deviation:.{digits}f}"
